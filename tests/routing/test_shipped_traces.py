import numpy as np
import pytest

from bywash.cli.main import app
from bywash.errors import TraceError
from bywash.routing import DECODE, PREFILL, SHIPPED_TRACES, shipped_trace, summarise


@pytest.mark.parametrize("name", SHIPPED_TRACES)
def test_shipped_traces_are_whole_runs_of_the_shipped_model(name):
    trace = shipped_trace(name)
    assert (trace.model, trace.num_experts, trace.top_k, len(trace.layers)) == ("bywash-tiny", 32, 4, 8)
    assert trace.source == "recorded"
    assert trace.step_phase_S.tolist() == [PREFILL] + [DECODE] * 95
    assert set(trace.topics) == ({"prose", "code", "tables"} if name == "mixed" else {name})
    assert trace.weights_NLK is not None
    sums = trace.weights_NLK.astype(np.float32).sum(axis=2)
    assert np.abs(sums - 1).max() < 5e-3  # norm_topk_prob, kept as float16
    assert trace.counts_LE().sum() == trace.tokens * 4 * 8


def test_hot_experts_differ_by_topic():
    """The skew is real: topics move more load than two halves of one topic do."""
    loads = {name: shipped_trace(name).counts_LE() for name in ("prose", "code", "tables")}
    shares = {name: load / load.sum(axis=1, keepdims=True) for name, load in loads.items()}

    def moved(a, b):
        return 0.5 * np.abs(shares[a] - shares[b]).sum(axis=1).mean()

    assert min(moved("prose", "code"), moved("prose", "tables"), moved("code", "tables")) > 0.1
    assert summarise(loads["prose"]).as_dict()["layers"]
    for name, load in loads.items():
        assert (load.max(axis=1) / load.mean(axis=1)).mean() > 1.5, name


def test_unknown_names_are_refused():
    with pytest.raises(TraceError, match="choose one of prose, code, tables, mixed"):
        shipped_trace("poetry")


def test_show_knows_them_by_name(capsys):
    app(["trace", "show", "mixed"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "recorded from bywash-tiny" in out
    assert "prose" in out
    assert "tables" in out
