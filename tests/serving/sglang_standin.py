"""A stand-in for the parts of SGLang that bywash's plugin touches. SGLang itself cannot be installed here.

Written in our own words after SGLang's two protocols, as they stood in its repository in November 2026: a provider that
prepares a layer's method and dispatcher (layers/moe/customized.py), and a dispatcher with standard outputs
(layers/moe/token_dispatcher). Nothing else of SGLang is here: a test that passes shows that bywash keeps to these
two protocols, not that a server runs.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


class BaseDispatcher(ABC):
    def __init__(self):
        self.quant_config = None

    @abstractmethod
    def dispatch(self, hidden_states, topk_output): ...

    @abstractmethod
    def combine(self, combine_input): ...


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


@dataclass(frozen=True)
class CustomizedMoELayer:
    method: Any
    dispatcher_factory: Callable[[Any], BaseDispatcher]


@runtime_checkable
class CustomizedMoEProvider(Protocol):
    def prepare_layer(self, *, layer, prefix, native_method, runner_config) -> CustomizedMoELayer: ...


def install(process_group):
    """Put the stand-in where `import sglang` finds it; the expert-parallel group is `process_group`."""
    customized = _module("sglang.srt.layers.moe.customized", CustomizedMoELayer=CustomizedMoELayer, _provider=None)

    def register_customized_moe_provider(provider):
        if not isinstance(provider, CustomizedMoEProvider):
            raise TypeError("not a provider")
        if customized._provider is not None:
            raise ValueError("already registered")
        customized._provider = provider

    customized.register_customized_moe_provider = register_customized_moe_provider
    _module("sglang.srt.layers.moe.token_dispatcher.base", BaseDispatcher=BaseDispatcher)
    _module("sglang.srt.layers.moe.token_dispatcher.standard", StandardDispatchOutput=StandardDispatchOutput)
    coordinator = SimpleNamespace(cpu_group=process_group)
    _module("sglang.srt.distributed", get_moe_ep_group=lambda: coordinator)
    return customized


def remove():
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        del sys.modules[name]


def _module(name, **contents):
    parent = None
    for depth in range(1, name.count(".") + 2):
        path = ".".join(name.split(".")[:depth])
        module = sys.modules.setdefault(path, ModuleType(path))
        module.__path__ = []
        if parent is not None:
            setattr(parent, path.rpartition(".")[2], module)
        parent = module
    for key, value in contents.items():
        setattr(parent, key, value)
    return parent
