"""`Finding`: one thing that is wrong with a configuration, in the form that `bywash fabric audit --json` prints."""

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is, what should be, where and why.

    Attributes:
        id: the rule, such as `headroom-short`; `docs/fabric-config.md` lists them all.
        severity: `error` loses packets, deadlocks or leaves traffic unprotected; `warning` costs performance.
        where: device and table key, such as `leaf3 BUFFER_PROFILE|pg_lossless_400000_5m_profile`.
    """

    id: str
    severity: Severity
    where: str
    is_: str
    should_be: str
    why: str

    def as_json(self) -> dict[str, Any]:
        """With the field names of the command line's contract."""
        return {
            "id": self.id,
            "severity": self.severity,
            "where": self.where,
            "is": self.is_,
            "should_be": self.should_be,
            "why": self.why,
        }

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.id}: is {self.is_}; should be {self.should_be}: {self.why}"
