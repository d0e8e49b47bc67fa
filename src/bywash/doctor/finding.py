"""What a check says: findings with a severity, a place, a reason and a remedy; and the variables worth setting.

Data only. Made by `checks`, gathered by `examine`, printed by `text` and the command line; the fabric audit and the
runtime's start-up checks read the same objects.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters, gravest first."""

    ERROR = "error"
    """Zero-copy does not work, or a library will fail or hang."""
    WARNING = "warning"
    """It works, but slower than the hardware, or it will break under load."""
    UNKNOWN = "unknown"
    """The check could not see what it needs. Never to be taken for all right."""
    INFO = "info"
    """Worth knowing; nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or could not be seen.

    `code` is stable, for programs; `where` names the device, port, interface, file or variable; `what` was found
    there; `why` it matters (for `UNKNOWN`: why it could not be seen); `fix` is a command or a setting, if there is one.
    """

    severity: Severity
    code: str
    where: str
    what: str
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable of NCCL or NVSHMEM: what is in force, what this host calls for (None: unset, for both), and why."""

    name: str
    in_force: str | None
    recommended: str | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check's outcome. `skipped` says why it does not apply to this host; then there are no findings."""

    check: str
    title: str
    findings: tuple[Finding, ...] = ()
    skipped: str | None = None

    @property
    def status(self) -> str:
        """`ok`, `not applicable`, or the gravest severity found."""
        if self.skipped is not None:
            return "not applicable"
        found = {finding.severity for finding in self.findings}
        return next((severity.value for severity in Severity if severity in found), "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one snapshot, in the order of the table, and the variables."""

    origin: str
    results: tuple[CheckResult, ...]
    variables: tuple[Variable, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding, in the order of the checks."""
        return tuple(finding for result in self.results for finding in result.findings)

    @property
    def exit_status(self) -> int:
        """0: every check that applies ran and found nothing wrong. 1: something is wrong, or could not be seen."""
        return int(any(finding.severity is not Severity.INFO for finding in self.findings))

    @property
    def headline(self) -> str:
        """One line: how many findings of each severity, how many checks passed and how many do not apply."""
        counts = [(name, sum(f.severity is name for f in self.findings)) for name in Severity]
        found = ", ".join(_counted(name, count) for name, count in counts if count) or "nothing wrong"
        passed = sum(result.status == "ok" for result in self.results)
        skipped = sum(result.skipped is not None for result in self.results)
        return f"{found}; {passed} of {len(self.results)} checks ok, {skipped} not applicable"

    def as_dict(self) -> dict[str, object]:
        """The report as JSON has it. Schema 1."""
        checks = [
            {"check": r.check, "title": r.title, "status": r.status, "reason": r.skipped or ""}
            | {"findings": [asdict(finding) for finding in r.findings]}
            for r in self.results
        ]
        return {
            "schema": 1,
            "origin": self.origin,
            "headline": self.headline,
            "exit_status": self.exit_status,
            "checks": checks,
            "variables": [asdict(variable) for variable in self.variables],
        }


def _counted(severity: Severity, count: int) -> str:
    plural = "s" if count > 1 and severity in (Severity.ERROR, Severity.WARNING) else ""
    return f"{count} {severity.value}{plural}"


def unseen(code: str, where: str, what: str, why: str, fix: str = "") -> Finding:
    """An `UNKNOWN` finding."""
    return Finding(severity=Severity.UNKNOWN, code=code, where=where, what=what, why=why, fix=fix)
