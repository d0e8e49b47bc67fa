"""Outcomes of settings on cases, each simulated once, in this process or in several.

Which process runs what changes nothing: a simulation depends on its scenario alone. Every wait has a deadline. Knows
nothing of search; `search` and `heldout` ask it.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Self

from bywash.errors import BywashError
from bywash.fabric.run import simulate
from bywash.fabric.tune.objective import Case, Fabric, Outcome, Score, outcome, scenario, score
from bywash.fabric.tune.space import Setting

DEADLINE_S = 900.0
"""No single simulation should need so long: the largest examples take seconds."""

Report = Callable[[int, int], None]
"""Called with simulations done, and how many there will be as far as is known."""


class Pool:
    """Runs simulations and remembers them. A context manager; `jobs` processes, 1 for none but this one."""

    def __init__(self, fabric: Fabric, cases: Sequence[Case], *, jobs: int = 1, report: Report | None = None) -> None:
        self.fabric, self.cases = fabric, tuple(cases)
        self.done: dict[tuple[Setting, int], Outcome] = {}
        self._jobs, self._report, self._goal = jobs, report, 0
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._jobs > 1:
            context = multiprocessing.get_context("spawn")  # threads of numba and torch do not survive a fork
            work = (self.fabric, self.cases)
            self._executor = ProcessPoolExecutor(self._jobs, context, initializer=_start, initargs=work)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=kind is None, cancel_futures=True)

    def run(self, settings: Iterable[Setting], cases: Iterable[int]) -> None:
        """Simulate all of these settings on all of these cases, as far as that has not been done.

        Raises:
            BywashError: a worker died, or a simulation takes longer than the deadline.
        """
        cases = tuple(cases)
        wanted = dict.fromkeys((setting, case) for setting in settings for case in cases)
        missing = [pair for pair in wanted if pair not in self.done]
        self._goal = len(self.done) + len(missing)
        if self._executor is None:
            for setting, case in missing:
                self._add(setting, case, _one(self.fabric, self.cases[case], setting))
        else:
            self._run_apart(self._executor, missing)

    def outcomes(self, setting: Setting, cases: Iterable[int]) -> list[Outcome]:
        """What is known of a setting on these cases, simulated when it is not."""
        cases = tuple(cases)
        self.run([setting], cases)
        return [self.done[setting, case] for case in cases]

    def score(self, setting: Setting, cases: Iterable[int]) -> Score:
        """`objective.score` over these cases."""
        return score(self.outcomes(setting, cases))

    def _run_apart(self, executor: ProcessPoolExecutor, missing: list[tuple[Setting, int]]) -> None:
        waiting: dict[Future[Outcome], tuple[Setting, int]] = {}
        try:
            for setting, case in missing:
                waiting[executor.submit(_work, setting, case)] = setting, case
            left = set(waiting)
            while left:
                ready, left = wait(left, timeout=DEADLINE_S, return_when=FIRST_COMPLETED)
                if not ready:
                    raise BywashError(f"tune: no simulation ended within {DEADLINE_S:g} s; use less traffic")
                for future in ready:
                    self._add(*waiting[future], future.result())
        except BrokenProcessPool as error:
            raise BywashError(
                "tune: a worker process died (out of memory?); use fewer --jobs or less traffic"
            ) from error

    def _add(self, setting: Setting, case: int, result: Outcome) -> None:
        self.done[setting, case] = result
        if self._report is not None:
            self._report(len(self.done), self._goal)


def _one(fabric: Fabric, case: Case, setting: Setting) -> Outcome:
    return outcome(simulate(scenario(fabric, setting, case)))


_shared: tuple[Fabric, tuple[Case, ...]] | None = None


def _start(fabric: Fabric, cases: tuple[Case, ...]) -> None:
    """In a worker: keep what all of its simulations share, and end when whoever started it has."""
    global _shared
    _shared = fabric, cases
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent closes no queue that its workers share, so that they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(setting: Setting, case: int) -> Outcome:
    assert _shared is not None  # `_start` ran first
    fabric, cases = _shared
    return _one(fabric, cases[case], setting)
