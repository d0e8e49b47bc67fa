"""What the operator sees while ranks work: the phase, and a bar for steps. Drawn by rank 0, on stderr."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bywash.models.job import Watch


class RunConsole(Watch):
    """A progress line per phase; quiet on ranks other than 0, and plain where stderr is no terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True)
        self._quiet = quiet
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(
            *columns, console=self._console, transient=True, disable=quiet or not self._console.is_terminal
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def phase(self, name: str) -> None:
        """See `Watch.phase`."""
        self._bar.reset(self._task, total=None, description=name)
        if not self._quiet and not self._console.is_terminal:
            self._console.print(f"bywash: {name}", highlight=False)

    def step(self, done: int, total: int) -> None:
        """See `Watch.step`."""
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Stop drawing. Safe to call twice."""
        self._bar.stop()
