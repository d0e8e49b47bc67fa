"""The `peer` exchange as an operator: what the compiler is told, and that compiled layers give the same bits."""

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bywash.errors import ConfigError
from bywash.exchange import peer_ops
from tests.exchange import peer_steps
from tests.kernels import emulator

needs_compiler = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernels for the CPU")
CONFIG = {"experts": 12, "top_k": 3, "hidden": 37, "dtype": "float16", "mode": "stable", "tokens": 20, "num_sms": 1}


def test_a_fake_result_is_contiguous_rows_like_the_input():
    with FakeTensorMode():
        x = torch.empty(7, 37, dtype=torch.bfloat16, device="cpu").t().contiguous().t()
        ids, weights = torch.zeros(7, 3, dtype=torch.int64), torch.zeros(7, 3)
        out = torch.ops.bywash.peer_moe(x, ids, weights, 0)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((7, 37), torch.bfloat16, True)


def test_a_layer_that_is_gone_is_named():
    with pytest.raises(ConfigError, match="layer 987654 of this compiled code is gone"):
        torch.ops.bywash.peer_moe(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), 987654)


def no_gpu():
    """The compiler must see that there is no GPU, once the emulated device is open."""
    gone = mock.Mock(side_effect=AssertionError)  # as torch says it, and as inductor expects it
    return mock.patch.multiple(torch.cuda, is_available=mock.Mock(return_value=False), get_device_properties=gone)


def check_operator(group):
    device, _ = peer_steps.open_device(group, devices=1, **CONFIG)
    factor_E = peer_steps.factors(12)
    layer = peer_ops.PeerLayer(device, lambda received: peer_steps.expert_outputs(device, received, factor_E))
    x, ids, weights = peer_steps.draw(torch.Generator().manual_seed(1), "holes", 15, device.layout)
    with no_gpu():
        torch.library.opcheck(torch.ops.bywash.peer_moe, (x, ids, weights, layer.number))


def check_compiled(group, backend):
    opened = peer_steps.open_device(group, devices=1, **CONFIG)
    with no_gpu(), mock.patch.object(peer_steps, "open_device", return_value=opened):
        peer_steps.compiled_layers(group, 1, CONFIG, 3, 8000, backend=backend)


@needs_compiler
@pytest.mark.slow
def test_the_operator_keeps_what_its_schema_says():
    with emulator.emulated():
        emulator.Threads(1, 60.0).run(check_operator)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_give_the_same_bits(backend):
    with emulator.emulated():
        emulator.Threads(1, 60.0).run(check_compiled, backend)
