"""This process as one rank that torchrun (or any launcher that sets RANK and WORLD_SIZE) has started."""

import os
from datetime import timedelta
from typing import Any

from bywash.errors import ConfigError, RankLostError
from bywash.launch.local import RankMain


def under_torchrun() -> bool:
    """Whether a launcher has given this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_under_torchrun(main: RankMain, payload: Any, asked_ranks: int | None, deadline_s: float) -> None:
    """Run `main` as the rank that the environment names.

    Raises:
        ConfigError: --ranks contradicts WORLD_SIZE, or the launcher's variables are incomplete.
        RankLostError: the launcher's store cannot be reached before the deadline.
    """
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if asked_ranks is not None and asked_ranks != ranks:
        raise ConfigError(
            f"--ranks {asked_ranks}: the launcher started {ranks} ranks; leave --ranks out under torchrun"
        )
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
