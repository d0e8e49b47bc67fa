"""`bywash bench layer`, small: every schedule measured, nothing wrong, and figures that fit together."""

import json

import pytest

from bywash.cli.bench_layer import parse_splits
from bywash.cli.main import app
from bywash.errors import ConfigError
from bywash.moe.pipeline import Split

SIZES = ["--layers", "3", "--hidden", "64", "--intermediate", "512", "--heads", "4", "--sequences", "6"]
SMALL = [*SIZES, "--sequence", "16", "--rounds", "2"]


@pytest.mark.parametrize("combine", ["exact", "stable"])
def test_bench_layer_measures_every_schedule_and_finds_nothing_wrong(tmp_path, combine):
    files = [tmp_path / "b.json", tmp_path / "t.json"]
    options = ["--combine", combine, "--splits", "2x1,1x2", "--json", str(files[0]), "--timeline", str(files[1])]
    app(["bench", "layer", *SMALL, "--shared", "--link", "100Mbps", *options], standalone_mode=False)
    document, timeline = (json.loads(file.read_text()) for file in files)
    assert document["emulated"] == timeline["otherData"]["emulated"] == "emulated link: 0.1 Gb/s, 20 us"
    rows, bars = document["rows"], [e for e in timeline["traceEvents"] if e["ph"] == "X"]
    assert [row["schedule"] for row in rows] == ["serial", "2 micro-batches", "2 chunks"]
    for number, row in enumerate(rows):
        sent = [sum(e["args"]["bytes"] for e in bars if e["pid"] == 2 * number + rank) for rank in range(2)]
        least_ms = max(sent) * 8 / 0.1e9 * 1e3  # the link sleeps that long, however fast or slow the machine
        assert 0 < least_ms < min(row["step_ms"], row["communication_alone_ms"])
        assert row["wrong"] == 0
        ideal = max(row["compute_alone_ms"], row["communication_alone_ms"])
        assert row["step_over_ideal"] == pytest.approx(row["step_ms"] / ideal, rel=0.01)
        assert row["faster_than_serial"] == pytest.approx(rows[0]["step_ms"] / row["step_ms"], rel=0.01)
    assert rows[0]["hidden_share"] == 0
    assert rows[1]["hidden_share"] > 0
    names = [e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "process_name"]
    assert names[:3] == ["serial, rank 0", "serial, rank 1", "2 micro-batches, rank 0"]


@pytest.mark.parametrize("text", ["0x1", "2x0", "7x1", "2x33", "1000x1", "1x65", "1x1,99x1"])
def test_splits_that_no_step_can_have_are_refused_at_once(text):
    """1000x1 took ten minutes to order."""
    with pytest.raises(ConfigError, match=f"^--splits {text.split(',')[-1]}: give at least 1 of each, at most as many"):
        parse_splits(text, 6)
    assert parse_splits("6x1, 2x32", 6) == (Split(lanes=6), Split(lanes=2, chunks=32))


@pytest.mark.slow  # other work moves both figures between calibration and measurement
def test_the_link_is_set_so_that_communication_takes_as_long_as_compute(tmp_path):
    file = tmp_path / "b.json"
    app(["bench", "layer", *SMALL, "--splits", "2x1", "--json", str(file)], standalone_mode=False)
    document = json.loads(file.read_text())
    assert document["emulated"].startswith("emulated link: ")
    serial = document["rows"][0]
    assert 0.2 < serial["communication_alone_ms"] / serial["compute_alone_ms"] < 5
