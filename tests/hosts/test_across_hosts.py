"""Two hosts with separate network stacks: results, bytes on the cable, and what happens when something breaks."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from bywash.balance import Placement
from bywash.cli.run import DEFAULT_PROMPTS, RunRequest, _job_options
from bywash.exchange import LocalExchange
from bywash.models.job import run_job
from bywash.moe import ExpertParallel
from tests.hosts import jobs
from tests.hosts.network import HEADERS_BYTES, RELAYED, SEGMENT_BYTES, VETH
from tests.moe.common import random_batch, random_experts

DEADLINE_S = 8
"""Of jobs that lose a rank: some wait for it to pass. It has to be enough for joining on a busy machine."""
TOKENS, STEPS, ROW_BYTES = 256, 3, 4 * jobs.SHAPE["hidden"]


def predicted_bytes(host):
    """What `hierarchical` with `fast` has to send from a host, worked out token by token."""
    home_E = Placement.equal(jobs.SHAPE["experts"], 4).home_E
    total = 0
    for rank in range(4):
        for step in range(1, STEPS + 1):
            _, routing = jobs.batch(rank, step, TOKENS)
            for ids in routing.ids_TK.tolist():
                crosses = any(home_E[expert] // 2 != rank // 2 for expert in ids)
                record = ROW_BYTES + 8 * jobs.SHAPE["top_k"] if rank // 2 == host else ROW_BYTES  # out, or back
                total += crosses * record
    return total


@pytest.fixture(scope="session")
def measured(cluster):
    """Payload bytes that each host sent, by way, without what TCP sent again, as it does on a busy machine."""
    results = {way: cluster.run("count_bytes", way=way, tokens=TOKENS, steps=STEPS) for way in ("auto", "by hand")}
    assert results["auto"][0]["name"] == "hierarchical"

    def payload(result):
        return result["bytes"] - HEADERS_BYTES * result["packets"] - SEGMENT_BYTES * result["again"]

    return {way: [payload(results[way][rank]) for rank in (0, 2)] for way in results} | {
        "said": [results["auto"][2 * host]["said"] + results["auto"][2 * host + 1]["said"] for host in range(2)]
    }


def test_bytes_on_the_cable_are_those_predicted(measured):
    for host in range(2):
        assert measured["auto"][host] == pytest.approx(predicted_bytes(host), rel=0.05)
        assert measured["auto"][host] == pytest.approx(measured["said"][host], rel=0.02)
    print(f"measured / predicted: {[m / predicted_bytes(h) for h, m in enumerate(measured['auto'])]}")


def test_fewer_bytes_than_a_flat_exchange_without_deduplication(measured):
    ratios = np.divide(measured["by hand"], measured["auto"])
    print(f"by hand / hierarchical: {ratios}")
    assert (ratios >= 1.8).all()


def test_bywash_run_gives_the_bits_of_one_process(cluster, tmp_path):
    out = tmp_path / "out.json"
    options = {"prompts": 8, "micro_batch": 1, "overlap": "microbatch", "tokens": 4}
    options |= {"node_schedule": "by-counts:1,1.05"}  # two lanes: two steps are in flight
    cluster.run("bywash_run", check=True, json=str(out), **options)
    report = json.loads(out.read_text())
    assert report["exchange"] == "hierarchical"
    assert report["tokens_identical"]
    assert report["logits_identical"]
    assert report["host_bytes"] < report["wire_bytes"]


def test_a_long_way_only_takes_longer(cluster, network, tmp_path):
    begun = tmp_path / "begun"
    job = cluster.start("endless_steps", cable=RELAYED, begun=str(begun), steps=40, pause_s=0.05)
    job.wait_for(begun)
    network.disturb(delay_ms=200)
    time.sleep(2)
    network.disturb()
    assert [answer["result"]["sha256"] for answer in job.answers()] == [bits_of_one_rank(rank) for rank in range(4)]


def bits_of_one_rank(rank):
    case = jobs.LAYER
    everything = random_experts(case.experts, case.hidden, case.inner, case.dtype, case.seed)
    layer = ExpertParallel(exchange=LocalExchange(), placement=Placement.equal(case.experts, 1), experts=everything)
    return jobs.sha256(layer(*random_batch(case, rank)))


def broken(cluster, tmp_path, ranks, harm, cable=None):
    """Start steps, do `harm` in the middle; what `ranks` say, and how long they took."""
    begun = tmp_path / "begun"
    options = {"cable": cable} if cable else {}
    job = cluster.start("endless_steps", deadline_s=DEADLINE_S, begun=str(begun), **options)
    job.wait_for(begun)
    harm(job)
    began = time.monotonic()
    answers = job.answers(ranks)
    return answers, max(answer["ended"] for answer in answers) - began


def test_a_killed_host_is_named(cluster, tmp_path):
    answers, took_s = broken(cluster, tmp_path, (0, 1), lambda job: job.kill((2, 3)))
    for answer in answers:
        assert (answer["error"], answer["ranks"]) == ("RankLostError", [2, 3]), answer
        assert "host host-b is lost" in answer["text"]
    assert took_s < 90, answers  # this only tells an end from a hang


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_lost_rank_is_named_on_both_hosts(cluster, tmp_path, how):
    answers, _ = broken(cluster, tmp_path, (0, 1, 2), lambda job: job.kill((3,), how))
    for answer in answers:
        assert (answer["error"], answer["ranks"]) == ("RankLostError", [3]), answer


def test_a_cut_cable_ends_both_sides(cluster, network, tmp_path):
    answers, took_s = broken(cluster, tmp_path, (0, 1, 2, 3), lambda job: network.plug(up=False))
    for rank, answer in enumerate(answers):
        assert answer["error"] == "RankLostError", answer
        assert answer["ranks"] == ([2, 3] if rank < 2 else [0, 1]), answer
    assert took_s < 90, answers


@pytest.mark.slow
def test_bywash_run_under_torchrun_on_both_hosts(cluster, tmp_path):
    out = tmp_path / "out.json"
    options = ["--check", "--tokens", "8", "--json", str(out), "--exchange", "hierarchical", "--deadline", "60"]
    agents = []
    for host in range(2):
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host),
            "--nproc-per-node", "2", "--master-addr", cluster.network.address(0, VETH), "--master-port", "29999",
            "-m", "bywash", "run", *options,
        ]  # fmt: skip
        command = cluster.network.command(host, *torchrun)
        agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    report = json.loads(out.read_text())
    assert (report["exchange"], report["ranks"]) == ("hierarchical", 4)
    assert report["tokens_identical"]
    assert report["logits_identical"]


@pytest.mark.slow
def test_lost_packets_are_sent_again_or_end_in_an_error(cluster, network, tmp_path):
    job = cluster.start(
        "endless_steps", cable=RELAYED, deadline_s=DEADLINE_S, begun=str(tmp_path / "begun"), steps=25, pause_s=0.02
    )
    job.wait_for(tmp_path / "begun")
    network.disturb(loss=0.3)
    answers = job.answers()
    print([answer.get("text", "all steps right") for answer in answers])
    for rank, answer in enumerate(answers):
        if "result" in answer:
            assert answer["result"]["sha256"] == bits_of_one_rank(rank)
        else:
            assert answer["error"] in ("RankLostError", "ExchangeError"), answer


def test_survivors_go_on_without_a_host(cluster, tmp_path):
    begun = tmp_path / "begun"
    job = cluster.start("model_run_that_goes_on", deadline_s=DEADLINE_S, begun=str(begun))
    job.wait_for(begun)
    job.kill((2, 3))
    answers = [answer["result"] for answer in job.answers((0, 1))]
    assert [answer["lost"] for answer in answers] == [[2, 3], [2, 3]]
    assert [(answer["rank"], answer["ranks"], answer["exchange"]) for answer in answers] == [
        (0, 2, "shm"),
        (1, 2, "shm"),
    ]
    assert sum(answer["experts"] for answer in answers) == 32
    tokens = {int(prompt): ids for answer in answers for prompt, ids in answer["tokens"].items()}
    assert tokens == alone()


@pytest.mark.slow
def test_nobody_goes_on_without_the_store(cluster, tmp_path):
    begun = tmp_path / "begun"
    job = cluster.start("model_run_that_goes_on", deadline_s=DEADLINE_S, begun=str(begun))
    job.wait_for(begun)
    job.kill((0, 1))
    for answer in job.answers((2, 3)):
        assert (answer["error"], answer["ranks"]) == ("RankLostError", [0, 1]), answer
        assert "making a group of the survivors" in answer["text"]


def alone():
    """The same prompts in this process."""
    prompts = tuple((text, None) for text in DEFAULT_PROMPTS[:3])
    options = replace(_job_options(RunRequest(prompts=prompts, tokens=8)), exchange="local")
    return run_job(options, None).generation.tokens


def test_other_code_on_one_host_is_refused_by_all(cluster):
    job = cluster.start("hosts_that_differ", environ=lambda rank: {"ODD_CODE": "deadbeef"} if rank == 3 else {})
    for answer in job.answers():
        assert answer["error"] == "ConfigError", answer
        assert re.search(r"code: rank 3 \(host host-b\) runs bywash \S+ \(deadbeef\), rank 0", answer["text"])


def test_equal_hosts_are_accepted(cluster):
    assert cluster.run("hosts_that_differ") == [[], [], [], []]
