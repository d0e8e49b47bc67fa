"""Snapshots in and out: the live host, directories, archives; and files that are damaged or hostile."""

import gzip
import io
import os
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.doctor import Severity, Snapshot, examine, live, load, save
from bywash.doctor.collect import MAX_ARCHIVE_BYTES, MAX_FILE_BYTES
from bywash.doctor.facts.pci import gpus
from bywash.doctor.reads import FILES, KEEP, NAMES
from bywash.errors import ConfigError
from tests.doctor import hosts

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"


@pytest.fixture(scope="module")
def here():
    return live()


def unpacked(snapshot: Snapshot, root: Path) -> Path:
    save(snapshot, root / "host.tar.gz")
    with tarfile.open(root / "host.tar.gz") as archive:
        archive.extractall(root / "host", filter="data")
    return root / "host"


@pytest.mark.parametrize("kind", ["archive", "directory"])
def test_a_saved_snapshot_says_the_same(tmp_path, kind):
    files = hosts.healthy()
    hosts.acs_on(files, hosts.bridges()[2])
    del files["commands/mlnx_qos-ens1np0.txt"]
    why = {"commands/mlnx_qos-ens1np0.txt": "mlnx_qos is not installed"}
    first = Snapshot(files=hosts.snapshot(files).files, unread=why)
    directory = unpacked(first, tmp_path)
    second = load(directory if kind == "directory" else tmp_path / "host.tar.gz")
    assert (second.files, second.unread, second.complete) == (first.files, first.unread, True)
    assert examine(second).findings == examine(first).findings
    unknown = [f for f in examine(second).findings if f.severity is Severity.UNKNOWN]
    assert "mlnx_qos is not installed" in unknown[0].why


def test_the_same_snapshot_gives_the_same_bytes(tmp_path):
    for name in ("one.tgz", "two.tgz"):
        save(hosts.snapshot(hosts.healthy()), tmp_path / name)
    assert (tmp_path / "one.tgz").read_bytes() == (tmp_path / "two.tgz").read_bytes()


def test_this_host_and_its_capture(here, tmp_path):
    save(here, tmp_path / "here.tar.gz")
    again = load(tmp_path / "here.tar.gz")
    assert (again.files, again.unread) == (here.files, here.unread)
    assert examine(again).findings == examine(here).findings


def test_a_host_with_neither_rdma_nor_gpu_has_exactly_two_errors(here):
    if here.has("sys/class/infiniband") or gpus(here) or here.has("proc/driver/nvidia/version"):
        pytest.skip("this host has an RDMA device or a GPU")
    errors = {f.code for f in examine(here).findings if f.severity is Severity.ERROR}
    assert errors == {"no-rdma-device", "no-gpu"}
    others = {f.code for f in examine(here).findings} - errors
    assert others <= {"shm-small", "numa-balancing"}  # true of some hosts


def test_only_what_is_listed_is_kept(here, monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    taken = live()
    everything = b"\n".join(taken.files.values())
    assert b"hunter2" not in everything
    assert b"NCCL_DEBUG=WARN" in taken.files["commands/env.txt"]
    kept = KEEP["proc/cmdline"]("root=/dev/sda1 token=abc intel_iommu=on iommu=pt pci=noacs url=http://host")
    assert kept.split() == ["intel_iommu=on", "iommu=pt", "pci=noacs"]


def test_filters_are_fixed_points(here):
    for name, keep in KEEP.items():
        text = here.text(name)
        if text is not None:
            assert keep(text + "\n" if text else text).strip() == text


def test_the_page_lists_everything_that_is_read():
    page = DOCS.read_text()
    for pattern in (*FILES, *NAMES):
        assert f"/{pattern}" in page, f"docs/doctor.md does not list {pattern}"


def test_a_hand_made_directory_is_not_complete(tmp_path):
    (tmp_path / "proc" / "sys" / "kernel").mkdir(parents=True)
    (tmp_path / "proc" / "sys" / "kernel" / "numa_balancing").write_text("1\n")
    snapshot = load(tmp_path)
    assert not snapshot.complete
    findings = {f.code: f.severity for f in examine(snapshot).findings}
    assert findings.pop("numa-balancing") is Severity.WARNING
    assert set(findings.values()) == {Severity.UNKNOWN}


@pytest.mark.parametrize(
    "content",
    [b"", b"not an archive", gzip.compress(b"not a tar"), gzip.compress(b"x" * 5000)[:50]],
    ids=["empty", "text", "no tar", "cut off"],  # bytes hold the time, and two collections must agree
)
def test_no_archive(tmp_path, content):
    (tmp_path / "bad.tar.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.tar\.gz"):
        load(tmp_path / "bad.tar.gz")


@pytest.mark.parametrize("manifest", [b"{", b"[]", b'{"schema": 2, "unread": {}}', b'{"schema": 1}', b"\xff"])
def test_damaged_manifest(tmp_path, manifest):
    root = unpacked(hosts.snapshot(hosts.healthy()), tmp_path)
    (root / "doctor.json").write_bytes(manifest)
    with pytest.raises(ConfigError, match=r"doctor\.json"):
        load(root)


def test_nothing_there(tmp_path):
    with pytest.raises(ConfigError, match="no such"):
        load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="nothing in it"):
        load(tmp_path)


