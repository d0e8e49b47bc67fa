"""Tasks of a search through joblib: processes here, or a Ray or Dask cluster inside `joblib.parallel_config(...)`."""

from collections.abc import Callable, Sequence
from typing import Any

from joblib import Parallel, delayed

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""


def run_tasks(
    what: str, tasks: Sequence[tuple[Any, tuple[Any, ...]]], jobs: int, progress: Progress | None
) -> list[Any]:
    """Results in the order of the tasks."""
    if progress is not None:
        progress(what, 0, len(tasks))
    made = []
    runner = Parallel(n_jobs=min(jobs, max(1, len(tasks))), return_as="generator")
    for one in runner(delayed(function)(*arguments) for function, arguments in tasks):
        made.append(one)
        if progress is not None:
            progress(what, len(made), len(tasks))
    return made
