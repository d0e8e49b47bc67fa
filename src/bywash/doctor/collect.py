"""The doctor's only I/O: makes a `Snapshot` of the live host, a directory or an archive, and writes archives.

Reads what `reads` lists and nothing else, at most `MAX_FILE_BYTES` of each file, and runs each tool with a deadline.
Never opens device nodes, pipes or sockets, never unpacks an archive to disk, never follows a link out of a directory.
Called by the command line, and by whatever wants a host's facts at run time (`live`).
"""

import glob
import gzip
import io
import json
import os
import re
import stat
import subprocess
import tarfile
import zlib
from pathlib import Path

from bywash.doctor.reads import FILES, KEEP, NAMES, Tool, tools
from bywash.doctor.snapshot import COMMANDS, Snapshot, command_path
from bywash.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_FILES = 50_000
MAX_ARCHIVE_BYTES = 64 << 20
TOOL_DEADLINE_S = 20.0
MANIFEST = "doctor.json"
_SCHEMA = 1


def live(deadline_s: float = TOOL_DEADLINE_S) -> Snapshot:
    """This host, now, as this user and in this container. `deadline_s` bounds each tool."""
    files, unread = _read_tree(Path("/"), FILES, NAMES, inside=False)
    home = Path(os.path.expanduser("~/.nccl.conf"))
    if home.is_file():
        _take("home/.nccl.conf", home, files, unread)
    named = "".join(f"{name}={value}\n" for name, value in sorted(os.environ.items()) if "\n" not in value)
    files[command_path("env")] = _kept(command_path("env"), named.encode(errors="replace"))
    hung: set[str] = set()
    for tool in tools(Snapshot(files=files)):
        program = tool.argv[0]
        output = f"{program} did not answer before" if program in hung else _run(tool, deadline_s)
        if isinstance(output, str):
            unread[command_path(tool.name)] = output
            hung |= {program} if "did not answer" in output else set()
        else:
            files[command_path(tool.name)] = _kept(command_path(tool.name), output)
    return Snapshot(files=files, unread=unread)


def load(path: str | Path) -> Snapshot:
    """A snapshot from a directory or from an archive that `save` wrote.

    Raises:
        ConfigError: no such thing, unreadable, damaged, or with nothing in it that the doctor reads.
    """
    root = Path(path)
    try:
        if root.is_dir():
            files, unread = _read_tree(root, (*FILES, f"{COMMANDS}/*.txt", MANIFEST), NAMES, inside=True)
        elif root.is_file():
            files, unread = _read_archive(root), {}
        else:
            raise ConfigError(f"--root {path}: no such directory or archive")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--root {path}: cannot read it: {getattr(error, 'strerror', None) or error}") from error
    manifest = files.pop(MANIFEST, None)
    if not files:
        raise ConfigError(
            f"--root {path}: nothing in it that the doctor reads; it should hold proc, sys and {COMMANDS}"
        )
    return Snapshot(
        files=files,
        unread=unread | (_unread_of(manifest, path) if manifest is not None else {}),
        complete=manifest is not None,
        origin=str(path),
    )


