"""The skew summary against loops, known laws and the published figures of real models."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import ConfigError, TraceError
from bywash.routing import TraceShape, contiguous_loads, drifting, load_counts, summarise, uniform
from bywash.routing.summary import zipf_exponent
from tests.routing.trace_samples import small_trace

REAL_DATA = Path(__file__).parents[3] / "shared" / "data" / "routing"


def test_a_layer_by_hand():
    counts = np.array([[1, 7, 2, 0, 6]])
    summary = summarise(counts, ranks=(2, 3, 5, 7), layers=[9])
    assert summary.layers == (9,)
    assert summary.max_over_mean_L[0] == pytest.approx(7 / 3.2)
    assert (summary.hottest_L[0], summary.unused_L[0], summary.total_L[0]) == (1, 1, 16)
    assert summary.top1_share_L[0] == summary.top10pct_share_L[0] == pytest.approx(7 / 16)
    # loads: [1+7+2, 0+6], [1+7, 2+0, 6], each alone, each alone and two ranks without experts
    assert summary.rank_max_over_mean_Ln[0] == pytest.approx([10 / 8, 8 / (16 / 3), 7 / 3.2, 7 / (16 / 7)])
    # 4 used experts, so the fit runs through the first 2 points
    assert summary.zipf_L[0] == pytest.approx(np.log(7 / 6) / np.log(2))
    assert summary.drift_L is None


def test_layers_without_counts_have_no_figures():
    summary = summarise(np.array([[0, 0], [4, 0], [2, 2]]))
    assert np.isnan(summary.max_over_mean_L).tolist() == [True, False, False]
    assert np.isnan(summary.zipf_L).tolist() == [True, True, False]
    assert summary.zipf_L[2] == 0
    first = json.loads(json.dumps(summary.as_dict(), allow_nan=False))["layers"][0]
    assert first["hottest_over_mean"] is None
    assert first["busiest_rank_over_mean"] == {"2": None, "4": None, "8": None}


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_contiguous_placement_against_a_loop(experts, ranks, seed):
    counts = np.random.default_rng(seed).integers(0, 1000, (3, experts))
    loads, start = np.zeros((3, ranks), int), 0
    for rank in range(ranks):
        stop = start + experts // ranks + (1 if rank < experts % ranks else 0)
        for expert in range(start, stop):
            loads[:, rank] += counts[:, expert]
        start = stop
    assert start == experts
    assert np.array_equal(contiguous_loads(counts, ranks), loads)


@pytest.mark.parametrize("experts", [4, 9, 64, 255])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.3])
def test_an_exact_power_law_is_fitted_exactly(experts, exponent):
    ranks = np.arange(1, experts + 1)
    counts = np.stack([ranks**-exponent, (ranks * 7.0) ** -exponent])
    shuffled = np.random.default_rng(1).permuted(counts, axis=1)
    assert zipf_exponent(shuffled) == pytest.approx([exponent, exponent], abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_the_fit_against_polyfit(experts, seed):
    counts = np.random.default_rng(seed).integers(0, 6, (1, experts))
    used = np.sort(counts[counts > 0])[::-1]
    fitted = zipf_exponent(counts)[0]
    if used.size < 2:
        assert np.isnan(fitted)
        return
    n = max(2, used.size // 2)
    slope = np.polyfit(np.log(np.arange(1, n + 1)), np.log(used[:n]), 1)[0]
    assert fitted == pytest.approx(-slope, abs=1e-9)


def test_drift_of_a_still_router_is_what_chance_gives():
    trace = uniform(TraceShape(num_experts=64, top_k=1, layers=3, tokens=400, steps=32), seed=3)
    summary = summarise(trace)
    assert summary.window_steps == 4
    assert summary.drift_L == pytest.approx(summary.drift_noise_L, rel=0.1)


def test_drift_sees_a_change_of_topic():
    shape = TraceShape(num_experts=64, top_k=2, layers=2, tokens=400, steps=20)
    summary = summarise(drifting(shape, topics=2, period=5, seed=0, exponent=1.2), window_steps=5)
    assert (summary.drift_L > 5 * summary.drift_noise_L).all()
    still = summarise(drifting(shape, topics=1, period=5, seed=0, exponent=1.2), window_steps=5)
    assert (still.drift_L < 1.3 * still.drift_noise_L).all()


def test_drift_by_hand_and_its_windows():
    summary = summarise(small_trace(step_phase_S=np.zeros(3, np.uint8)), window_steps=1)
    # two windows: the empty step makes none
    trace = small_trace()
    first, second = trace.counts_SLE()[0] / 9, trace.counts_SLE()[2] / 6
    assert summary.drift_L == pytest.approx(np.abs(first - second).sum(axis=1) / 2)
    # of both phases only the decode steps count, and there is one
    assert summarise(trace).drift_L is None


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: summarise(np.ones((2, 4)), ranks=(0,)), "ranks = 0"),
        (lambda: summarise(np.ones(4), layers=[0]), "counts: shape"),
        (lambda: summarise(np.ones((2, 4)), layers=[0]), "counts: shape"),
        (lambda: summarise(np.array([[1, -1]])), "counts: must be"),
        (lambda: summarise(np.array([[1, np.nan]])), "counts: must be"),
        (
            lambda: summarise(uniform(TraceShape(num_experts=4, top_k=1), seed=0), window_steps=0),
            "window_steps",
        ),
    ],
)
def test_wrong_questions_are_refused(call, field):
    with pytest.raises(ConfigError, match=field):
        call()


def test_counts_files(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": [[0.0, 0.0], [3.0, 1.0], [0, 2]]}))
    layers, counts = load_counts(path)
    assert layers == (1, 2)
    assert counts.tolist() == [[3.0, 1.0], [0.0, 2.0]]
    path.write_text("[[1, 2, 3]]")
    assert load_counts(path)[1].tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"counts": 1}', "logical_count: must be a list"),
        ("[]", "counts: must be a list"),
        ("[[1, 2], [1]]", r"counts\[1\]: has 1 experts, layer 0 has 2"),
        ("[[1, -2]]", r"counts\[0\]"),
        ("[[1, true]]", r"counts\[0\]"),
        ("[[1, NaN]]", r"counts\[0\]"),
        ("[[1], 3]", r"counts\[1\]"),
        ("[[0, 0]]", "all counts are zero"),
        ("[[1, Infinity]]", r"counts\[0\]"),
        ("[[1e308, 1e308]]", r"counts\[0\]"),
        ("[[1e-320, 0]]", r"counts\[0\]"),
        ("[[1" + "0" * 400 + "]]", r"counts\[0\]"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_wrong_counts_file_is_named(tmp_path, text, message):
    path = tmp_path / "counts.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=rf"counts\.json: .*{message}"):
        load_counts(path)


def _real_counts() -> dict[tuple[str, str], np.ndarray]:
    """The counts that are kept beside the published figures, by (dataset, layer)."""
    found = {}
    for file in sorted((REAL_DATA / "sglang_deepseek_v3_ep_statistics").glob("*.json")):
        layers, counts = load_counts(file)
        found.update({(f"deepseek-v3 sglang {file.stem}", str(n)): c for n, c in zip(layers, counts)})
    for file in sorted((REAL_DATA / "olmoe_expert_counts").glob("*.json")):
        data = json.loads(file.read_text())
        found.update({(file.stem, f"L{i}"): np.array(c) for i, c in enumerate(data["counts"])})
    with np.load(REAL_DATA / "llama4_mmlu_traces" / "llama4_mmlu_top1.npz", allow_pickle=False) as data:
        for layer, tokens in zip(data["layers"], data["tokens"]):
            found[("llama4-maverick mmlu(3 subjects)", str(layer))] = np.bincount(tokens, minlength=128)
    return found


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="the recorded counts of real models are not beside this tree")
def test_published_figures_of_real_models():
    """Every row of the CSV whose counts are at hand: all figures to the four digits it gives."""
    counts = _real_counts()
    with open(REAL_DATA / "per_layer_skew.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["dataset"], row["layer"]) in counts]
    assert len(rows) >= 600
    sizes = (2, 4, 8, 16, 32, 64)
    for row in rows:
        summary = summarise(counts[row["dataset"], row["layer"]][None], sizes)
        figures = {
            "maxmean": summary.max_over_mean_L,
            "top1": summary.top1_share_L,
            "top10pct": summary.top10pct_share_L,
            "zipf": summary.zipf_L,
            "total": summary.total_L,
        }
        figures |= {f"gpu_maxmean_ep{r}": x for r, x in zip(sizes, summary.rank_max_over_mean_Ln.T)}
        for name, value in figures.items():
            if row[name]:
                assert value[0] == pytest.approx(float(row[name]), abs=5.1e-5), (
                    row["dataset"],
                    row["layer"],
                    name,
                )
