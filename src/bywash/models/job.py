"""One rank's part of `bywash run`: join, agree, load, generate, report to rank 0.

The same function runs in local processes, under torchrun and, with one rank, in the checks of `check.py`.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import bywash
from bywash.balance import Placement, prepare_planner
from bywash.balance.limits import MOST_ROWS
from bywash.errors import CheckpointError, ConfigError
from bywash.exchange import Combine, DeviceKind, Exchange, Group, Link, Traffic, one_host, open_exchange
from bywash.models.checkpoint import fingerprint, weight_files
from bywash.models.families import family_of
from bywash.models.generate import Generation, Observer, generate, make_micro_batches
from bywash.models.job_metrics import job_metrics
from bywash.models.loader import DTYPES, gated_experts, load_model, read_config
from bywash.models.overflow import OverflowOptions, OverflowResult
from bywash.models.overlap import JobShape, Overlap, overlap_for
from bywash.models.stages import LanguageModel, MicroBatch
from bywash.moe import ExpertParallel, SlotPool
from bywash.moe.pipeline import Span, Usage, usage
from bywash.routing import DECODE, PREFILL, Routing, RoutingTrace, TraceRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What all ranks must agree on. Paths are resolved, prompts are token ids."""

    directory: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    micro_batch: int
    exchange: str
    combine: Combine
    link: Link | None
    dtype: str
    speeds: tuple[int, ...]
    stop_ids: tuple[int, ...]
    deadline_s: float
    check: bool
    trace: bool
    topics: tuple[str, ...] = ()
    overlap: str = "off"
    node_schedule: str = "together"
    timeline: bool = False
    overflow: OverflowOptions | None = None
    home: tuple[int, ...] = ()
    """The rank that owns each expert, in every layer; () shares experts out by `speeds`."""
    device: DeviceKind | None = None
    """Where the model runs; None leaves it to `job_device`."""


@dataclass(slots=True, kw_only=True)
class RankResult:
    """What a rank reports to rank 0 when it has finished.

    Attributes:
        exchange: the exchange that ran, and what of its timing is emulated.
        device: where the model ran.
        experts_by: how its experts were computed; see `ExpertParallel.backend`.
        generation: its prompts' tokens and, in a check, prefill logits.
        traffic: what it sent.
        rows_LR: int64 [MoE layers, R], expert rows of each rank summed over steps (equal on all ranks).
        experts: how many experts it owns.
        bytes_read: bytes of weights it read from disk.
        load_s, prefill_s, decode_s: wall time of each phase, seconds.
        router_mismatches: tokens for which our gate differed from the model's router; None if not checked.
        trace: its share of the routing trace, if asked for.
        overlap: how its steps were split, and why.
        prefill_usage, decode_usage: what of the layers' time was compute, communication and exposed communication.
        spans: when each stage ran, if the timeline was asked for.
        overflow: what became of rows beyond what their home should take; None without slots or a capacity.
    """

    exchange: str
    device: DeviceKind
    experts_by: str
    emulated: str | None
    generation: Generation
    traffic: Traffic
    rows_LR: np.ndarray
    experts: int
    bytes_read: int
    load_s: float
    prefill_s: float = 0.0
    decode_s: float = 0.0
    router_mismatches: int | None = None
    trace: RoutingTrace | None = None
    overlap: Overlap | None = None
    prefill_usage: Usage = field(default_factory=Usage)
    decode_usage: Usage = field(default_factory=Usage)
    spans: list[Span] = field(default_factory=list)
    overflow: OverflowResult | None = None


def run_job(options: JobOptions, group: Group | None, watch: "Watch | None" = None) -> RankResult:
    """Load this rank's share of the model and generate. `group` is None for a single process.

    Raises:
        BywashError: see its subclasses; every rank raises, each saying what it knows.
    """
    torch.set_num_threads(1)  # one thread everywhere is part of what makes logits bitwise the same
    watch = watch or Watch()
    rank, ranks = (group.rank, group.ranks) if group else (0, 1)
    directory = Path(options.directory)
    config = read_config(directory)
    kind = options.device or job_device(options.exchange, options.link, group)
    if options.overflow is not None and kind != "cpu":
        raise ConfigError(
            "--slots, --capacity-factor: rows leave home between CPU ranks only so far; leave them out on GPUs, or add "
            "--exchange shm"
        )
    options = replace(options, device=kind)
    if group:
        group.agree(**_facts(options, directory))
    start = time.monotonic()
    watch.phase("loading weights")
    placement = _placement(options, family_of(config, options.directory).num_experts(config), ranks)
    mine = placement.experts_of(rank)
    device = own_device(kind, rank)
    model, bytes_read = load_model(directory, mine, DTYPES[options.dtype], device)
    stages = LanguageModel(model, options.directory)
    if not stages.moe_layers:
        raise CheckpointError(f"{directory}: the model has no MoE layer; there is nothing to spread over ranks")
    if options.overflow is not None:
        prepare_planner()
    if group:
        group.meet("loading weights")
    load_s = time.monotonic() - start
    name = options.exchange if ranks > 1 else "auto"
    exchange = open_exchange(
        name, group, combine_mode=options.combine, link=options.link, device=kind, node_schedule=options.node_schedule
    )
    try:
        result = _generate(options, stages, exchange, placement, watch, device)
    finally:
        exchange.close()
    result.experts, result.bytes_read, result.load_s = len(mine), bytes_read, load_s
    return result


