"""Rows against the naive oracle, conservation laws, choices that match their counts, schedules that keep bytes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.balance import Placement
from bywash.errors import ConfigError
from bywash.fabric import FrameConfig, leaf_spine, rail_optimised
from bywash.planner import (
    SCHEDULES,
    Compute,
    Method,
    Router,
    RowFormat,
    TokenChoices,
    Wire,
    drawn_choices,
    layer_bytes,
    moe_flows,
    naive,
    recorded_choices,
    resampled_choices,
    round_trip_us,
)
from bywash.planner.moe_traffic import rows_between
from bywash.planner.schedule import active_flows
from bywash.routing import DECODE, TraceShape, shipped_trace, zipf

METHODS = list(itertools.product(("per-expert", "per-rank", "per-node"), ("flat", "hierarchical")))


def make_choices(*, ranks=8, tokens=5, experts=13, top_k=3, layers=2, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((ranks * tokens, layers, experts)), axis=2)[:, :, :top_k].astype(np.uint8)
    rank_N = rng.permutation(np.repeat(np.arange(ranks), tokens))
    return TokenChoices(ids_NLK=ids, rank_N=rank_N, num_experts=experts, ranks=ranks, note="test")


@pytest.mark.parametrize(("rows", "path"), METHODS)
@given(
    servers=st.integers(1, 4),
    gpus=st.integers(1, 4),
    tokens=st.integers(1, 6),
    experts=st.integers(2, 11),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_rows_are_those_of_the_oracle(rows, path, servers, gpus, tokens, experts, seed):
    rng = np.random.default_rng(seed)
    ranks, top_k = servers * gpus, int(rng.integers(1, experts + 1))
    choices = make_choices(ranks=ranks, tokens=tokens, experts=experts, top_k=top_k, layers=1, seed=seed)
    home_E = rng.integers(0, ranks, experts)
    method = Method(gpus_per_server=gpus, rows=rows, path=path)
    ids_NK = choices.ids_NLK[:, 0]
    fast, local = rows_between(ids_NK, choices.rank_N, home_E, ranks, method)
    slow, slow_local = naive.rows_between(ids_NK.tolist(), choices.rank_N.tolist(), home_E.tolist(), ranks, method)
    np.testing.assert_array_equal(fast, slow)
    assert local == slow_local
    server_R = np.arange(ranks) // gpus
    assert not fast[server_R[:, None] == server_R].any()  # what NVLink carries does not enter the fabric
    if rows == "per-expert":
        assert fast.sum() + local == choices.ids_NLK.size
    if path == "hierarchical":  # the fabric is crossed on one rail
        assert not fast[np.arange(ranks)[:, None] % gpus != np.arange(ranks) % gpus].any()


def test_the_worked_example():
    """2 servers of 2 GPUs, one token on rank 0 that chose experts 3, 2, 1 at home on ranks 3, 2, 1."""
    ids, rank, home = np.array([[3, 2, 1]]), np.array([0]), np.arange(4)
    expected = {
        ("per-rank", "flat"): {(0, 3), (0, 2)},
        ("per-node", "flat"): {(0, 3)},
        ("per-node", "hierarchical"): {(0, 2)},
        ("per-rank", "hierarchical"): {(1, 3), (0, 2)},
    }
    for (rows, path), pairs in expected.items():
        got, local = rows_between(ids, rank, home, 4, Method(gpus_per_server=2, rows=rows, path=path))
        assert {tuple(pair) for pair in np.argwhere(got).tolist()} == pairs
        assert (got.max(), local) == (1, 1)


def test_fewer_copies_the_coarser_the_rows():
    choices = make_choices(ranks=16, tokens=40, experts=32, top_k=8)
    placement = [Placement.equal(32, 16)]
    sent = {
        rows: layer_bytes(choices, placement, Method(gpus_per_server=4, rows=rows), RowFormat())[0].network_rows
        for rows in ("per-expert", "per-rank", "per-node")
    }
    assert sent["per-expert"] > sent["per-rank"] > sent["per-node"]


def test_bytes_of_a_row_and_of_a_layer():
    row = RowFormat()
    assert (row.dispatch_bytes, row.combine_bytes) == (7168 + 56 * 4 + 16, 14_336)
    assert RowFormat(hidden=129, dispatch="fp8", index_bytes=0).dispatch_bytes == 129 + 2 * 4
    choices = make_choices()
    for layer in layer_bytes(choices, [Placement.equal(13, 8)], Method(gpus_per_server=2), row):
        np.testing.assert_array_equal(layer.dispatch_HH * row.combine_bytes, layer.combine_HH.T * row.dispatch_bytes)
        assert layer.dispatch_HH.sum() == layer.network_rows * row.dispatch_bytes


@pytest.mark.parametrize("router", [Router(top_k=8), Router(top_k=8, groups=8, top_groups=4)], ids=["free", "grouped"])
def test_drawn_choices_match_their_counts(router):
    popularity = np.random.default_rng(3).permutation(np.arange(1, 65) ** -0.6)
    choices = drawn_choices(popularity[None], router, ranks=4, tokens=4096, seed=5, note="a law")
    seen, wanted = choices.counts_LE()[0] / choices.ids_NLK.size, popularity / popularity.sum()
    assert abs(seen - wanted).sum() / 2 < 0.02  # a draw with p ~ popularity is 0.08 off
    ids = np.sort(choices.ids_NLK[:, 0].astype(int), axis=1)
    assert (np.diff(ids, axis=1) > 0).all()
    groups_used = 1 + (np.diff(ids // (64 // router.groups), axis=1) > 0).sum(axis=1)
    assert groups_used.max() <= router.top_groups


def test_a_draw_is_reproducible_and_seeds_differ():
    counts = np.arange(1.0, 17.0)[None]
    make = [drawn_choices(counts, Router(top_k=2), ranks=2, tokens=50, seed=s, note="x").ids_NLK for s in (1, 1, 2)]
    np.testing.assert_array_equal(make[0], make[1])
    assert (make[0] != make[2]).any()


def test_every_expert_may_be_chosen_by_every_token():
    choices = drawn_choices(np.ones((1, 4)), Router(top_k=4), ranks=1, tokens=9, seed=0, note="x")
    assert (np.sort(choices.ids_NLK[:, 0], axis=1) == np.arange(4)).all()


def test_choices_from_a_recording():
    trace = shipped_trace("prose")
    whole = recorded_choices(trace, 1, 3)
    np.testing.assert_array_equal(whole.ids_NLK, trace.ids_NLK[trace.step_slice(1)])
    assert set(whole.rank_N.tolist()) == {0, 1, 2}
    drawn = resampled_choices(trace, ranks=4, tokens=300, seed=1, phase=DECODE)
    decode_N = np.repeat(trace.step_phase_S == DECODE, trace.step_tokens_S)
    known = {row.tobytes() for row in trace.ids_NLK[decode_N]}
    assert all(row.tobytes() in known for row in drawn.ids_NLK)
    assert np.bincount(drawn.rank_N).tolist() == [300] * 4


def wire():
    topology = rail_optimised(servers=4, nics_per_server=2, spines=2, gbps=100.0, delay_ns=500.0)
    return Wire(topology=topology, frame=FrameConfig(), rtt_us=round_trip_us(topology, 250.0))


def some_layers(layers=2, **shape):
    choices = make_choices(ranks=8, layers=layers, tokens=30, **shape)
    return layer_bytes(choices, [Placement.equal(13, 8)], Method(gpus_per_server=2), RowFormat(hidden=256))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_moves_every_byte_once(schedule):
    layers = some_layers()
    flows = moe_flows(layers, wire(), schedule=schedule, compute=Compute(attention_us=3.0, experts_us=1.5))
    assert flows.gap_ps_P.tolist() == [3_000_000, 1_500_000] * 2
    for phase, matrix in enumerate(m for one in layers for m in (one.dispatch_HH, one.combine_HH)):
        sent = np.zeros((8, 8), np.int64)
        here = flows.phase_F == phase
        np.add.at(sent, (flows.src_F[here], flows.dst_F[here]), flows.bytes_F[here])
        np.testing.assert_array_equal(sent, matrix)


def test_paced_messages_end_together_and_fill_the_busiest_link():
    flows = moe_flows(some_layers(1), wire(), schedule="paced", compute=Compute())
    first = flows.phase_F == 0
    took = wire().wire_us(1.0, 1.0) * flows.bytes_F[first] / flows.rate_gbps_F[first]
    np.testing.assert_allclose(took, took[0])
    into_H = np.bincount(flows.dst_F[first], flows.rate_gbps_F[first])
    out_H = np.bincount(flows.src_F[first], flows.rate_gbps_F[first])
    leaf_out = [out_H[rail::2].sum() for rail in range(2)]
    assert max(into_H.max(), out_H.max()) <= 100.0 * (1 + 1e-9)
    assert max(leaf_out) <= 2 * 100.0 * 2  # at most what NICs send; uplinks are checked by the bound


def test_by_counts_every_receiver_is_offered_its_line_in_each_exchange():
    flows = moe_flows(some_layers(2), wire(), schedule="by-counts", compute=Compute())
    for phase in range(4):
        here = flows.phase_F == phase
        into_H = np.bincount(flows.dst_F[here], flows.rate_gbps_F[here])
        np.testing.assert_allclose(into_H[into_H > 0], 100.0)


def test_bound_of_a_host_and_of_uplinks():
    frame = FrameConfig(payload_bytes=1000, header_bytes=0)
    topology = leaf_spine(hosts=8, leaves=2, spines=1, gbps=100.0, delay_ns=0.0)
    one = Wire(topology=topology, frame=frame, rtt_us=2.0)
    local = np.zeros((8, 8), np.int64)
    local[0, 1] = local[0, 2] = 100_000  # host 0 sends 200 kB within its leaf: 16 us at 100 Gb/s
    assert one.bound_us(local) == pytest.approx(18.0)
    away = np.zeros((8, 8), np.int64)
    away[0, 4] = away[1, 5] = away[2, 6] = 100_000  # 300 kB over one uplink of 100 Gb/s: 24 us
    assert one.bound_us(away) == pytest.approx(26.0)


def test_round_trip_and_flows_to_fill_it():
    topology = rail_optimised(servers=2, nics_per_server=2, spines=1, delay_ns=100.0)
    assert round_trip_us(topology, 700.0) == pytest.approx(2 * (4 * 0.1 + 3 * 0.7))
    assert active_flows(1.2, 5.0) == 6
    assert active_flows(50.0, 5.0) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Router(top_k=9).check(8), "top_k = 9"),
        (lambda: Router(top_k=2, groups=3, top_groups=1).check(8), "groups = 3"),
        (lambda: drawn_choices(np.array([[9.0, 1, 1]]), Router(top_k=2), ranks=1, tokens=1, seed=0, note=""), "81.8%"),
        (lambda: drawn_choices(np.array([[-1.0, 2]]), Router(top_k=1), ranks=1, tokens=1, seed=0, note=""), "negative"),
        (lambda: RowFormat(dispatch="int4"), "dispatch = 'int4'"),
        (lambda: Method(gpus_per_server=0), "gpus_per_server = 0"),
        (lambda: Compute(attention_us=float("nan")), "attention_us = nan"),
        (
            lambda: layer_bytes(make_choices(), [Placement.equal(13, 4)], Method(gpus_per_server=2), RowFormat()),
            "13 experts on 4 ranks",
        ),
        (
            lambda: layer_bytes(make_choices(), [Placement.equal(13, 8)], Method(gpus_per_server=3), RowFormat()),
            "multiple of gpus_per_server",
        ),
        (
            lambda: moe_flows(
                layer_bytes(make_choices(), [Placement.equal(13, 8)], Method(gpus_per_server=8), RowFormat()),
                wire(),
                schedule="at-once",
                compute=Compute(),
            ),
            "no row leaves its server",
        ),
        (lambda: moe_flows(some_layers(), wire(), schedule="later", compute=Compute()), "schedule = 'later'"),
    ],
)
def test_errors_name_what_is_wrong(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_generated_traces_work_too():
    trace = zipf(TraceShape(num_experts=16, top_k=2, layers=2, tokens=64), exponent=0.5, seed=0)
    choices = recorded_choices(trace, 0, 8)
    layers = layer_bytes(choices, [Placement.equal(16, 8)], Method(gpus_per_server=2), RowFormat())
    assert sum(layer.network_rows + layer.local_rows for layer in layers) <= 64 * 2 * 2
