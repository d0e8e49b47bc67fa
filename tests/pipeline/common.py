"""Schedules, faults and rank functions that several pipeline tests share."""

import time
from dataclasses import replace

import torch

from bywash.balance import Placement
from bywash.bench.stack import Stack, StackShape, make_batches
from bywash.exchange import LocalExchange, open_exchange
from bywash.moe.pipeline import Forward, Split, ThreadExecutor, build_schedule, forward_naive


def without_semaphore(schedule, number):
    """The same schedule with one semaphore less, the others renumbered: a fault that `check` refuses."""

    def kept(numbers):
        return tuple(n - (n > number) for n in numbers if n != number)

    ops = tuple(replace(op, awaits=kept(op.awaits), signals=kept(op.signals)) for op in schedule.ops)
    semaphores = schedule.semaphores[:number] + schedule.semaphores[number + 1 :]
    return replace(schedule, ops=ops, semaphores=semaphores)


def split_unequally(batches, lanes, generator):
    """Consecutive batches in lanes of random sizes, some of them empty."""
    ends = sorted(torch.randint(0, len(batches) + 1, (lanes - 1,), generator=generator).tolist())
    return [batches[a:b] for a, b in zip([0, *ends], [*ends, len(batches)])]


def random_case(seed, layers=None):
    """(shape, batches of rank 0 and 1, split) of a soak step; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    shape = StackShape(
        layers=layers or pick(1, 2, 3),
        hidden=pick(16, 32),
        intermediate=pick(16, 48),
        experts=4,
        top_k=2,
        heads=2,
        sequence=pick(1, 3, 16, 17),
        shared=pick(False, True),
        seed=seed % 7,
    )
    split = Split(lanes=pick(1, 2, 3), chunks=pick(1, 1, 2, 3), overlapped=pick(True, True, True, True, False))
    return shape, (pick(0, 1, 2, 5), pick(1, 2, 3)), split


def expected_of(shape, batches, rank, step=0):
    """What the oracle makes of one rank's batches, in this process alone."""
    placement = Placement.equal(shape.experts, 1)
    stack = Stack(shape, placement, 0)
    ours = make_batches(shape, batches, rank, step)
    with torch.inference_mode():
        forward_naive(stack.layers, stack.on(LocalExchange()), ours)
    return [batch.hidden_BSD for batch in ours]


class Delayed:
    """`work` with a random pause before some ops, as a busy machine would make."""

    def __init__(self, work, seed, most_s):
        self._work, self._most_s = work, most_s
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, op):
        draw = float(torch.rand(1, generator=self._generator))
        if draw < 0.3:
            time.sleep(draw / 0.3 * self._most_s)
        return self._work(op)


def overlapped_steps(group, name, combine, cases, most_delay_s=0.0, drop=None, link=None):
    """Run each (seed, shape, batches by rank, split) on this rank; returns the outputs of each.

    One exchange for each shape, as a job has. `drop` removes that semaphore (modulo their number) from every schedule
    but the first, which opens the exchange.
    """
    exchanges, outputs = {}, []
    with torch.inference_mode(), ThreadExecutor(deadline_s=4 * group.deadline_s) as executor:
        try:
            for number, (seed, shape, batches_R, split) in enumerate(cases):
                key = (shape.hidden, shape.experts)
                if key not in exchanges:
                    exchanges[key] = open_exchange(name, group, combine_mode=combine, link=link)
                stack = Stack(shape, Placement.equal(shape.experts, group.ranks), group.rank)
                schedule = build_schedule(stack.forms, split)
                if drop is not None and number:
                    schedule = without_semaphore(schedule, drop % len(schedule.semaphores))
                batches = make_batches(shape, batches_R[group.rank], group.rank, seed)
                lanes = split_unequally(batches, split.lanes, torch.Generator().manual_seed(seed))
                work = Forward(
                    stack.layers, stack.on(exchanges[key]), lanes, chunks=split.chunks, nothing=stack.nothing
                )
                delayed = Delayed(work, 2 * seed + group.rank, most_delay_s) if most_delay_s else work
                executor.run(schedule, delayed)
                outputs.append([batch.hidden_BSD for batch in batches])
        finally:
            for exchange in exchanges.values():
                exchange.close()
    return outputs


def wrong_outputs(outputs_R, cases):
    """(case, rank) of outputs that are not bitwise the oracle's."""
    return [
        (seed, rank)
        for number, (seed, shape, batches_R, _) in enumerate(cases)
        for rank, outputs in enumerate(outputs_R)
        if not all(map(torch.equal, outputs[number], expected_of(shape, batches_R[rank], rank, seed)))
    ]


def soak_cases(seeds):
    return [(seed, *random_case(seed)) for seed in seeds]
