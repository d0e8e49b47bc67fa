"""Loading a Hugging Face MoE model with only this rank's experts, through transformers' own `from_pretrained`.

The model class is subclassed so that its expert modules are cut to this rank's share while they are still on the
meta device, and `from_pretrained` gets lazy tensors of that share. Name conversion, dtype and checks stay
transformers' own. `bywash run` calls it; `stages.py` wraps what it returns.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from bywash.errors import BywashError, CheckpointError
from bywash.models.checkpoint import ALL_EXPERTS, bytes_to_read, lazy_tensors
from bywash.models.families import family_of
from bywash.moe import GatedExperts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(directory: Path) -> Any:
    """The model's transformers config, of a family that bywash runs.

    Raises:
        CheckpointError: no directory, no readable config.json, or an unsupported family.
    """
    file = directory / "config.json"
    if not directory.is_dir():
        raise CheckpointError(f"--model {directory}: no such directory, and no preset of that name")
    try:
        model_type = str(json.loads(file.read_text())["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read as a model configuration ({error!r})") from error
    if model_type not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{file}: model_type {model_type!r} is unknown to transformers {transformers.__version__}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises many types here, all about this one file
        raise CheckpointError(f"{file}: transformers cannot use it ({error})") from error
    family_of(config, str(directory))
    _check_supported(config, file)
    return config


def stop_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """The ids that end a text, from config.json and generation_config.json (chat models list more there)."""
    found = [config.eos_token_id]
    if (directory / "generation_config.json").exists():
        try:
            found.append(json.loads((directory / "generation_config.json").read_text()).get("eos_token_id"))
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{directory}/generation_config.json: cannot be read ({error!r})") from error
    ids = [i for one in found for i in (one if isinstance(one, list) else [one]) if i is not None]
    return tuple(dict.fromkeys(ids))


def _check_supported(config: Any, file: Path) -> None:
    """Refuse what would load and then compute something else."""
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
        raise CheckpointError(
            f"{file}: rope_type {rope['rope_type']!r} depends on the length of each prompt; bywash computes prompts of "
            "different lengths together and does not run it"
        )
    if getattr(config, "quantization_config", None):
        method = config.quantization_config.get("quant_method", "unknown")
        raise CheckpointError(
            f"{file}: the weights are quantised ({method}); bywash reads float32, bfloat16 and float16 weights: "
            "dequantise the checkpoint first"
        )


def load_model(
    directory: Path, experts: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> tuple[Any, int]:
    """Load the dense weights whole and, of the experts, only those listed.

    Args:
        directory: checkpoint with config.json and safetensors.
        experts: ids of the experts to hold, ascending; the same in every MoE layer; may be empty.
        dtype: dtype of the weights in memory.
        device: where they end up, by default in CPU memory; they pass through it.

    Returns:
        (transformers causal LM in eval mode, bytes read from disk).

    Raises:
        CheckpointError: the checkpoint is unreadable, truncated or lacks tensors.
    """
    config = read_config(directory)
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    total = family_of(config, str(directory)).num_experts(config)
    with lazy_tensors(directory, experts, total) as tensors:
        try:
            model, report = _with_experts(cls, len(experts)).from_pretrained(
                None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
            )
        except BywashError:
            raise
        except Exception as error:  # transformers raises many types here, all about these files
            raise CheckpointError(f"{directory}: the weights do not fit config.json ({error})") from error
        read = bytes_to_read(tensors)
    # A rank without experts has empty expert tensors, which no checkpoint holds.
    missing = sorted(name for name in report["missing_keys"] if experts or not ALL_EXPERTS.search(name))
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} tensors are missing from the checkpoint, the first is {missing[0]}"
        )
    # transformers drops what its class knows to ignore; old checkpoints also carry rotary tables.
    unused = sorted(name for name in report["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq"))
    if unused:
        raise CheckpointError(
            f"{directory}: {len(unused)} tensors have no place in the model that config.json describes, the first is "
            f"{unused[0]}"
        )
    if device is not None and device.type != "cpu":
        try:
            model = model.to(device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise CheckpointError(
                f"{directory}: this rank's weights do not fit on {device}: {read / 2**30:.1f} GiB were read, "
                f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free; use more ranks on more GPUs"
            ) from error
    return model.eval().requires_grad_(False), read


def _with_experts(cls: Any, count: int) -> Any:
    """`cls` with `count` experts in every expert module, whatever the config says."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        for module in self.modules():
            if is_experts(module):
                for name, weight in list(module.named_parameters(recurse=False)):
                    cut = torch.empty((count, *weight.shape[1:]), dtype=weight.dtype, device=weight.device)
                    setattr(module, name, nn.Parameter(cut, requires_grad=False))
                module.num_experts = count

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def is_experts(module: nn.Module) -> bool:
    """Whether a module is transformers' stack of experts (its decorator marks them all)."""
    return hasattr(module, "_is_expert_parallel")


def gated_experts(module: Any) -> GatedExperts:
    """The experts of one transformers module, sharing its weights."""
    gate_up, down = module.gate_up_proj.data, module.down_proj.data
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return GatedExperts(
        gate_up_LGD=gate_up,
        down_LDF=down,
        apply_gate=module._apply_gate,
        gate_up_bias_LG=module.gate_up_proj_bias.data if module.has_bias else None,
        down_bias_LD=module.down_proj_bias.data if module.has_bias else None,
        swiglu=is_swiglu(module._apply_gate),
    )


def is_swiglu(apply_gate: Callable[[Tensor], Tensor]) -> bool:
    """Whether an activation is silu(first half) * second half. It is tried out, since no name says so reliably."""
    probe = torch.linspace(-9.0, 9.0, 64).reshape(4, 16)
    gate, up = probe.chunk(2, dim=1)
    return torch.allclose(apply_gate(probe), F.silu(gate) * up, rtol=1e-5, atol=1e-6)
