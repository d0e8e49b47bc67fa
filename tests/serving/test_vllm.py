"""Conformance with vLLM: its own kernel class on two CPU ranks. Needs vLLM's CPU build: `make test-vllm`."""

import importlib.util
import os
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bywash.errors import ConfigError
from bywash.serving import vllm_plugin
from tests.serving import vllm_steps

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM, reason="vLLM is not installed here; `make test-vllm` installs its CPU build"
)


@needs_vllm
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vllms_kernel_gives_the_same_on_two_ranks_as_on_one(pools, dtype):
    answers = pools(2).run(vllm_steps.layer_on_ranks, dtype, 4)
    for worst, counters in answers:
        print(f"largest difference {worst:.2f} eps; {counters}")
        assert worst <= (8 if dtype == "float32" else 2)  # sums are made in another order, and rounded once per rank
        assert counters["moe_extra_steps"] == 0
    assert sum(counters["exchange_rows_sent"] for _, counters in answers) > 0


@needs_vllm
def test_two_micro_batches_in_flight(pools):
    assert pools(2).run(vllm_steps.interleaved_halves) == [True, True]


@needs_vllm
@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "rows"])
def test_fp8_rows_travel_with_their_scales(pools, per_token):
    assert sum(pools(2).run(vllm_steps.fp8_rows, per_token)) > 0


@needs_vllm
def test_what_cannot_be_served_is_refused_by_name(monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config

    from bywash.serving import vllm_halves

    def original(moe, quant_config, routing_tables=None, allow_new_interface=False, use_monolithic=False):
        return "vLLM's own"

    alone, spread = (vllm_steps.moe_config(ranks, 0, torch.bfloat16) for ranks in (1, 2))
    assert vllm_halves.make_halves(original, alone, None, allow_new_interface=True) == "vLLM's own"
    assert vllm_halves.make_halves(original, spread, None) == "vLLM's own"
    other = vllm_steps.moe_config(2, 0, torch.bfloat16, backend="deepep_v2")
    with pytest.raises(ConfigError, match="deepep_v2"):
        vllm_halves.make_halves(original, other, None, allow_new_interface=True)
    with pytest.raises(ConfigError, match="moe-backend"):
        vllm_halves.make_halves(original, spread, None, allow_new_interface=True, use_monolithic=True)
    three = VllmConfig()
    three.parallel_config.ubatch_size = 3  # afterwards, since vLLM 0.32 has micro-batches with other backends only
    with set_current_vllm_config(three), pytest.raises(ConfigError, match="--ubatch-size 3: bywash keeps 2"):
        vllm_halves.make_halves(original, spread, None, allow_new_interface=True)
    with pytest.raises(ConfigError, match="nvfp4"):
        vllm_halves._quantised(torch.zeros(1, 2), SimpleNamespace(quant_dtype="nvfp4"), False)


@needs_vllm
def test_linear_owners_are_vllms():
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    from bywash.serving.vllm_halves import linear_owners

    for experts, ranks in ((8, 2), (7, 3), (64, 8)):
        rank_E = linear_owners(experts, ranks)
        for rank in range(ranks):
            _, expert_map, _ = determine_expert_map(ranks, rank, experts)
            assert torch.equal(expert_map >= 0, rank_E == rank)


@needs_vllm
def test_the_entry_point_is_found_and_does_nothing_unless_asked(monkeypatch):
    from vllm.model_executor.layers.fused_moe import all2all_utils

    monkeypatch.delenv("BYWASH_VLLM", raising=False)
    before = all2all_utils.maybe_make_prepare_finalize
    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "bywash"]
    assert len(found) == 1
    found[0].load()()
    assert all2all_utils.maybe_make_prepare_finalize is before


@pytest.mark.parametrize("installed", [False, True])
def test_another_vllm_is_refused_by_name(monkeypatch, installed):
    path = "vllm.model_executor.layers.fused_moe"
    names = [path.rsplit(".", depth)[0] for depth in (3, 2, 1)]
    for name in (*names, path, f"{path}.all2all_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if installed else None)
    monkeypatch.setenv("BYWASH_VLLM", "1")
    with pytest.raises(ConfigError, match="and does not fit this one"):
        vllm_plugin.register()


def test_the_switch(monkeypatch):
    for value, on in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("BYWASH_VLLM", value)
        assert vllm_plugin.asked_for() is on
    monkeypatch.setenv("BYWASH_VLLM", "yes")
    with pytest.raises(ConfigError, match="BYWASH_VLLM=yes"):
        vllm_plugin.asked_for()
    if not HAS_VLLM:
        os.environ["BYWASH_VLLM"] = "0"
        vllm_plugin.register()
