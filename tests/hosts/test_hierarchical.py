"""The `hierarchical` exchange among local processes that play hosts: its arithmetic, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.balance import Limits, Placement
from bywash.errors import ConfigError
from bywash.exchange import LocalExchange, open_exchange
from bywash.exchange.hierarchical import HierarchicalExchange
from bywash.exchange.host_map import HostMap
from bywash.exchange.node_schedule import LEAST_PIECE_BYTES, MOST_PIECE_BYTES, NodeSchedule, Place, cut, pieces
from bywash.moe import ExpertParallel, SlotPool, expert_parallel_naive
from tests.moe.common import Case, layer_cases, random_batch, random_experts

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def layer_steps(group, case, names, steps, schedule="together", slots=0):
    """Steps of one layer with hosts by `names`, and under `shm`: the outputs of both, and rows that left home."""
    placement = Placement.equal(case.experts, group.ranks)
    mine = random_experts(
        case.experts, case.hidden, case.inner, case.dtype, case.seed, placement.experts_of(group.rank)
    )
    outputs = {}
    for name in ("hierarchical", "shm"):
        exchange = open_exchange("shm", group, combine_mode=case.combine)
        if name == "hierarchical":
            exchange = HierarchicalExchange(
                group, combine_mode=case.combine, schedule=schedule, hosts=HostMap.of(names[: group.ranks])
            )
        pool = None
        if slots:
            limits = Limits(capacity=8, alpha_1024=1024, fetch_rows=1, use_rows=1)
            pool = SlotPool(exchange, limits, slots=slots, experts=case.experts)
        layer = ExpertParallel(exchange=exchange, placement=placement, experts=mine, pool=pool)
        outputs[name], spilled = [], 0
        for step in range(steps):
            batch = random_batch(replace(case, seed=case.seed + 13 * step), group.rank)
            outputs[name].append(layer(*batch, reuse_plan=bool(step % 2)))
            spilled += layer.plans[0].spilled
        outputs[name + " spilled"] = spilled
        exchange.close()
    return outputs


@settings(max_examples=15, deadline=None)
@given(
    case=layer_cases(["exact", "stable", "fast"], ranks=(2, 4), inner=24, tokens=(0, 0, 1, 5, 17, 33), skews=(0.0,)),
    names=st.lists(st.sampled_from("aabbc"), min_size=4, max_size=4),
    schedule=st.sampled_from(["together", "rotated", "staggered:1", "paced:0.5", "by-counts:0.5"]),
)
def test_any_map_of_ranks_to_hosts_gives_the_bits_of_one_rank_and_of_shm(pools, case, names, schedule):
    everything = random_experts(case.experts, case.hidden, case.inner, case.dtype, case.seed)
    alone = ExpertParallel(
        exchange=LocalExchange(combine_mode="exact"),
        placement=Placement.equal(case.experts, 1),
        experts=everything,
    )
    for rank, outputs in enumerate(pools(case.ranks).run(layer_steps, case, names, 3, schedule)):
        for step, out_TD in enumerate(outputs["hierarchical"]):
            x_TD, routing = random_batch(replace(case, seed=case.seed + 13 * step), rank)
            wanted = expert_parallel_naive(x_TD, routing, everything)
            torch.testing.assert_close(out_TD, wanted, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype])
            assert out_TD.dtype == case.dtype
            if case.combine == "exact":
                assert torch.equal(out_TD, alone(x_TD, routing))
            if case.combine == "stable":
                assert torch.equal(out_TD, outputs["shm"][step])


@pytest.mark.parametrize("combine", ["exact", "stable", "fast"])
def test_rows_that_leave_home_for_slots_on_another_host(pools, combine):
    case = Case(
        hidden=33, inner=16, experts=8, top_k=3, tokens=(40, 9, 0, 21), dtype=torch.float32, combine=combine, seed=5,
        skew=0.5,
    )  # fmt: skip
    results = pools(4).run(layer_steps, case, "abab", 4, "together", 2)
    assert all(result["hierarchical spilled"] > 0 for result in results)
    for result in results:
        for ours, shm in zip(result["hierarchical"], result["shm"], strict=True):
            torch.testing.assert_close(ours, shm, rtol=2e-5, atol=2e-5)
            assert combine == "fast" or torch.equal(ours, shm)


def test_gateways_share_the_sources_of_a_larger_host():
    hosts = HostMap.of("aaabb")
    assert [hosts.gateways(rank) for rank in range(5)] == [[3], [4], [3], [0], [1]]
    assert [hosts.sources(rank) for rank in range(5)] == [[3], [4], [], [0, 2], [1]]


@given(names=st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_every_rank_has_one_gateway_on_every_other_host(names):
    hosts = HostMap.of(names)
    assert sorted(rank for ranks in hosts.members for rank in ranks) == list(range(len(names)))
    entered = np.zeros((len(names), hosts.hosts), int)
    for rank in range(len(names)):
        for source in hosts.sources(rank):
            entered[source, hosts.host_R[rank]] += 1
            assert rank in hosts.gateways(source)
    for rank, host in enumerate(hosts.host_R):
        assert entered[rank].tolist() == [int(other != host) for other in range(hosts.hosts)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("random", "choose one of together, rotated, staggered, paced, by-counts"),
        ("rotated:5", "rotated takes no rate"),
        ("paced", "give the rate of a host's link in Gb/s, such as paced:25"),
        ("staggered:-1", "such as staggered:25"),
        ("paced:nan", "such as paced:25"),
        ("paced:25,1.05", "such as paced:25"),
        ("by-counts", "such as by-counts:25"),
        ("by-counts:,2", "such as by-counts:25"),
        ("by-counts:25,", "from 0.01 to 10, such as by-counts:25,1.05"),
        ("by-counts:25,0", "from 0.01"),
        ("by-counts:25,1,2", "from 0.01"),
        ("by-counts:25, 1", "from 0.01"),
        ("by-counts:5e-324", "from 1e-06 to 100000"),
        ("paced:2_5", "from 1e-06 to 100000"),
        ("paced:\u0662\u0665", "such as paced:25"),
    ],
)
def test_schedules_that_cannot_be_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        NodeSchedule.parse(text)


def test_schedules_read_as_they_are_written():
    for text in (
        "together",
        "rotated",
        "staggered:25",
        "paced:0.2",
        "by-counts:400",
        "by-counts:25,1.05",
        "paced:1e-05",
    ):
        assert str(NodeSchedule.parse(text)) == text


@given(
    sizes=st.dictionaries(st.integers(1, 9), st.integers(0, 3 * MOST_PIECE_BYTES), max_size=6),
    text=st.sampled_from(["together", "rotated", "staggered:10", "paced:10", "by-counts:8,1.25", "paced:0.1"]),
    per_host=st.integers(1, 8),
    seed=st.integers(0, 7),
)
def test_every_byte_is_sent_once_in_order_and_never_above_the_rate(sizes, text, per_host, seed):
    schedule, place = NodeSchedule.parse(text), Place(hosts=10, per_host=per_host, index=seed % per_host)
    due_bytes = {rank: 3 * size for rank, size in sizes.items()}
    sent = pieces(schedule, sizes, {rank: rank for rank in sizes}, place, due_bytes)
    assert [piece.due_s for piece in sent] == sorted(piece.due_s for piece in sent)
    for rank, size in sizes.items():
        mine = [(piece.start, piece.stop) for piece in sent if piece.rank == rank]
        assert mine == cut(size, schedule)
        assert sum(stop - start for start, stop in mine) == size
        if schedule.in_pieces and size:
            flows = 3 if schedule.by_counts else per_host * sum(size > 0 for size in sizes.values())
            whole_s = (
                flows * size * 8e-9 / (0.1 if text == "paced:0.1" else 10)
            )  # what a link needs for all, were all alike
            due_s = [piece.due_s for piece in sent if piece.rank == rank]
            assert due_s == pytest.approx([(n + place.phase(rank)) * whole_s / len(mine) for n in range(len(mine))])
    assert schedule.in_pieces or schedule.name == "staggered" or all(piece.due_s == 0 for piece in sent)


@pytest.mark.parametrize(
    ("text", "piece_bytes"),
    [
        ("paced:0.1", LEAST_PIECE_BYTES),
        ("by-counts:10", 100_000),
        ("by-counts:10,2", 100_000),
        ("paced:400", 256 << 10),
    ],
)
def test_pieces_take_the_link_as_long_whatever_its_rate_between_two_sizes(text, piece_bytes):
    assert cut(2 * piece_bytes + 1, NodeSchedule.parse(text)) == [
        (0, piece_bytes), (piece_bytes, 2 * piece_bytes), (2 * piece_bytes, 2 * piece_bytes + 1)
    ]  # fmt: skip


@given(hosts=st.integers(2, 9), per_host=st.integers(1, 8))
def test_senders_to_one_host_and_receivers_of_one_sender_take_turns(hosts, per_host):
    """With messages alike a link to a host carries one piece at a time, and so does the link of a host that sends."""
    phases = {
        (host, index): [Place(hosts=hosts, per_host=per_host, index=index).phase((0 - host) % hosts)]
        for host in range(1, hosts)
        for index in range(per_host)
    }
    to_host_0 = sorted(phase for each in phases.values() for phase in each)
    wanted = [turn / len(phases) for turn in range(len(phases))]
    assert to_host_0 == pytest.approx(wanted)
    from_host_0 = [
        Place(hosts=hosts, per_host=per_host, index=index).phase(distance)
        for distance in range(1, hosts)
        for index in range(per_host)
    ]
    assert sorted(from_host_0) == pytest.approx(wanted)


def test_staggered_turns_begin_a_mean_message_apart():
    schedule = NodeSchedule.parse("staggered:8")
    place = Place(hosts=3, per_host=2, index=0)
    due = {piece.rank: piece.due_s for piece in pieces(schedule, {3: 10**6, 5: 3 * 10**6}, {3: 2, 5: 1}, place)}
    assert due == {5: 0.0, 3: pytest.approx(4e-3)}
