"""The exchange's kernels, emulated on the CPU, against the same oracles as on GPUs."""

import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from bywash.errors import ConfigError
from bywash.exchange import peer_device
from bywash.moe.device_layer import DeviceLayer
from bywash.routing import Routing
from tests.exchange import peer_steps
from tests.exchange.pushing import push_outputs
from tests.kernels import emulator

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for the CPU")

SMALL = {"experts": 12, "top_k": 3, "dtype": "bfloat16", "tokens": 20}
LONG = {"experts": 6, "top_k": 2, "hidden": 40, "dtype": "bfloat16", "tokens": 1500}
QUICK = {
    "stable": (2, {**SMALL, "hidden": 136, "mode": "stable", "num_sms": 1, "tokens": 90}),  # several rounds
    "exact-fp8": (
        2,
        {**SMALL, "hidden": 269, "dtype": "float16", "mode": "exact", "fp8": "power-of-two", "num_sms": 1},
    ),
}
SLOW = {
    "wide": (2, {**SMALL, "hidden": 1048, "mode": "stable"}),
    "exact": (2, {**SMALL, "hidden": 1048, "mode": "exact"}),
    "three-f16": (3, {**SMALL, "hidden": 37, "dtype": "float16", "mode": "stable"}),
    "four-f32": (4, {**SMALL, "hidden": 300, "dtype": "float32", "mode": "fast", "num_sms": 2}),
    "fp8": (2, {**SMALL, "hidden": 1032, "mode": "exact", "fp8": "amax"}),
    "fp8-odd": (3, {**SMALL, "hidden": 269, "dtype": "float16", "mode": "stable", "fp8": "power-of-two"}),
    "one-sm": (2, {**SMALL, "hidden": 64, "mode": "stable", "num_sms": 1, "fp8": "amax"}),
    "long": (2, {**LONG, "mode": "stable"}),
    "long-three": (3, {**LONG, "mode": "stable"}),
    "long-exact": (3, {**LONG, "mode": "exact"}),
    "alone": (1, {**SMALL, "hidden": 72, "mode": "stable"}),
}


@pytest.mark.parametrize(("ranks", "config"), QUICK.values(), ids=QUICK)
def test_random_steps(ranks, config):
    with emulator.emulated():
        emulator.Threads(ranks, 60.0).run(peer_steps.random_steps, 1, config, 4, 1000)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "config"), SLOW.values(), ids=SLOW)
def test_more_random_steps(ranks, config):
    with emulator.emulated():
        emulator.Threads(ranks, 60.0).run(peer_steps.random_steps, 1, config, 9, 1000)


class Factors:
    """Experts that can push, as `peer_steps` has them."""

    can_push = True

    def __init__(self, device, factor_E):
        self.device, self.factor_E, self.pushed = device, factor_E, 0

    def __call__(self, rows_PD, index_M, ends_L, out_MD=None, *, targets_M=None):
        received = self.device._channels[0].received
        y = peer_steps.expert_outputs(self.device, received, self.factor_E)
        if targets_M is not None:
            self.pushed += int((targets_M[: int(ends_L[-1])] != 0).sum())
            push_outputs(received, y)
        return y


