"""Which `RowCarrier` for which machine."""

import torch

from bywash.errors import ConfigError
from bywash.exchange import Group, one_host, open_exchange
from bywash.exchange.carrier import ExchangeCarrier, RowCarrier


def open_carrier(
    group: Group,
    *,
    cuda: bool,
    tokens: int,
    top_ranks: int,
    columns: int,
    dtype: torch.dtype,
    sent_bytes: int,
    narrow: bool = False,
) -> RowCarrier:
    """Open this rank's end. Every rank calls, with the same sizes; see `DeviceCarrier` for them.

    Rows on GPUs go through memory that all GPUs of the host map, rows on CPUs through shared memory on one host and
    gloo across hosts; a single rank moves nothing.

    Raises:
        ConfigError: rows on GPUs of several hosts, or memory that does not fit.
        RankLostError: a rank did not come.
    """
    if not cuda or group.ranks == 1:
        name = "local" if group.ranks == 1 else "shm" if one_host(group) else "gloo"
        exchange = open_exchange(name, group, combine_mode="exact")
        return ExchangeCarrier(exchange, columns=columns, dtype=dtype, sent_bytes=sent_bytes)
    if not one_host(group):
        raise ConfigError(f"rows on GPUs of {group.hosts.hosts} hosts: they are carried between GPUs of one host only")
    from bywash.exchange.carrier_device import DeviceCarrier  # late: CPU ranks need nothing of it

    return DeviceCarrier(
        group,
        tokens=tokens,
        top_ranks=top_ranks,
        columns=columns,
        dtype=dtype,
        sent_bytes=sent_bytes,
        narrow=narrow,
    )
