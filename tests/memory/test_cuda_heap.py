"""Heaps on real GPUs, shared both ways; the errors that need none run everywhere."""

import importlib.util

import pytest
import torch

from bywash.errors import ConfigError
from bywash.memory.cuda_heap import open_cuda_heaps

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_gpu = pytest.mark.skipif(
    GPUS == 0 or importlib.util.find_spec("cuda.bindings" if GPUS else "json") is None,
    reason="needs a CUDA device and cuda-bindings",
)


def write_to_everyone(group, devices, sharing, words):
    """Each rank writes its number into its own row of every heap; returns what it finds in its own."""
    from bywash.kernels.driver import check, driver

    torch.cuda.set_device(group.rank % devices)
    heaps = open_cuda_heaps(group, 4 * words * group.ranks, arithmetic="rows", facts={}, sharing=sharing)
    own = heaps[group.rank].tensor(0, (group.ranks, words), torch.int32)
    clean = not own.any().item()
    mine = torch.full((words,), group.rank + 1, dtype=torch.int32, device="cuda")
    group.meet("checking that heaps are clean")
    for heap in heaps:
        at = heap.address + 4 * words * group.rank
        check(driver().cuMemcpyDtoD(at, mine.data_ptr(), 4 * words), "writing to a peer")
    torch.cuda.synchronize()
    group.meet("writing")
    found = own.unique(dim=1).flatten().tolist()
    group.meet("reading")  # by IPC memory goes with its owner
    return clean, found


@needs_gpu
@pytest.mark.parametrize("sharing", ["auto", "vmm", "ipc"])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"))])
@pytest.mark.parametrize("words", [1, 1_000_003])
def test_every_rank_writes_into_every_heap(pools, devices, sharing, words):
    assert pools(3).run(write_to_everyone, devices, sharing, words) == [(True, [1, 2, 3])] * 3


def open_differently(group):
    open_cuda_heaps(group, 64, arithmetic="", facts={}, sharing="ipc" if group.rank else "vmm")


@needs_gpu
def test_ranks_that_share_differently_are_named(pools):
    with pytest.raises(ConfigError, match="GPU heaps shared by: rank 1 has 'ipc', rank 0 has 'vmm'"):
        pools(2).run(open_differently)


def ask_for_too_much(group, sharing):
    torch.cuda.set_device(0)
    open_cuda_heaps(group, 1 << 45, arithmetic="far too much", facts={}, sharing=sharing)


@needs_gpu
@pytest.mark.parametrize("sharing", ["vmm", "ipc"])
def test_a_heap_that_does_not_fit_says_how_large_it_is(pools, sharing):
    with pytest.raises(ConfigError, match=r"does not fit: 33,554,432\.0 MiB needed.*far too much"):
        pools(2).run(ask_for_too_much, sharing)
