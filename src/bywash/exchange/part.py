"""`Part`: some ranks of a group as a group of their own, for an exchange among them.

Ranks are counted from 0 within the part. It shares the group's store under another name and starts no process group.
"""

from collections.abc import Sequence

import torch.distributed as dist

from bywash.exchange.group import Group


class Part(Group):
    """This rank's view of a part that it belongs to.

    Attributes:
        members: the ranks in the whole group, by rank in the part.
    """

    def __init__(self, group: Group, members: Sequence[int]) -> None:
        """Take the ranks `members`, ascending. Every one of them calls, at the same point between two shares."""
        self.members = tuple(members)
        self.rank, self.ranks = self.members.index(group.rank), len(self.members)
        self.deadline_s = group.deadline_s
        self.peers = [group.peers[rank] for rank in self.members]
        self._store = dist.PrefixStore(f"part/{self.members[0]}/{group._shares}", group.store)
        self._shares, self._roll = 0, None

    def close(self) -> None:
        """Nothing: the whole group is its maker's to close."""
