"""What ranks on test hosts do: (rank, ranks, store, deadline_s, **arguments) to JSON values."""

import hashlib
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from bywash.balance import Placement, plan_step
from bywash.bench.alone import ComputeAlone, Recorded, RecordingForward
from bywash.bench.by_hand import by_hand_step
from bywash.bench.stack import Stack, StackShape, make_batches, split_batches
from bywash.errors import RankLostError
from bywash.exchange import Group, open_exchange, rebuild
from bywash.moe import ExpertParallel
from bywash.moe.pipeline import Forward, Split, ThreadExecutor, build_schedule
from bywash.routing import Routing
from tests.hosts.network import counters, segments_again
from tests.moe.common import Case, random_batch, random_experts

SHAPE = {"hidden": 1024, "experts": 32, "top_k": 4}
LAYER = Case(
    hidden=64, inner=32, experts=16, top_k=4, tokens=(24, 7, 0, 33), dtype=torch.float32, combine="exact", seed=3
)  # fmt: skip


def batch(rank, step, tokens, hot=(1.0, ())):
    """Every token goes to four experts, all equally likely but for (how many times as likely, which)."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(tokens, SHAPE["hidden"], generator=generator)
    draws = torch.rand(tokens, SHAPE["experts"], generator=generator)
    draws[:, list(hot[1])] **= 1 / hot[0]  # Efraimidis and Spirakis: the largest u^(1/w) are a weighted sample
    ids = draws.topk(SHAPE["top_k"]).indices
    return x, Routing(ids_TK=ids, weights_TK=torch.rand(ids.shape, generator=generator), num_experts=SHAPE["experts"])


def doubled(received):
    rows, _ = (received.ids_NK >= 0).nonzero(as_tuple=True)
    return received.rows_ND[rows] * 2


def count_bytes(rank, ranks, store, deadline_s, *, way, tokens, steps):
    """Bytes over the cable from this host, headers left out, and what the exchange says that it sent."""
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=deadline_s)
    placement = Placement.equal(SHAPE["experts"], ranks)
    exchange = open_exchange("auto" if way == "by hand" else way, group, combine_mode="fast")
    name = exchange.name

    def step(number):
        x, routing = batch(rank, number, tokens)
        if way == "by hand":
            return by_hand_step(x, routing, placement, lambda rows, _: rows * 2)
        counts_RE = exchange.counts(routing.counts_E().int().numpy())
        received, handle = exchange.dispatch(x, routing, plan_step(counts_RE, placement))
        return exchange.combine(handle, doubled(received))

    step(0)
    group.share("warm", "warming up")
    before, again, said = counters(), segments_again(), exchange.traffic.host_bytes or 0
    for number in range(1, steps + 1):
        x, routing = batch(rank, number, tokens)
        torch.testing.assert_close(step(number), 2 * x * routing.weights_TK.sum(dim=1, keepdim=True))
    torch.distributed.barrier()
    after = counters()
    exchange.close()
    group.close()
    return {
        "name": name,
        "bytes": after[0] - before[0],
        "packets": after[1] - before[1],
        "again": segments_again() - again,
        "said": (exchange.traffic.host_bytes or 0) - said,
    }


def time_steps(rank, ranks, store, deadline_s, *, tokens, steps):
    """Milliseconds of one dispatch and combine by way, median of interleaved rounds, and bytes that left this host."""
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=deadline_s)
    placement = Placement.equal(SHAPE["experts"], ranks)
    x, routing = batch(rank, 0, tokens)
    exchanges = {name: open_exchange(name, group, combine_mode="fast") for name in ("hierarchical", "gloo")}

    def exchanged(exchange):
        counts_RE = exchange.counts(routing.counts_E().int().numpy())
        received, handle = exchange.dispatch(x, routing, plan_step(counts_RE, placement))
        return exchange.combine(handle, doubled(received))

    ways = {name: lambda exchange=exchange: exchanged(exchange) for name, exchange in exchanges.items()}
    ways["by hand"] = lambda: by_hand_step(x, routing, placement, lambda rows, _: rows * 2)
    times, sent = {name: [] for name in ways}, {}
    for _ in range(steps + 1):
        for name, way in ways.items():
            torch.distributed.barrier()
            before, began = counters(), time.perf_counter()
            way()
            torch.distributed.barrier()
            times[name].append(1e3 * (time.perf_counter() - began))
            sent[name] = counters()[0] - before[0]
    group.close()
    return {name: {"ms": statistics.median(times[name][1:]), "bytes": sent[name]} for name in ways}


def schedule_steps(rank, ranks, store, deadline_s, *, tokens, last_tokens, hot, schedules, rounds):
    """One dispatch and combine by each schedule, whose outputs are compared; interleaved rounds, the first left out.

    The last rank has `last_tokens`, and experts of rank 0 weigh `hot` times as much as others. Of each, by round: `ms`,
    segments that TCP sent again from this host (`again`), rows that left it (`out`) and came to it (`into`).
    """
    torch.set_num_threads(1)
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=deadline_s)
    placement = Placement.equal(SHAPE["experts"], ranks)
    mine = last_tokens if rank == ranks - 1 else tokens
    x, routing = batch(rank, 0, mine, hot=(hot, placement.experts_of(0)))
    exchanges = {
        text: open_exchange("hierarchical", group, combine_mode="fast", node_schedule=text) for text in schedules
    }
    found, wanted = {text: [] for text in schedules}, None
    for _ in range(rounds + 1):
        for text, exchange in exchanges.items():
            torch.distributed.barrier()
            again, began = segments_again(), time.perf_counter()
            before = replace(exchange.traffic)
            counts_RE = exchange.counts(routing.counts_E().int().numpy())
            received, handle = exchange.dispatch(x, routing, plan_step(counts_RE, placement))
            output = exchange.combine(handle, doubled(received))
            torch.distributed.barrier()
            ms = 1e3 * (time.perf_counter() - began)
            wanted = output if wanted is None else wanted
            assert torch.equal(output, wanted), text
            out, into = (getattr(exchange.traffic, k) - getattr(before, k) for k in ("rows_sent", "rows_returned"))
            found[text].append({"ms": ms, "again": segments_again() - again, "out": out, "into": into})
    for exchange in exchanges.values():
        exchange.close()
    group.close()
    return {text: each[1:] for text, each in found.items()}


def prefill(rank, ranks, store, deadline_s, *, mode, prompts, length):
    """Prefill of the shipped model with --overlap `mode`: seconds in all and of compute, bytes to other hosts."""
    from bywash.cli.run import RunRequest, _job_options
    from bywash.models.job import run_job

    ids = torch.randint(0, 250, (prompts, length), generator=torch.Generator().manual_seed(1)).tolist()
    request = RunRequest(
        prompts=tuple((tuple(row), None) for row in ids), tokens=1, overlap=mode, combine="fast", deadline=deadline_s,
        exchange="hierarchical",
    )  # fmt: skip
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=deadline_s)
    result = run_job(_job_options(request), group)
    group.close()
    used = result.prefill_usage
    return {
        "step_s": result.prefill_s,
        "layers_s": used.step_ns / 1e9,
        "compute_s": used.compute_ns / 1e9,
        "bytes": result.traffic.host_bytes,
    }


def bywash_run(rank, ranks, store, deadline_s, **request):
    """`bywash run` as a rank, with the options of `RunRequest`."""
    from bywash.cli.run import DEFAULT_PROMPTS, RunRequest, rank_main

    prompts = tuple((text, None) for text in DEFAULT_PROMPTS[: request.pop("prompts")])
    rank_main(RunRequest(prompts=prompts, deadline=deadline_s, **request), rank, ranks, store)


def endless_steps(rank, ranks, store, deadline_s, *, begun, steps=10**6, combine="exact", pause_s=0.0):
    """Steps of one layer, until there is an error or enough of them. Returns how many, all of them checked."""
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=deadline_s)
    try:
        return _steps(group, Path(begun), steps, combine, pause_s)
    finally:
        group.close()


def _steps(group, begun, steps, combine, pause_s):
    case = replace(LAYER, combine=combine)
    placement = Placement.equal(case.experts, group.ranks)
    experts = random_experts(
        case.experts, case.hidden, case.inner, case.dtype, case.seed, placement.experts_of(group.rank)
    )
    exchange = open_exchange("hierarchical", group, combine_mode=combine)
    layer = ExpertParallel(exchange=exchange, placement=placement, experts=experts)
    first = None
    try:
        for number in range(steps):
            out = layer(*random_batch(case, group.rank), reuse_plan=number > 0)
            first = out if first is None else first
            assert torch.equal(out, first)
            if number == 3 and group.rank == 0:
                begun.touch()
            time.sleep(pause_s)
    finally:
        exchange.close()
    return {"steps": steps, "sha256": sha256(first)}


def sha256(out_TD):
    return hashlib.sha256(out_TD.numpy().tobytes()).hexdigest()


def model_run_that_goes_on(rank, ranks, store, deadline_s, *, begun):
    """A model's generation loses a host; the survivors rebuild, reload and generate again. Returns their tokens."""
    from bywash.cli.run import DEFAULT_PROMPTS, RunRequest, _job_options
    from bywash.models.job import Watch, run_job

    class Touch(Watch):
        def step(self, done, total):
            if done == 2 and rank == 0:
                Path(begun).touch()
            time.sleep(0.05)

    prompts = tuple((text, None) for text in DEFAULT_PROMPTS[:3])
    options = _job_options(RunRequest(prompts=prompts, tokens=40, deadline=deadline_s))
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=deadline_s)
    try:
        run_job(options, group, Touch())
        return {"lost": []}
    except RankLostError as error:
        began, lost = time.monotonic(), list(error.ranks)
        group = rebuild(group, lost)
        result = run_job(replace(options, new_tokens=8), group)
        tokens = {str(p): ids for p, ids in result.generation.tokens.items()}
        return {
            "lost": lost, "text": str(error), "rank": group.rank, "ranks": group.ranks, "exchange": result.exchange,
            "tokens": tokens, "experts": result.experts, "rebuilt_s": time.monotonic() - began,
        }  # fmt: skip
    finally:
        group.close()


