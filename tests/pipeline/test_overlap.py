"""Overlapped steps on real ranks: the bits of the oracle, whatever the split, and errors as the exchange gives them."""

import os
import time

import pytest
import torch

from bywash.bench.stack import StackShape
from bywash.errors import BywashError, PipelineError, RankLostError
from bywash.exchange import Link
from bywash.moe.pipeline import SERIAL, Split
from tests.pipeline.common import overlapped_steps, soak_cases, wrong_outputs
from tests.ranks import DEADLINE_S, RankPool

SHAPE = StackShape(layers=3, hidden=32, intermediate=48, experts=6, top_k=3, heads=2, sequence=9, shared=True)
SPLITS = [SERIAL, Split(), Split(lanes=2), Split(lanes=3), Split(chunks=3), Split(lanes=2, chunks=2)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("exchange", ["shm", "gloo"])
def test_every_split_gives_the_bits_of_the_oracle(pools, exchange, ranks):
    name = "local" if ranks == 1 else exchange
    cases = [(number, SHAPE, (5, 2, 0)[:ranks], split) for number, split in enumerate(SPLITS)]
    outputs_R = pools(ranks).run(overlapped_steps, name, "exact", cases)
    assert wrong_outputs(outputs_R, cases) == []


@pytest.mark.parametrize("combine", ["stable", "fast"])
def test_other_combines_give_what_the_serial_schedule_gives(pools, combine):
    """`stable` bit for bit; `fast` promises closeness."""
    cases = [(0, SHAPE, (4, 3), split) for split in SPLITS]
    for outputs in pools(2).run(overlapped_steps, "shm", combine, cases):
        serial, *others = (torch.cat(one) for one in outputs)
        for other in others:
            if combine == "stable":
                assert torch.equal(other, serial)
            torch.testing.assert_close(other, serial, rtol=1e-5, atol=1e-5)


def test_an_emulated_link_changes_no_bits(pools):
    cases = [(number, SHAPE, (3, 4), split) for number, split in enumerate(SPLITS)]
    link = Link(rate_gbps=0.05, latency_us=300)
    outputs_R = pools(2).run(overlapped_steps, "shm", "exact", cases, 0.0, None, link)
    assert wrong_outputs(outputs_R, cases) == []


def steps_then_die(group, exchange, rank, at_s):
    """Overlapped steps until `rank` leaves in the middle of one."""
    if group.rank == rank:
        import threading

        threading.Timer(at_s, os._exit, (1,)).start()
    cases = [(number, SHAPE, (4, 4), SPLITS[2 + number % 4]) for number in range(10**6)]
    return overlapped_steps(group, exchange, "exact", cases, 0.002)


@pytest.mark.parametrize("exchange", ["shm", "gloo"])
def test_a_rank_that_dies_is_named_by_the_exchanges_own_error(pools, exchange):
    pool = pools(2)
    pool.send(steps_then_die, [(exchange, 1, 0.5)] * 2)
    error = pool.receive(0)
    pool.close()
    assert isinstance(error, RankLostError), error
    assert error.ranks == (1,)


def fail_in_a_stage(group, exchange, rank):
    """One rank's compute fails in the middle of the second step; both find out."""
    from bywash.bench import stack

    original, calls = stack.SyntheticLayer.attention, []

    def attention(self, batch):
        calls.append(batch)
        if len(calls) > 2 * SHAPE.layers + 2:
            raise BywashError("this layer cannot be computed")
        original(self, batch)

    if group.rank == rank:
        stack.SyntheticLayer.attention = attention
    begun = time.monotonic()
    try:
        overlapped_steps(group, exchange, "exact", [(0, SHAPE, (2, 2), Split(lanes=2))] * 2)
    except BywashError as error:
        return type(error), str(error), time.monotonic() - begun
    finally:
        stack.SyntheticLayer.attention = original


def test_a_stage_that_fails_ends_both_ranks_at_once(pools):
    """The failing rank raises its own error; the other names it when that closes its exchange."""
    pool = pools(2)
    (own, text, own_s), (other, seen, other_s) = pool.run(fail_in_a_stage, "shm", 0)
    pool.close()
    assert (own, text) == (BywashError, "this layer cannot be computed")
    assert other is RankLostError
    assert "rank 0" in seen
    assert max(own_s, other_s) < DEADLINE_S / 2, "nobody had to wait for the deadline"


@pytest.mark.parametrize("drop", range(6))
def test_with_one_semaphore_removed_a_step_fails(drop):
    """Stage delays make the race certain: whatever semaphore is gone, some stage finds its input missing."""
    pool = RankPool(2, deadline_s=10)  # what one rank misses, the other may wait for
    split = Split(lanes=2) if drop % 2 else Split(lanes=2, chunks=2)
    cases = [(seed, SHAPE, (3, 3), split) for seed in range(40)]
    with pytest.raises((PipelineError, RankLostError, BywashError)):
        pool.run(overlapped_steps, "shm", "exact", cases, 0.01, drop)


def soak(pools, exchange, steps, most_delay_s, each=50):
    """Random sizes, splits and delays between stages: no hang, no wrong bit. Each call has its own time limit."""
    for first in range(0, steps, each):
        cases = soak_cases(range(first, min(first + each, steps)))
        outputs_R = pools(2).run(overlapped_steps, exchange, "exact", cases, most_delay_s)
        assert wrong_outputs(outputs_R, cases) == []


def test_soak(pools):
    soak(pools, "shm", 200, 0.001)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("exchange", ["shm", "gloo"])
def test_soak_of_ten_thousand_steps(pools, exchange):
    soak(pools, exchange, 10_000, 0.002)
