"""`bywash bench exchange`: one dispatch and combine, ours and two baselines, in one run.

A step is counts, plan, dispatch and combine, without expert compute: outputs are prepared before the clock starts, so
that no algorithm is charged for them. Each size is checked first, with outputs computed from what really arrived.

Shapes: T tokens of a rank, K experts per token, D hidden, E experts, M (row, expert) pairs.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bywash.balance import Placement, plan_step
from bywash.bench.by_hand import by_hand_bytes, by_hand_step
from bywash.exchange import Exchange, GlooExchange, Group, LocalExchange, ShmExchange
from bywash.exchange.link import Links
from bywash.exchange.names import Combine
from bywash.routing import Routing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Accepted relative difference to one process; sums per rank round at other places than sums in k order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeBench:
    """What to measure; `sizes` are tokens per rank."""

    sizes: tuple[int, ...]
    hidden: int
    experts: int
    top_k: int
    dtype: str
    combine: Combine
    zipf: float
    rounds: int
    seed: int = 0
    link: Links | None = None

    def steps_per_round(self, tokens: int) -> int:
        """Steps between two clock readings: more of the short ones, so that a round outlasts a time slice."""
        return max(1, min(20, 512 // tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One rank's measurement of one algorithm at one size.

    Attributes:
        algorithm: `shm`, `gloo` (deduplicated) or `by_hand`.
        tokens: per rank.
        times_us: microseconds per step, one value for each round.
        wrong: elements that differ from one process.
        wire_bytes, logical_bytes: of one step, sent by this rank; logical: a row per pair, both ways.
        imbalance: expert rows of the busiest rank over the mean.
        emulated: what is not real about the timing.
    """

    algorithm: str
    tokens: int
    times_us: list[float]
    wrong: int
    wire_bytes: int
    logical_bytes: int
    imbalance: float
    emulated: str | None = None


def measure(group: Group, bench: ExchangeBench) -> Iterator[list[Measured]]:
    """Measure every size on this rank; yields the algorithms of one size at a time. All ranks call it alike."""
    torch.set_num_threads(1)
    shm = ShmExchange(group, combine_mode=bench.combine, tokens=max(bench.sizes), link=bench.link)
    gloo = GlooExchange(group, combine_mode=bench.combine)
    placement = Placement.equal(bench.experts, group.ranks)
    try:
        for tokens in bench.sizes:
            yield _measure_size(group, bench, placement, {"shm": shm, "gloo": gloo}, tokens)
    finally:
        shm.close()
        gloo.close()


def _measure_size(
    group: Group, bench: ExchangeBench, placement: Placement, exchanges: dict[str, Exchange], tokens: int
) -> list[Measured]:
    x_TD, routing = draw_batch(bench, group.rank, tokens)
    expected = _one_process(bench, x_TD, routing)
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    imbalance = _imbalance(exchanges["gloo"], routing, placement)
    logical = 2 * routing.ids_TK.numel() * row_bytes
    steps: dict[str, Callable[[], Tensor]] = {}
    found: dict[str, tuple[int, int]] = {}
    for name, exchange in exchanges.items():
        before = exchange.traffic.wire_bytes
        out = exchange_step(exchange, placement, x_TD, routing, None)
        found[name] = _wrong(out, expected, bench.dtype), exchange.traffic.wire_bytes - before
        steps[name] = _timed_step(exchange, placement, x_TD, routing)
    out = by_hand_step(x_TD, routing, placement, fake_experts(bench.experts))
    found["by_hand"] = _wrong(out, expected, bench.dtype), by_hand_bytes(routing, placement, group.rank, row_bytes)
    steps["by_hand"] = _timed_by_hand(placement, x_TD, routing)
    times = _interleaved(group, steps, bench.rounds, bench.steps_per_round(tokens))
    return [
        Measured(
            algorithm=name,
            tokens=tokens,
            times_us=times[name],
            wrong=wrong,
            wire_bytes=wire,
            logical_bytes=logical,
            imbalance=imbalance,
            emulated=exchanges[name].emulated if name in exchanges else None,
        )
        for name, (wrong, wire) in found.items()
    ]


def exchange_step(
    exchange: Exchange, placement: Placement, x_TD: Tensor, routing: Routing, y_MD: Tensor | None
) -> Tensor:
    """One step; outputs are `y_MD` if given, else computed by `fake_experts` from what arrived."""
    counts_RE = exchange.counts(routing.counts_E().numpy().astype(np.int32))
    received, handle = exchange.dispatch(x_TD, routing, plan_step(counts_RE, placement))
    if y_MD is None:
        here = received.ids_NK >= 0
        rows = received.rows_ND[here.nonzero()[:, 0]]
        y_MD = fake_experts(placement.num_experts)(rows, received.ids_NK[here])
    return exchange.combine(handle, y_MD)


