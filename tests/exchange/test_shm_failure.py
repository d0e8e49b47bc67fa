"""A rank that is killed, stopped or late, a heap that does not fit: named by the others, who survive and go on.

No supervisor takes part: the parent only collects what the ranks say.
"""

import errno
import gc
import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bywash.balance import Placement, plan_step
from bywash.errors import BywashError, ConfigError, RankLostError
from bywash.exchange import Group
from bywash.exchange.shm import ShmExchange
from tests.exchange.shm_steps import counts_of, expected, outputs_of, step_input
from tests.leftovers import assert_gone, assert_nothing_new, left_behind
from tests.ranks import DEADLINE_S, RankPool

SHAPE = {"hidden": 16, "experts": 8, "top_k": 2}
SHORT_S = 3.0
"""The deadline of a step in which a rank is stopped or late; all else has the pool's, which no load can use up."""
GOOD_STEPS = 3
POINTS = ["counts", "rows", "between peers", "outputs"]


def one_step(exchange, number, act=None, when=None):
    """One step; `act` runs just before this rank does `when`."""

    def reached(point):
        if act is not None and point == when:
            act()

    placement = Placement.equal(SHAPE["experts"], exchange.ranks)
    x, routing = step_input(exchange.rank, number, tokens=4 + exchange.rank, **SHAPE)
    reached("counts")
    plan = plan_step(exchange.counts(counts_of(routing)), placement)
    reached("rows")
    if act is not None and when == "between peers":
        send_rows, last = exchange._send_rows, exchange._end.peers[-1]

        def send_some(step, peer, message):
            if peer == last:
                act()
            send_rows(step, peer, message)

        exchange._send_rows = send_some
    received, handle = exchange.dispatch(x, routing, plan)
    reached("outputs")
    out = exchange.combine(handle, outputs_of(received))
    assert torch.equal(out, expected(x, routing))


def come_after(group, survivors):
    """Return when all of them have given up, however long that takes them."""
    group.store.set_timeout(timedelta(seconds=DEADLINE_S))
    group.store.wait([f"gave up/{rank}" for rank in survivors])


def until_failure(group, culprit, how, when):
    """Good steps, then the culprit fails; what this rank sees: two errors, and the seconds until the first."""
    exchange = ShmExchange(group)
    for number in range(GOOD_STEPS):
        one_step(exchange, number)
    acts = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "late": lambda: come_after(group, set(range(group.ranks)) - {culprit}),
    }
    if how != "killed":
        group.deadline_s = SHORT_S
    began = time.monotonic()
    try:
        one_step(exchange, GOOD_STEPS, acts[how] if group.rank == culprit else None, when)
    except BywashError as error:
        seconds = time.monotonic() - began
        group.deadline_s = DEADLINE_S
        group.store.set(f"gave up/{group.rank}", "")
        again = None
        try:
            exchange.counts(np.zeros(SHAPE["experts"], dtype=np.int32))
        except BywashError as second:
            again = second
        exchange.close()
        return error, again, seconds
    return None


def start_again(group, survivors, port):
    """The same processes, a new group of those that are left, a new exchange."""
    group.close()
    store = dist.PrefixStore("again", dist.TCPStore("127.0.0.1", port))
    new = Group(rank=survivors.index(group.rank), ranks=len(survivors), store=store, deadline_s=group.deadline_s)
    exchange = ShmExchange(new)
    for number in range(GOOD_STEPS):
        one_step(exchange, number)
    exchange.close()
    new.close()
    del exchange
    gc.collect()
    return "bywash-heap" in Path("/proc/self/maps").read_text()


def check_survivors(pool, culprit, how, when, word):
    before = left_behind()
    survivors = [rank for rank in range(pool.ranks) if rank != culprit]
    pool.send(until_failure, [(culprit, how, when)] * pool.ranks)
    for rank in survivors:
        answer = pool.receive(rank)
        assert not isinstance(answer, Exception), answer
        error, again, seconds = answer
        assert isinstance(error, RankLostError)
        assert error.ranks == (culprit,), str(error)
        assert f"rank {culprit} (pid {pool.processes[culprit].pid}) is {word}" in str(error)
        if how == "killed":
            assert seconds < DEADLINE_S / 2, "nobody has to wait for the deadline"
        else:
            assert f" of {SHORT_S:g} s)" in str(error)
        assert str(again) == str(error), "a failed exchange says why on every later call"
        print(f"rank {rank}: after {seconds:.2f} s: {error}")
    for rank in survivors:  # only these are asked, so the culprit may be dead, stopped or asleep
        pool._pipes[rank].send((start_again, (survivors, pool._store.port)))
    assert [pool.receive(rank) for rank in survivors] == [False] * len(survivors)
    assert_nothing_new(before)


