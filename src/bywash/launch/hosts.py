"""What must fit together before ranks of several hosts start: code, the rank-to-host map, cables, clocks.

Every rank shares a card; all examine the same cards and come to the same findings, so that one report names everything
that is wrong at once. `bywash run` calls `check_hosts` after joining. Options, weights and configuration are compared
by `Group.agree` afterwards, with or without several hosts.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

import bywash
from bywash.errors import ConfigError
from bywash.exchange import Group, HostMap
from bywash.launch.network import interface_towards

CLOCKS_APART_S = 2.0
"""Above what ranks that leave one barrier together differ by on a slow network. Logs and timelines are in wall time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCard:
    """What one rank says of itself.

    Attributes:
        host: its host's name.
        code: bywash's version and a hash of its sources.
        python, torch: versions.
        local_rank, node: its place and its host's number, as the launcher says; None where it does not.
        network: the network (10.1.0.0/24) of the interface that its traffic takes; "" if unknown.
        clock_s: wall time just after a barrier.
    """

    host: str
    code: str
    python: str
    torch: str
    local_rank: int | None
    node: int | None
    network: str
    clock_s: float


def check_hosts(group: Group) -> list[str]:
    """Compare all ranks' cards; return warnings, the same on all ranks. Every rank calls; free on one host.

    Raises:
        ConfigError: the hosts do not fit together; one line for each finding.
    """
    if group.hosts.hosts == 1:
        return []
    group.share("here", "comparing hosts")  # all leave this together: their clocks should say the same
    mine = own_card(group.peers[group.rank].host_name, os.environ)
    cards = [HostCard(**json.loads(text)) for text in group.share(json.dumps(asdict(mine)), "comparing hosts")]
    errors, warnings = examine(cards, group.hosts)
    if errors:
        raise ConfigError("the hosts do not fit together:\n" + "\n".join(f"- {text}" for text in errors + warnings))
    return warnings


def own_card(host: str, environ: "os._Environ[str] | dict[str, str]") -> HostCard:
    """This rank's card."""
    towards = interface_towards(environ.get("MASTER_ADDR", ""))
    return HostCard(
        host=host,
        code=f"{bywash.__version__} ({source_hash()})",
        python=platform.python_version(),
        torch=torch.__version__,
        local_rank=_number(environ.get("LOCAL_RANK")),
        node=_number(environ.get("GROUP_RANK")),
        network=str(towards[1].network) if towards else "",
        clock_s=time.time(),
    )


def examine(cards: Sequence[HostCard], hosts: HostMap) -> tuple[list[str], list[str]]:
    """(errors, warnings) of all ranks' cards. Pure: the same cards give the same texts.

    Example: rank 1 with other code than rank 0 gives one error that names rank 1, its host and both versions.
    """
    errors = [text for name in ("code", "python", "torch") for text in _unequal(cards, name)]
    errors += _crossed(cards, hosts) + _torn_nodes(cards, hosts)
    return errors, _odd_places(cards, hosts) + _uneven(cards, hosts) + _clocks(cards)


@cache
def source_hash() -> str:
    """8 digits that differ where the installed bywash differs, whatever its version says."""
    root, found = Path(bywash.__file__).parent, hashlib.sha256()
    for file in sorted(path for kind in ("*.py", "*.cu", "*.cuh") for path in root.rglob(kind)):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:8]


def _unequal(cards: Sequence[HostCard], name: str) -> list[str]:
    odd = [rank for rank, card in enumerate(cards) if getattr(card, name) != getattr(cards[0], name)]
    if not odd:
        return []
    first, what = odd[0], "bywash" if name == "code" else name
    return [
        f"{name}: {_ranks(odd)} (host {cards[first].host}) {'runs' if len(odd) == 1 else 'run'} {what} "
        f"{getattr(cards[first], name)}, rank 0 (host {cards[0].host}) {getattr(cards[0], name)}; install the same on "
        "every host"
    ]


def _crossed(cards: Sequence[HostCard], hosts: HostMap) -> list[str]:
    """Ranks of one index are on different networks, and one of them is on the network of another index."""
    found = []
    for rank, card in enumerate(cards):
        index, first = hosts.index_R[rank], hosts.members[0]
        if hosts.host_R[rank] == 0 or not card.network or index >= len(first):
            continue
        same = cards[first[index]]
        others = [r for r in first if cards[r].network == card.network]
        if same.network and same.network != card.network and others:
            found.append(
                f"cables: rank {rank} (number {index} of host {card.host}) is on network {card.network}, on host "
                f"{same.host} that is rank {others[0]}'s network, rank {first[index]} (number {index}) is on "
                f"{same.network}; ranks of one number talk to each other: swap the cables, or the addresses"
            )
    return found


def _torn_nodes(cards: Sequence[HostCard], hosts: HostMap) -> list[str]:
    """What the launcher calls one node are several hosts."""
    found = []
    for node in sorted({card.node for card in cards if card.node is not None}):
        ranks = [rank for rank, card in enumerate(cards) if card.node == node]
        if len({hosts.host_R[rank] for rank in ranks}) > 1:
            where = ", ".join(f"rank {rank} on {cards[rank].host}" for rank in ranks)
            found.append(
                f"node {node}: the launcher calls these one node, they share no processes or network: {where}; give "
                "every host a --node-rank of its own, and do not put ranks of one host into separate containers"
            )
    return found


def _odd_places(cards: Sequence[HostCard], hosts: HostMap) -> list[str]:
    odd = [r for r, card in enumerate(cards) if card.local_rank not in (None, hosts.index_R[r])]
    if not odd:
        return []
    rank = odd[0]
    return [
        f"places: {_ranks(odd)}: the launcher says LOCAL_RANK {cards[rank].local_rank} of rank {rank}, but "
        f"{hosts.index_R[rank]} ranks of host {cards[rank].host} come before it; ranks of one number talk to each other"
    ]


def _uneven(cards: Sequence[HostCard], hosts: HostMap) -> list[str]:
    sizes = [len(ranks) for ranks in hosts.members]
    if min(sizes) == max(sizes):
        return []
    texts = [f"{cards[ranks[0]].host} {len(ranks)}" for ranks in hosts.members]
    return [f"ranks per host differ ({', '.join(texts)}): ranks of smaller hosts carry traffic of several others"]


def _clocks(cards: Sequence[HostCard]) -> list[str]:
    late, early = (pick(range(len(cards)), key=lambda r: cards[r].clock_s) for pick in (max, min))
    apart_s = cards[late].clock_s - cards[early].clock_s
    if apart_s <= CLOCKS_APART_S:
        return []
    return [
        f"clocks: host {cards[late].host} (rank {late}) is {apart_s:.1f} s ahead of host {cards[early].host} (rank "
        f"{early}); logs and timelines will not line up: run NTP or chrony on both"
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
