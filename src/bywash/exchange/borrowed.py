"""`BorrowedGroup`: the ranks of a torch process group that somebody else made, as a `Group` of bywash.

An engine (vLLM, SGLang) or a program written for DeepEP has its process groups already and keeps them; bywash finds out
who runs where through the group's own store, under names of its own. Knows nothing of the engines. `RowCarrier`s and
what is built on them start from it.
"""

from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from bywash.errors import ConfigError
from bywash.exchange.group import Group, describe_this_process, read_peers
from bywash.exchange.names import DEADLINE_S


class BorrowedGroup(Group):
    """This rank's view of a process group that it does not own; ranks are counted within the group."""

    _borrowed: ClassVar[dict[str, int]] = {}

    def __init__(self, process_group: dist.ProcessGroup, *, deadline_s: float = DEADLINE_S) -> None:
        """Meet the other ranks; returns when all have come. Every rank of the group calls, equally often.

        Args:
            process_group: made by `init_process_group` or `new_group`. Its backend matters only to the `gloo` exchange.
            deadline_s: how long any wait on the others may take, seconds, whatever the process group's own timeout.

        Raises:
            ConfigError: a deadline of nothing, or a group that this rank is not in.
            RankLostError: a rank did not come before the deadline; the message names it.
        """
        if deadline_s <= 0:
            raise ConfigError(f"deadline {deadline_s}: must be more than 0 seconds")
        self.rank, self.ranks, self.deadline_s = process_group.rank(), process_group.size(), deadline_s
        if self.rank < 0:
            raise ConfigError("process group: this rank is not a member of it")
        self.process_group = process_group
        number = self._borrowed.get(process_group.group_name, 0)
        self._borrowed[process_group.group_name] = number + 1
        # A connection of its own: a timeout would be its owner's as well, and whose wait holds up the other's.
        store = _get_process_group_store(process_group).clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"bywash/{number}", store)
        self._store.set_timeout(timedelta(seconds=deadline_s))
        self._shares, self._roll, self._silent = 0, None, set()
        self.peers = []
        self.peers = read_peers(self.share(describe_this_process(), "joining a borrowed process group"))
        self._watch_other_hosts()

    def close(self) -> None:
        """Stop answering roll calls. The process group is its owner's to destroy."""
        self._leave_roll()