@pytest.fixture
def three():
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.mark.parametrize("when", POINTS)
def test_a_killed_rank_is_named_and_the_others_go_on(three, when):
    check_survivors(three, 1, "killed", when, "gone (killed, or exited with an error of its own)")


@pytest.mark.parametrize("when", ["rows", "between peers"])
def test_a_stopped_rank_is_named(three, when):
    check_survivors(three, 2, "stopped", when, "stopped (SIGSTOP)")


@pytest.mark.parametrize("when", ["rows", "between peers"])
def test_a_late_rank_is_named_and_not_those_that_wait_for_it(three, when):
    check_survivors(three, 2, "late", when, "late: it did not arrive before the deadline")
    error, _, _ = three.receive(2)  # when it comes at last, it learns what happened
    assert isinstance(error, RankLostError)
    assert error.ranks == (2,)


def leaves_early(group):
    exchange = ShmExchange(group)
    one_step(exchange, 0)
    if group.rank == 0:
        exchange.close()
        return None
    began = time.monotonic()
    try:
        one_step(exchange, 1)
    except RankLostError as error:
        return error.ranks, str(error), time.monotonic() - began
    finally:
        exchange.close()


def test_a_rank_that_closes_is_missed_at_once(pools):
    _, (ranks, text, seconds) = pools(2).run(leaves_early)
    assert ranks == (0,)
    assert "gone from the exchange (it closed it" in text
    assert seconds < DEADLINE_S / 2, "nobody had to wait for the deadline"


def too_big(group, tokens):
    exchange = ShmExchange(group, tokens=tokens)
    try:
        one_step(exchange, 0)
    finally:
        exchange.close()


def test_a_heap_that_does_not_fit_shows_the_arithmetic_on_every_rank(pools):
    pool = pools(2)
    pool.send(too_big, [(2**40,)] * 2)
    errors = [pool.receive(rank) for rank in range(2)]
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert str(errors[0]) == str(errors[1])
    rows, outputs = 2 * 2**40 * (16 * 4 + 8 * 2), 2**40 * 2 * 16 * 4
    assert f"2 sources x {2**40} tokens x (64 B row + 16 B index and weights) = {rows:,} B" in str(errors[0])
    assert f"{2**40} tokens x 2 outputs x 64 B = {outputs:,} B" in str(errors[0])
    assert f"2 ranks x {2 * (rows + outputs) / 2**20:,.1f} MiB" in str(errors[0])
    assert pool.run(too_big, 0) == [None, None], "the group is still good for an exchange that fits"


def refused(group, culprit):
    """One rank may not make files as large as the rows heap: the kernel refuses its pages."""
    exchange = ShmExchange(group, tokens=4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.rank == culprit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        one_step(exchange, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        exchange.close()


def test_a_rank_whose_memory_is_refused_is_named_on_every_rank(pools):
    pool = pools(3)
    pool.send(refused, [(1,)] * 3)
    errors = [pool.receive(rank) for rank in range(3)]
    assert [type(error) for error in errors] == [ConfigError] * 3, errors
    reason = os.strerror(errno.EFBIG)
    assert all("rank 1 could not allocate its heap" in str(error) and reason in str(error) for error in errors)
    assert pool.run(too_big, 0) == [None] * 3


def descriptors_around_an_exchange(group):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    exchange = ShmExchange(group)
    one_step(exchange, 0)
    during = len(os.listdir("/proc/self/fd"))
    mapped = Path("/proc/self/maps").read_text().count("bywash-heap")
    exchange.close()
    del exchange
    gc.collect()
    return before, during, mapped, Path("/proc/self/maps").read_text().count("bywash-heap")


def test_an_exchange_holds_no_descriptors_and_its_memory_goes_with_it(pools):
    for before, during, mapped, after in pools(2).run(descriptors_around_an_exchange):
        assert during == before
        assert mapped == 4, "two heaps of each of two ranks"
        assert after == 0


def test_memory_and_sockets_of_killed_ranks_are_gone():
    before = left_behind()
    pool = RankPool(2)
    pool.run(too_big, 100_000)
    pids = [process.pid for process in pool.processes]
    pool.close()  # SIGKILL
    assert_nothing_new(before)
    assert_gone(pids)
