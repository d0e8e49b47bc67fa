"""The search: the same every time, better clusters give better plans, and what cannot be says what binds."""

import numpy as np
import pytest

from bywash.planner.candidate import Problem
from bywash.planner.cluster import parse_cluster
from bywash.planner.cost import GroupCost
from bywash.planner.group import make_group
from bywash.planner.refine import at_times
from bywash.planner.search import search
from bywash.planner.target import Target, Workload
from bywash.planner.traffic import WAYS
from tests.planner.samples import FABRIC, cluster_of, problem_of

SMALL = {"h100-small": {"like": "h100", "memory_gb": 24.0}}
"""Memory in which one host of two cannot hold the model, so that groups span hosts."""
WORK = Workload(prompt_tokens=256, output_tokens=128, chunk_tokens=256, sequences=16)


def found(*nodes, target=None, fabric=FABRIC, workload=WORK, **more):
    cluster = cluster_of(*nodes, fabric=fabric, **more)
    return search(cluster, problem_of(cluster, "mixtral-8x7b", workload, target))


def hosts(device="h100", gbps=400.0, count=2, devices=4):
    return [(f"h{i}", device, devices, gbps) for i in range(count)]


def test_the_same_search_gives_the_same_plan():
    first, second = (found(*hosts("h100-small"), devices=SMALL) for _ in range(2))
    assert [one.tokens_per_s for one in first.ranked] == [one.tokens_per_s for one in second.ranked]
    assert [str(one.arithmetic) for one in first.pareto] == [str(one.arithmetic) for one in second.pareto]
    assert first.winner.outcomes[0].decode.options == second.winner.outcomes[0].decode.options


def test_groups_that_leave_their_host_are_priced_by_simulation():
    result = found(*hosts("h100-small"), devices=SMALL)
    (outcome,) = result.winner.outcomes
    assert len(outcome.candidate.group.members) == 2
    tried = result.sendings[0, 1]
    assert outcome.candidate.sending == tried[0].sending
    assert len({one.sending for one in tried}) == len(tried) == 5
    sources = {kind.name: figure.source for kind, figure in outcome.decode.stages.items()}
    assert sources["DISPATCH"] == sources["COMBINE"] == "simulated"
    assert set(result.simulated) == {((0, 1), "decode"), ((0, 1), "prefill")}
    assert all(run.drops == 0 and np.isfinite(run.dispatch_us) for run in result.simulated.values())


def test_hosts_that_hold_the_model_stay_alone_where_nics_are_slow():
    result = found(*hosts("h100", 10.0))
    assert [len(one.candidate.group.members) for one in result.winner.outcomes] == [1, 1]
    assert result.simulated == {}


def rate(*nodes, **more):
    return found(*nodes, **more).winner.tokens_per_s


def test_a_slower_cable_makes_a_slower_plan():
    slow = FABRIC | {"links": [{"link": "leaf0-spine0", "gbps": 10}, {"link": "leaf0-spine1", "gbps": 10}]}
    plain = rate(*hosts("h100-small"), devices=SMALL)
    assert rate(*hosts("h100-small"), devices=SMALL, fabric=slow) < 0.9 * plain


def test_slower_nics_make_a_slower_plan():
    plain = rate(*hosts("h100-small"), devices=SMALL)
    assert rate(*hosts("h100-small", 50.0), devices=SMALL) < plain


def test_a_newer_generation_makes_a_faster_plan_and_takes_more_of_the_work():
    old, new = [("a", "a100", 4, 400), ("b", "a100", 4, 400)], [("a", "a100", 4, 400), ("b", "h100", 4, 400)]
    assert rate(*new) > 1.2 * rate(*old)
    cluster = cluster_of(*new)
    cost = GroupCost.of(problem_of(cluster), make_group(cluster, (0, 1)), WAYS[0])
    assert cost.own_R[4:].min() > cost.own_R[:4].max()
    assert cost.traffic.tokens_R[4:].min() > cost.traffic.tokens_R[:4].max()


def test_a_host_that_misses_the_bound_goes_idle_and_says_why():
    nodes = [("a", "h100", 4, 1), ("b", "l40s", 4, 1)]
    alone = {name: found((name, name, 4, 1)).winner.tpot_ms for name in ("h100", "l40s")}
    assert alone["l40s"] > alone["h100"]
    between = (alone["h100"] + alone["l40s"]) / 2
    winner = found(*nodes, target=Target(tpot_ms=between)).winner
    assert [one.candidate.group.hosts for one in winner.outcomes] == [(0,)]
    ((idle, why),) = winner.idle
    assert idle == (1,)
    assert "time between tokens: needs" in why


