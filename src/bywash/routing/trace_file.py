"""The routing trace file: one zip that `numpy.load` reads too, with a JSON header.

Knows nothing of how a trace is made or used. `RoutingTrace.save` and `.load` call it; the
schema is documented in `docs/routing-trace.md`.

The writer fixes all that zip leaves open (time stamps, order, permissions), so the same trace gives the same
bytes under the same zlib. The reader trusts nothing: no pickle, every array's size is checked before it is
used, and all damage becomes a `TraceError` naming the file and the member.
"""

import io
import json
import os
import struct
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bywash.errors import TraceError
from bywash.routing.trace import Array, RoutingTrace

SCHEMA = "bywash.routing_trace"
VERSION = 1

_HEADER = "header.json"
_ARRAYS = ("ids_NLK", "step_tokens_S", "step_phase_S", "token_prompt_N", "token_position_N")
_WEIGHTS = "weights_NLK"
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can name
_AGAIN = "copy it again from where it was made, or record it anew"

# What zipfile, zlib and numpy raise on bytes that are no archive or a broken one.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    OSError,
)


def save(trace: RoutingTrace, path: Path) -> None:
    """Write the trace to `path` through a temporary file beside it. Raises `TraceError` when that fails."""
    if not path.name:
        raise TraceError(f"{str(path)!r}: cannot write the trace: give the name of a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: cannot write the trace: there is a directory or device of this name")
        with open(temporary, "wb") as file:
            _write(trace, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise TraceError(f"{path}: cannot write the trace: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def load(path: Path) -> RoutingTrace:
    """Read and check a trace file. Raises `TraceError` naming the file, the field and what to do."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise TraceError(f"{path}: cannot read the trace: {error.strerror or error}") from error
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return _read(archive)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except _DAMAGE as error:
        what = "not a routing trace (no zip archive), or cut short"
        if content[:2] == b"PK":
            what = "damaged or cut short"
        raise TraceError(f"{path}: {what} ({error}); {_AGAIN}") from error


def _write(trace: RoutingTrace, file: io.BufferedWriter) -> None:
    header = {
        "schema": SCHEMA,
        "version": VERSION,
        "source": trace.source,
        "seed": trace.seed,
        "model": trace.model,
        "note": trace.note,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "layers": list(trace.layers),
        "tokens": trace.tokens,
        "steps": trace.steps,
        "topics": list(trace.topics),
        "weights": trace.weights_NLK is not None,
    }
    with zipfile.ZipFile(file, "w") as archive:
        _add(archive, _HEADER, (json.dumps(header, indent=1) + "\n").encode())
        for name in (*_ARRAYS, _WEIGHTS):
            array = getattr(trace, name)
            if array is not None:
                _add(archive, f"{name}.npy", _npy_bytes(array))


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=_ZIP_EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3  # else the writing system's number, which differs between Windows and the rest
    info.external_attr = 0o644 << 16
    archive.writestr(info, content, compresslevel=6)


def _npy_bytes(array: Array) -> bytes:
    buffer = io.BytesIO()
    little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    np.lib.format.write_array(buffer, little_endian, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def _read(archive: zipfile.ZipFile) -> RoutingTrace:
    header = _read_header(archive)
    names = (*_ARRAYS, _WEIGHTS) if _field(header, "weights", bool) else _ARRAYS
    arrays = {name: _read_array(archive, name) for name in names}
    seed = header.get("seed")
    if seed is not None and type(seed) is not int:
        raise TraceError(f"{_HEADER}: seed = {seed!r}: must be an integer or null; {_AGAIN}")
    trace = RoutingTrace(
        **arrays,
        layers=tuple(_items(header, "layers", int)),
        num_experts=_field(header, "num_experts", int),
        model=_field(header, "model", str),
        note=_field(header, "note", str),
        topics=tuple(_items(header, "topics", str)),
        source=_field(header, "source", str),
        seed=seed,
    )
    for name in ("tokens", "steps", "top_k"):
        if _field(header, name, int) != getattr(trace, name):
            raise TraceError(
                f"{_HEADER}: {name} = {header[name]}, but the arrays hold {getattr(trace, name)}; {_AGAIN}"
            )
    return trace


def _read_header(archive: zipfile.ZipFile) -> dict[str, Any]:
    try:
        header = json.loads(_member(archive, _HEADER))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{_HEADER}: is not JSON ({error}); {_AGAIN}") from error
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        found = header.get("schema") if isinstance(header, dict) else None
        raise TraceError(f"{_HEADER}: schema = {found!r}, must be {SCHEMA!r}: this is another kind of file")
    version = header.get("version")
    if version != VERSION or type(version) is not int:
        raise TraceError(
            f"{_HEADER}: version = {version!r}, this bywash reads version {VERSION}; read it with the bywash "
            "that wrote it, or record it anew"
        )
    return header


def _field(header: dict[str, Any], name: str, kind: type) -> Any:
    value = header.get(name)
    if type(value) is not kind:  # bool is an int to isinstance
        raise TraceError(f"{_HEADER}: {name} = {value!r}: must be {kind.__name__}; {_AGAIN}")
    return value


def _items(header: dict[str, Any], name: str, kind: type) -> list[Any]:
    values: list[Any] = _field(header, name, list)
    if any(type(value) is not kind for value in values):
        raise TraceError(f"{_HEADER}: {name}: must hold only {kind.__name__}; {_AGAIN}")
    return values


def _read_array(archive: zipfile.ZipFile, name: str) -> Array:
    content = _member(archive, f"{name}.npy")
    stream = io.BytesIO(content)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("unknown .npy version")
        shape, column_order, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise TraceError(f"{name}.npy: is no numpy array ({error}); {_AGAIN}") from error
    # Numpy would allocate what the header claims; compare with what is there before believing it.
    claimed = dtype.itemsize
    for length in shape:
        claimed *= length
    if dtype.hasobject or column_order or claimed != len(content) - stream.tell():
        raise TraceError(
            f"{name}.npy: claims {dtype} {list(shape)}, {claimed} bytes, but holds "
            f"{len(content) - stream.tell()}; {_AGAIN}"
        )
    array: Array = np.frombuffer(content, dtype, offset=stream.tell()).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    if name not in archive.namelist():
        raise TraceError(f"{name}: is missing from the file; it is another kind of file, or {_AGAIN}")
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TraceError(f"{name}: compressed in a way ({info.compress_type}) no trace uses; {_AGAIN}")
    try:
        return archive.read(info)
    except _DAMAGE as error:
        raise TraceError(f"{name}: damaged or cut short ({error}); {_AGAIN}") from error
