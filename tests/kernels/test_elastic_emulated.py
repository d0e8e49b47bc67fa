"""The elastic exchange's kernels, emulated on the CPU: the steps that GPUs run, against the same oracles."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bywash.balance import Limits, Placement, SlotDirectory
from bywash.errors import ConfigError
from bywash.moe import elastic_layer
from bywash.routing import Routing
from tests.exchange import elastic_steps
from tests.kernels import emulator

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for the CPU")

SMALL = {
    "experts": 12,
    "top_k": 3,
    "hidden": 24,
    "dtype": "bfloat16",
    "tokens": 16,
    "slots": 2,
    "layers": 2,
    "num_sms": 1,
}
QUICK = {"stable": (2, {**SMALL, "mode": "stable", "limits": Limits()})}
SLOW = {
    "exact": (2, {**SMALL, "mode": "exact", "limits": Limits(alpha_1024=1100)}),
    "fast": (2, {**SMALL, "mode": "fast", "limits": Limits()}),
    "stable-three": (3, {**SMALL, "mode": "stable", "limits": Limits(), "layers": 1, "slots": 3}),
    "stable-four-uneven": (
        4,
        {**SMALL, "mode": "stable", "limits": Limits(), "home": [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3], "experts": 12},
    ),
    "f32-odd": (
        2,
        {**SMALL, "mode": "stable", "limits": Limits(), "dtype": "float32", "hidden": 37, "experts": 7, "num_sms": 2},
    ),
    "top1": (3, {**SMALL, "mode": "stable", "limits": Limits(), "top_k": 1}),
    "capped": (2, {**SMALL, "mode": "exact", "limits": Limits(capacity=9, alpha_1024=2048)}),
    "many-tokens": (2, {**SMALL, "mode": "stable", "limits": Limits(), "tokens": 900, "num_sms": 3}),
}


@pytest.mark.parametrize(("ranks", "config"), QUICK.values(), ids=QUICK)
def test_steps_follow_their_plans_and_have_the_bits_of_no_plan(ranks, config):
    with emulator.emulated():
        answers = emulator.Threads(ranks, 60.0).run(elastic_steps.elastic_steps, 1, config, 8, 40)
    assert sum(spilled for spilled, _, _ in answers)
    assert sum(fetched for _, fetched, _ in answers)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "config"), SLOW.values(), ids=SLOW)
def test_more_steps(ranks, config):
    with emulator.emulated():
        answers = emulator.Threads(ranks, 60.0).run(elastic_steps.elastic_steps, 1, config, 24, 40)
    assert sum(spilled for spilled, _, _ in answers)
    assert sum(fetched for _, fetched, _ in answers)


@pytest.mark.parametrize("mode", ["stable", pytest.param("exact", marks=pytest.mark.slow)])
def test_steps_that_exceed_the_buffers_run_in_waves(mode):
    config = {**SMALL, "mode": mode, "limits": Limits(fetch_rows=12, capacity=40), "layers": 1}
    with emulator.emulated():
        steps = emulator.Threads(2, 60.0)
        answers = steps.run(lambda *a: elastic_steps.elastic_steps(*a, capacity=30), 1, config, 4, 90)
    assert all(waves for _, _, waves in answers)


def test_slots_can_go_and_come_back():
    config = {**SMALL, "mode": "stable", "limits": Limits()}
    with emulator.emulated():
        ranks = emulator.Threads(2, 60.0)
        answers = ranks.run(lambda *a: elastic_steps.elastic_steps(*a, resize=True), 1, config, 9, 200)
    assert all(fetched for _, fetched, _ in answers)


def test_damaged_weights_are_an_error_on_every_rank():
    config = {**SMALL, "mode": "stable", "limits": Limits(), "layers": 1}
    with emulator.emulated():
        answers = emulator.Threads(2, 20.0).run(elastic_steps.damaged, 1, config)
    assert {kind for kind, _ in answers} == {"ExchangeError"}, answers
    assert all("damaged" in text for _, text in answers), answers


class FactorExperts:
    """The tests' experts in place of `ElasticExperts`, which need a GPU; one call computes own ones and guests."""

    def __init__(self, layers, number):
        self._layers, self._number = layers, number

    def own_outputs(self, received, out_MD):
        layers = self._layers
        y = elastic_steps.compute(layers.device, layers.slots, received, self._number, out_MD.shape[0])
        if received.target_M is not None:
            elastic_steps.push_outputs(received, y)
        return y

    def guest_outputs(self, received, out_MD):
        pass

    def check(self):
        pass


def use_and_close(group):
    """A good step of `ElasticLayers`, whether `close` lets memory go, and then every use of what is closed."""
    experts, tokens, hidden = 6, 4, 8
    placement = Placement.equal(experts, group.ranks)
    sizes = elastic_layer.ElasticSizes(
        tokens=tokens, top_k=2, hidden=hidden, inner=elastic_steps.INNER, layers=1, slots=1, pairs=2 * tokens * 2
    )
    layers = elastic_layer.ElasticLayers(group, placement, Limits(), sizes, num_sms=1)
    elastic_steps.fill_weights(layers.slots, placement, group.rank, 1)
    layer = layers.layer(0)
    group.threads.barrier.wait(200)
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :2].contiguous()
    routing = Routing(ids_TK=ids, weights_TK=torch.rand(tokens, 2, generator=generator), num_experts=experts)
    out = layer(x, routing)
    layer.check()
    home_TK = torch.from_numpy(placement.home_E).long()[ids]
    expected = elastic_steps.oracle(x, ids, routing.weights_TK, home_TK, 0, experts, "stable")
    assert torch.equal(out, expected)
    group.threads.barrier.wait(200)
    held = weakref.ref(layer.record.counts_RE), weakref.ref(layers.h_MF), weakref.ref(layers.y_MD)
    layers.close()
    layers.close()
    assert layers.slots.mapped_bytes == 0
    assert not any(gone() for gone in held)
    for use in (
        lambda: layer(x, routing),
        layer.check,
        lambda: layers.layer(0),
        lambda: layers.resize(1),
        lambda: layers.device.dispatch(x, ids, routing.weights_TK),
        lambda: layers.slots.own(0),
    ):
        with pytest.raises(ConfigError, match="closed"):
            use()


def test_closed_layers_give_their_memory_back_and_run_no_more():
    stream = SimpleNamespace(
        synchronize=lambda: None, wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda: "event"
    )
    streams = {"Stream": lambda **_: stream, "stream": lambda _: nullcontext(), "current_stream": lambda: stream}
    parts = {"_open_planner": host_planner, "ElasticExperts": FactorExperts}
    with emulator.emulated(), mock.patch.multiple(torch.cuda, **streams), mock.patch.multiple(elastic_layer, **parts):
        emulator.Threads(2, 60.0).run(use_and_close)


def host_planner(placement, limits, sizes):
    directory = SlotDirectory.empty(
        ranks=placement.ranks, slots=sizes.slots, experts=placement.num_experts, layers=sizes.layers
    )
    return elastic_steps.HostPlanner(placement, limits, directory)
