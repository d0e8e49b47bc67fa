"""A host as the doctor sees it: a few hundred small files and the output of a few tools, in memory.

Knows nothing of where they came from (a live host, a directory, an archive: `collect`) nor of what they mean
(`facts`). Every check is a function of a `Snapshot` and nothing else, so it can be tried on hosts we do not have.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

COMMANDS = "commands"
"""Tools' output is kept as `commands/NAME.txt`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Files by path (no leading slash), and why those that should be there are not.

    `complete`: a path that is absent here was absent on the host. False for a directory put together by hand, where
    absence proves nothing.
    """

    files: Mapping[str, bytes]
    unread: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True
    origin: str = "this host"
    _children: dict[str, list[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tree: dict[str, set[str]] = {}
        for path in self.files:
            parts = path.split("/")
            for depth in range(1, len(parts) + 1):
                tree.setdefault("/".join(parts[: depth - 1]), set()).add(parts[depth - 1])
        children = {parent: sorted(names, key=natural) for parent, names in tree.items()}
        object.__setattr__(self, "_children", children)

    def has(self, path: str) -> bool:
        """Whether there is such a file or directory."""
        return path in self.files or path in self._children

    def children(self, directory: str) -> list[str]:
        """Names in a directory, `mlx5_2` before `mlx5_10`; empty where there is none."""
        return self._children.get(directory, [])

    def text(self, path: str) -> str | None:
        """A file's text, stripped; bytes that are no UTF-8 are replaced. None where it is missing."""
        content = self.files.get(path)
        return None if content is None else content.decode(errors="replace").strip()

    def integer(self, path: str) -> int | None:
        """A file that holds one decimal number; None where it is missing or holds anything else."""
        return integer(self.text(path))

    def output(self, name: str) -> str | None:
        """What the tool printed, unstripped; None where it did not run or failed."""
        content = self.files.get(command_path(name))
        return None if content is None else content.decode(errors="replace")

    def why_not(self, path: str) -> str:
        """Why a file tells nothing, for a person: it is missing, or does not hold what it should."""
        if path in self.files:
            start = self.files[path][:40].decode(errors="replace").strip()
            return f"{shown(path)}: holds {start!r}" if start else f"{shown(path)}: empty"
        if path in self.unread:
            return f"{shown(path)}: {self.unread[path]}"
        return f"{shown(path)}: {'not there' if self.complete else 'not in the snapshot'}"


def command_path(name: str) -> str:
    """Where a tool's output is kept."""
    return f"{COMMANDS}/{name}.txt"


def shown(path: str) -> str:
    """A path as a person knows it: `/sys/...`; tools' output keeps its place in the snapshot."""
    return path if path.startswith(f"{COMMANDS}/") else f"/{path}"


def integer(text: str | None) -> int | None:
    """Decimal digits with an optional sign; None for anything else, and for what no counter of Linux can hold."""
    return int(text) if text is not None and re.fullmatch(r"[-+]?[0-9]{1,20}", text) else None


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that takes digits as numbers."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]{1,20})", name)]
