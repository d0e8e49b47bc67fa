import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.fabric.config.fixed_point import Dcqcn, marking_probability
from bywash.fabric.config.thresholds import (
    EgressCase,
    alpha_of,
    any_spread_ecn_bound,
    choose_marking,
    peak_bytes,
    queue_at_first_pause,
    settled_queue,
    static_pause_threshold,
)

CONTROL = Dcqcn(
    alpha_timer_us=1, cut_interval_us=4, increase_timer_us=300, byte_counter_bytes=32_767, increase_mbps=100
)


def case(**changes):
    settings = {
        "gbps": 100.0,
        "inputs_gbps": (100.0,) * 31,
        "senders": 16,
        "sender_gbps": 100.0,
        "shared_bytes": 20_000_000,
        "ports": 32,
        "priorities": 1,
        "dynamic_th": 0,
        "loop_us": 10.0,
        "mtu_bytes": 9216,
    }
    return EgressCase(**settings | changes)


def test_thresholds_of_the_dcqcn_paper():
    """Zhu et al. 2015: 32 ports of 40G, 12 MB, 8 priorities, 22.4 KB of headroom; beta 8 is alpha 1."""
    assert static_pause_threshold(12e6, 32, 8, 22_400) == pytest.approx(24_470, abs=10)
    shared = 12e6 - 8 * 32 * 22_400
    assert any_spread_ecn_bound(shared, 32, 8, alpha_of(0)) == pytest.approx(21_750, abs=10)
    assert static_pause_threshold(12e6, 32, 8, 22_400) / 32 == pytest.approx(765, abs=1)


def test_the_any_spread_bound_by_the_occupancy_it_stands_for():
    """All P n queues at Kmin, one ingress has sent n of them: at the bound it pauses exactly then."""
    shared, ports, priorities, alpha = 5e6, 24, 3, 0.5
    bound = any_spread_ecn_bound(shared, ports, priorities, alpha)
    threshold = alpha * (shared - priorities * ports * bound)
    assert threshold == pytest.approx(ports * bound)


@given(st.integers(1, 200), st.integers(-8, 7), st.floats(1e5, 1e8))
def test_equal_queues_settle_where_choudhury_and_hahne_say(queues, th, shared):
    """Each queue at the limit that the others leave it."""
    alpha = alpha_of(th)
    queue = settled_queue(shared, queues, alpha)
    assert queue == pytest.approx(alpha * (shared - queues * queue), rel=1e-6)
    assert queue_at_first_pause(shared, alpha, 1 / queues) == pytest.approx(queues * queue)


def test_first_pause_of_the_simulators_incast():
    """ns-3: alpha 1/8, 32 MiB, 32 to one at 100G; a first frame comes after 1.084 us, the first pause at 68.07."""
    shared = 32 * 1024 * 1024 - 33 * (37_500 + 4096)
    queue = queue_at_first_pause(shared, 1 / 8, 1 / 32) + 32 * 4096
    assert 1.084 + queue / (31 * 100e9 / 8) * 1e6 == pytest.approx(68.07, rel=0.01)


@pytest.mark.parametrize(("flows", "queue_kb"), [(1, 11.2), (2, 20.2), (4, 41.8), (8, 93.8), (10, 122.6)])
def test_dcqcn_fixed_point_of_the_paper(flows, queue_kb):
    """40G, Kmin 5 KB, Kmax 200 KB, Pmax 1 %: mean queue of the fluid model."""
    assert 5 + marking_probability(flows, 40) / 0.01 * 195 == pytest.approx(queue_kb, rel=0.01)


def test_sixteen_flows_have_no_fixed_point_on_the_slope():
    assert marking_probability(16, 40) > 0.01


@given(
    gbps=st.sampled_from([25.0, 100.0, 200.0, 400.0]),
    senders=st.integers(2, 64),
    ports=st.integers(4, 64),
    priorities=st.integers(1, 3),
    th=st.integers(-3, 3),
    shared=st.integers(4_000_000, 150_000_000),
    loop=st.floats(2, 60),
    enqueue=st.booleans(),
)
def test_a_chosen_marking_keeps_both_conditions(gbps, senders, ports, priorities, th, shared, loop, enqueue):
    one = case(
        gbps=gbps,
        sender_gbps=gbps,
        inputs_gbps=(gbps,) * (ports - 1),
        senders=senders,
        ports=ports,
        priorities=priorities,
        dynamic_th=th,
        shared_bytes=shared,
        loop_us=loop,
        mark_at_enqueue=enqueue,
    )
    bound = any_spread_ecn_bound(shared, ports, priorities, alpha_of(th))
    try:
        chosen = choose_marking(one, CONTROL)
    except ConfigError:  # too small a buffer: the next test
        assume(False)
    assert chosen.kmin_bytes < bound
    assert chosen.kmin_bytes < chosen.kmax_bytes
    assert chosen.peak_bytes <= chosen.first_pause_bytes + 1
    assert 1 <= chosen.pmax_percent <= 100
    assert (chosen.pace_gbps is None) == (chosen.rotation is None)
    if chosen.pace_gbps is not None:
        assert peak_bytes(one, chosen.kmax_bytes, gbps, senders) > chosen.first_pause_bytes
        assert 1 <= chosen.rotation < senders
        assert chosen.pace_gbps < gbps


def test_a_buffer_too_small_for_any_marking_is_refused():
    with pytest.raises(ConfigError, match="two frames"):
        choose_marking(case(shared_bytes=500_000, ports=32), CONTROL)


def test_messages_smaller_than_the_room_need_no_bound():
    bounded = choose_marking(case(gbps=400.0, sender_gbps=400.0, inputs_gbps=(400.0,) * 31), CONTROL)
    small = choose_marking(
        case(gbps=400.0, sender_gbps=400.0, inputs_gbps=(400.0,) * 31, message_bytes=200_000), CONTROL
    )
    assert bounded.rotation is not None
    assert small.rotation is None


def test_the_arithmetic_is_printed():
    text = "\n".join(choose_marking(case(), CONTROL).lines)
    for part in ("HPCC", "any spread", "first pause", "loop 10.0 us", "fixed point of 16 flows"):
        assert part in text