def test_links_and_pipes_in_a_snapshot_are_not_followed(tmp_path):
    (tmp_path / "secret").write_text("0")
    kernel = tmp_path / "host" / "proc" / "sys" / "kernel"
    kernel.mkdir(parents=True)
    (kernel / "numa_balancing").symlink_to(tmp_path / "secret")
    os.mkfifo(kernel / "osrelease")
    (tmp_path / "host" / "proc" / "meminfo").write_text("MemTotal: 1 kB\n")
    snapshot = load(tmp_path / "host")
    assert list(snapshot.files) == ["proc/meminfo"]
    assert "leads out" in snapshot.unread["proc/sys/kernel/numa_balancing"]
    assert "no regular file" in snapshot.unread["proc/sys/kernel/osrelease"]


def test_large_things_are_bounded(tmp_path):
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(bytes(MAX_ARCHIVE_BYTES + 1), 1))
    with pytest.raises(ConfigError, match="more than"):
        load(tmp_path / "bomb.tar.gz")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_bytes(b"MemTotal: 1 kB\n" * MAX_FILE_BYTES)
    assert len(load(tmp_path).files["proc/meminfo"]) <= MAX_FILE_BYTES


WHOLE = hosts.snapshot(hosts.healthy()).files
PATHS = sorted(WHOLE)


def spoil(content: bytes, kind: str, at: int, junk: bytes) -> bytes:
    at %= len(content) + 1
    return {
        "cut": content[:at],
        "junk": junk,
        "insert": content[:at] + junk + content[at:],
        "flip": _flip(content, at),
    }[kind]


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes(255 - b for b in content[at : at + 1]) + content[at + 1 :]


damage = st.dictionaries(
    st.sampled_from(PATHS),
    st.tuples(st.sampled_from(["cut", "junk", "insert", "flip", "gone"]), st.integers(0, 4000), st.binary(max_size=40)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=50, deadline=None)
@given(damage=damage, complete=st.booleans())
def test_garbled_files_never_give_a_traceback(damage, complete):
    files = dict(WHOLE)
    for path, (kind, at, junk) in damage.items():
        if kind == "gone":
            del files[path]
        else:
            files[path] = spoil(files[path], kind, at, junk)
    report = examine(Snapshot(files=files, complete=complete))
    assert report.exit_status in (0, 1)
    assert all(f.what and f.why for f in report.findings)


MUST_NOTICE = [
    path
    for path in PATHS
    if path.endswith(
        ("/state", "/rate", "/link_layer", "/mtu", "numa_balancing", "current_link_width", "limits", "mounts")
    )
    and "/device/net/" not in path
    and not any(bridge in path for bridge in hosts.bridges())
] + [path for path in PATHS if path.startswith(("commands/mlnx", "commands/nvidia"))]


@pytest.mark.parametrize("path", MUST_NOTICE)
def test_a_file_that_holds_nonsense_is_unknown_never_ok(path):
    report = examine(Snapshot(files=WHOLE | {path: b"\x00nonsense\xff"}))
    assert any(f.severity is Severity.UNKNOWN for f in report.findings), path


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["cut", "insert", "flip"]),
    at=st.integers(0, 1 << 20),
    junk=st.binary(max_size=20),
    raw=st.booleans(),
)
def test_garbled_archives_load_or_say_so(tmp_path, kind, at, junk, raw):
    buffer = io.BytesIO()
    save(hosts.snapshot(hosts.healthy()), tmp_path / "host.tar.gz")
    content = (tmp_path / "host.tar.gz").read_bytes()
    content = (
        gzip.compress(spoil(gzip.decompress(content), kind, at, junk), 1) if raw else spoil(content, kind, at, junk)
    )
    buffer.write(content)
    (tmp_path / "host.tar.gz").write_bytes(buffer.getvalue())
    with suppress(ConfigError):  # anything else is a traceback
        examine(load(tmp_path / "host.tar.gz"))


def test_a_tool_that_hangs_or_fails_is_unread(tmp_path, monkeypatch):
    for name, body in (("lspci", "sleep 60"), ("mlnx_qos", "echo no such device >&2; exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "did not answer within 0.2 s" in live(deadline_s=0.2).unread["commands/lspci.txt"]


def doctor(*options, cwd):
    command = [sys.executable, "-m", "bywash", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd)


def test_command_line(tmp_path):
    save(hosts.snapshot(hosts.healthy()), tmp_path / "good.tar.gz")
    spoilt = hosts.healthy() | {"proc/sys/kernel/numa_balancing": "1"}
    save(hosts.snapshot(spoilt), tmp_path / "bad.tar.gz")
    good = doctor("--root", "good.tar.gz", cwd=tmp_path)
    assert (good.returncode, good.stderr) == (0, "")
    assert "nothing wrong; 19 of 19 checks ok" in good.stdout
    bad = doctor("--root", "bad.tar.gz", "--json", "out.json", cwd=tmp_path)
    assert bad.returncode == 1
    assert "sysctl -w kernel.numa_balancing=0" in bad.stdout
    assert '"code": "numa-balancing"' in (tmp_path / "out.json").read_text()
    for options in (("--root", "absent"), ("--capture", "x.zip"), ("--capture", "x.tgz", "--root", "good.tar.gz")):
        refused = doctor(*options, cwd=tmp_path)
        assert refused.returncode == 2, options
        assert refused.stderr.startswith("bywash: --")
