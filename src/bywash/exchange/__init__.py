"""Moving rows between ranks: the `Exchange` interface and what implements it.

`local` is one rank; `gloo` is CPU processes over sockets; `shm` is CPU processes of one host over shared memory. All
give the same result; `open_exchange` picks by name.
"""

from bywash.errors import ConfigError
from bywash.exchange.base import Exchange, Handle, Received, Traffic
from bywash.exchange.gloo import GlooExchange
from bywash.exchange.group import Group
from bywash.exchange.link import Link
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
    "LocalExchange",
    "Received",
    "ShmExchange",
    "Traffic",
    "open_exchange",
]


def open_exchange(name: str, group: Group | None, *, combine_mode: Combine = "exact") -> Exchange:
    """Open this rank's end of the exchange called `name`.

    Args:
        name: one of `EXCHANGES`.
        group: the ranks; None stands for a single process (only `local`).
        combine_mode: see `Exchange`.

    Raises:
        ConfigError: unknown name, or `local` with more than one rank.
    """
    if name not in EXCHANGES:
        raise ConfigError(f"--exchange {name}: choose one of {', '.join(EXCHANGES)}")
    if name == "local":
        if group is not None and group.ranks > 1:
            raise ConfigError(f"--exchange local is for one rank, this job has {group.ranks}: use shm or gloo")
        return LocalExchange(combine_mode=combine_mode)
    if group is None:
        raise ConfigError(f"--exchange {name} needs a group of ranks")
    opened: type[GlooExchange] | type[ShmExchange] = ShmExchange if name == "shm" else GlooExchange
    return opened(group, combine_mode=combine_mode)
