"""The small message that goes before rows between hosts: what a rank tells its gateways, and what they check.

int32 words: rows for this gateway, digest of the plan, hidden size, top-k, number of the dtype, rows per expert [E],
and whatever the schedule wants known (`node_due`) [W]. Knows nothing of who carries it. `hierarchical` calls it.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bywash.errors import ConfigError, PlanMismatchError
from bywash.exchange.rows import shape_text

_FIXED = 5
"""Words before the counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Header:
    """What one rank says of its step.

    Attributes:
        digest: of its plan.
        shape: hidden size, top-k and number of the dtype.
        counts_E: int32 [E], its rows per expert.
        due_W: int32 [W], its `due_words`; none where the schedule does not need them.
        rows: rows for the gateway that this is for.
    """

    digest: int
    shape: tuple[int, int, int]
    counts_E: Tensor
    due_W: Tensor
    rows: int = 0

    @property
    def size(self) -> int:
        """Words, the same for every rank of a job."""
        return _FIXED + self.counts_E.numel() + self.due_W.numel()

    def words(self, rows: int) -> Tensor:
        """To send to a gateway that gets `rows` rows."""
        fixed = torch.from_numpy(np.array([rows, self.digest, *self.shape], np.uint32).view(np.int32))
        return torch.cat([fixed, self.counts_E, self.due_W])

    def read(self, words: Tensor) -> "Header":
        """What another rank sent, in a message as long as this rank's."""
        rows, digest, hidden, top_k, dtype = words[:_FIXED].numpy().view(np.uint32).tolist()
        counts_E, due_W = words[_FIXED:].split([self.counts_E.numel(), self.due_W.numel()])
        shape = (hidden, top_k, dtype)
        return replace(self, digest=digest, shape=shape, counts_E=counts_E, due_W=due_W, rows=rows)

    def check(self, theirs: "Header", rank: int, here: int) -> None:
        """Compare another rank's with this one's, of rank `here`.

        Raises:
            PlanMismatchError: it planned differently.
            ConfigError: its rows have another shape.
        """
        if theirs.digest != self.digest:
            raise PlanMismatchError(
                f"rank {rank} planned this step differently (digest {theirs.digest:#010x}, rank {here} has "
                f"{self.digest:#010x}); no row was read. All ranks must run the same bywash with the same options",
                [rank],
            )
        if theirs.shape != self.shape:
            raise ConfigError(
                f"rank {rank} sends rows of {shape_text(theirs.shape)}; rank {here} has {shape_text(self.shape)}"
            )
