"""Public serving points with expert parallelism, against the planner: time between tokens, on one host.

A point's prediction is a decode step of all its sequences, plus the prompts that are read in between: each output token
waits for `concurrency / output tokens` of them. Points of one stack (model, device, engine) are split by their key: on
one half weights are fitted, `start + a x decode step + b x prompts`, for what an engine adds to each step and what its
kernels lack; the other half judges. AIConfigurator's single number gets a start and a weight in the same way. Knows no
files: `tables` reads, `aic` asks the peer.

Shapes of keys: many points were written down twice, once with 8 GPUs of `tp 8, moe_ep 8` and again, with the same
figures to the last digit, as `tp 64, moe_tp 8, moe_ep 8`: `_devices` takes both as 8.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bywash.planner.candidate import Problem
from bywash.planner.cluster import parse_cluster
from bywash.planner.cost import GroupCost
from bywash.planner.group import make_group
from bywash.planner.model import ModelShape, load_model_shape
from bywash.planner.sample import Sample, make_sample
from bywash.planner.target import Target, Workload
from bywash.planner.traffic import WAYS
from bywash.planner.validate.deepep import descend
from bywash.planner.validate.points import Check, Spread, spread

MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
DEVICES = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
DTYPES = {("deepseek-v3", "fp8"): "fp8", ("qwen3-235b", "fp8"): "fp8", ("gpt-oss-120b", "fp4"): "mxfp4"}
FEW = 16
"""Sequences at once; below, a step is mostly weights and starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration at one concurrency.

    Attributes:
        model_path, system, backend: as the table has them.
        model: our preset. device: our generation.
        devices, tp: of the host; `tp` of them split attention.
        prompt_tokens, output_tokens, concurrency: of the load.
        tpot_ms: median of `repeats`, all measured values that differ.
    """

    model_path: str
    system: str
    backend: str
    model: str
    dtype: str
    device: str
    devices: int
    tp: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    tpot_ms: float
    repeats: tuple[float, ...]

    @property
    def stack(self) -> str:
        """What shares a factor."""
        return f"{self.model}, {self.device}, {self.backend}"

    @property
    def key(self) -> str:
        """What should give one time: checkpoints of one shape share it."""
        return repr((self.stack, self.devices, self.tp, self.prompt_tokens, self.output_tokens, self.concurrency))

    @property
    def fitting(self) -> bool:
        """Which half its key falls into."""
        return hashlib.sha256(self.key.encode()).digest()[0] % 2 == 0


Weights = tuple[float, ...]
"""Of a fit: a start in ms, then a factor for each part."""
LEAST_FOR_ALL = 6
"""Points; with fewer only one factor is fitted."""
Peer = Callable[[Point], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What validation found.

    Attributes:
        raw: all points, nothing fitted. scaled: the judging half, by the weights.
        weights: of each stack: ours (start, decode step, prompts), and the peer's (start, its number).
        rows, points: rows of the table with expert parallelism, and points that they amount to.
        skipped: points left out, by reason.
        noise: of repeats, see `noise_of`.
    """

    raw: tuple[Check, ...]
    scaled: tuple[Check, ...]
    weights: dict[str, tuple[Weights, Weights | None]]
    rows: int
    points: int
    skipped: dict[str, int]
    noise: Spread


