"""Local processes: errors come back as they were, lost ranks are named, nobody is left behind."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta

import pytest

from bywash.errors import BywashError, ConfigError, RankLostError
from bywash.exchange import Group
from bywash.launch import run_local
from tests.leftovers import assert_gone

DEADLINE_S = 60.0
"""No rank of a slow or busy machine comes as late as that."""


def writes_its_pid(directory, rank, ranks, store):
    (directory / f"{rank}.pid").write_text(str(os.getpid()))
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=DEADLINE_S)
    group.close()


def fails_on_rank_1(_, rank, ranks, store):
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=DEADLINE_S)
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
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=DEADLINE_S)
    group.agree(**{"--tokens": 16, "--dtype": "bfloat16" if rank == 2 else "float32"})


def test_all_ranks_run_and_none_is_left(tmp_path):
    run_local(writes_its_pid, tmp_path, 3, deadline_s=DEADLINE_S)
    pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(3)]
    assert len(set(pids)) == 3
    assert_gone(pids)


def test_a_deadline_that_no_rank_can_meet_is_an_error_not_a_crash():
    with pytest.raises(BywashError, match=r"did not reach the process that started it within --deadline, 1e-09 s"):
        run_local(writes_its_pid, None, 1, deadline_s=1e-9)


def test_the_cause_is_raised_not_its_echo():
    with pytest.raises(ConfigError, match=r"layers\[3\].gate: made up"):
        run_local(fails_on_rank_1, None, 3, deadline_s=DEADLINE_S)


def test_a_crash_is_called_a_bug():
    with pytest.raises(RuntimeError, match=r"rank 0 crashed; this is a bug in bywash:[\s\S]*ZeroDivisionError: a bug"):
        run_local(crashes_on_rank_0, None, 1, deadline_s=DEADLINE_S)


def test_a_killed_rank_is_named(tmp_path):
    with pytest.raises(RankLostError, match=r"rank 2 \(pid \d+\) was killed by SIGKILL") as caught:
        run_local(dies_on_rank_2, tmp_path, 3, deadline_s=DEADLINE_S)
    assert caught.value.ranks == (2,)


def test_another_configuration_is_named_with_its_rank():
    with pytest.raises(ConfigError, match="--dtype: rank 2 was started with 'bfloat16', rank 0 with 'float32'"):
        run_local(disagrees, None, 3, deadline_s=DEADLINE_S)


def sleeps(directory, rank, ranks, store):
    (directory / f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(200)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name)
def test_no_rank_outlives_its_parent(tmp_path, how):
    context = multiprocessing.get_context("forkserver")
    parent = context.Process(target=run_local, args=(sleeps, tmp_path, 2, DEADLINE_S))
    parent.start()
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    end = time.monotonic() + 100
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    os.kill(parent.pid, how)
    parent.join(60)
    assert parent.exitcode == (-how if how == signal.SIGKILL else 128 + how)
    assert_gone(pids)


def loads_slowly_on_rank_1(_, rank, ranks, store):
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=DEADLINE_S)
    group.deadline_s = 0.5  # for what comes after joining
    if rank == 1:
        time.sleep(2)
    group.meet("loading weights")


def test_a_slow_load_is_waited_for_beyond_the_deadline():
    run_local(loads_slowly_on_rank_1, None, 2, deadline_s=DEADLINE_S)


def dies_while_loading(_, rank, ranks, store):
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=DEADLINE_S)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.meet("loading weights")


def test_a_rank_that_dies_while_loading_is_named_at_once():
    with pytest.raises(RankLostError, match=r"rank 1 \(pid \d+\) .* while loading weights"):
        run_local(dies_while_loading, None, 2, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("ranks", [0, -1, 65])
def test_impossible_numbers_of_ranks(ranks):
    with pytest.raises(ConfigError, match=f"--ranks {ranks}"):
        run_local(writes_its_pid, None, ranks, deadline_s=DEADLINE_S)


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(RankLostError("rank 3 is gone", [3])))
    assert (str(error), error.ranks) == ("rank 3 is gone", (3,))
    assert isinstance(error, BywashError)


def stops_on_rank_1(_, rank, ranks, store):
    import torch
    import torch.distributed as dist

    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=DEADLINE_S)
    short = dist.new_group(timeout=timedelta(seconds=2))  # joining may take longer than that
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with group.blame("waiting in a test"):
        dist.all_reduce(torch.ones(1), group=short)


def test_a_stopped_rank_is_named_by_the_others_at_the_deadline():
    with pytest.raises(RankLostError, match=r"rank 1 \(pid \d+\) is stopped \(SIGSTOP\); seen by rank 0") as caught:
        run_local(stops_on_rank_1, None, 3, deadline_s=DEADLINE_S)
    assert caught.value.ranks == (1,)
