"""Going on without lost ranks: the survivors make a group of their own.

The job's store decides who they are, so that all of them agree and nobody goes on alone: of two halves that cannot
reach each other, the one with the store goes on, and the other gets an error. After that a caller places experts on the
ranks that are left and loads its share from the checkpoint. Callers: an engine, after a `RankLostError`.
"""

import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from bywash.errors import RankLostError
from bywash.exchange.group import Group
from bywash.exchange.roll_call import StoreLostError, bounded

_POLL_S = 0.02


def rebuild(group: Group, lost: Sequence[int]) -> Group:
    """A group of the ranks that are left, numbered anew in their old order. Every survivor calls; closes `group`.

    The first of them to have waited a deadline, or to have seen everybody but the lost, says who is in. Close exchanges
    of the old group before.

    Args:
        group: the old one, after an error.
        lost: the ranks that this one knows to be lost: the error's `ranks`.

    Raises:
        RankLostError: the store is lost, this rank has been left out, or another is lost on the way.
    """
    try:
        store, members = bounded(lambda: _agree(group, set(lost)), 2 * group.deadline_s)
    except StoreLostError:
        raise group.store_lost("making a group of the survivors") from None
    group.close()
    if group.rank not in members:
        raise RankLostError(
            f"rank {group.rank}: the others took it for lost and went on without it, as ranks {members}", [group.rank]
        )
    return Group(rank=members.index(group.rank), ranks=len(members), store=store, deadline_s=group.deadline_s)


def _agree(group: Group, lost: set[int]) -> tuple[dist.Store, list[int]]:
    """Come, wait for the others up to the deadline, and propose who is in; the first proposal counts.

    Returns:
        (a connection of its own to the store, the old numbers of who is in).
    """
    store = dist.PrefixStore("rebuild", group.store.clone())  # type: ignore[attr-defined]
    store.set(f"here/{group.rank}", json.dumps(sorted(lost)))
    end = time.monotonic() + group.deadline_s
    here: set[int] = set()
    while not store.check(["members"]):
        here = {rank for rank in range(group.ranks) if store.check([f"here/{rank}"])}
        missed = set().union(*(json.loads(store.get(f"here/{rank}")) for rank in here))
        if here >= set(range(group.ranks)) - missed or time.monotonic() > end:
            store.compare_set("members", "", json.dumps(sorted(here)))
        time.sleep(_POLL_S)
    return store, json.loads(store.get("members"))
