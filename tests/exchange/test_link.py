"""The emulated link: arithmetic exactly, delivery against the ideal, and always labelled."""

import statistics
import time
from unittest import mock

import numpy as np
import pytest
import torch

from bywash.balance import Placement, plan_step
from bywash.errors import ConfigError
from bywash.exchange import shm_endpoint
from bywash.exchange.link import Link, LinkClocks, describe
from bywash.exchange.shm import ShmExchange
from bywash.memory import sleep_until_ns
from bywash.routing import Routing
from tests.exchange.shm_steps import counts_of


def test_messages_of_a_pair_queue_and_other_pairs_do_not():
    clocks = LinkClocks(Link(rate_gbps=8, latency_us=5), rank=0, ranks=3)
    assert [clocks.due_ns(1, 1000, 0), clocks.due_ns(1, 1000, 0), clocks.due_ns(2, 1000, 0)] == [6000, 7000, 6000]
    assert clocks.due_ns(1, 1000, 10_000) == 16_000, "an idle link starts at once"


def test_each_pair_may_have_its_own_link_or_none():
    clocks = LinkClocks({(0, 1): Link(rate_gbps=1, latency_us=0), (1, 0): Link(rate_gbps=2, latency_us=0)}, 0, 3)
    assert clocks.due_ns(1, 1000, 0) == 8000
    assert clocks.due_ns(2, 1000, 0) == 0
    assert LinkClocks(None, 0, 3).due_ns(1, 1000, 0) == 0


def test_impossible_links_are_refused():
    with pytest.raises(ConfigError, match=r"link\.rate_gbps = 0"):
        Link(rate_gbps=0, latency_us=1)
    with pytest.raises(ConfigError, match=r"link\.latency_us = -1"):
        Link(rate_gbps=1, latency_us=-1)
    with pytest.raises(ConfigError, match="0 -> 2: not a pair of the ranks"):
        LinkClocks({(0, 2): Link(rate_gbps=1, latency_us=1)}, 0, 2)


def test_what_is_emulated_is_said():
    assert describe(None) is None
    assert describe(Link(rate_gbps=200, latency_us=2.5)) == "emulated link: 200 Gb/s, 2.5 us"
    slow = {(0, 1): Link(rate_gbps=1, latency_us=9), (1, 0): Link(rate_gbps=1, latency_us=9)}
    assert describe(slow) == "emulated links: 1 Gb/s, 9 us"


HIDDEN = 2048


def deliveries(group, link, tokens, repeats):
    """Rank 0 sends `tokens` rows to rank 1. By repeat, in ns of CLOCK_MONOTONIC, which both share: on rank 0 when the
    message was handed to the link, when the call around that began, 0, 0; on rank 1 when it was seen behind the link,
    when the call ended, the CPU time of the wait, and until when the link made it wait.
    """
    exchange = ShmExchange(group, tokens=tokens, link=link)
    mine = tokens if group.rank == 0 else 0
    x = torch.ones(mine, HIDDEN)
    routing = Routing(ids_TK=torch.ones(mine, 1, dtype=torch.int64), weights_TK=torch.ones(mine, 1), num_experts=2)
    stamps = []
    signal, await_flags = exchange._end.signal, exchange._end.await_flags

    def stamped_signal(*args):
        stamps.append(args[-1])
        return signal(*args)

    def stamped_await(*args):
        cpu = time.thread_time_ns()
        await_flags(*args)
        stamps.extend([time.monotonic_ns(), time.thread_time_ns() - cpu])

    def stamped_sleep(due_ns):
        stamps.append(due_ns)
        sleep_until_ns(due_ns)

    exchange._end.signal, exchange._end.await_flags = stamped_signal, stamped_await
    times = []
    with mock.patch.object(shm_endpoint, "sleep_until_ns", stamped_sleep):
        for _ in range(repeats + 1):
            plan = plan_step(exchange.counts(counts_of(routing)), Placement.equal(2, 2))
            stamps.clear()
            called = time.monotonic_ns()
            received, handle = exchange.dispatch(x, routing, plan)
            returned = time.monotonic_ns()
            _, due, seen, cpu = stamps[:4] if group.rank == 1 else (0, 0, stamps[0], 0)
            times.append((seen, called if group.rank == 0 else returned, cpu, due))
            exchange.combine(handle, received.rows_ND)
    exchange.close()
    return times[1:], exchange.emulated  # the first step opened the heap


LINKS = pytest.mark.parametrize(
    ("rate_gbps", "latency_us", "tokens"), [(4, 200, 512), (4, 20, 1024), (10, 5000, 130)], ids=str
)


def delivered(pools, rate_gbps, latency_us, tokens, repeats):
    """What `deliveries` found on rank 0 and on rank 1, and the ideal, ns."""
    link = Link(rate_gbps=rate_gbps, latency_us=latency_us)
    (sent, label), (arrived, _) = pools(2).run(deliveries, link, tokens, repeats)
    assert label == f"emulated link: {rate_gbps} Gb/s, {latency_us} us"
    size_bytes = tokens * (HIDDEN * 4 + 8) + 64 + 2 * 8 + 16
    assert size_bytes > 1_000_000
    return sent, arrived, size_bytes * 8 / rate_gbps + latency_us * 1000


@LINKS
def test_a_message_over_1_mb_is_due_when_the_link_would_deliver_it(pools, rate_gbps, latency_us, tokens):
    """To the nanosecond, and it is not seen before."""
    sent, arrived, ideal_ns = delivered(pools, rate_gbps, latency_us, tokens, 3)
    for here, there in zip(sent, arrived, strict=True):
        assert there[3] - here[0] == pytest.approx(ideal_ns, abs=1)
        assert there[0] >= there[3]


@pytest.mark.slow  # what is added to that is the machine's
@LINKS
def test_a_message_over_1_mb_arrives_within_5_percent_of_rate_and_latency(pools, rate_gbps, latency_us, tokens):
    """A busy machine only ever delays, so the best of several runs is the claim."""
    sent, arrived, ideal_ns = delivered(pools, rate_gbps, latency_us, tokens, 9)
    pairs = list(zip(sent, arrived, strict=True))
    ratios = sorted((there[0] - here[0]) / ideal_ns for here, there in pairs)
    calls = sorted((there[1] - here[1]) / ideal_ns for here, there in pairs)
    print(
        f"ideal {ideal_ns / 1000:.0f} us; measured / ideal best {ratios[0]:.4f}, "
        f"median {statistics.median(ratios):.4f}, worst {ratios[-1]:.4f}; whole dispatch best {calls[0]:.4f}"
    )
    assert ratios[0] <= 1.05


def test_waiting_for_the_link_costs_little_cpu(pools):
    link = Link(rate_gbps=100, latency_us=50_000)
    _, (arrived, _) = pools(2).run(deliveries, link, 16, 3)
    least = min(cpu for _, _, cpu, _ in arrived)
    print(f"emulated latency 50 ms: {least / 1e6:.2f} ms of CPU")
    assert least < 50e6 * 0.5, "a wait that spins takes all of it; what others do on the machine is not counted"


def test_counts_pay_the_latency_too(pools):
    """The rank that begins first waits for a message sent later, so for more than the latency."""
    assert max(pools(2).run(count_round, Link(rate_gbps=1, latency_us=3000))) >= 1.0


def count_round(group, link):
    exchange = ShmExchange(group, link=link)
    exchange.counts(np.zeros(4, dtype=np.int32))
    begun = time.monotonic_ns()
    exchange.counts(np.zeros(4, dtype=np.int32))
    ratio = (time.monotonic_ns() - begun) / 3_000_000
    exchange.close()
    return ratio
