"""Who still answers, in a job on several hosts, where no process table shows all ranks.

Every rank keeps a thread that looks into the job's store twice a second whether somebody calls the roll, and answers
whatever the rank itself is doing: a rank that is only waiting for others is thereby told from one that is gone, stopped
or cut off. A rank that gives up leaves word of why. A store that does not answer in time is an error of its own: its
host is gone or cannot be reached. `Group` calls this; on one host it needs none of it.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

POLL_S = 0.5
LIMIT_S = 3.0
"""For one roll call: six looks of every rank, or a few round trips of the slowest network."""
_ASKED = "roll/asked"
T = TypeVar("T")


class StoreLostError(Exception):
    """The job's store did not answer in time."""


class RollCall:
    """One rank's part: answers when others call the roll, and calls it."""

    def __init__(self, store: dist.Store, rank: int, ranks: int) -> None:
        """Begin to answer."""
        self._rank, self._ranks = rank, ranks
        # Connections of their own: an operation on a dead connection blocks all later ones on it.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        answering = store.clone()  # type: ignore[attr-defined]
        self._stop, self._lost = threading.Event(), False
        self._thread = threading.Thread(target=self._answer, args=(answering,), daemon=True, name="bywash-roll-call")
        self._thread.start()

    def call(self) -> set[int]:
        """The ranks that answer within `LIMIT_S`; this one always does.

        Raises:
            StoreLostError: the store does not.
        """
        answering: set[int] = {self._rank}

        def ask() -> None:
            number, end = self._store.add(_ASKED, 1), time.monotonic() + LIMIT_S
            while len(answering) < self._ranks and time.monotonic() < end:
                for rank in set(range(self._ranks)) - answering:
                    if self._store.check([f"roll/{number}/{rank}"]):
                        answering.add(rank)
                time.sleep(0.02)

        self._in_time(ask)
        return answering

    def tell(self, kind: str, text: str, ranks: tuple[int, ...]) -> None:
        """Leave word of why this rank gives up, if the store can still be reached."""
        word = json.dumps({"kind": kind, "text": text, "ranks": ranks})
        with suppress(StoreLostError):
            self._in_time(lambda: self._store.set(f"told/{self._rank}", word))

    def told(self, ranks: set[int]) -> dict[int, dict[str, Any]]:
        """What those of `ranks` that gave up have said: kind of error, text, ranks at fault.

        Raises:
            StoreLostError: the store does not answer.
        """

        def read() -> dict[int, dict[str, Any]]:
            return {r: json.loads(self._store.get(f"told/{r}")) for r in ranks if self._store.check([f"told/{r}"])}

        return self._in_time(read)

    def leave(self, lost: set[int]) -> None:
        """Answer no more. Rank 0 may hold the store, and stays a while for all but `lost` to leave first."""

        def last_to_leave() -> None:
            self._store.set(f"left/{self._rank}", "left")
            others = set(range(self._ranks)) - lost if self._rank == 0 else set()
            end = time.monotonic() + 2 * LIMIT_S  # they may be calling the roll
            while time.monotonic() < end and not all(self._store.check([f"left/{rank}"]) for rank in others):
                time.sleep(0.02)

        with suppress(StoreLostError):
            self._in_time(last_to_leave, 2 * LIMIT_S)
        self._stop.set()
        self._thread.join(2 * POLL_S)

    def _in_time(self, call: Callable[[], T], limit_s: float = LIMIT_S) -> T:
        """`bounded`, but a store that was silent once is not waited for again."""
        if self._lost:
            raise StoreLostError
        try:
            return bounded(call, limit_s + 1.0)
        except StoreLostError:
            self._lost = True
            raise

    def _answer(self, store: dist.Store) -> None:
        answered = 0
        with suppress(RuntimeError, dist.DistError):  # the store is gone: nobody can call
            store.set_timeout(timedelta(seconds=LIMIT_S))
            while not self._stop.wait(POLL_S):
                asked = store.add(_ASKED, 0)
                for number in range(answered + 1, asked + 1):
                    store.set(f"roll/{number}/{self._rank}", "here")
                answered = asked


def bounded(call: Callable[[], T], limit_s: float) -> T:
    """What `call` returns, or `StoreLostError` after `limit_s`: operations of a store have no deadline of their own."""
    results: list[T] = []

    def run() -> None:
        with suppress(RuntimeError, dist.DistError):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True, name="bywash-store")
    thread.start()
    thread.join(limit_s)
    if not results:
        raise StoreLostError
    return results[0]
