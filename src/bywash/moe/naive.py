"""The slow, obvious oracle of `ExpertParallel`: every token through each of its experts, one at a time, one process."""

import torch
from torch import Tensor

from bywash.moe.experts import Experts
from bywash.routing import Routing


def expert_parallel_naive(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """[T, D] to [T, D]; `experts` holds all E experts, slot e is expert e. Sums in float32, in k order."""
    out = torch.zeros_like(x_TD)
    for token in range(x_TD.shape[0]):
        total = torch.zeros(x_TD.shape[1])
        for k in range(routing.top_k):
            expert = int(routing.ids_TK[token, k])
            if expert >= 0:
                y = experts.forward(expert, x_TD[token : token + 1])[0]
                total += routing.weights_TK[token, k] * y.float()
        out[token] = total.to(x_TD.dtype)
    return out
