"""Ways of sending: what a runtime cannot keep to is never taken; what is taken reaches `bywash run` in its words."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from bywash.cli.main import app
from bywash.exchange.node_schedule import NodeSchedule
from bywash.fabric import single_switch
from bywash.planner.group import make_group
from bywash.planner.model import load_model_shape
from bywash.planner.moe_traffic import LayerBytes
from bywash.planner.network import Network, Sending, Sent
from bywash.planner.output.folder import plan_files, plan_json
from bywash.planner.output.text import plan_text
from bywash.planner.plan import make_plan
from bywash.planner.search import search
from bywash.planner.sendings import FACTOR, TCP_PAYLOAD, TriedSending, best_first, node_schedule, refusal, sendings_of
from bywash.planner.target import Target, Workload
from bywash.routing.skew import TraceShape, zipf
from tests.planner.samples import cluster_of, problem_of

SOCKET = {"cpu-socket": {"like": "cpu", "bf16_tflops": 3.0, "memory_gb": 3.0, "memory_gbytes_per_s": 200.0}}
FABRIC = {"kind": "leaf-spine", "nodes_per_leaf": 4, "spines": 2, "links_per_pair": 1, "uplink_gbps": 100}
GPUS = {"h100-small": {"like": "h100", "memory_gb": 24.0}}
BY_COUNTS = Sending(schedule="by-counts", factor=FACTOR)


def cpu_hosts(*rates, fabric=FABRIC):
    nodes = [
        {"name": f"h{i}", "device": "cpu-socket", "devices": 2, "nics": [{"gbps": rate}]}
        for i, rate in enumerate(rates)
    ]
    return cluster_of(fabric=fabric, devices=SOCKET, nodes=nodes)


def group_of(cluster):
    return make_group(cluster, tuple(range(len(cluster.hosts))))


@pytest.fixture(scope="module")
def plan():
    """Eight hosts of two CPU ranks on 5 Gb/s; all experts fit into all hosts only, some of them four times as hot."""
    skewed = zipf(TraceShape(num_experts=128, top_k=8, layers=2, tokens=4096), exponent=1.0, seed=0)
    work = Workload(prompt_tokens=512, output_tokens=16, chunk_tokens=512, sequences=4)
    return make_plan(cpu_hosts(*[5.0] * 8), load_model_shape("olmoe"), skewed, work, Target())


def test_pace_by_counts_is_taken_where_it_pays(plan):
    (group,) = plan.groups
    assert group.outcome.candidate.sending == BY_COUNTS
    assert {one.sending for one in group.sendings} == {
        *sendings_of(group.cost.group),
        *sendings_of(group.cost.group, BY_COUNTS),
    }
    taken, *others = (one.outcome.tokens_per_s for one in group.sendings)
    assert all(taken > 1.01 * other for other in others)


def test_what_is_taken_is_an_option_of_the_run(plan, tmp_path, monkeypatch):
    files = plan_files(plan)
    (written,) = yaml.safe_load(files["plan.yaml"])["groups"]
    parsed = NodeSchedule.parse(written["node_schedule"])
    assert (parsed.name, parsed.factor) == ("by-counts", FACTOR)
    assert parsed.rate_gbps == pytest.approx(5.0 * TCP_PAYLOAD, rel=0.005)
    assert plan_json(plan)["groups"][0]["node_schedule"] == written["node_schedule"]
    for name in ("g0.torchrun.sh", "g0.slurm.sh", "g0.lws.yaml"):
        assert f"--node-schedule {written['node_schedule']}" in files[name]
    (tmp_path / "plan.yaml").write_text(files["plan.yaml"])
    seen = []
    monkeypatch.setattr("bywash.cli.run.start_run", seen.append)
    for more in ([], ["--node-schedule", "rotated"]):
        CliRunner().invoke(app, ["run", "--plan", str(tmp_path / "plan.yaml"), *more])
    assert [one.node_schedule for one in seen] == [written["node_schedule"], "rotated"]
    assert seen[0].exchange == "hierarchical"


def test_the_plan_says_what_the_alternatives_cost(plan):
    text, tried = plan_text(plan), plan.groups[0].sendings
    assert "by-counts:4.58,1.05" in text
    for one in tried[1:]:
        times = [one.runs["prefill"], tried[0].runs["prefill"]]
        share = (times[0].dispatch_us + times[0].combine_us) / (times[1].dispatch_us + times[1].combine_us)
        assert f"({share:.3f}x)" in next(line for line in text.splitlines() if str(one.sending) in line)
    assert [one["schedule"] for one in plan_json(plan)["groups"][0]["sendings"]] == [t.sending.schedule for t in tried]


def test_gpus_are_never_given_a_rate_but_told_what_it_would_give():
    cluster = cluster_of(*((f"h{i}", "h100-small", 4, 400.0) for i in range(2)), devices=GPUS)
    work = Workload(prompt_tokens=256, output_tokens=128, chunk_tokens=256, sequences=16)
    result = search(cluster, problem_of(cluster, "mixtral-8x7b", work))
    tried = result.sendings[0, 1]
    assert {one.sending.schedule for one in tried if one.refused} == {"by-counts"}
    faster = [
        replace(one, outcome=replace(one.outcome, tokens_per_s=9e9)) if one.refused else one for one in reversed(tried)
    ]
    assert best_first(faster)[0].sending.schedule != "by-counts"
    for one in tried:
        if not one.refused:
            assert NodeSchedule.parse(node_schedule(one.sending, group_of(cluster))).rate_gbps is None


def test_pace_by_counts_must_be_worth_its_rate(plan):
    slow, fast = (one for one in reversed(plan.groups[0].sendings) if one.sending.schedule != "rotated")
    assert fast.sending == BY_COUNTS
    little = replace(fast, outcome=replace(fast.outcome, tokens_per_s=1.005 * slow.outcome.tokens_per_s))
    assert best_first([slow, little])[0] is slow
    assert best_first([slow, fast])[0] is fast
    misses: TriedSending = replace(slow, outcome=replace(slow.outcome, binding=("a bound",)))
    assert best_first([misses, little])[0] is little


def test_hosts_with_unlike_links_are_not_paced_at_one_rate():
    alike, mixed = group_of(cpu_hosts(25.0, 25.0)), group_of(cpu_hosts(25.0, 10.0))
    assert refusal(BY_COUNTS, alike) == ""
    assert node_schedule(BY_COUNTS, alike) == "by-counts:22.9,1.05"
    assert "10 to 25 Gb/s" in refusal(BY_COUNTS, mixed)
    assert refusal(Sending(schedule="rotated"), mixed) == ""


def test_cpu_ranks_share_the_first_nic_of_their_host():
    nodes = [
        {"name": f"h{i}", "device": "cpu", "devices": 4, "nics": [{"gbps": 25.0}, {"gbps": 10.0}]} for i in range(2)
    ]
    group = group_of(cluster_of(fabric=FABRIC, nodes=nodes))
    assert group.port_R.tolist() == [0] * 4 + [2] * 4
    assert node_schedule(BY_COUNTS, group) == "by-counts:22.9,1.05"


def test_groups_at_once_are_each_sent_in_their_own_way():
    """Two groups on one switch, one of them paced at half of its line."""
    network, bytes_PP = Network(single_switch(hosts=6, gbps=100.0, delay_ns=500.0)), np.zeros((2, 6, 6), np.int64)
    bytes_PP[0, :3, :3] = bytes_PP[1, 3:, 3:] = 1_000_000 * (1 - np.eye(3, dtype=np.int64))
    layers = [(LayerBytes(dispatch_HH=m, combine_HH=m, network_rows=1, local_rows=0),) for m in bytes_PP]
    whole, half = Sending(schedule="at-once"), Sending(schedule="by-counts", factor=0.5)
    sent = [Sent(layers=layers[0], sending=whole), Sent(layers=layers[1], sending=half)]
    alone = [network.simulate([one]) for one in sent]
    for (dispatch, combine), one in zip(network.simulate_together(sent), alone):
        assert (dispatch, combine) == pytest.approx((one.dispatch_us, one.combine_us), rel=0.02)
    assert alone[1].dispatch_us > 1.8 * alone[0].dispatch_us
    assert network.simulate(sent).dispatch_us == pytest.approx(alone[1].dispatch_us, rel=0.02)


def test_a_very_slow_network_is_priced_all_the_same():
    """With patience a run would take longer than a scenario may: a price, no error about the scenario."""
    work = Workload(prompt_tokens=512, output_tokens=16, chunk_tokens=512, sequences=4)
    cluster = cpu_hosts(*[0.1] * 8)
    result = search(cluster, problem_of(cluster, "olmoe", work))
    (outcome,) = result.winner.outcomes
    bound_us = min(one.runs["prefill"].dispatch_us for one in result.sendings[outcome.candidate.group.hosts])
    assert outcome.prefill.layer_us > bound_us > 1e6