def save(snapshot: Snapshot, path: str | Path) -> None:
    """Write a `.tar.gz`; the same snapshot gives the same bytes. Raises `ConfigError`."""
    manifest = {"schema": _SCHEMA, "unread": dict(sorted(snapshot.unread.items()))}
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in sorted({MANIFEST: json.dumps(manifest, indent=1).encode(), **snapshot.files}.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    try:
        Path(path).write_bytes(buffer.getvalue())
    except OSError as error:
        raise ConfigError(f"--capture {path}: cannot write it: {error.strerror or error}") from error


def _read_tree(
    root: Path, patterns: tuple[str, ...], names: tuple[str, ...], *, inside: bool
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Files that match, and why some could not be read. `inside`: a link out of the root is not followed."""
    files: dict[str, bytes] = {}
    unread: dict[str, str] = {}
    base = root.resolve()
    for pattern in patterns:
        for name in _matching(root, pattern):
            if inside and not (root / name).resolve().is_relative_to(base):
                unread[name] = "a link that leads out of the snapshot"
                continue
            _take(name, root / name, files, unread)
            if len(files) > MAX_FILES:
                raise ConfigError(f"{root}: more than {MAX_FILES:,} files to read; is it a snapshot of one host?")
    for pattern in names:
        files.update((name, b"") for name in _matching(root, pattern))
    return files, unread


def _matching(root: Path, pattern: str) -> list[str]:
    if "*" not in pattern:
        return [pattern] if os.path.lexists(root / pattern) else []
    return sorted(glob.glob(pattern, root_dir=root))


def _take(name: str, file: Path, files: dict[str, bytes], unread: dict[str, str]) -> None:
    try:
        files[name] = _kept(name, _read_bytes(file))
    except OSError as error:
        # An empty entry of a GID table answers EINVAL: that is how the kernel says there is none.
        if not re.search(r"/gid_attrs/", name):
            unread[name] = error.strerror or type(error).__name__


def _read_bytes(file: Path) -> bytes:
    """The start of a regular file. Raises OSError, for anything that is no regular file too."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not make us wait
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(0, "no regular file")
        with os.fdopen(handle, "rb", closefd=False) as stream:
            return stream.read(MAX_FILE_BYTES)
    finally:
        os.close(handle)


def _kept(name: str, content: bytes) -> bytes:
    keep = KEEP.get(name)
    return content if keep is None else keep(content.decode(errors="replace")).encode()


def _run(tool: Tool, deadline_s: float) -> bytes | str:
    """What the tool printed, or why there is nothing."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    try:
        done = subprocess.run(
            tool.argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline_s,
            check=False,
            env=os.environ | {"PATH": path, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return f"{tool.argv[0]} is not installed"
    except subprocess.TimeoutExpired:
        return f"{tool.argv[0]} did not answer within {deadline_s:g} s"
    except OSError as error:
        return f"{tool.argv[0]}: {error.strerror or error}"
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        return f"{tool.argv[0]} failed with status {done.returncode}" + (f": {said[0][:200]}" if said else "")
    return done.stdout


def _read_archive(path: Path) -> dict[str, bytes]:
    """The members that the doctor reads. Bounded before it is parsed: an archive from elsewhere may be a bomb."""
    files: dict[str, bytes] = {}
    wanted = [_one_level(pattern) for pattern in (*FILES, *NAMES, f"{COMMANDS}/*.txt", MANIFEST)]
    try:
        with gzip.open(path) as packed:
            content = packed.read(MAX_ARCHIVE_BYTES + 1)
        if len(content) > MAX_ARCHIVE_BYTES:
            raise ConfigError(f"--root {path}: more than {MAX_ARCHIVE_BYTES:,} bytes; is it a snapshot of one host?")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for entry in archive:
                name = os.path.normpath(entry.name)
                stream = archive.extractfile(entry) if entry.isfile() else None
                if stream is not None and any(pattern.fullmatch(name) for pattern in wanted):
                    files[name] = _kept(name, stream.read(MAX_FILE_BYTES))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, OverflowError) as error:
        raise ConfigError(f"--root {path}: no archive of `bywash doctor --capture`, or damaged: {error}") from error
    return files


def _one_level(pattern: str) -> re.Pattern[str]:
    """A regular expression in which `*` does not cross a slash."""
    return re.compile("[^/]*".join(map(re.escape, pattern.split("*"))))


def _unread_of(manifest: bytes, path: str | Path) -> dict[str, str]:
    try:
        data = json.loads(manifest)
        if data["schema"] != _SCHEMA:
            raise ConfigError(f"--root {path}: {MANIFEST}: schema {data['schema']!r}, this bywash reads {_SCHEMA}")
        return {str(name): str(reason) for name, reason in data["unread"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--root {path}: {MANIFEST} is damaged; take the snapshot again, or delete that file: every absent file "
            "then counts as not seen"
        ) from error
