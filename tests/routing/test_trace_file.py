"""The trace file: round trip, same bytes, and an error that helps for every kind of damage."""

import io
import json
import os
import time
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import TraceError
from bywash.routing import RoutingTrace, TraceShape, zipf
from tests.routing.trace_samples import EXPERTS, REPEATED, TOP_K, assert_same, small_trace


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.trace"


def _rewrite(path, *, drop=(), arrays=(), **header_changes):
    """Write the file again with some members dropped or replaced and some header fields changed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members["header.json"])
    header.update(header_changes)
    members["header.json"] = json.dumps(header).encode()
    for name, array in dict(arrays).items():
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=array.dtype.hasobject)
        members[f"{name}.npy"] = buffer.getvalue()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            if name not in drop:
                archive.writestr(name, content)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights_NLK": np.linspace(0, 1, 5 * 2 * TOP_K, dtype=np.float16).reshape(5, 2, TOP_K)},
        {"topics": ("Recht", "Künstliche Intelligenz"), "model": "m", "note": "two\nlines"},
        {"source": "generated", "seed": 2**70},
        {"num_experts": 400, "ids_NLK": small_trace().ids_NLK.astype(np.uint16) * 33},
    ],
    ids=["plain", "weights", "labels", "generated", "uint16"],
)
def test_round_trip(path, changes):
    trace = small_trace(**changes)
    trace.save(path)
    assert_same(RoutingTrace.load(path), trace)
    assert os.listdir(path.parent) == [path.name]


def test_an_empty_trace_round_trips(path):
    empty = RoutingTrace(
        ids_NLK=np.zeros((0, 1, 2), np.uint8),
        step_tokens_S=np.zeros(0, np.int32),
        step_phase_S=np.zeros(0, np.uint8),
        token_prompt_N=np.zeros(0, np.int32),
        token_position_N=np.zeros(0, np.int32),
        layers=(0,),
        num_experts=4,
    )
    empty.save(path)
    assert_same(RoutingTrace.load(path), empty)


def test_same_content_same_bytes(path, monkeypatch):
    small_trace().save(path)
    first = path.read_bytes()
    monkeypatch.setattr(time, "time", lambda: 2e9)
    monkeypatch.setattr(time, "localtime", lambda *_: (2033, 5, 18, 0, 0, 0, 0, 0, 0))
    again = path.with_name("b.trace")
    RoutingTrace.load(path).save(again)
    assert again.read_bytes() == first


def test_numpy_reads_the_arrays(path):
    trace = small_trace()
    trace.save(path)
    with np.load(path, allow_pickle=False) as arrays:
        assert np.array_equal(arrays["ids_NLK"], trace.ids_NLK)
        assert json.loads(bytes(arrays["header.json"]))["schema"] == "bywash.routing_trace"


def test_the_file_is_compact(path):
    trace = zipf(TraceShape(num_experts=64, top_k=8, layers=4, tokens=256, steps=8), exponent=1.0, seed=0)
    trace.save(path)
    assert path.stat().st_size < trace.ids_NLK.nbytes


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    small_trace().save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraceError, match=r"a\.trace: cannot write the trace: No space left"):
        small_trace(model="new").save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_reader_of_the_old_file_keeps_it_whole(path):
    small_trace().save(path)
    before = path.read_bytes()
    with open(path, "rb") as reader:
        small_trace(model="new").save(path)
        assert reader.read() == before
    assert RoutingTrace.load(path).model == "new"


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none/a\.trace: cannot write the trace: No such file"):
        small_trace().save(tmp_path / "none" / "a.trace")
    with pytest.raises(TraceError, match=r"absent\.trace: cannot read the trace: No such file"):
        RoutingTrace.load(tmp_path / "absent.trace")
    with pytest.raises(TraceError, match="cannot read the trace"):
        RoutingTrace.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "other"}, "schema = 'other'"),
        ({"version": 2}, "version = 2, this bywash reads version 1; read it with the bywash that wrote it"),
        ({"version": True}, "version = True"),
        ({"num_experts": "12"}, "num_experts = '12'"),
        ({"num_experts": EXPERTS - 7}, r"ids_NLK\[\d, \d\] = .*must be distinct experts 0\.\.4"),
        ({"layers": [3, 7, 8]}, "ids_NLK: shape"),
        ({"layers": [3, 7.5]}, "layers: must hold only int"),
        ({"layers": None}, "layers = None"),
        ({"topics": [1]}, "topics: must hold only str"),
        ({"tokens": 6}, "tokens = 6, but the arrays hold 5"),
        ({"steps": 1}, "steps = 1, but the arrays hold 3"),
        ({"top_k": 2}, "top_k = 2, but the arrays hold 3"),
        ({"seed": "x"}, "seed = 'x'"),
        ({"source": "generated"}, "seed = None"),
        ({"weights": True}, r"weights_NLK\.npy: is missing"),
        ({"drop": ["header.json"]}, r"header\.json: is missing"),
        ({"drop": ["token_prompt_N.npy"]}, r"token_prompt_N\.npy: is missing"),
        ({"arrays": {"ids_NLK": REPEATED}}, r"ids_NLK\[0, 0\] = \[0, 0, 0\]"),
        ({"arrays": {"step_tokens_S": np.array([3, 0, 1], np.int32)}}, "step_tokens_S: sums to 4"),
        ({"arrays": {"step_tokens_S": np.array([3.0, 0, 2])}}, "step_tokens_S: is float64"),
        ({"arrays": {"token_prompt_N": np.zeros(4, np.int32)}}, "token_prompt_N: is int32"),
        ({"arrays": {"token_prompt_N": np.array([None] * 5)}}, r"token_prompt_N\.npy: claims object"),
    ],
)
def test_a_wrong_field_is_named(path, changes, message):
    small_trace().save(path)
    _rewrite(path, **changes)
    with pytest.raises(TraceError, match=rf"a\.trace: .*{message}"):
        RoutingTrace.load(path)


def test_unknown_members_and_fields_are_ignored(path):
    small_trace().save(path)
    _rewrite(path, arrays={"later_N": np.zeros(5)}, later="field")
    assert_same(RoutingTrace.load(path), small_trace())


def test_an_array_that_claims_more_than_it_holds(path):
    small_trace().save(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["ids_NLK.npy"] = members["ids_NLK.npy"].replace(b"(5, 2, 3)", b"(9999999, 9999, 3)")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(TraceError, match=r"a\.trace: ids_NLK\.npy"):
        RoutingTrace.load(path)


def test_an_array_of_objects_is_refused_by_its_dtype(path):
    small_trace().save(path)
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|O", "fortran_order": False, "shape": (5,)})
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["token_prompt_N.npy"] = buffer.getvalue() + bytes(40)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(TraceError, match=r"a\.trace: token_prompt_N\.npy: claims object"):
        RoutingTrace.load(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"[[1, 2]]", b"PK\x03\x04 not really"])
def test_other_files_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"a\.trace: .*copy it again"):
        RoutingTrace.load(path)


def test_every_truncation_is_found(path):
    small_trace().save(path)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(TraceError, match=r"a\.trace: .*cut short"):
            RoutingTrace.load(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_byte_never_passes_unseen(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "a.trace"
    trace = small_trace(weights_NLK=np.full((5, 2, TOP_K), 0.5, np.float16), topics=("a", "b"))
    trace.save(path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        loaded = RoutingTrace.load(path)
    except TraceError as error:
        message = str(error)
    else:  # the byte was one that means nothing, such as a time stamp
        assert_same(loaded, trace)
        return
    assert message.startswith(str(path))
