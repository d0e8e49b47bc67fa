"""Where commands write: files checked before the work starts, and a stdout that may be full or closed."""

import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bywash.errors import BywashError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

STDOUT = "-"
"""In place of a file: print it."""


class OutputClosedError(BywashError):
    """Whoever read stdout has gone, as in `bywash ... | head`. The command ends without a word, as a shell's would."""

    exit_code = 141


def writable(path: str | Path | None, flag: str, *, or_stdout: bool = False) -> None:
    """Refuse an output file that cannot be written, before any work. None is no file; `-` may be stdout.

    Leaves nothing behind, and does not touch what is there.
    """
    if path is None or (or_stdout and path == STDOUT):
        return
    if str(path) in ("", "."):  # Path("") is "."
        raise ConfigError(f"{flag} {str(path)!r}: must be the name of a file")
    file = Path(path)
    try:
        if file.is_dir():
            raise ConfigError(f"{flag} {path}: is a directory; give the name of a file")
        if not file.resolve().parent.is_dir():
            raise ConfigError(f"{flag} {path}: its directory does not exist")
        if file.is_file():
            with open(file, "ab"):
                pass
        elif file.is_char_device():
            device = os.open(file, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                os.write(device, b"")  # /dev/full refuses even nothing
            finally:
                os.close(device)
        elif file.exists():  # a pipe: its reader would see it opened and closed
            if not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            with tempfile.TemporaryFile(dir=file.resolve().parent):
                pass
    except (OSError, ValueError, RuntimeError) as error:
        raise _unwritable(path, flag, error) from error


def replaceable(path: str | Path | None, flag: str) -> None:
    """`writable`, for files that are written beside their place and then put there: no devices, no pipes."""
    if path is not None and str(path) not in ("", ".") and os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{flag} {path}: is no regular file; give the name of a file")
    writable(path, flag)


def apart(outputs: Mapping[str, str | Path | None]) -> None:
    """Refuse options (flag to file) that name one file twice: what is written later would replace the rest.

    None is no file. stdout and devices may be named more than once.
    """
    seen: dict[str, Path] = {}
    for flag, path in outputs.items():
        if path is None or str(path) == STDOUT:
            continue
        file = Path(path)
        for other, theirs in seen.items():
            if _is_same(file, theirs):
                raise ConfigError(f"{flag} {path}: is {other} too; give it another name")
        seen[flag] = file


def _is_same(file: Path, other: Path) -> bool:
    try:
        if file.exists() and other.exists():
            return file.is_file() and file.samefile(other)
        return file.resolve() == other.resolve()
    except (OSError, ValueError, RuntimeError):
        return False  # whoever opens it will say what is wrong


def write_json(path: str, data: dict[str, Any], flag: str = "--json") -> None:
    """Write a JSON document to a file, or print it for `-`. Raises `ConfigError` naming the flag."""
    text = json.dumps(data, indent=2) + "\n"
    if path == STDOUT:
        if sys.stdout is None:
            raise ConfigError(f"{flag} -: stdout is closed")
        with printing():
            sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise _unwritable(path, flag, error) from error


@contextmanager
def printing() -> Iterator[None]:
    """Around code that prints to stdout: what goes wrong there becomes a `BywashError`.

    Raises:
        OutputClosedError: the reader has gone.
        BywashError: anything else, such as a full disk.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError as error:
        drop_stdout()
        raise OutputClosedError("stdout: its reader has gone") from error
    except OSError as error:
        drop_stdout()
        raise BywashError(f"stdout: cannot write to it: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise BywashError(f"stdout: its encoding {error.encoding} lacks a character; set PYTHONUTF8=1") from error


def stdout_console(width: int | None = None) -> "Console":
    """A rich console on stdout whose broken pipe is an error that `printing` sees, not an exit."""
    from rich.console import Console

    class StdoutConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return StdoutConsole(width=width)


def fill_closed_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed, so that no socket of ours gets their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(opened, True)


def drop_stdout() -> None:
    """Send what is still buffered to /dev/null: Python would stumble over it again at exit."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _unwritable(path: str | Path, flag: str, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"{flag} {path}: cannot write it: {reason}; name a file that can be written")
