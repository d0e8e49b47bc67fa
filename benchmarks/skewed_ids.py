"""Ids of tokens whose experts are as popular as a recorded layer's, by Gumbel top-k.

Shapes: L layers, E experts, T tokens, K experts per token.
The benchmarks of the exchange and of elastic layers call it.
"""

import functools
from pathlib import Path

import numpy as np
import torch

from bywash.errors import BywashError
from bywash.routing.counts import load_counts


@functools.cache
def counts_for(path, experts):
    """Recorded counts, float64 [L, E]; ends the program with a line if the file is not one, or of other experts."""
    try:
        _, counts_LE = load_counts(Path(path))
    except BywashError as error:
        raise SystemExit(f"--counts: {error}") from None
    if counts_LE.shape[1] != experts:
        raise SystemExit(f"--counts: {path}: its layers have {counts_LE.shape[1]} experts; {experts} are needed")
    return counts_LE


def middle_layer(counts_LE, ranks):
    """(the layer whose busiest rank is the median of all layers' under contiguous placement, its max/mean)."""
    rows_LR = counts_LE.reshape(len(counts_LE), ranks, -1).sum(2)
    busiest_L = rows_LR.max(1) / rows_LR.mean(1)
    layer = int(np.argsort(busiest_L, kind="stable")[len(busiest_L) // 2])
    return layer, float(busiest_L[layer])


def popularity(counts_E):
    """Float32 [E] without zeros: an expert that nobody took in the record may still be taken."""
    return torch.from_numpy(counts_E).float().clamp(min=0.5)


def draw_ids(popularity_E, tokens, top_k, generator):
    """int64 [T, K], on the generator's device."""
    times_TE = torch.empty(tokens, popularity_E.shape[0], device=generator.device).exponential_(generator=generator)
    return (popularity_E.to(generator.device).log() - times_TE.log()).topk(top_k, dim=1).indices
