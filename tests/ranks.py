"""Rank processes for tests: they join one group, then run any importable function that a test sends them."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from bywash.errors import BywashError, RankLostError
from bywash.exchange import Group
from bywash.launch import local

ANSWER_S = 120.0
PRELOADED = [*local.PRELOADED, "bywash.models.check", "bywash.cli.console", "bywash.moe", "tests.ranks"]
"""A process has one fork server, whoever starts it, so the ranks of `run_local` find their imports done here too."""
DEADLINE_S = 60.0
"""For tests that are about something else: no rank of a slow or busy machine comes as late as that. A test that waits
for a deadline to pass takes a pool of its own."""


class RankPool:
    """`ranks` processes in one gloo group. A task is `fn(group, *args)`; every rank runs it with its own args."""

    def __init__(self, ranks: int, *, deadline_s: float = DEADLINE_S) -> None:
        self.ranks, self.healthy = ranks, True
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = []
        self._pipes: list[Connection] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, ranks, self._store.port, deadline_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def send(self, fn: Callable[..., Any], args_R: Sequence[tuple[Any, ...]]) -> None:
        for pipe, args in zip(self._pipes, args_R, strict=True):
            pipe.send((fn, args))

    def receive(self, rank: int, timeout_s: float = ANSWER_S) -> Any:
        """One rank's result, or the exception it raised (returned, not raised)."""
        if not self._pipes[rank].poll(timeout_s):
            self.close()
            raise TimeoutError(f"rank {rank} gave no answer within {timeout_s} s")
        return self._pipes[rank].recv()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """The same arguments on every rank; results by rank, the first exception raised."""
        return self.run_each(fn, [args] * self.ranks)

    def run_each(self, fn: Callable[..., Any], args_R: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.send(fn, args_R)
        found: dict[int, Any] = {}
        end = time.monotonic() + ANSWER_S
        try:
            while len(found) < self.ranks:
                self._receive_some(found, end)
        except BaseException:  # also a test's own timeout: answers that come now belong to nobody
            self.close()
            raise
        results = [found[rank] for rank in range(self.ranks)]
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            self.close()  # ranks may be out of step: the next test gets a new pool
            raise min(errors, key=lambda error: isinstance(error, RankLostError))  # the cause before its echoes
        return results

    def _receive_some(self, found: dict[int, Any], end: float) -> None:
        """Add the answers that are there; a crash is raised at once, since others may wait for that rank."""
        left = {self._pipes[rank]: rank for rank in range(self.ranks) if rank not in found}
        ready = wait(list(left), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(left.values())} gave no answer within {ANSWER_S} s")
        for pipe in ready:
            answer = found[left[pipe]] = pipe.recv()
            if isinstance(answer, AssertionError):
                raise answer

    def close(self) -> None:
        self.healthy = False
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, ranks: int, port: int, deadline_s: float, pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    group = Group(rank=rank, ranks=ranks, store=dist.TCPStore("127.0.0.1", port), deadline_s=deadline_s)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(fn(group, *args))
        except BywashError as error:
            pipe.send(error)
        except Exception:
            pipe.send(AssertionError(f"rank {rank}:\n{traceback.format_exc()}"))
