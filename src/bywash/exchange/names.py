"""The names and defaults that a user may choose, in one place for the package and the command line."""

from typing import Literal

Combine = Literal["exact", "stable", "fast"]
COMBINES: tuple[Combine, ...] = ("exact", "stable", "fast")
DeviceKind = Literal["cpu", "cuda"]
EXCHANGES = ("auto", "local", "gloo", "shm", "peer", "hierarchical")
DEADLINE_S = 60.0
"""Default for every wait on other ranks: far above any step, short enough that an operator sees the error."""