def hosts_that_differ(rank, ranks, store, deadline_s):
    """Joins and compares hosts; a rank with ODD_CODE in its environment runs other code."""
    from bywash.launch import hosts

    if "ODD_CODE" in os.environ:
        hosts.source_hash = lambda: os.environ["ODD_CODE"]
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=deadline_s)
    try:
        return hosts.check_hosts(group)
    finally:
        group.close()


def stack_steps(rank, ranks, store, deadline_s, *, shape, batches, splits, rounds):
    """Steps of a stack of MoE layers across hosts, by split, whose outputs are compared; medians of interleaved rounds.

    Of each: `step_s`, `compute_s` of the same compute on rows that had arrived, `cpu_s` of this process in the step,
    `moving_cpu_s` of them for all but compute, and the `bytes` that left this host.
    """
    torch.set_num_threads(1)
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=deadline_s)
    stack = Stack(StackShape(**shape), Placement.equal(shape["experts"], ranks), rank)
    exchange = open_exchange("hierarchical", group, combine_mode="fast")
    experts, found, wanted = stack.on(exchange), {}, None
    with torch.inference_mode(), ThreadExecutor(deadline_s=5 * deadline_s) as executor:
        cases = {text: _StackCase(stack, experts, batches, Split(**split)) for text, split in splits.items()}
        for _ in range(rounds + 1):
            for text, case in cases.items():
                torch.distributed.barrier()
                sent, began, cpu_began = counters()[0], time.perf_counter(), time.process_time()
                output = case.step(executor, rank)
                measured = {"cpu_s": time.process_time() - cpu_began}
                torch.distributed.barrier()
                measured |= {"step_s": time.perf_counter() - began, "bytes": counters()[0] - sent}
                torch.distributed.barrier()
                began, cpu_began = time.perf_counter(), time.process_time()
                case.compute_alone(rank)
                measured["compute_s"] = time.perf_counter() - began
                measured["moving_cpu_s"] = measured["cpu_s"] - (time.process_time() - cpu_began)
                found.setdefault(text, []).append(measured)
                wanted = wanted or output
                assert all(torch.equal(a, b) for a, b in zip(wanted, output, strict=True)), text
    exchange.close()
    group.close()
    return {text: {key: statistics.median(m[key] for m in each[1:]) for key in each[0]} for text, each in found.items()}


class _StackCase:
    """One split of the stack's step on one rank; the first step records what arrives, for compute alone."""

    def __init__(self, stack, experts, batches, split):
        self.stack, self.experts, self.batches, self.split = stack, experts, batches, split
        self.schedule = build_schedule(stack.forms, split, cost=lambda kind, lane: 1)
        self.recorded = Recorded()

    def step(self, executor, rank):
        lanes = self._lanes(rank)
        arguments = (self.stack.layers, self.experts, lanes)
        options = {"chunks": self.split.chunks, "nothing": self.stack.nothing}
        if not self.recorded.arrived:
            work = RecordingForward(*arguments, **options, recorded=self.recorded)
        else:
            work = Forward(*arguments, **options)
        executor.run(self.schedule, work)
        return [batch.hidden_BSD for lane in lanes for batch in lane]

    def compute_alone(self, rank):
        options = {"chunks": self.split.chunks, "nothing": self.stack.nothing, "recorded": self.recorded}
        work = ComputeAlone(self.stack.layers, self.experts, self._lanes(rank), **options)
        for op in self.schedule.ops:
            work(op)

    def _lanes(self, rank):
        return split_batches(make_batches(self.stack.shape, self.batches, rank), self.split.lanes)
