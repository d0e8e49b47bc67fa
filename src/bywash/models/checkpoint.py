"""Reading a checkpoint directory so that each rank reads only its own experts.

Tensors are opened lazily; experts of other ranks are left on disk, and a tensor that stacks all experts is cut to
this rank's slice before it is read. Knows the Hugging Face layout, nothing of models or ranks.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bywash.errors import CheckpointError

_ONE_EXPERT = re.compile(r"\.experts\.(\d+)\.")
ALL_EXPERTS = re.compile(r"\.experts\.[a-z_]+$")
_INDEX = "model.safetensors.index.json"


class StackedExperts:
    """A lazy [E, ...] tensor of which only some experts are read. Quacks like a safetensors slice."""

    def __init__(self, tensor: Any, experts: Sequence[int]) -> None:
        self._tensor, self._experts = tensor, list(experts)

    def get_shape(self) -> list[int]:
        """Shape after the cut."""
        return [len(self._experts), *self._tensor.get_shape()[1:]]

    def get_dtype(self) -> str:
        """Dtype as safetensors names it."""
        return str(self._tensor.get_dtype())

    def __getitem__(self, index: Any) -> Any:
        import torch

        if not self._experts:
            return self._tensor[0:0][index]
        return torch.cat([self._tensor[e : e + 1] for e in self._experts])[index]


@contextmanager
def lazy_tensors(directory: Path, experts: Sequence[int], num_experts: int) -> Iterator[dict[str, Any]]:
    """Open every tensor of the checkpoint that a rank owning `experts` of `num_experts` needs, without reading it.

    Yields a dict of checkpoint names to lazy tensors, valid inside the block.

    Raises:
        CheckpointError: a file is missing, truncated or no safetensors file, or holds another number of experts than
            config.json says; the message names it.
    """
    mine = set(experts)
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in weight_files(directory):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(
                    f"{file}: cannot be read as safetensors ({error}); it may be truncated: copy or download it again"
                ) from error
            for name in opened.keys():  # noqa: SIM118 - not a dict
                one, tensor = _ONE_EXPERT.search(name), opened.get_slice(name)
                stacked = ALL_EXPERTS.search(name) is not None
                held = int(one[1]) + 1 if one else tensor.get_shape()[0] if stacked else num_experts
                if held > num_experts or (stacked and held < num_experts):
                    raise CheckpointError(
                        f"{file}: {name} is for {held} experts or more, config.json has {num_experts}"
                    )
                if one is None or int(one[1]) in mine:
                    tensors[name] = StackedExperts(tensor, experts) if stacked else tensor
        yield tensors


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all checked to be there."""
    index = directory / _INDEX
    if index.exists():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index ({error!r}); copy or download it again") from error
    else:
        names = ["model.safetensors"]
    files = [directory / name for name in names]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; the checkpoint in {directory} is not complete")
    return files


def fingerprint(file: Path) -> str:
    """A short hash of a weight file: its size, its header, and 64 blocks spread over it. Cheap at any size.

    For finding ranks that were given different weights, not for finding a flipped bit.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with open(file, "rb") as stream:
        for block in range(64):
            stream.seek(size * block // 64)
            digest.update(stream.read(4096))
    return digest.hexdigest()[:16]


def bytes_to_read(tensors: dict[str, Any]) -> int:
    """Bytes that reading these lazy tensors moves from disk."""
    sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
    total = 0
    for tensor in tensors.values():
        count = 1
        for size in tensor.get_shape():
            count *= size
        total += count * sizes.get(tensor.get_dtype(), 1)
    return total
