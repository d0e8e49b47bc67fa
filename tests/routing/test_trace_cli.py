"""`bywash trace show` and `make`, and that reading a trace does not load torch."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import bywash.routing
from bywash.cli.trace import app
from bywash.errors import ConfigError, TraceError
from bywash.routing import RoutingTrace


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "d.trace"
    size = ["--experts", 24, "--topk", 2, "--layers", 3, "--tokens", 64, "--steps", 8, "--seed", 5]
    run("make", "--kind", "drifting", "--topics", 2, "--period", 4, *size, "--out", path)
    return path


@pytest.mark.parametrize(
    ("kind", "options", "note"),
    [
        ("uniform", [], "uniform"),
        ("zipf", ["--exponent", 1.5], "zipf exponent=1.5"),
        ("hot-set", ["--hot", 2, "--share", 0.25], "hot_set hot=2 share=0.25"),
        ("drifting", ["--topics", 3], "drifting topics=3 period=10 exponent=0.9"),
    ],
)
def test_make_writes_the_trace_it_was_asked_for(tmp_path, kind, options, note):
    path = tmp_path / "a.trace"
    size = ["--experts", 16, "--topk", 3, "--layers", 2, "--tokens", 5, "--steps", 4, "--seed", 9]
    said = run("make", "--kind", kind, *options, *size, "--out", path)
    trace = RoutingTrace.load(path)
    assert trace.note == note
    assert (trace.num_experts, trace.top_k, len(trace.layers), trace.tokens, trace.steps) == (16, 3, 2, 20, 4)
    assert trace.seed == 9
    assert note in said
    first = path.read_bytes()
    run("make", "--kind", kind, *options, *size, "--out", path)
    assert path.read_bytes() == first


def test_make_refuses_an_option_of_another_law(tmp_path):
    with pytest.raises(ConfigError, match="--hot = 3: kind zipf has no such option"):
        run("make", "--kind", "zipf", "--hot", 3, "--out", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_show_prints_layers_topics_and_a_headline(trace_file):
    text = run("show", trace_file, "--ranks", "4,5")
    assert text.startswith("3 layers x 24 experts, top-2, 512 tokens in 8 steps (0 prefill, 8 decode)")
    assert "the hottest expert gets" in text
    assert "EP5 busiest rank" in text
    for word in ("Zipf", "EP4", "drift", "topic-0", "topic-1"):
        assert word in text


def test_show_json_is_the_summary_and_nothing_else(trace_file, tmp_path):
    data = json.loads(run("show", trace_file, "--ranks", "4", "--json", "-"))
    assert [row["layer"] for row in data["layers"]] == [0, 1, 2]
    assert sum(row["assignments"] for row in data["layers"]) == 3 * 512 * 2
    assert sorted(data["topics"]) == ["topic-0", "topic-1"]
    assert (data["source"], data["seed"]) == ("generated", 5)
    run("show", trace_file, "--ranks", "4", "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == data


def test_show_takes_counts_and_skips_dense_layers(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": [[0, 0, 0, 0], [6, 1, 1, 0], [2, 2, 2, 2]]}))
    data = json.loads(run("show", path, "--ranks", "2,3", "--json", "-"))
    assert [row["layer"] for row in data["layers"]] == [1, 2]
    assert data["layers"][0]["hottest_over_mean"] == 3.0
    assert data["layers"][0]["busiest_rank_over_mean"] == {"2": 1.75, "3": 2.625}
    assert "2 layers x 4 experts (counts only)" in run("show", path)


@pytest.mark.parametrize("ranks", ["", "x", "4,0", "2;3", "99999999999"])
def test_show_refuses_wrong_ranks(trace_file, ranks):
    with pytest.raises(ConfigError, match="--ranks"):
        run("show", trace_file, "--ranks", ranks)


def test_show_names_what_it_cannot_read_or_write(trace_file, tmp_path):
    with pytest.raises(TraceError, match=r"none\.trace: cannot read it"):
        run("show", tmp_path / "none.trace")
    trace_file.write_bytes(trace_file.read_bytes()[:200])
    with pytest.raises(TraceError, match=r"d\.trace: damaged or cut short"):
        run("show", trace_file)
    (tmp_path / "c.json").write_text("[[1, 2]]")
    with pytest.raises(ConfigError, match=r"--json .*: its directory does not exist"):
        run("show", tmp_path / "c.json", "--json", tmp_path / "no" / "out.json")


def test_an_empty_trace_is_shown(tmp_path):
    from bywash.routing import TraceRecorder

    path = tmp_path / "e.trace"
    TraceRecorder(layers=[0], num_experts=4, top_k=1).finish().save(path)
    assert "no tokens" in run("show", path)


@pytest.mark.parametrize(
    ("size", "flag"),
    [
        (["--layers", 10**12], "--layers 1000000000000"),
        (["--tokens", 2**31], "tokens = 2147483648"),
        (["--kind", "drifting", "--topics", 10**12], "1000000000000 x --layers 4 x --experts"),
    ],
)
def test_make_refuses_what_does_not_fit(tmp_path, size, flag):
    with pytest.raises(ConfigError, match=flag):
        run("make", *size, "--out", tmp_path / "a")


def test_no_figure_is_a_dash(tmp_path):
    from bywash.routing import TraceRecorder

    (tmp_path / "c.json").write_text("[[1, 0], [2, 3]]")
    TraceRecorder(layers=[0], num_experts=4, top_k=1).finish().save(tmp_path / "e.trace")
    for file in ("c.json", "e.trace"):
        assert "nan" not in run("show", tmp_path / file).lower()


def test_reading_a_trace_does_not_load_torch():
    code = (
        "import sys, bywash.routing as r, bywash.cli.trace\n"
        "assert r.RoutingTrace and 'torch' not in sys.modules\n"
        "assert r.Gate and r.NO_EXPERT == -1 and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_exported_names():
    assert sorted(bywash.routing.__all__) == [
        "DECODE",
        "Gate",
        "NO_EXPERT",
        "PREFILL",
        "Routing",
        "RoutingTrace",
        "SHIPPED_TRACES",
        "SkewSummary",
        "TraceRecorder",
        "TraceShape",
        "contiguous_loads",
        "drifting",
        "hot_set",
        "load_counts",
        "merge_traces",
        "route",
        "shipped_trace",
        "summarise",
        "uniform",
        "zipf",
    ]
    for name in bywash.routing.__all__:
        assert getattr(bywash.routing, name) is not None
    with pytest.raises(AttributeError, match="nothing_here"):
        bywash.routing.nothing_here  # noqa: B018
