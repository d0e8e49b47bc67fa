"""A layer as SGLang would run it, on the stand-in: provider, native method, dispatcher, on CPU ranks."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from bywash.errors import ConfigError
from tests.serving import sglang_standin as standin

EXPERTS, HIDDEN, TOP_K = 6, 20, 2


def weights_of_experts():
    made = torch.Generator().manual_seed(3)
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=made) / HIDDEN**0.5


def tokens_of(rank, step):
    made = torch.Generator().manual_seed(10 * step + rank)
    count = [9, 0, 4, 1][(rank + step) % 4]
    x = torch.randn(count, HIDDEN, generator=made).bfloat16()
    weights, ids = torch.rand(count, EXPERTS, generator=made).topk(TOP_K, dim=1)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=made) < 0.2, -1)
    return x, standin.StandardTopKOutput(weights, ids.int(), torch.zeros(count, EXPERTS))


class NativeMethod:
    """What SGLang's runner does with a standard dispatch output: local experts, weights applied, -1 left out."""

    def __init__(self, first, count):
        self.experts = weights_of_experts()[first : first + count]

    def apply(self, layer, dispatch_output):
        x, _, routing = dispatch_output
        out = torch.zeros(x.shape)
        for n, k in (routing.topk_ids >= 0).nonzero().tolist():
            y = x[n].float() @ self.experts[routing.topk_ids[n, k]]
            out[n] += routing.topk_weights[n, k] * y
        return standin.StandardCombineInput(out.to(x.dtype))


def layer_on_ranks(group):
    """Steps of a layer prepared by the registered provider, both at once and in halves of two sub-batches."""
    os.environ["BYWASH_SGLANG"], os.environ["BYWASH_MAX_TOKENS"] = "1", "16"
    customized = standin.install(dist.group.WORLD)
    try:
        from bywash.serving import sglang_dispatcher, sglang_plugin

        sglang_plugin.register()
        sglang_plugin.register()
        local = EXPERTS // group.ranks
        config = SimpleNamespace(num_experts=EXPERTS, num_local_experts=local, num_fused_shared_experts=0)
        native, alone = NativeMethod(group.rank * local, local), NativeMethod(0, EXPERTS)
        prepared = customized._provider.prepare_layer(
            layer=None, prefix="layers.0", native_method=native, runner_config=config
        )
        assert prepared.method is native
        dispatcher = prepared.dispatcher_factory(config)
        assert isinstance(dispatcher, standin.BaseDispatcher)
        for step in range(4):
            given = [tokens_of(group.rank, 2 * step + b) for b in range(2)]
            want = [alone.apply(None, standin.StandardDispatchOutput(x, None, r)).hidden_states for x, r in given]
            out = dispatcher.combine(native.apply(None, dispatcher.dispatch(*given[0])))
            torch.testing.assert_close(out.float(), want[0].float(), rtol=0.02, atol=0.02)
            for b, (x, routing) in enumerate(given):
                dispatcher.dispatch_a(hidden_states=x, topk_output=routing, tbo_subbatch_index=b)
            rows = [dispatcher.dispatch_b(tbo_subbatch_index=b) for b in range(2)]
            for b in range(2):
                dispatcher.combine_a(native.apply(None, rows[b]), tbo_subbatch_index=b)
            for b in range(2):
                out = dispatcher.combine_b(tbo_subbatch_index=b)
                torch.testing.assert_close(out.float(), want[b].float(), rtol=0.02, atol=0.02)
        _misuse(dispatcher, sglang_dispatcher, group.ranks)
        counters = sglang_dispatcher.shared_exchange().counters()
        sglang_dispatcher.shared_exchange().close()
        return counters
    finally:
        standin.remove()
        sys.modules.pop("bywash.serving.sglang_dispatcher", None)


def _misuse(dispatcher, module, ranks):
    with pytest.raises(ConfigError, match="combine_b of sub-batch 0"):
        dispatcher.combine_b()
    with pytest.raises(ConfigError, match="no expert ids"):
        dispatcher.dispatch_a(torch.zeros(1, HIDDEN), SimpleNamespace())
    for wrong, words in (
        ({"num_local_experts": 1}, "6 experts, 1 on each"),
        ({"num_fused_shared_experts": 1}, "fused"),
    ):
        sizes = {"num_experts": EXPERTS, "num_local_experts": EXPERTS // ranks, "num_fused_shared_experts": 0}
        with pytest.raises(ConfigError, match=words):
            module.make_dispatcher(SimpleNamespace(**{**sizes, **wrong}))
