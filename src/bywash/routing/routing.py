"""`Routing`: which experts each token goes to, and with what weight.

Shapes: T tokens, K experts per token (top-k), E experts in the layer.
Knows nothing of ranks, devices or networks. Gates make it, the plan counts it, an exchange moves by it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bywash.errors import RoutingError

NO_EXPERT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The router's choice for one layer and one batch of tokens on one rank.

    Attributes:
        ids_TK: int64 [T, K], expert ids in 0..num_experts-1, distinct within a row, in the router's own
            order; -1 (`NO_EXPERT`) means "no expert here" and its weight is ignored.
        weights_TK: float32 [T, K], the weight of each expert's output in the token's sum.
        num_experts: E, the experts of this layer over all ranks.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    num_experts: int

    @property
    def tokens(self) -> int:
        """T, the number of tokens routed."""
        return self.ids_TK.shape[0]

    @property
    def top_k(self) -> int:
        """K, the number of experts a token is sent to."""
        return self.ids_TK.shape[1]

    def counts_E(self) -> Tensor:
        """Rows per expert: int64 [E], where the ids are. (`PeerDevice` counts in a kernel instead.)"""
        if self.ids_TK.is_cuda:
            return torch.bincount(self.ids_TK.reshape(-1) + 1, minlength=self.num_experts + 1)[1:]
        # numpy: in a decode step the calls cost more than the counting. Bin 0 takes "no expert".
        counts = np.bincount(self.ids_TK.numpy().ravel() + 1, minlength=self.num_experts + 1)
        return torch.from_numpy(counts[1:])

    def check(self, where: str = "routing") -> "Routing":
        """Raise `RoutingError` unless shapes, ids and weights are what a router may produce.

        Costs a host sync on a device tensor, so hot paths call it only in `--check` runs.
        """
        ids, weights = self.ids_TK, self.weights_TK
        if ids.dim() != 2 or ids.shape != weights.shape:
            raise RoutingError(
                f"{where}: ids {list(ids.shape)}, weights {list(weights.shape)}: both must be [tokens, top_k]"
            )
        if ids.dtype != torch.int64 or weights.dtype != torch.float32:
            raise RoutingError(f"{where}: ids must be int64 and weights float32, got {ids.dtype} and {weights.dtype}")
        bad = (ids < NO_EXPERT) | (ids >= self.num_experts)
        if bad.any():
            token, k = (int(i) for i in bad.nonzero()[0])
            raise RoutingError(
                f"{where}.ids[{token}, {k}] = {int(ids[token, k])} is not an expert: this layer has "
                f"experts 0..{self.num_experts - 1} (-1 stands for none)"
            )
        bad = ~torch.isfinite(weights) & (ids >= 0)
        if bad.any():
            token, k = (int(i) for i in bad.nonzero()[0])
            raise RoutingError(
                f"{where}.weights[{token}, {k}] = {float(weights[token, k])}: a gate gave a value that is "
                "not finite; look at the hidden states that entered the router"
            )
        ordered = ids.sort(dim=1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if repeated.any():
            token = int(repeated.nonzero()[0, 0])
            raise RoutingError(
                f"{where}.ids[{token}] = {ids[token].tolist()} names an expert twice; a token may choose each once"
            )
        return self
