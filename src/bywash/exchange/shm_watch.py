"""Who is to blame when a wait in the `shm` exchange does not end, and telling everybody else.

A waiting rank looks at three things: what others have written into its *abort record*, the process table, and, at the
deadline, whom the late ranks are themselves waiting for. The first rank to find a culprit writes it into every peer's
control heap, so that survivors agree within milliseconds and without a supervisor. Costs nothing while all goes well.
"""

from enum import IntEnum

from bywash.errors import BywashError, ConfigError, ExchangeError, PlanMismatchError, RankLostError
from bywash.exchange.group import Group
from bywash.exchange.shm_layout import ABORT_TEXT_BYTES, Control
from bywash.memory import store_release

_NS = 1_000_000_000


class Abort(IntEnum):
    """First word of an abort record: what its writer found. 0 is "nothing"."""

    LOST = 1
    MISMATCH = 2
    CONFIG = 3
    FAILED = 4
    CLOSED = 5


_ERRORS: dict[int, type[ExchangeError]] = {
    Abort.LOST: RankLostError,
    Abort.MISMATCH: PlanMismatchError,
    Abort.FAILED: ExchangeError,
}


class Watch:
    """One rank's eye on the others, over the control heaps."""

    def __init__(self, group: Group, control: Control) -> None:
        self._group, self._control = group, control
        self._rank, self._ranks = group.rank, group.ranks

    def check(self, pending: list[int], waited_ns: int, during: str) -> BywashError | None:
        """The error to raise for a wait on `pending` that has lasted `waited_ns`; None to go on waiting.

        Called only in the slow part of a wait. The caller looks at its words once more before it raises, since a
        rank may send and then end.
        """
        self._say_waiting(pending)
        told = self._told(pending, during)
        if told is not None:
            return told
        sick = self._group.sick()
        gone = {rank: sick[rank] for rank in pending if sick.get(rank) == "gone"}
        if gone:
            return self._group.lost(gone, during)
        deadline_s = self._group.deadline_s
        if waited_ns < deadline_s * _NS:
            return None
        overdue = self._overdue(pending, sick, f"{during} (waited {waited_ns / _NS:.1f} s of {deadline_s:g} s)")
        # A rank that has just given up waits for nobody any more and would look late; but it tells first.
        return self._told(pending, during) or overdue

    def done_waiting(self) -> None:
        """Take back what `check` let others see."""
        self._say_waiting([])

    def tell(self, error: BywashError) -> None:
        """Write `error` into every peer's abort record, unless this rank has already written one."""
        kind, culprits = Abort.CONFIG, 0
        if isinstance(error, ExchangeError):
            kind = next((k for k, cls in _ERRORS.items() if type(error) is cls), Abort.FAILED)  # type: ignore[assignment]
            culprits = sum(1 << rank for rank in error.ranks)
        self._write(kind, culprits, str(error))

    def tell_closed(self) -> None:
        """Let ranks that still wait for this one know that it has left."""
        self._write(Abort.CLOSED, 1 << self._rank, "closed")

    def _write(self, kind: int, culprits: int, text: str) -> None:
        data = text.encode()[:ABORT_TEXT_BYTES].decode(errors="ignore").encode()
        padded = data + b"\0" * (-len(data) % 8)
        for peer in range(self._ranks):
            words, at = self._control.words[peer], self._control.layout.abort(self._rank)
            if peer == self._rank or words[at]:
                continue
            words[at + 1], words[at + 2] = culprits, len(data)
            words[at + 3 : at + 3 + len(padded) // 8] = memoryview(padded).cast("Q")
            store_release(words, at, kind)

    def _told(self, pending: list[int], during: str) -> BywashError | None:
        """What another rank has found out, if it has."""
        words = self._control.words[self._rank]
        for teller in range(self._ranks):
            at = self._control.layout.abort(teller)
            kind = words[at]
            if not kind or (kind == Abort.CLOSED and teller not in pending):
                continue
            if kind == Abort.CLOSED:
                why = "gone from the exchange (it closed it: after an error of its own, or calling less often)"
                return self._group.lost({teller: why}, during)
            text = self._text(words, at)
            if kind == Abort.CONFIG:
                return ConfigError(f"{text} (found by rank {teller})")
            culprits = [rank for rank in range(self._ranks) if words[at + 1] >> rank & 1]
            return _ERRORS[kind](f"{text}; rank {teller} told rank {self._rank} while {during}", culprits)
        return None

    @staticmethod
    def _text(words: memoryview, at: int) -> str:
        length = words[at + 2]
        return bytes(words[at + 3 : at + 3 + -(-length // 8)].cast("B")[:length]).decode(errors="replace")

    def _overdue(self, pending: list[int], sick: dict[int, str], during: str) -> ExchangeError:
        """Follow who waits for whom to those that wait for nobody: they are late, not their victims."""
        found: dict[int, str] = {}
        seen, queue = {self._rank}, list(pending)
        while queue:
            rank = queue.pop()
            if rank in seen:
                continue
            seen.add(rank)
            waits_for = self._waiting_of(rank)
            if rank in sick:
                found[rank] = sick[rank]
            elif waits_for:
                queue.extend(waits_for)
            else:
                found[rank] = "late: it did not arrive before the deadline"
        if found:
            return self._group.lost(found, during)
        return ExchangeError(
            f"ranks {', '.join(str(r) for r in sorted(seen))} wait for each other: every rank must make the same "
            f"calls in the same order; seen by rank {self._rank} while {during}",
            sorted(seen),
        )

    def _say_waiting(self, pending: list[int]) -> None:
        words = self._control.words[self._rank]
        words[self._control.layout.waiting] = sum(1 << rank for rank in pending)

    def _waiting_of(self, rank: int) -> list[int]:
        mask = self._control.words[rank][self._control.layout.waiting]
        return [other for other in range(self._ranks) if mask >> other & 1]
