"""Every error bywash raises on purpose, in one hierarchy.

A user error says what was wrong, where, and what to do; the command line prints it without a traceback.
Knows nothing of the rest of the package; everything may import it.
"""

from collections.abc import Sequence


class BywashError(Exception):
    """Root of all errors that bywash raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(BywashError):
    """An option, file or description is wrong. The message starts with the path of the field."""

    exit_code = 2


class RoutingError(BywashError):
    """Expert ids or gate weights that no router may produce: out of range, repeated, NaN, wrong shape."""

    exit_code = 2


class TraceError(BywashError):
    """A routing trace file is missing, damaged, or of another schema."""

    exit_code = 2


class CheckpointError(BywashError):
    """A checkpoint directory is unreadable, truncated, incomplete, or of a family bywash does not run."""

    exit_code = 2


class ExchangeError(BywashError):
    """An exchange between ranks failed. `ranks` names the ranks at fault, as far as they are known."""

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message, tuple(ranks))
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        return str(self.args[0])


class RankLostError(ExchangeError):
    """A rank died, was stopped, or came later than the deadline."""


class PlanMismatchError(ExchangeError):
    """Ranks disagree on the plan of a step; found before any of its rows were read."""


class PipelineError(BywashError):
    """The streams of a schedule do not fit together: a stage ran before its input, or waits for what never comes."""
