"""`NodeDevice`, the exchange between GPUs of several hosts: arithmetic, steps on emulated kernels and on GPUs."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.balance import Placement
from bywash.errors import ConfigError
from bywash.exchange import node_pack
from bywash.exchange.host_map import HostMap
from bywash.exchange.node_device import NodeDevice
from bywash.exchange.node_layout import NodeLayout, node_capacity
from bywash.exchange.node_naive import slots_naive
from tests.exchange import node_steps
from tests.kernels import emulator
from tests.ranks import RankPool

SMALL = {"experts": 12, "top_k": 3, "hidden": 40, "dtype": "bfloat16", "tokens": 21, "capacity": 8}
ON_THREE = {**SMALL, "experts": 18, "tokens": 15, "capacity": 5}
"""For three hosts: its inner leg has the sizes of that of `SMALL` on two, so that its kernels are compiled already."""
MODES = ("exact", "stable", "fast")
MISTAKES = [
    ("plan", "PlanMismatchError", "planned this step differently"),
    ("expert", "ConfigError", "expert id 15, which does not exist"),
    ("tokens", "ConfigError", "more than its input has rows"),
]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs, to play two hosts")
emulated_only = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for the CPU")


class Mailboxes:
    """A wire between threads: a queue for each pair of ranks."""

    device = "cpu"

    def __init__(self, threads, hosts, rank):
        self.threads, self.hosts, self.rank = threads, hosts, rank

    def buffers(self, make):
        return make()

    def __call__(self, sent, got):
        for peer, parts in zip(self.hosts.gateways(self.rank), sent, strict=True):
            self.threads.mail[self.rank, peer] = [part.clone() for part in parts]
        self.threads.barrier.wait(200)
        for peer, parts in zip(self.hosts.gateways(self.rank), got, strict=True):
            for part, came in zip(parts, self.threads.mail[peer, self.rank], strict=True):
                part.copy_(came)
        self.threads.barrier.wait(200)

    def finished(self, limit_s):
        return True


class Hosts(emulator.Threads):
    """A job whose ranks are threads, on several hosts; each host's heaps are shared by its own ranks."""

    def __init__(self, names, deadline_s=60.0):
        super().__init__(len(names), deadline_s)
        self.map, self.mail, self.said = HostMap.of(names), {}, {}
        self.inner = [emulator.Threads(len(ranks), deadline_s) for ranks in self.map.members]

    def rank(self, rank):
        group = super().rank(rank)

        def share(value, during):
            self.said[rank] = value
            self.barrier.wait(200)
            found = [self.said[r] for r in range(self.ranks)]
            self.barrier.wait(200)
            return found

        group.share, group.blame, group.verdict = share, nullcontext, RuntimeError
        group.agree, group.tell = lambda **facts: None, lambda error: None
        return group

    def open(self, group, config):
        placement = Placement.equal(config["experts"], self.ranks)
        inner = self.inner[self.map.host_R[group.rank]]
        device = NodeDevice(
            group,
            node_steps.layout_of(self.map, **config),
            placement.home_E,
            Mailboxes(self, self.map, group.rank),
            hosts=self.map,
            inner_members=inner.rank(self.map.index_R[group.rank]),
        )
        return device, placement


def on_hosts(names, config, function, *args):
    """`function(device, hosts, placement, *args)` on every rank, kernels emulated."""
    hosts = Hosts(names)

    def work(group):
        device, placement = hosts.open(group, config)
        return function(device, hosts.map, placement, *args)

    with emulator.emulated():
        return hosts.run(work)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slots_are_those_of_the_oracle(data):
    names = data.draw(st.sampled_from(["ab", "aabb", "abc", "abab", "aabbcc"]))
    hosts = HostMap.of(names)
    experts, tokens = data.draw(st.integers(len(names), 14)), data.draw(st.integers(0, 20))
    top_k = data.draw(st.integers(1, 4))
    layout = node_steps.layout_of(
        hosts, experts=experts, top_k=top_k, hidden=8, dtype="bfloat16", mode="fast", tokens=max(1, tokens),
        capacity=data.draw(st.integers(1, max(1, tokens))),
    )  # fmt: skip
    here = data.draw(st.integers(0, hosts.hosts - 1))
    rank_E = Placement.equal(experts, len(names)).home_E
    ids = data.draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * top_k, max_size=tokens * top_k))
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(tokens, top_k)
    weights_TK = torch.rand(tokens, top_k)
    tables = node_pack.Tables.of(rank_E, hosts, here, "cpu")
    packed = node_pack.pack(ids_TK, weights_TK, tables, layout, layout.waves)
    wanted = slots_naive(ids_TK, rank_E.tolist(), hosts, here, layout)
    others = [host for host in range(hosts.hosts) if host != here]
    for slot in range(layout.slots(layout.waves)):
        token, host, places = wanted.get(slot, (0, None, (-1,) * top_k))
        assert packed.meta_SJ[slot, :top_k].tolist() == list(places)
        if slot in wanted:
            assert packed.token_S[slot] == token
            assert packed.place_OT[others.index(host), token] == slot
            assert torch.equal(packed.meta_SJ[slot, top_k:].view(torch.float32), weights_TK[token])
    assert int((packed.place_OT >= 0).sum()) == len(wanted)
    per_host = [sum(host == one for _, one, _ in wanted.values()) for host in others]
    assert int(packed.most) == max(per_host)


@emulated_only
@pytest.mark.slow
@pytest.mark.parametrize("names", ["ab", "aabb", "abab", "abc"])
@pytest.mark.parametrize("mode", MODES)
def test_hosts_and_ranks(names, mode):
    waves = on_hosts(names, {**SMALL, "mode": mode}, node_steps.random_steps, 4, 200)
    assert 1 <= max(waves) <= 3


