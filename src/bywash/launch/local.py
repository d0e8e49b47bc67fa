"""Ranks as processes of this machine, for laptops, tests and CI; on a cluster torchrun starts them instead.

The parent holds the rendezvous store and reports errors; it moves no data. Ranks find lost peers themselves, so the
parent only sweeps up: it ends ranks that others have named, and no rank outlives it.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from bywash.errors import BywashError, ConfigError, ExchangeError, RankLostError

RankMain = Callable[[Any, int, int, Any], None]
"""(payload, rank, ranks, store) -> None; must be importable by name."""

MAX_LOCAL_RANKS = 64
PRELOADED = ("torch.distributed", "bywash.models.job", "transformers.modeling_utils", "transformers.generation")
"""Imported once by the server that forks the ranks. modeling_utils and generation are what a model class pulls in."""


@dataclass(frozen=True, slots=True)
class _Report:
    """How one rank ended, as it says itself."""

    rank: int
    error: BywashError | None
    crash: str | None = None


def run_local(main: RankMain, payload: Any, ranks: int, deadline_s: float) -> None:
    """Run `main` on `ranks` local processes and wait for all of them.

    Raises:
        ConfigError: `ranks` is not between 1 and 64.
        BywashError: what the ranks reported; where several did, the cause rather than its echoes.
    """
    if not 1 <= ranks <= MAX_LOCAL_RANKS:
        raise ConfigError(f"--ranks {ranks}: choose 1 to {MAX_LOCAL_RANKS} local processes")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    _start_forkserver()  # its imports take seconds; let them run beside ours
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alive, ours_alone = context.Pipe(duplex=False)  # no rank holds the writing end, so it closes when this process dies
    processes: list[BaseProcess] = []
    pipes = []
    with _ended_by_signals():
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                job = (main, payload, rank, ranks, store.port, deadline_s, theirs, alive)
                process: BaseProcess = context.Process(target=_child, args=job, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            _raise_worst(_await(processes, pipes, deadline_s))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            ours_alone.close()


def _start_forkserver() -> None:
    """Start it with Ctrl-C held off: while it imports it would answer with a traceback; afterwards it ignores it."""
    resource_tracker.ensure_running()  # which would let Ctrl-C in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an exception would, so that the ranks are swept up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _await(processes: Sequence[BaseProcess], pipes: list[Connection], deadline_s: float) -> list[_Report]:
    """Collect every rank's report; after the first failure give the others one deadline to find out themselves."""
    reports: dict[int, _Report] = {}
    waiting = dict(enumerate(pipes))
    end: float | None = None
    while waiting and (end is None or time.monotonic() < end):
        for pipe in wait(list(waiting.values()), timeout=0.2):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            del waiting[rank]
            reports[rank] = _read(rank, processes[rank], pipes[rank])
            if reports[rank].error is not None or reports[rank].crash:
                end = end or time.monotonic() + deadline_s + 2.0
        named = {
            r for report in reports.values() if isinstance(report.error, ExchangeError) for r in report.error.ranks
        }
        if named and set(waiting) <= named:
            break  # everyone else has ended; those left are the ones that do not answer
    return [reports[rank] for rank in sorted(reports)]


def _read(rank: int, process: BaseProcess, pipe: Connection) -> _Report:
    try:
        report = pipe.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return _Report(rank, RankLostError(f"rank {rank} (pid {process.pid}) {how}", [rank]))
    assert isinstance(report, _Report)
    return report


def _raise_worst(reports: list[_Report]) -> None:
    """Raise the cause: a crash or a rank's own error before what others saw of it."""
    for report in reports:
        if report.crash:
            raise RuntimeError(f"rank {report.rank} crashed; this is a bug in bywash:\n{report.crash}")
    errors = [report.error for report in reports if report.error is not None]
    own = [error for error in errors if not isinstance(error, RankLostError)]
    if own:
        raise own[0]
    lost = [(report.rank, report.error) for report in reports if isinstance(report.error, RankLostError)]
    if lost:
        # How the rank ended is this process's own account; where the others stood when they saw it is a survivor's.
        ended = [error for rank, error in lost if rank in error.ranks][:1]
        seen = [error for rank, error in lost if rank not in error.ranks][:1]
        raise RankLostError("; ".join(str(error) for error in ended + seen), (ended + seen)[0].ranks)


def _child(
    main: RankMain,
    payload: Any,
    rank: int,
    ranks: int,
    port: int,
    deadline_s: float,
    pipe: Connection,
    parent_alive: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the ranks
    threading.Thread(target=_end_with_parent, args=(parent_alive,), daemon=True).start()
    try:
        main(payload, rank, ranks, _store(rank, port, deadline_s))
        pipe.send(_Report(rank, None))
    except BywashError as error:
        pipe.send(_Report(rank, error))
    except Exception:
        pipe.send(_Report(rank, None, traceback.format_exc()))


def _store(rank: int, port: int, deadline_s: float) -> Any:
    """The parent's store."""
    from datetime import timedelta

    import torch.distributed as dist

    try:
        return dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=deadline_s))
    except dist.DistError as error:
        raise BywashError(
            f"rank {rank} did not reach the process that started it within --deadline, {deadline_s:g} s; give it more"
        ) from error


def _end_with_parent(parent_alive: Connection) -> None:
    """Leave at once when the parent is gone, however it went. (A death signal would watch the fork server instead.)"""
    with suppress(EOFError, OSError):
        parent_alive.recv()
    os._exit(1)
