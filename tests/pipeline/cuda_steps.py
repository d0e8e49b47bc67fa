"""What rank processes run in the tests of the pipeline on GPUs: every way and split against the serial schedule."""

import random
import time

import torch

from bywash.balance import Placement
from bywash.errors import BywashError
from bywash.exchange.moves import GatherSteps
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from bywash.exchange.staged import HostMoves
from bywash.moe.device_experts import open_device_experts
from bywash.moe.device_layer import pairs_capacity
from bywash.moe.pipeline import SERIAL, Kind, Split, build_schedule
from bywash.moe.pipeline.attention_cuda import AttentionSizes
from bywash.moe.pipeline.run_cuda import CudaExecutor
from bywash.moe.pipeline.shared_cuda import row_independent_backend
from bywash.moe.pipeline.stack_cuda import (
    GatherForward,
    PeerForward,
    devices_needed,
    part_tokens,
)
from bywash.moe.pipeline.stack_sizes import StackSizes, random_weights

SPLITS = (Split(), Split(lanes=2), Split(lanes=3), Split(chunks=3), Split(lanes=2, chunks=2))
WAYS = ("copies", "kernels", "host memory")
SEQUENCES = (0, 24, 56)
"""Tokens of a sequence; without any, a stack of experts alone, which any split may cut."""
NEEDED = ((Kind.ROUTE, Kind.DISPATCH), (Kind.EXPERTS, Kind.COMBINE))
"""Pairs of stages whose semaphore nothing else replaces: the copies would take what is not there yet."""
_MOST_DELAY_CYCLES = 400_000


class Stack:
    """A small stack on this rank, by any way and split; with `sequence`, it has attention and a shared expert too."""

    def __init__(self, group, devices, *, layers=3, experts=12, top_k=4, hidden=512, inner=256, tokens=160, sequence=0):
        torch.cuda.set_device(group.rank % devices)
        self.group, self.placement = group, Placement.equal(experts, group.ranks)
        self.sizes = StackSizes(
            layers=layers,
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            inner=inner,
            tokens=tokens,
            attention=AttentionSizes(heads=4, kv_heads=2, head_size=64, sequence=sequence) if sequence else None,
            shared_inner=128 if sequence else 0,
        )
        self.local = len(self.placement.experts_of(group.rank))
        self.weights = random_weights(self.sizes, self.local, group.rank, seed=3)
        self.executor = CudaExecutor()

    def open(self, split, way, num_sms=4):
        """(forward, schedule, its exchanges)."""
        sizes = self.sizes
        layout = PeerLayout(
            ranks=self.group.ranks,
            experts=sizes.experts,
            top_k=sizes.top_k,
            tokens=part_tokens(sizes, split),
            hidden=sizes.hidden,
            dtype=torch.bfloat16,
            exact=False,
        )
        pairs, home_E = pairs_capacity(layout, self.local), self.placement.home_E
        experts = [
            open_device_experts(*pair, pairs=pairs, backend=row_independent_backend())
            for pair in zip(self.weights.gate_up, self.weights.down, strict=True)
        ]
        common = sizes, split, self.weights, experts, self.local
        number, schedule = devices_needed(split), build_schedule([sizes.form] * sizes.layers, split)
        if way == "kernels":
            found = [
                PeerDevice(self.group, layout, home_E, combine_mode="stable", num_sms=num_sms) for _ in range(number)
            ]
            return PeerForward(*common, found), schedule, found
        kind = {"make_moves": HostMoves} if way == "host memory" else {}
        found = [GatherSteps(self.group, layout, home_E, **kind) for _ in range(number)]
        return GatherForward(*common, found), schedule, found

    def feed(self, forward, seed, count):
        generator = torch.Generator(device="cuda").manual_seed(100 * seed + self.group.rank)
        forward.input_TD.copy_(torch.randn(forward.input_TD.shape, generator=generator, device="cuda"))
        forward.set_counts(count)

    def run(self, forward, schedule, work=None, leave_out=()):
        forward.begin()
        self.executor.run(schedule, work or forward, leave_out=leave_out)
        forward.end()
        return forward.output_TD


def delayed(forward, rng):
    """`forward` with kernels that only spin, before some ops."""

    def work(op):
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(_MOST_DELAY_CYCLES))
        forward(op)

    return work


def soak(group, devices, way, steps, seed):
    """Random sizes and delays, eager and captured; every step bitwise equal to the serial one. Returns the steps."""
    rng, done = random.Random(seed), 0  # the same on every rank
    own = random.Random(seed + 17 * group.rank)
    while done < steps:
        split, sequence = rng.choice(SPLITS), rng.choice(SEQUENCES)
        tokens = sequence * rng.randrange(3, 7) if sequence else rng.randrange(8, 300)
        stack = Stack(group, devices, tokens=tokens, top_k=rng.choice((1, 4)), sequence=sequence)
        plain, plain_schedule, plain_devices = stack.open(SERIAL, "kernels")
        forward, schedule, exchanges = stack.open(split, way)
        stack.run(forward, schedule)
        step = stack.executor.capture(schedule, delayed(forward, own), before=forward.begin, after=forward.end)
        for number in range(min(20, steps - done)):
            counts = [rng.choice((0, 1, tokens, rng.randrange(tokens + 1))) for _ in range(group.ranks)]
            count = counts[group.rank]
            for one in (plain, forward):
                stack.feed(one, done, count)
            expected = stack.run(plain, plain_schedule)[:count].clone()
            if number % 2:
                step.replay()
            else:
                stack.run(forward, schedule, delayed(forward, own))
            for device in (*plain_devices, *exchanges):
                device.check()
            out = forward.output_TD[:count]
            assert torch.equal(out, expected), (
                f"step {done}, {way}, {split}, tokens {counts} of {tokens}, {'replayed' if number % 2 else 'eager'}: "
                f"{int((out != expected).any(1).sum())} rows differ"
            )
            done += 1
        for device in (*plain_devices, *exchanges):
            device.close()
    return done


def soak_without(group, devices, kinds, steps):
    """With the semaphores from one stage to another left out and the first delayed: what goes wrong, or "nothing"."""
    deadline_s, group.deadline_s = group.deadline_s, 2.0
    try:
        stack = Stack(group, devices)
        plain, plain_schedule, _ = stack.open(SERIAL, "kernels")
        forward, schedule, exchanges = stack.open(Split(lanes=2), "copies")
        ops = schedule.ops
        missing = [
            number
            for number, one in enumerate(schedule.semaphores)
            if (ops[one.source].kind, ops[one.target].kind) == kinds
        ]
        assert missing, f"no semaphore from {kinds[0]} to {kinds[1]} in {schedule.split}"

        def late(op):
            if op.kind == kinds[0]:
                torch.cuda._sleep(_MOST_DELAY_CYCLES)
            forward(op)

        began = time.monotonic()
        for number in range(steps):
            for one in (plain, forward):
                stack.feed(one, number, stack.sizes.tokens)
            expected = stack.run(plain, plain_schedule).clone()
            out = stack.run(forward, schedule, late, leave_out=missing)
            try:
                for device in exchanges:
                    device.check()
            except BywashError as error:
                return f"step {number}: {type(error).__name__} after {time.monotonic() - began:.1f} s: {error}"
            if not torch.equal(out, expected):
                return f"step {number}: {int((out != expected).any(1).sum())} rows are wrong"
        return "nothing"
    finally:
        group.deadline_s = deadline_s