@emulated_only
@pytest.mark.parametrize("mode", ["exact", pytest.param("fast", marks=pytest.mark.slow)])
def test_two_hosts_of_two_ranks_with_counts_on_the_device(mode):
    on_hosts("aabb", {**SMALL, "mode": mode}, node_steps.padded_steps, 2, 300)


@emulated_only
@pytest.mark.parametrize(
    ("ranks", "schedule", "config"),
    [(3, "rotated", ON_THREE), pytest.param(2, "together", SMALL, marks=pytest.mark.slow)],
)
def test_messages_between_processes(pools, ranks, schedule, config):
    config = {**config, "mode": "fast"}
    assert len(set(pools(ranks).run(node_steps.over_gloo, schedule, config, node_steps.random_steps, 2, 500))) == 1


def test_a_wire_is_closed_and_refuses_a_second_use(pools):
    for came, error in pools(2).run(node_steps.used_after_close):
        assert came in ([1.0] * 3, [0.0] * 3)
        assert error == "ConfigError: exchange across hosts: the wire is closed; open a new one"


@pytest.mark.parametrize("stage", ["meet", "connect"])
def test_opening_a_wire_ends_by_the_deadline(stage):
    """Torch itself would wait longer than the test may take; a rank that stops after it has met the others is named."""
    pool = RankPool(2, deadline_s=20.0)
    error, _ = pool.run(node_steps.nobody_at_the_other_end, stage)
    pool.close()
    assert error.startswith("RankLostError: ")
    assert "rank 1 " in error
    assert "connecting hosts by NCCL" in error


@emulated_only
def test_too_few_waves_are_noticed_by_every_rank():
    config = {**SMALL, "mode": "fast"}
    assert on_hosts("ab", config, node_steps.too_few_waves) == [[3, 3]] * 2


@emulated_only
@pytest.mark.parametrize(("how", "own", "words"), MISTAKES)
def test_mistakes_end_in_an_error_on_every_rank(how, own, words):
    config = {**SMALL, "mode": "fast"}
    judge_mistake(on_hosts("ab", config, node_steps.fail_on_purpose, how), how, own, words)


def judge_mistake(answers, how, own, words):
    assert answers[1][0] == own, answers
    assert words in answers[1][1]
    other = "PlanMismatchError" if how == "plan" else "ExchangeError"
    assert (answers[0][0], answers[0][2]) == (other, [1]), answers


@pytest.fixture
def two_hosts():
    """Two rank processes, one GPU each: NCCL is set up for good by the first communicator of a process."""
    pool = RankPool(2, deadline_s=5.0)
    yield pool
    pool.close()


@needs_two
@pytest.mark.parametrize("mode", MODES)
def test_two_gpus_that_play_two_hosts(two_hosts, mode):
    config = {**SMALL, "mode": mode, "tokens": 200, "capacity": 64, "hidden": 512}
    two_hosts.run(node_steps.on_gpus, "ab", config, node_steps.random_steps, 30, 1000)
    two_hosts.run(node_steps.on_gpus, "ab", config, node_steps.padded_steps, 20, 2000)
    assert two_hosts.run(node_steps.on_gpus, "ab", config, node_steps.same_bits_as_peer, 3000) == [0, 0]


@needs_two
@pytest.mark.parametrize(("how", "own", "words"), MISTAKES)
def test_mistakes_across_gpus_end_in_an_error_on_every_rank(two_hosts, how, own, words):
    config = {**SMALL, "mode": "fast"}
    judge_mistake(two_hosts.run(node_steps.on_gpus, "ab", config, node_steps.fail_on_purpose, how), how, own, words)


@needs_two
def test_a_lost_host_is_named_within_the_deadline_and_the_process_survives(two_hosts):
    arguments = ("ab", {**SMALL, "mode": "fast"}, node_steps.lose_the_other_host)
    two_hosts.send(node_steps.on_gpus, [arguments] * 2)
    kind, ranks, text, seconds, alive = two_hosts.receive(0)
    assert (kind, ranks, alive) == ("RankLostError", [1], 1000.0), text
    assert seconds < 15.0


def layout(**changes):
    config = {"hosts": 2, "per_host": 1, "experts": 8, "top_k": 2, "tokens": 10, "hidden": 8, "dtype": torch.bfloat16}
    return NodeLayout(**{**config, "combine": "fast", "capacity": 4, **changes})


def test_waves_hold_a_whole_step():
    assert (layout().waves, layout().slots(2), layout(hosts=3).slots(2)) == (3, 8, 16)
    assert (layout(combine="exact").outputs, layout(combine="stable").outputs) == (2, 1)
    assert layout(combine="stable", per_host=2).outputs == 2
    assert layout().wire_bytes(3) == 12 * (16 + 16 + 16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hosts": 1}, "all ranks are on one host"),
        ({"capacity": 11}, "capacity 11; 1 to 10 rows"),
        ({"hidden": 5}, "no multiple of 16 bytes"),
    ],
)
def test_layouts_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        layout(**changes)


def test_capacity_follows_from_how_many_tokens_need_a_host():
    assert node_capacity(4096, 8, 256, 2)[0] == 4096
    rows, why = node_capacity(4096, 8, 256, 8)
    assert rows == 2832, why
    assert node_capacity(1, 1, 4, 4)[0] == 1
    with pytest.raises(ConfigError, match="top-8 of 4 experts"):
        node_capacity(4096, 8, 4, 2)
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(4096, 256, generator=generator).argsort(dim=1)[:, :8]
    assert all(int((ids // 32 == host).any(1).sum()) <= rows for host in range(8))