def run_layers(group, config):
    """A layer that pushes and one that does not, over one exchange; how many outputs each pushed."""
    device, placement = peer_steps.open_device(group, devices=1, **config)
    layout, factor_E, pushed = device.layout, peer_steps.factors(config["experts"]), []
    for push in (True, False):
        experts = Factors(device, factor_E)
        layer = DeviceLayer(device, experts, local_experts=config["experts"] // group.ranks, push=push)
        for seed in (4, 5):
            x, ids, weights = peer_steps.draw_all(seed, layout, config["tokens"])[group.rank]
            out = layer(x, Routing(ids_TK=ids, weights_TK=weights, num_experts=config["experts"]))
            expected = peer_steps.oracle_out(x, ids, weights, placement, layout, config["mode"])
            assert peer_steps.same_bits(out, expected), f"push {push}, seed {seed}"
        received = device.dispatch(x, ids, weights)  # who only asks for outputs finds all of them in y
        assert peer_steps.same_bits(device.combine(layer.compute(received)), expected), f"push {push}, by hand"
        pushed.append(experts.pushed)
    if layout.apart:
        refuse_pushing_batches(device, x, ids, weights)
    else:
        with pytest.raises(ConfigError, match="all travel summed"):
            device.combine(out.new_zeros(1, layout.hidden), pushed=True)
    with pytest.raises(ConfigError, match="to push"):
        layer.compute(received, push=True)
    return pushed


def refuse_pushing_batches(device, x, ids, weights):
    """Once rows are batched, outputs are not where the targets are meant for; the step can still be combined."""
    device.dispatch(x, ids, weights)
    y = torch.zeros(device.batch(device.layout.places).index_LC.numel(), device.layout.hidden, dtype=x.dtype)
    with pytest.raises(ConfigError, match="pushed after `batch`"):
        device.combine(y, pushed=True)
    assert not device.combine(y).any()
    device.check()
    received = device.dispatch(x, ids, weights)  # the next step may push again
    y = torch.zeros(received.index_M.numel(), device.layout.hidden, dtype=x.dtype)
    push_outputs(received, y)
    assert not device.combine(y, pushed=True).any()
    device.check()


@pytest.mark.parametrize("mode", ["exact", pytest.param("stable", marks=pytest.mark.slow)])
def test_layers_push_what_travels_unsummed(mode):
    with emulator.emulated():
        answers = emulator.Threads(2, 60.0).run(run_layers, {**SMALL, "hidden": 40, "mode": mode, "num_sms": 1})
    assert all(not without and (with_ > 0) == (mode == "exact") for with_, without in answers), answers


def refuse_arguments(group):
    """What a caller may get wrong on the host, in turn; a good step afterwards shows that nothing was launched."""
    config = QUICK["stable"][1]
    device, _ = peer_steps.open_device(group, devices=1, **config)
    generator = torch.Generator().manual_seed(group.rank)
    x, ids, weights = peer_steps.draw(generator, "uniform", 90, device.layout)
    y = torch.zeros(device.layout.places * 3, 136, dtype=torch.bfloat16)
    wrong = {
        "x is": lambda: device.dispatch(x.float(), ids, weights),
        "ids is": lambda: device.dispatch(x, ids[:, :2], weights),
        "weights is": lambda: device.dispatch(x, ids, weights.double()),
        "tokens is": lambda: device.dispatch(x, ids, weights, tokens=torch.tensor([90])),
        "rows with scales": lambda: device.dispatch(x, ids, weights, scales_TG=weights),
        "a step of 180 tokens": lambda: device.dispatch(*(torch.cat([t, t]) for t in (x, ids, weights))),
        "combine before any dispatch": lambda: device.combine(y),
        "batches of -1": lambda: device.batch(-1),
        "generation 2; 0 to 1": lambda: device.dispatch(x, ids, weights, generation=2),
        "12 of 0 to 1 are needed": lambda: device.set_plan(np.full(12, 2), 0, 0),
    }
    for words, call in wrong.items():
        with pytest.raises(ConfigError, match=words):
            call()
    device.dispatch(x, ids, weights)
    with pytest.raises(ConfigError, match="outputs is"):
        device.combine(y.float())
    device.combine(y)
    device.check()


def test_arguments_that_do_not_fit_are_refused_before_any_launch():
    with emulator.emulated():
        emulator.Threads(2, 60.0).run(refuse_arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("plan", "PlanMismatchError"),
        ("tokens", "ConfigError"),
        ("expert", "ConfigError"),
        ("capacity", "ConfigError"),
    ],
)
def test_mistakes_end_in_the_same_error_on_every_rank(how, kind):
    with emulator.emulated():
        answers = emulator.Threads(2, 20.0).run(peer_steps.fail_on_purpose, 1, how)
    assert [got for got, _ in answers] == [kind, kind], answers


class LateToCombine(emulator.EmulatedKernels):
    def launch(self, name, blocks, parameters, *, early=False):
        if name.startswith("combine") and parameters[self.fields.index("rank")] == 1:
            time.sleep(0.5)
        super().launch(name, blocks, parameters, early=early)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [0, 2])
def test_the_wait_for_outputs_is_needed(fault, monkeypatch):
    config = {**SMALL, "hidden": 136, "mode": "stable", "build": {"fault": fault}}
    with emulator.emulated(), pytest.raises(AssertionError) if fault else nullcontext():
        monkeypatch.setattr(peer_device, "load_kernels", LateToCombine)
        emulator.Threads(2, 20.0).run(peer_steps.random_steps, 1, config, 4, 1000)
