"""Moving rows between ranks: the `Exchange` interface and what implements it.

`local` is one rank; `gloo` is CPU processes over sockets; `shm` is CPU processes of one host over shared memory; `peer`
is GPUs of one host; `hierarchical` is CPU processes of several hosts, `shm` inside each and sockets between. All give
the same result; `open_exchange` picks by name.
"""

from bywash.errors import ConfigError
from bywash.exchange.base import Exchange, Handle, Received, Traffic
from bywash.exchange.gloo import GlooExchange
from bywash.exchange.group import Group
from bywash.exchange.hierarchical import HierarchicalExchange
from bywash.exchange.host_map import HostMap
from bywash.exchange.link import Link, Links
from bywash.exchange.local import LocalExchange
from bywash.exchange.names import COMBINES, DEADLINE_S, EXCHANGES, Combine, DeviceKind
from bywash.exchange.shm import ShmExchange
from bywash.exchange.survivors import rebuild

__all__ = [
    "COMBINES",
    "DEADLINE_S",
    "EXCHANGES",
    "Combine",
    "DeviceKind",
    "Exchange",
    "GlooExchange",
    "Group",
    "Handle",
    "HierarchicalExchange",
    "HostMap",
    "Link",
    "Links",
    "LocalExchange",
    "Received",
    "ShmExchange",
    "Traffic",
    "one_host",
    "open_exchange",
    "rebuild",
]


def open_exchange(
    name: str,
    group: Group | None,
    *,
    combine_mode: Combine = "exact",
    link: Links | None = None,
    device: DeviceKind = "cpu",
    node_schedule: str = "together",
) -> Exchange:
    """Open this rank's end of the exchange called `name`.

    Args:
        name: one of `EXCHANGES`; `auto` is `local` for one rank; for ranks of one host `peer` where rows are on GPUs,
            else `shm`; for ranks of several hosts `hierarchical`, or `gloo` where every host has one rank.
        group: the ranks; None stands for a single process.
        combine_mode: see `Exchange`.
        link: emulate this link between ranks (`shm` alone can).
        device: where the rows are.
        node_schedule: of `hierarchical`, the order of sending between hosts; see `NodeSchedule.parse`.

    Raises:
        ConfigError: unknown name, `local` with more than one rank, a link where none can be emulated, or rows where
            the exchange cannot move them.
    """
    if name not in EXCHANGES:
        raise ConfigError(f"--exchange {name}: choose one of {', '.join(EXCHANGES)}")
    if name == "auto":
        name = "local" if group is None or group.ranks == 1 else _fastest(group.hosts, device)
    if device == "cuda" and name in ("shm", "gloo", "hierarchical"):
        raise ConfigError(f"--exchange {name} moves rows in CPU memory, this job's are on GPUs: use peer or auto")
    if link is not None and name != "shm":
        raise ConfigError(f"--link: only shm between ranks of one host can emulate a link, this job runs over {name}")
    if name == "local":
        if group is not None and group.ranks > 1:
            raise ConfigError(f"--exchange local is for one rank, this job has {group.ranks}: use shm or gloo")
        return LocalExchange(combine_mode=combine_mode)
    if group is None:
        raise ConfigError(f"--exchange {name} needs a group of ranks")
    if name == "shm":
        return ShmExchange(group, combine_mode=combine_mode, link=link)
    if name == "peer":
        from bywash.exchange.peer import PeerExchange  # late: CPU ranks need nothing of it

        return PeerExchange(group, combine_mode=combine_mode)
    if name == "hierarchical":
        return HierarchicalExchange(group, combine_mode=combine_mode, schedule=node_schedule)
    return GlooExchange(group, combine_mode=combine_mode)


def one_host(group: Group) -> bool:
    """Whether all ranks run on one host, and so can map each other's memory."""
    return group.hosts.hosts == 1


def _fastest(hosts: HostMap, device: DeviceKind) -> str:
    if hosts.hosts == 1:
        return "peer" if device == "cuda" else "shm"
    return "gloo" if hosts.hosts == len(hosts.host_R) else "hierarchical"
