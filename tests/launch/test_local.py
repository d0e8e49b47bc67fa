"""Local processes: errors come back as they were, lost ranks are named, nobody is left behind."""

import os
import signal
import time

import pytest

from bywash.errors import BywashError, ConfigError, RankLostError
from bywash.exchange import Group
from bywash.launch import run_local


def writes_its_pid(directory, rank, ranks, store):
    (directory / f"{rank}.pid").write_text(str(os.getpid()))
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=20)
    group.close()


def fails_on_rank_1(_, rank, ranks, store):
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=20)
    if rank == 1:
        raise ConfigError("layers[3].gate: made up for this test")
    group.agree(anything=1)


def crashes_on_rank_0(_, rank, ranks, store):
    if rank == 0:
        raise ZeroDivisionError("a bug")


def dies_on_rank_2(directory, rank, ranks, store):
    writes_its_pid(directory, rank, ranks, store)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def disagrees(_, rank, ranks, store):
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=20)
    group.agree(**{"--tokens": 16, "--dtype": "bfloat16" if rank == 2 else "float32"})


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_all_ranks_run_and_none_is_left(tmp_path):
    run_local(writes_its_pid, tmp_path, 3, deadline_s=20)
    pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(3)]
    assert len(set(pids)) == 3
    assert not any(alive(pid) for pid in pids)


def test_the_cause_is_raised_not_its_echo():
    with pytest.raises(ConfigError, match=r"layers\[3\].gate: made up"):
        run_local(fails_on_rank_1, None, 3, deadline_s=20)


def test_a_crash_is_called_a_bug():
    with pytest.raises(RuntimeError, match=r"rank 0 crashed; this is a bug in bywash:[\s\S]*ZeroDivisionError: a bug"):
        run_local(crashes_on_rank_0, None, 1, deadline_s=20)


def test_a_killed_rank_is_named(tmp_path):
    with pytest.raises(RankLostError, match=r"rank 2 \(pid \d+\) was killed by SIGKILL") as caught:
        run_local(dies_on_rank_2, tmp_path, 3, deadline_s=20)
    assert caught.value.ranks == (2,)


def test_another_configuration_is_named_with_its_rank():
    with pytest.raises(ConfigError, match="--dtype: rank 2 was started with 'bfloat16', rank 0 with 'float32'"):
        run_local(disagrees, None, 3, deadline_s=20)


@pytest.mark.parametrize("ranks", [0, -1, 65])
def test_impossible_numbers_of_ranks(ranks):
    with pytest.raises(ConfigError, match=f"--ranks {ranks}"):
        run_local(writes_its_pid, None, ranks, deadline_s=20)


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(RankLostError("rank 3 is gone", [3])))
    assert (str(error), error.ranks) == ("rank 3 is gone", (3,))
    assert isinstance(error, BywashError)


def stops_on_rank_1(_, rank, ranks, store):
    import torch
    import torch.distributed as dist

    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with group.blame("waiting in a test"):
        dist.all_reduce(torch.ones(1))


def test_a_stopped_rank_is_named_by_the_others_within_the_deadline():
    start = time.monotonic()
    with pytest.raises(RankLostError, match=r"rank 1 \(pid \d+\) is stopped \(SIGSTOP\); seen by rank 0") as caught:
        run_local(stops_on_rank_1, None, 3, deadline_s=3)
    assert caught.value.ranks == (1,)
    assert time.monotonic() - start < 3 + 20  # starting the processes included
