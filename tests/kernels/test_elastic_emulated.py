"""The elastic exchange's kernels, emulated on the CPU: the steps that GPUs run, against the same oracles."""

import pytest

from bywash.balance import Limits
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
