"""Moving rows between ranks: the `Exchange` interface and what implements it.

`local` is one rank; `gloo` is CPU processes over sockets. All give the same result; `open_exchange` picks by name.
"""

from bywash.errors import ConfigError
from bywash.exchange.base import Exchange, Handle, Received, Traffic
from bywash.exchange.gloo import GlooExchange
from bywash.exchange.group import Group
from bywash.exchange.local import LocalExchange
from bywash.exchange.names import COMBINES, DEADLINE_S, EXCHANGES, Combine

__all__ = [
    "COMBINES",
    "DEADLINE_S",
    "EXCHANGES",
    "Combine",
    "Exchange",
    "GlooExchange",
    "Group",
    "Handle",
    "LocalExchange",
    "Received",
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
            raise ConfigError(f"--exchange local is for one rank, this job has {group.ranks}: use gloo")
        return LocalExchange(combine_mode=combine_mode)
    if group is None:
        raise ConfigError(f"--exchange {name} needs a group of ranks")
    return GlooExchange(group, combine_mode=combine_mode)