def serving_checks(rows: Sequence[dict[str, str]], peer: Peer, *, on_point: Callable[[int, int], None]) -> Serving:
    """Predict every point that the planner can describe; `on_point(done, total)` as they end."""
    parallel = [row for row in rows if row["mode"] == "agg" and _whole(row["moe_ep_size"]) > 1]
    skipped: dict[str, int] = {}
    points = merged(parallel, skipped)
    raw: list[_Judged] = []
    for done, point in enumerate(points, start=1):
        parts = predict(point)
        if parts is None:
            _count(skipped, "does not fit into memory as we keep it")
        else:
            raw.append(_Judged(point=point, parts=parts, check=_check(point, sum(parts), peer(point))))
        on_point(done, len(points))
    weights = {
        stack: _weights([one for one in raw if one.point.stack == stack and one.point.fitting])
        for stack in dict.fromkeys(one.point.stack for one in raw)
    }
    return Serving(
        raw=tuple(one.check for one in raw),
        scaled=tuple(_scaled(one, *weights[one.point.stack]) for one in raw if not one.point.fitting),
        weights=weights,
        rows=len(parallel),
        points=len(raw),
        skipped=skipped,
        noise=noise_of([one.point for one in raw]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    point: Point
    parts: tuple[float, float]
    check: Check


def merged(rows: Iterable[dict[str, str]], skipped: dict[str, int]) -> list[Point]:
    """Points of rows, repeats and copies joined; `skipped` counts rows left out, by reason."""
    found: dict[Point, set[float]] = {}
    for row in rows:
        point = _point(row)
        if isinstance(point, str):
            _count(skipped, point)
        else:
            found.setdefault(replace(point, tpot_ms=0.0), set()).add(point.tpot_ms)
    return [
        replace(point, tpot_ms=float(np.median(sorted(values))), repeats=tuple(sorted(values)))
        for point, values in found.items()
    ]


def noise_of(points: Sequence[Point]) -> Spread:
    """Differences from their median of values that were measured under one key, where there are several.

    Example: one configuration measured as 8 and 12 ms: twice 20 %.
    """
    values: dict[str, list[float]] = {}
    for point in points:
        values.setdefault(point.key, []).extend(point.repeats)
    several = [found for found in values.values() if len(set(found)) > 1]
    return spread([abs(x / float(np.median(found)) - 1) for found in several for x in found])


def _point(row: dict[str, str]) -> Point | str:
    """The point of a row, or why there is none."""
    model, device = MODELS.get(row["model_path"]), DEVICES.get(row["system"])
    if model is None or device is None:
        return "a model or device that has no preset here"
    dtype = DTYPES.get((model, row["precision"]))
    if dtype is None:
        return "a dtype that has no rates here"
    devices = _devices(row)
    if devices is None:
        return "experts split among devices (moe_tp), which we do not do"
    dp = max(1, _whole(row["attention_dp_size"]))
    asked = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    concurrency = int(asked.group(1)) if asked else _whole(row["batch_size"]) * dp
    tpot_ms = float(row["silicon_tpot_ms"] or 0)
    if not concurrency or tpot_ms <= 0:
        return "no concurrency or no time"
    return Point(
        model_path=row["model_path"], system=row["system"], backend=row["backend"], model=model, dtype=dtype,
        device=device, devices=devices, tp=1 if dp > 1 else devices, prompt_tokens=_whole(row["isl"]),
        output_tokens=_whole(row["osl"]), concurrency=concurrency, tpot_ms=tpot_ms, repeats=(),
    )  # fmt: skip


def _devices(row: dict[str, str]) -> int | None:
    """Devices of the host; None where experts are split as well.

    Example: tp 8, moe_tp 1, ep 8 is 8 devices; tp 64, moe_tp 8, ep 8 repeats the same runs: 8; tp 4, moe_tp 2, ep 2 of
    a table that has no data-parallel column is 4 devices with split experts: None.
    """
    ep, moe_tp = _whole(row["moe_ep_size"]), _whole(row["moe_tp_size"])
    if moe_tp <= 1:
        return ep
    return ep if moe_tp == ep and row["attention_dp_size"] else None


def predict(point: Point) -> tuple[float, float] | None:
    """Milliseconds of a decode step, and of the prompts read meanwhile; None where our memory ledger has no room."""
    base = _prepared(point.model, point.dtype, point.device, point.devices, point.tp)
    work = Workload(
        prompt_tokens=point.prompt_tokens,
        output_tokens=point.output_tokens,
        chunk_tokens=-(-point.prompt_tokens // point.devices),
    )
    cost = replace(base, problem=replace(base.problem, workload=work), _known={})
    each = point.concurrency / point.devices  # a share of a sequence where attention is split
    priced = cost.price(each)  # type: ignore[arg-type]
    if priced.decode is None or priced.prefill is None:
        return None
    return priced.decode.step_ms, point.concurrency / point.output_tokens * priced.prefill.step_ms


@cache
def _prepared(model: str, dtype: str, device: str, devices: int, tp: int) -> GroupCost:
    """Placement and traffic of one host; what depends on the load is put in later."""
    shape = replace(load_model_shape(model), dtype=dtype)
    cluster = parse_cluster({"nodes": [{"name": "host", "device": device, "devices": devices}]})
    work = Workload(prompt_tokens=1024, output_tokens=1024, chunk_tokens=1024)
    sample = _sample(shape)
    problem = Problem(model=shape, sample=sample, workload=work, target=Target(), network=None, ports=0)
    return GroupCost.of(problem, make_group(cluster, (0,), tp), WAYS[0])


@cache
def _sample(shape: ModelShape) -> Sample:
    return make_sample(shape, None)


def _check(point: Point, ours: float, theirs: float | None) -> Check:
    return Check(
        regime=f"{point.stack}, {'up to' if point.concurrency <= FEW else 'above'} {FEW} sequences",
        name=f"{point.devices} devices, tp {point.tp}, {point.prompt_tokens}+{point.output_tokens}, "
        f"{point.concurrency} at once",
        measured=point.tpot_ms,
        predicted=ours,
        other=theirs,
    )


def _weights(half: Sequence[_Judged]) -> tuple[Weights, Weights | None]:
    """Ours, and the peer's where it gives answers."""
    measured = [one.check.measured for one in half]
    both = [(one.check.other, one.check.measured) for one in half if one.check.other is not None]
    ours = fit_weights([one.parts for one in half], measured)
    return ours, fit_weights([(other,) for other, _ in both], [ms for _, ms in both]) if both else None


def fit_weights(parts: Sequence[tuple[float, ...]], measured: Sequence[float]) -> Weights:
    """A start and a factor for each part, not negative, with the least mean square of log errors.

    With fewer than `LEAST_FOR_ALL` points one factor for all parts, no start; without points 1. Example: parts (1, 1)
    and (2, 2), measured as 3 and 6: (0, 1.5, 1.5).
    """
    if not measured:
        return 0.0, 1.0, 1.0
    x_NP, y_N = np.array(parts, np.float64), np.array(measured, np.float64)
    if y_N.size < LEAST_FOR_ALL:
        return (0.0, *[float(np.exp(np.mean(np.log(y_N / x_NP.sum(axis=1)))))] * x_NP.shape[1])
    columns_NP = np.column_stack([np.full(y_N.size, y_N.min()), x_NP])

    def loss(log_w: NDArray[np.float64]) -> float:
        return float(np.mean(np.log(columns_NP @ np.exp(log_w) / y_N) ** 2))

    found = np.exp(descend(loss, np.log([0.2, *[1.0] * x_NP.shape[1]])))
    return (float(found[0] * y_N.min()), *found[1:].tolist())


def _scaled(one: _Judged, ours: Weights, theirs: Weights | None) -> Check:
    other = one.check.other
    return replace(
        one.check,
        predicted=_weighted(ours, one.parts),
        other=None if other is None or theirs is None else _weighted(theirs, (other,)),
    )


def _weighted(weights: Weights, parts: tuple[float, ...]) -> float:
    start, *factors = weights
    return start + sum(factor * part for factor, part in zip(factors, parts, strict=True))


def _count(skipped: dict[str, int], why: str) -> None:
    skipped[why] = skipped.get(why, 0) + 1


def _whole(text: str) -> int:
    return int(float(text)) if text else 0
