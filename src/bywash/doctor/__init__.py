"""`bywash doctor`: what stands between this host and zero-copy, and how to mend it.

Data flows one way: `collect` (the only I/O) makes a `Snapshot`, `facts` read it, `checks` judge it, `examine` runs the
table of checks into a `Report`, `text` and the command line print that. Works the same on a snapshot of another host.
Knows nothing of torch, of running jobs, or of switches.

Reading order: `snapshot`, `finding`, `reads`, `examine`, then any check.
"""

from bywash.doctor.collect import live, load, save
from bywash.doctor.examine import CHECKS, examine
from bywash.doctor.finding import CheckResult, Finding, Report, Severity, Variable
from bywash.doctor.snapshot import Snapshot

__all__ = [
    "CHECKS",
    "CheckResult",
    "Finding",
    "Report",
    "Severity",
    "Snapshot",
    "Variable",
    "examine",
    "live",
    "load",
    "save",
]