def job_device(exchange: str, link: Link | None, group: Group | None) -> DeviceKind:
    """Where a job's model runs: on GPUs with `peer`, and with `auto` on one host if there are any and their packages.

    An emulated link is for CPU ranks, and so are the exchanges that are named for them.
    """
    if exchange == "peer":
        return "cuda"
    fits = exchange == "auto" and link is None and (group is None or one_host(group))
    return "cuda" if fits and torch.cuda.is_available() and find_spec("cuda") and find_spec("cuda.core") else "cpu"


def own_device(kind: DeviceKind, rank: int) -> torch.device:
    """This rank's device, made the current one: ranks take the GPUs in turn, and share them if there are too few.

    Raises:
        ConfigError: there is no GPU.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--exchange peer: no CUDA device is visible; use --exchange shm or gloo on CPUs")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class Watch:
    """Progress of a run; the command line draws it. The default is silent."""

    def phase(self, name: str) -> None:
        """A phase begins."""

    def step(self, done: int, total: int) -> None:
        """`done` of `total` generation steps are over."""


@dataclass(slots=True)
class _Meter:
    """Times the steps, sums the rows, feeds the trace."""

    options: JobOptions
    layer_row: dict[int, int]
    ranks: int
    watch: Watch
    recorder: TraceRecorder | None
    began: list[float] = field(default_factory=list)
    rows_LR: np.ndarray = field(init=False)
    usage: list[Usage] = field(default_factory=lambda: [Usage(), Usage()])
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows_LR = np.zeros((len(self.layer_row), self.ranks), dtype=np.int64)

    def on_step(self, step: int, batches: Sequence[MicroBatch]) -> None:
        self.began.append(time.monotonic())
        self.watch.step(step, self.options.new_tokens)
        if self.recorder is not None:
            self.recorder.begin_step(*_token_places(step, batches))

    def on_layer(self, layer: int, routing: Routing, rows_R: np.ndarray) -> None:
        self.rows_LR[self.layer_row[layer]] += rows_R
        if self.recorder is not None:
            self.recorder.add(layer, routing.ids_TK.cpu(), routing.weights_TK.cpu())

    def on_spans(self, step: int, spans: Sequence[Span]) -> None:
        self.usage[step > 0] += usage(spans)
        if self.options.timeline:
            self.spans += spans


def _generate(
    options: JobOptions,
    stages: LanguageModel,
    exchange: Exchange,
    placement: Placement,
    watch: Watch,
    device: torch.device,
) -> RankResult:
    layers = [layer.index for layer in stages.moe_layers]
    recorder = _recorder(options, stages, layers) if options.trace else None
    pool = _slot_pool(options, stages, exchange, placement)
    experts = {
        layer.index: ExpertParallel(
            exchange=exchange,
            placement=placement,
            experts=gated_experts(layer.experts_module),
            pool=pool,
            layer=number,
        )
        for number, layer in enumerate(stages.moe_layers)
    }
    meter = _Meter(options, {layer: i for i, layer in enumerate(layers)}, exchange.ranks, watch, recorder)
    overlap = _overlap(options, stages, exchange.ranks)
    watch.phase("generating")
    with job_metrics(exchange, pool):
        generation = generate(
            stages,
            experts,
            make_micro_batches(options.prompts, options.micro_batch, exchange.rank, exchange.ranks, device),
            new_tokens=options.new_tokens,
            stop_ids=frozenset(options.stop_ids),
            keep_logits=options.check,
            check_router=options.check,
            prefill=overlap.prefill,
            decode=overlap.decode,
            deadline_s=options.deadline_s,
            observer=Observer(on_step=meter.on_step, on_layer=meter.on_layer, on_spans=meter.on_spans),
        )
    ends = [*meter.began[1:], time.monotonic()]
    watch.step(options.new_tokens, options.new_tokens)
    return RankResult(
        exchange=exchange.name,
        device=options.device or "cpu",
        experts_by=experts[layers[0]].backend,
        emulated=exchange.emulated,
        generation=generation,
        traffic=exchange.traffic,
        rows_LR=meter.rows_LR,
        experts=0,
        bytes_read=0,
        load_s=0.0,
        prefill_s=ends[0] - meter.began[0],
        decode_s=ends[-1] - ends[0],
        router_mismatches=sum(layer.router_mismatches or 0 for layer in stages.moe_layers) if options.check else None,
        trace=recorder.finish() if recorder else None,
        overlap=overlap,
        prefill_usage=meter.usage[0],
        decode_usage=meter.usage[1],
        spans=meter.spans,
        overflow=_overflow_result(pool),
    )


def _slot_pool(options: JobOptions, stages: LanguageModel, exchange: Exchange, placement: Placement) -> SlotPool | None:
    if options.overflow is None:
        return None
    limits = options.overflow.limits(
        tokens=sum(len(prompt) for prompt in options.prompts),
        top_k=stages.top_k,
        experts=stages.num_experts,
        speeds=options.speeds,
    )
    slots, layers = options.overflow.slots, len(stages.moe_layers)
    most_pairs = MOST_ROWS
    if options.overflow.capacity_factor:  # a capacity for each expert that a rank has, at home or in a slot
        own = int(np.bincount(placement.home_E).max())
        most_pairs = max((own + slots) * limits.capacity, exchange.ranks * stages.top_k)
    return SlotPool(
        exchange,
        limits,
        slots=slots,
        experts=stages.num_experts,
        layers=layers,
        most_pairs=most_pairs,
        ahead_pairs=len(options.prompts) * stages.top_k,
    )


def _overflow_result(pool: SlotPool | None) -> OverflowResult | None:
    if pool is None:
        return None
    capacity = pool.limits.capacity
    return OverflowResult(capacity=capacity if capacity < MOST_ROWS else None, counters=pool.counters)


def _overlap(options: JobOptions, stages: LanguageModel, ranks: int) -> Overlap:
    groups = -(-len(options.prompts) // options.micro_batch)
    job = JobShape(
        ranks=ranks,
        batches=-(-groups // ranks),
        batch_prompts=options.micro_batch,
        length=max(len(prompt) for prompt in options.prompts),
        combine=options.combine,
        link=options.link,
        device=options.device or "cpu",
    )
    return overlap_for(options.overlap, stages, job)


def _recorder(options: JobOptions, stages: LanguageModel, layers: list[int]) -> TraceRecorder:
    return TraceRecorder(
        layers=layers,
        num_experts=stages.num_experts,
        top_k=stages.top_k,
        keep_weights=True,
        model=Path(options.directory).name,
        topics=options.topics,
    )


def _placement(options: JobOptions, num_experts: int, ranks: int) -> Placement:
    if options.home:
        if len(options.home) != num_experts:
            raise ConfigError(f"--plan: places {len(options.home)} experts, the model has {num_experts}")
        return Placement(home_E=np.array(options.home, np.int32), ranks=ranks)
    if not options.speeds:
        return Placement.equal(num_experts, ranks)
    if len(options.speeds) != ranks:
        raise ConfigError(f"--speeds names {len(options.speeds)} ranks, the job has {ranks}")
    return Placement.weighted(num_experts, options.speeds)


def _facts(options: JobOptions, directory: Path) -> dict[str, Any]:
    """What must be equal on all ranks, under names an operator knows."""
    flags = {
        "new_tokens": "--tokens",
        "deadline_s": "--deadline",
        "topics": "--topic",
        "stop_ids": "stop ids",
        "home": "--plan",
    }
    flags["overflow"] = "--slots, --capacity-factor, --alpha, --break-even"
    flags["device"] = "where the model runs"
    values = asdict(options)
    # Every rank may keep its own copy of the checkpoint: what is in it is compared, not its path.
    del values["directory"]
    facts = {flags.get(name, f"--{name.replace('_', '-')}"): value for name, value in values.items()}
    facts["config.json sha256"] = hashlib.sha256((directory / "config.json").read_bytes()).hexdigest()[:16]
    facts["weight files"] = {file.name: fingerprint(file) for file in weight_files(directory)}
    facts["bywash version"] = bywash.__version__
    facts["torch version"] = torch.__version__
    facts["transformers version"] = transformers.__version__
    return facts


def _token_places(step: int, batches: Sequence[MicroBatch]) -> tuple[int, np.ndarray, np.ndarray]:
    """(phase, prompt of each real token, its position), in the order in which the layers see the tokens."""
    prompts: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    positions: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    for batch in batches:
        rows = batch.real_rows.cpu().numpy()
        width = batch.ids_BS.shape[1]
        all_positions = (batch.keep_BC.long().cumsum(1) - 1)[:, -width:].reshape(-1).cpu().numpy()
        prompts.append(np.asarray(batch.prompts, dtype=np.int32)[rows // width])
        positions.append(all_positions[rows].astype(np.int32))
    return (PREFILL if step == 0 else DECODE), np.concatenate(prompts), np.concatenate(positions)