def fake_experts(num_experts: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Experts that cost nothing but tell their rows apart: expert e multiplies by 1 + e / E."""

    def compute(rows_MD: Tensor, expert_M: Tensor) -> Tensor:
        return rows_MD * (1 + expert_M / num_experts).to(rows_MD.dtype)[:, None]

    return compute


def _timed_step(exchange: Exchange, placement: Placement, x_TD: Tensor, routing: Routing) -> Callable[[], Tensor]:
    """A step with outputs made beforehand: the same number of rows as will arrive, contents of no matter."""
    counts_RE = exchange.counts(routing.counts_E().numpy().astype(np.int32))
    pairs = int(plan_step(counts_RE, placement).rows_R[exchange.rank])
    y_MD = torch.ones(pairs, x_TD.shape[1], dtype=x_TD.dtype)
    return lambda: exchange_step(exchange, placement, x_TD, routing, y_MD)


def _timed_by_hand(placement: Placement, x_TD: Tensor, routing: Routing) -> Callable[[], Tensor]:
    return lambda: by_hand_step(x_TD, routing, placement, lambda rows, _: rows)


def _interleaved(
    group: Group, steps: dict[str, Callable[[], Tensor]], rounds: int, steps_per_round: int
) -> dict[str, list[float]]:
    """Microseconds per step of each round: back-to-back steps between two clock readings, as nccl-tests does.

    The algorithms take turns, so that a noisy moment of the machine meets each of them.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            with group.blame("starting a measurement"):
                dist.barrier()
            start = time.perf_counter()
            for _ in range(steps_per_round):
                step()
            if number:  # the first round warms caches and connections
                times[name].append((time.perf_counter() - start) * 1e6 / steps_per_round)
    return times


def draw_batch(bench: ExchangeBench, rank: int, tokens: int) -> tuple[Tensor, Routing]:
    """Seeded tokens and routing; expert popularity follows Zipf's law with exponent `zipf` (0: uniform)."""
    generator = torch.Generator().manual_seed(bench.seed * 1000 + rank)
    x_TD = torch.randn(tokens, bench.hidden, generator=generator).to(DTYPES[bench.dtype])
    # Gumbel top-k draws k distinct experts with these odds; the hot ones lie scattered over the ranks.
    odds_E = -bench.zipf * torch.log(torch.arange(1, bench.experts + 1).float())
    odds_E = odds_E[torch.randperm(bench.experts, generator=torch.Generator().manual_seed(bench.seed))]
    noise = -torch.log(-torch.log(torch.rand(tokens, bench.experts, generator=generator).clamp(min=1e-12)))
    ids_TK = (odds_E + noise).topk(bench.top_k, dim=1).indices
    weights_TK = torch.rand(tokens, bench.top_k, generator=generator)
    return x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK, num_experts=bench.experts)


def _one_process(bench: ExchangeBench, x_TD: Tensor, routing: Routing) -> Tensor:
    return exchange_step(LocalExchange(), Placement.equal(bench.experts, 1), x_TD, routing, None)


def _imbalance(exchange: Exchange, routing: Routing, placement: Placement) -> float:
    return plan_step(exchange.counts(routing.counts_E().numpy().astype(np.int32)), placement).imbalance


def _wrong(out: Tensor, expected: Tensor, dtype: str) -> int:
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    return int((~((out - expected).float().abs() <= TOLERANCE[dtype] * scale)).sum())


def rows_of(measured_R: list[list[Measured]]) -> list[dict[str, Any]]:
    """One size's measurements of all ranks as JSON rows: a step takes as long as its slowest rank."""
    by_name = {one.algorithm: [m[i] for m in measured_R] for i, one in enumerate(measured_R[0])}
    times = {name: np.max([m.times_us for m in ranks], axis=0) for name, ranks in by_name.items()}
    medians = {name: float(np.median(t)) for name, t in times.items()}
    rows = []
    for name, ranks in by_name.items():
        wire = max(m.wire_bytes for m in ranks)
        logical = max(m.logical_bytes for m in ranks)
        rows.append(
            {
                "algorithm": name,
                "tokens": ranks[0].tokens,
                "logical_bytes": logical,
                "wire_bytes": wire,
                "time_us_median": round(medians[name], 1),
                "time_us_p10": round(float(np.percentile(times[name], 10)), 1),
                "time_us_p90": round(float(np.percentile(times[name], 90)), 1),
                "algbw_gbytes_per_s": round(logical / medians[name] / 1e3, 3),
                "busbw_gbytes_per_s": round(wire / medians[name] / 1e3, 3),
                "wrong": sum(m.wrong for m in ranks),
                "imbalance": round(ranks[0].imbalance, 3),
                "ratio_to_by_hand": round(medians["by_hand"] / medians[name], 2),
                "ratio_to_dedup_gloo": round(medians["gloo"] / medians[name], 2),
                "emulated": ranks[0].emulated,
            }
        )
    return rows
