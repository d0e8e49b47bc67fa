"""The exchange below the engines' adapters: on CPU ranks, and on emulated GPUs in the slow lane."""

import pytest
import torch

from bywash.errors import ConfigError
from bywash.exchange.carrier_device import DeviceCarrier
from bywash.serving import exchange
from tests.exchange.test_deepep import Ranks
from tests.kernels import emulator
from tests.serving import exchange_steps


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_on_cpu_ranks(pools, ranks):
    counters = pools(ranks).run(exchange_steps.steps, 6)
    assert all(rank["moe_steps"] == 12 and rank["moe_extra_steps"] == 0 for rank in counters)


def test_misuse_is_refused_before_anything_is_sent(pools):
    pools(1).run(misuse)


def misuse(group):
    served = exchange.ServingExchange(group=group)
    x, ids, weights = torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)

    def start(x=x, ids=ids, scales=None, step_tokens=None):
        return served.start(
            *(x, ids, weights, torch.zeros(2, dtype=torch.int64)),
            out_dtype=torch.float32,
            most_tokens=4,
            step_tokens=step_tokens,
            scales_TG=scales,
        )

    for wrong, words in (
        ({"step_tokens": 3}, "rank 0 brings 4 tokens to a step, where no rank was to bring more than 3"),
        ({"ids": ids[:, :1]}, r"ids \[4, 1\] and weights \[4, 2\]"),
        ({"scales": torch.ones(4, 1, dtype=torch.int32)}, "scales are torch.int32"),
    ):
        with pytest.raises(ConfigError, match=words):
            start(**wrong)
    flight = start()
    rows = flight.dispatched().x_ND
    for y in (rows[1:], rows.repeat(1, 9)):
        with pytest.raises(ConfigError, match="for 4 rows that came"):
            flight.give_back(y)
    flight.give_back(rows)
    assert torch.equal(flight.result()[:, :8], x)
    served.close()


def test_counters_may_be_asked_for_while_a_step_opens_a_carrier(pools):
    pools(1).run(counted_meanwhile)


def counted_meanwhile(group):
    served = exchange.ServingExchange(group=group)

    class Carrier:
        extra_steps = 1

        def traffic(self):
            served._carriers[(len(served._carriers),)] = self
            return {}

        def close(self):
            pass

    served._carriers[(0,)] = Carrier()
    assert served.counters()["moe_extra_steps"] == 1
    served.close()


@pytest.mark.slow
@pytest.mark.parametrize("sync", [True, False])
def test_steps_on_emulated_gpus(monkeypatch, sync):
    if emulator.COMPILER is None:
        pytest.skip("needs g++ to compile the kernels for the CPU")
    monkeypatch.setattr(exchange, "open_carrier", lambda group, *, cuda, **sizes: DeviceCarrier(group, **sizes))
    with emulator.emulated():
        Ranks(2, 60.0).run(exchange_steps.steps, 4, 20, 72, sync)
