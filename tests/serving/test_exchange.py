"""The exchange below the engines' adapters: on CPU ranks, and on emulated GPUs in the slow lane."""

import pytest

from bywash.exchange.carrier_device import DeviceCarrier
from bywash.serving import exchange
from tests.exchange.test_deepep import Ranks
from tests.kernels import emulator
from tests.serving import exchange_steps


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_on_cpu_ranks(pools, ranks):
    counters = pools(ranks).run(exchange_steps.steps, 6)
    assert all(rank["moe_steps"] == 12 and rank["moe_extra_steps"] == 0 for rank in counters)


@pytest.mark.slow
@pytest.mark.parametrize("sync", [True, False])
def test_steps_on_emulated_gpus(monkeypatch, sync):
    if emulator.COMPILER is None:
        pytest.skip("needs g++ to compile the kernels for the CPU")
    monkeypatch.setattr(exchange, "open_carrier", lambda group, *, cuda, **sizes: DeviceCarrier(group, **sizes))
    with emulator.emulated():
        Ranks(2, 60.0).run(exchange_steps.steps, 4, 20, 72, sync)
