"""This process as one rank that torchrun, srun or any launcher that sets RANK and WORLD_SIZE has started."""

import os
from datetime import timedelta
from typing import Any

from bywash.errors import ConfigError, RankLostError
from bywash.launch.local import RankMain
from bywash.launch.network import interface_towards
from bywash.launch.slurm import slurm_environment


def under_torchrun() -> bool:
    """Whether a launcher has given this process a rank. Under SLURM this sets what torchrun would have set."""
    if "RANK" not in os.environ:
        os.environ.update(slurm_environment(os.environ))
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_under_torchrun(main: RankMain, payload: Any, asked_ranks: int | None, deadline_s: float) -> None:
    """Run `main` as the rank that the environment names.

    Raises:
        ConfigError: --ranks contradicts WORLD_SIZE, or the launcher's variables are incomplete or wrong.
        RankLostError: the launcher's store cannot be reached before the deadline.
    """
    import torch.distributed as dist

    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    if "MASTER_PORT" in os.environ:
        _number("MASTER_PORT")
    if not 0 <= rank < ranks:
        raise ConfigError(f"RANK={rank}: must be 0 to {ranks - 1}, below WORLD_SIZE={ranks}; check the launcher")
    if asked_ranks is not None and asked_ranks != ranks:
        raise ConfigError(
            f"--ranks {asked_ranks}: the launcher started {ranks} ranks; leave --ranks out under torchrun"
        )
    towards = interface_towards(os.environ.get("MASTER_ADDR", ""))
    if towards is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", towards[0])
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=deadline_s)))
    except ValueError as error:
        raise ConfigError(f"the launcher's environment is incomplete: {error}") from error
    except (RuntimeError, dist.DistError) as error:
        raise RankLostError(
            f"rank {rank}: no answer from the store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"within {deadline_s:g} s ({error})"
        ) from error
    main(payload, rank, ranks, store)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(
            f"{name}={os.environ[name]!r}: must be a whole number; without a launcher, unset RANK and WORLD_SIZE"
        ) from None
