"""Outputs that experts push, in the tests of exchanges: straight into their source's slots, on GPUs or emulated."""

import ctypes

import numpy as np
import torch


def push_outputs(received, y):
    """What experts that push do: outputs that have a target go there, and are nowhere else."""
    targets = received.target_M[: int(received.starts_E[-1])]
    for m, address in enumerate(targets.tolist()):
        if address:
            copy_row(address, y[m])
    y[: targets.numel()][targets != 0] = float("nan")


def copy_row(address, row):
    if not row.is_cuda:
        ctypes.memmove(address, row.data_ptr(), row.nbytes)
        return
    from bywash.kernels.driver import check, driver

    stream = torch.cuda.current_stream().cuda_stream
    check(driver().cuMemcpyDtoDAsync(address, row.data_ptr(), row.nbytes, stream), "pushing a row")


def may_push(received, seed, rank):
    """Whether this rank's experts push in a step: each rank decides for itself."""
    return received.target_M is not None and bool(np.random.default_rng([seed, rank]).integers(2))
