"""Moving rows between ranks: the `Exchange` interface and what implements it.

`local` is one rank; `gloo` is CPU processes over sockets; `shm` is CPU processes of one host over shared memory; `peer`
is GPUs of one host. All give the same result; `open_exchange` picks by name.
"""

from bywash.errors import ConfigError
from bywash.exchange.base import Exchange, Handle, Received, Traffic
from bywash.exchange.gloo import GlooExchange
from bywash.exchange.group import Group
from bywash.exchange.link import Link, Links
from bywash.exchange.local import LocalExchange
from bywash.exchange.names import COMBINES, DEADLINE_S, EXCHANGES, Combine
from bywash.exchange.shm import ShmExchange

__all__ = [
    "COMBINES",
    "DEADLINE_S",
    "EXCHANGES",
    "Combine",
    "Exchange",
    "GlooExchange",
    "Group",
    "Handle",
    "Link",
    "Links",
    "LocalExchange",
    "Received",
    "ShmExchange",
    "Traffic",
    "open_exchange",
]


def open_exchange(
    name: str, group: Group | None, *, combine_mode: Combine = "exact", link: Links | None = None
) -> Exchange:
    """Open this rank's end of the exchange called `name`.

    Args:
        name: one of `EXCHANGES`; `auto` is `local` for one rank, `shm` for ranks of one host, else `gloo`.
        group: the ranks; None stands for a single process.
        combine_mode: see `Exchange`.
        link: emulate this link between ranks (`shm` alone can).

    Raises:
        ConfigError: unknown name, `local` with more than one rank, or a link where none can be emulated.
    """
    if name not in EXCHANGES:
        raise ConfigError(f"--exchange {name}: choose one of {', '.join(EXCHANGES)}")
    if name == "auto":
        one_host = group is not None and len({peer.host for peer in group.peers}) == 1
        name = "local" if group is None or group.ranks == 1 else "shm" if one_host else "gloo"
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
    return GlooExchange(group, combine_mode=combine_mode)