@pytest.mark.parametrize(
    ("nodes", "target", "name"),
    [
        (hosts(), Target(tpot_ms=0.1), "time between tokens"),
        (hosts(), Target(ttft_ms=0.1), "time to first token"),
        (hosts(), Target(step_ms=0.1), "prefill step"),
        (hosts(), Target(tokens_per_s=1e9), "tokens per second"),
        (hosts("l40s", count=1, devices=1), Target(), "memory for experts on 1 host, 1 l40s"),
    ],
)
def test_infeasible_says_what_binds_and_by_how_much(nodes, target, name):
    result = found(*nodes, target=target)
    assert result.winner is None
    assert result.binding[0].name == name
    assert result.binding[0].excess > 1
    assert f"{name}: needs" in str(result.binding[0])


def test_slots_without_room_for_the_model_say_that_memory_binds():
    work = WORK.model_copy(update={"slots": 2})
    result = found(*hosts("l40s", count=1, devices=1), workload=work)
    assert result.binding[0].name == "memory for experts on 1 host, 1 l40s"


def test_a_bound_that_only_the_simulation_breaks_is_what_binds():
    """One host has no room, two keep the bound as long as the network has no queues."""
    simulated = found(*hosts("h100-small"), devices=SMALL).winner.tpot_ms
    result = found(*hosts("h100-small"), devices=SMALL, target=Target(tpot_ms=0.9999 * simulated))
    assert result.winner is None
    assert result.binding[0].name == "time between tokens"
    assert result.binding[0].excess == pytest.approx(1, abs=0.1)


def test_every_cut_of_one_generation_is_ranked():
    result = found(*hosts("h100", count=4, devices=1, gbps=10.0))
    assert len({one.label for one in result.ranked}) == 3  # 1, 2 and 4 hosts a group


def test_a_simulated_exchange_is_moved_to_another_batch_along_its_line():
    run = next(iter(found(*hosts("h100-small"), devices=SMALL).simulated.values()))
    rtt = 0.1 * run.dispatch_us
    half = at_times(run, 0.5, rtt)
    assert half.dispatch_us == pytest.approx(0.55 * run.dispatch_us)
    assert at_times(half, 2.0, rtt).combine_us == pytest.approx(run.combine_us)


def test_too_many_sequences_do_not_fit():
    cluster = cluster_of(*hosts())
    problem = problem_of(cluster, "mixtral-8x7b", WORK)
    cost = GroupCost.of(problem, make_group(cluster, (0,)), WAYS[0])
    assert cost.price(16).feasible
    binding = cost.price(100_000).binding
    assert binding[0].name == "memory of h100"
    assert cost.price(16).ledgers[0].need_bytes == sum(one.bytes for one in cost.price(16).ledgers[0].entries)


def test_more_sequences_take_longer_and_give_more():
    cluster = cluster_of(*hosts())
    cost = GroupCost.of(problem_of(cluster, "mixtral-8x7b", WORK), make_group(cluster, (0, 1)), WAYS[2])
    few, many = cost.price(8), cost.price(32)
    assert few.tpot_ms < many.tpot_ms
    assert few.tokens_per_s < many.tokens_per_s
    serial = dict(many.prefill.options)["serial"]
    total = sum(figure.us for figure in many.prefill.stages.values())
    assert many.prefill.step_ms <= serial
    assert serial == pytest.approx(32 * total / 1e3, rel=0.01)  # and the output matrix


def test_attention_split_over_ranks_holds_less_of_its_weights():
    cluster = cluster_of(*hosts())
    problem: Problem = problem_of(cluster, "qwen3-235b", WORK)
    costs = [GroupCost.of(problem, make_group(cluster, (0, 1), tp), WAYS[2]).price(8) for tp in (1, 4)]
    entries = [{one.name: one.bytes for one in cost.ledgers[0].entries} for cost in costs]
    assert entries[1]["dense weights"] * 4 == pytest.approx(entries[0]["dense weights"], rel=1e-6)
    assert entries[1]["KV cache"] == entries[0]["KV cache"]  # four heads for four ranks
    assert costs[0].decode.stages != costs[1].decode.stages


def test_groups_that_share_uplinks_are_priced_together():
    """Both hosts of a group on different leaves, which are joined by as much as one host's NICs."""
    nodes = [
        {
            "name": f"{leaf}{i}",
            "device": "h100-small",
            "devices": 4,
            "nics": [{"gbps": 400, "count": 4, "switch": leaf}],
        }
        for i in range(2)
        for leaf in ("a", "b")
    ]
    rates = []
    for count in (8, 2):
        cables = [{"a": leaf, "b": "spine", "gbps": 400, "count": count} for leaf in ("a", "b")]
        fabric = {"kind": "cables", "cables": cables}
        cluster = parse_cluster({"nodes": nodes, "fabric": fabric, "devices": SMALL})
        problem = problem_of(cluster, "mixtral-8x7b", WORK)
        result = search(cluster, problem)
        notes = [run.arithmetic for run in result.simulated.values()]
        rates.append((result.winner.tokens_per_s, [len(one.candidate.group.hosts) for one in result.winner.outcomes]))
    assert rates[0][1] == rates[1][1] == [2, 2]
    assert rates[1][0] < rates[0][0]
    assert all("2 groups at once" in note for note in notes)
