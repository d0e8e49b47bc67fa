"""The schedule `by-counts`: every host is offered its line by all senders together, of this very step's bytes."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bywash.balance import Placement, plan_step
from bywash.errors import ConfigError, PlanMismatchError
from bywash.exchange import node_leg, node_schedule
from bywash.exchange.hierarchical import HierarchicalExchange
from bywash.exchange.host_map import HostMap
from bywash.exchange.node_due import due_by_host, due_words
from bywash.exchange.node_header import Header
from bywash.exchange.node_schedule import NodeSchedule, rates_gbps
from tests.hosts.test_hierarchical import layer_steps
from tests.moe.common import Case, random_batch

PIECE = 512
"""Bytes of a piece in these steps, so that their small messages have several."""


def naive_rate(bytes_SH, source, host, line_gbps, factor):
    """One message's, with what each source sends to its receiver's host."""
    due = 0
    for other in range(len(bytes_SH)):
        due += bytes_SH[other][host]
    return factor * line_gbps * bytes_SH[source][host] / due


@st.composite
def crossing(draw):
    """A map of ranks to hosts, and the bytes that each rank sends to each other host."""
    names = draw(st.lists(st.integers(0, 4), min_size=1, max_size=9))
    hosts, rng = HostMap.of(names), np.random.default_rng(draw(st.integers(0, 1000)))
    bytes_RH = rng.integers(0, 10_000, (len(names), hosts.hosts)) * (rng.random((len(names), hosts.hosts)) < 0.7)
    bytes_RH[np.arange(len(names)), list(hosts.host_R)] = 0
    return hosts, bytes_RH


@given(case=crossing(), factor=st.sampled_from([0.5, 1.0, 1.25]))
def test_all_senders_together_offer_a_host_its_line(case, factor):
    hosts, bytes_RH = case
    schedule = NodeSchedule(name="by-counts", rate_gbps=25.0, factor=factor)
    due_H = bytes_RH.sum(axis=0)
    offered_H, ends_H = np.zeros(hosts.hosts), [[] for _ in range(hosts.hosts)]
    for source in range(len(bytes_RH)):
        host_of = {hosts.gateway(source, host): host for host in range(hosts.hosts) if bytes_RH[source, host]}
        sent = {rank: int(bytes_RH[source, host]) for rank, host in host_of.items()}
        due_bytes = {rank: int(due_H[host]) for rank, host in host_of.items()}
        rates = rates_gbps(schedule, sent, 1, due_bytes)
        for rank, host in host_of.items():
            assert rates[rank] == pytest.approx(naive_rate(bytes_RH.tolist(), source, host, 25.0, factor))
            offered_H[host] += rates[rank]
            ends_H[host].append(sent[rank] / rates[rank])
    assert offered_H[due_H > 0] == pytest.approx(factor * 25.0)
    assert all(max(ends) == pytest.approx(min(ends)) for ends in ends_H if ends)


@given(case=crossing(), seed=st.integers(0, 100))
def test_what_hosts_are_due_adds_up_from_the_words_of_ranks(case, seed):
    hosts, rows_RH = case
    back_R = np.random.default_rng(seed).integers(0, 10**6, len(rows_RH))
    words_RW = [
        due_words([n for host, n in enumerate(rows.tolist()) if host != here], int(back), here)
        for rows, back, here in zip(rows_RH, back_R, hosts.host_R, strict=True)
    ]
    due = due_by_host(np.stack(words_RW), hosts)
    for host, members in enumerate(hosts.members):
        assert due.rows_H[host] == sum(int(rows_RH[rank, host]) for rank in range(len(rows_RH)))
        assert due.outputs_H[host] == sum(int(back_R[rank]) for rank in members)


def header(**changes):
    words = {"digest": 2**32 - 1, "shape": (64, 4, 1), "counts_E": torch.arange(3, dtype=torch.int32)}
    return Header(**{**words, "due_W": torch.tensor([5, 0, 2], dtype=torch.int32), **changes})


def test_a_header_arrives_as_it_was_sent_and_a_difference_is_named():
    mine, theirs = header(), header(due_W=torch.tensor([0, 7, 1], dtype=torch.int32))
    found = mine.read(theirs.words(rows=9))
    assert (found.rows, found.digest, found.shape) == (9, 2**32 - 1, (64, 4, 1))
    assert (found.counts_E.tolist(), found.due_W.tolist()) == ([0, 1, 2], [0, 7, 1])
    mine.check(found, rank=5, here=2)
    with pytest.raises(PlanMismatchError, match=r"rank 5 planned .*0x00000007, rank 2 has 0xffffffff"):
        mine.check(mine.read(header(digest=7).words(rows=9)), rank=5, here=2)
    with pytest.raises(ConfigError, match=r"rank 5 sends rows of hidden 32, top-4, torch.bfloat16; rank 2 has"):
        mine.check(mine.read(header(shape=(32, 4, 1)).words(rows=9)), rank=5, here=2)


def spied_steps(group, case, names, slots):
    """Steps as in `layer_steps`, under an earlier step's plan every other time; every message's sizes, dues, pieces."""
    calls, pieces, least = [], node_leg.pieces, node_schedule.LEAST_PIECE_BYTES

    def spy(schedule, sizes, distances, place, due_bytes=None):
        found = pieces(schedule, sizes, distances, place, due_bytes)
        if schedule.by_counts:
            phases = {rank: place.phase(distances[rank]) for rank in sizes}
            calls.append((dict(sizes), dict(due_bytes), [(p.rank, p.start, p.due_s) for p in found], phases))
        return found

    node_leg.pieces, node_schedule.LEAST_PIECE_BYTES = spy, PIECE
    try:
        outputs = layer_steps(group, case, names, 4, "by-counts:0.04,1.25", slots)
    finally:
        node_leg.pieces, node_schedule.LEAST_PIECE_BYTES = pieces, least
    same = all(torch.equal(a, b) for a, b in zip(outputs["hierarchical"], outputs["shm"], strict=True))
    return {"calls": calls, "same": same, "spilled": outputs["hierarchical spilled"]}


@pytest.mark.parametrize(
    ("names", "combine", "slots"),
    [("aabb", "exact", 0), ("abcd", "fast", 0), ("abca", "stable", 0), ("abac", "stable", 2), ("abaa", "exact", 2)],
)
def test_every_step_is_paced_by_the_bytes_that_all_ranks_send_in_it(pools, names, combine, slots):
    """Over sockets: the oracle is what every rank handed to the leg, added up."""
    case = Case(
        hidden=33, inner=16, experts=3 if names == "abcd" else 8, top_k=3, tokens=(40, 9, 0, 21), dtype=torch.float32,
        combine=combine, seed=5, skew=0.5 if slots else 0.0,
    )  # fmt: skip
    hosts = HostMap.of(names)
    results = pools(4).run(spied_steps, case, names, slots)
    assert (sum(result["spilled"] for result in results) > 0) == (slots > 0)
    assert combine == "fast" or all(result["same"] for result in results)
    assert [len(result["calls"]) for result in results] == [8] * 4  # rows and outputs of four steps
    seen = set()
    for message in range(8):
        calls = [result["calls"][message] for result in results]
        bytes_RH = [[0] * hosts.hosts for _ in calls]
        for source, (sizes, *_) in enumerate(calls):
            for rank, size in sizes.items():
                bytes_RH[source][hosts.host_R[rank]] += size
        for sizes, due_bytes, sent, phases in calls:
            for rank, size in sizes.items():
                host = hosts.host_R[rank]
                due = sum(of_source[host] for of_source in bytes_RH)
                assert due_bytes[rank] == due
                seen.add(due)
                starts, ends_s = range(0, size, PIECE), due * 8e-9 / (1.25 * 0.04)
                wanted = {at: (n + phases[rank]) * ends_s / len(starts) for n, at in enumerate(starts)}
                assert {start: due_s for to, start, due_s in sent if to == rank} == pytest.approx(wanted)
    assert len(seen) > 8


def steps_in_flight(group, case, names, schedule):
    """Two steps begun before the first is finished, in small pieces; whether each gives its own rows, doubled."""
    least, node_schedule.LEAST_PIECE_BYTES = node_schedule.LEAST_PIECE_BYTES, PIECE
    exchange = HierarchicalExchange(group, combine_mode="fast", schedule=schedule, hosts=HostMap.of(names))
    placement, right = Placement.equal(case.experts, group.ranks), []
    try:
        for pair in range(3):
            steps = [random_batch(replace(case, seed=2 * pair + n), group.rank) for n in range(2)]
            plans = [plan_step(exchange.counts(routing.counts_E().int().numpy()), placement) for _, routing in steps]
            handles = [
                exchange.dispatch_start(x, routing, plan) for (x, routing), plan in zip(steps, plans, strict=True)
            ]
            for handle in handles:
                received = exchange.dispatch_finish(handle)
                exchange.combine_start(handle, received.rows_ND[(received.ids_NK >= 0).nonzero()[:, 0]] * 2)
            for handle, (x, routing) in zip(handles, steps, strict=True):
                wanted = 2 * x * (routing.weights_TK * (routing.ids_TK >= 0)).sum(dim=1, keepdim=True)
                right.append(torch.allclose(exchange.combine_finish(handle), wanted, atol=1e-5))
    finally:
        node_schedule.LEAST_PIECE_BYTES = least
        exchange.close()
    return right


@pytest.mark.parametrize("schedule", ["rotated", "staggered:0.02", "paced:0.04", "by-counts:0.04"])
def test_pieces_of_two_steps_in_flight_do_not_mix(pools, schedule):
    case = Case(
        hidden=33, inner=16, experts=8, top_k=3, tokens=(40, 19, 30, 21), dtype=torch.float32, combine="fast", seed=0
    )
    assert pools(4).run(steps_in_flight, case, "abbc", schedule) == [[True] * 6] * 4


@pytest.mark.parametrize("schedule", ["staggered:1e-06", "paced:1e-06", "by-counts:1e-06"])
def test_a_rate_that_no_step_can_keep_within_the_deadline_is_an_error(schedule):
    hosts, parts = HostMap.of("abc"), {1: torch.zeros(100_000), 2: torch.zeros(100_000)}
    leg = node_leg.NodeLeg(SimpleNamespace(rank=0, deadline_s=10.0), hosts, NodeSchedule.parse(schedule))
    with pytest.raises(
        ConfigError, match=f"--node-schedule {schedule}: at this rate a step takes .* the deadline is 10 s"
    ):
        leg.begin(node_leg.Message.ROWS, parts, {}, "dispatching rows", np.array([0, 10**6, 10**6]))


def test_a_second_step_has_the_link_once_the_first_has_left(monkeypatch):
    """By a clock that only sleeping moves: its pieces keep their distances from each other, none before its turn."""
    now, left = [0.0], []

    def sleep(seconds):
        now[0] += seconds + 1e-6  # a sleep is never early

    def isend(part, rank, tag):
        left.append(now[0])
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(node_leg, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(node_leg.dist, "isend", isend)
    group = SimpleNamespace(rank=0, deadline_s=10.0, blame=lambda what: nullcontext())
    leg = node_leg.NodeLeg(group, HostMap.of("abc"), NodeSchedule.parse("by-counts:0.01"))
    parts, due_H = {1: torch.zeros(50_000), 2: torch.zeros(20_000)}, np.array([0, 10**6, 10**6])
    steps = [leg.begin(node_leg.Message.ROWS, parts, {}, "dispatching rows", due_H) for _ in range(2)]
    for step in steps:
        step.began = 0.0  # as if begun by this clock
    for step in steps:
        leg.finish(step, "waiting for dispatched rows")
    first, second = np.array(left[: len(left) // 2]), np.array(left[len(left) // 2 :])
    assert 0.7 < first[-1] < 0.8  # of 1 MB at 10 Mb/s, but for the last piece
    assert second == pytest.approx(first + first[-1], abs=1e-4)


def test_two_hosts_paced_over_a_cable_give_the_same_bits(cluster):
    """Other ranks' rows, twice as many from the last; the job compares outputs with those of `together`."""
    schedules = ["together", "by-counts:1", "by-counts:1,1.5"]
    results = cluster.run("schedule_steps", tokens=48, last_tokens=96, hot=4.0, schedules=schedules, rounds=1)
    rows = [{text: (one["out"], one["into"]) for text, (one,) in result.items()} for result in results]
    assert all(len(set(each.values())) == 1 for each in rows)
    assert sum(each["together"][0] for each in rows) == sum(each["together"][1] for each in rows) > 0
