"""Validation: what is fitted, what is held out, and that public tables are read as they are meant."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bywash.cli.main import app
from bywash.errors import ConfigError
from bywash.planner.validate import aic, tables, validate
from bywash.planner.validate.deepep import Measured, Rates, deepep_checks, predict, reference_lines, uniform_choices
from bywash.planner.validate.own import own_checks
from bywash.planner.validate.points import Check, by_regime, order, spread
from bywash.planner.validate.serving import fit_weights, merged, noise_of, serving_checks
from bywash.planner.validate.text import OWN_TARGET, held_out, validation_text

TRUE = Rates(
    nic_gbps=200.0,
    peer={"low-latency": 0.5, "normal": 0.8},
    dispatch_us={"low-latency": 15.0, "normal": 30.0},
    combine_us={"low-latency": 12.0, "normal": 50.0},
    node_us={"low-latency": 25.0, "normal": 8.0},
)
COLUMNS = [
    "id",
    "silicon_data_source",
    "backend",
    "model_path",
    "system",
    "precision",
    "mode",
    "isl",
    "osl",
    "batch_size",
    "tp_size",
    "attention_dp_size",
    "moe_tp_size",
    "moe_ep_size",
    "silicon_ttft_ms",
    "silicon_tpot_ms",
]


def _world(nodes=(1, 2, 4, 8)):
    """Tables of a world in which the planner's lines are true at `TRUE`."""
    made = []
    for mode in ("low-latency", "normal"):
        for half in ("dispatch", "combine"):
            for n in nodes:
                for tokens in (2, 16, 128, 512, 4096):
                    one = Measured(mode=mode, half=half, nodes=n, experts=256, tokens=tokens, us=1.0)
                    made.append(replace(one, us=predict(one, TRUE)))
    return made


def _row(**changes):
    usual = {
        "silicon_data_source": "x; silicon_concurrency=16; y", "backend": "trtllm", "model_path": "openai/gpt-oss-120b",
        "system": "h200_sxm", "precision": "fp4", "mode": "agg", "isl": "1024", "osl": "1024", "batch_size": "16",
        "tp_size": "2.0", "attention_dp_size": "1.0", "moe_tp_size": "1.0", "moe_ep_size": "2.0",
        "silicon_tpot_ms": "8.0",
    }  # fmt: skip
    return dict.fromkeys(COLUMNS, "") | usual | changes


def test_a_world_of_known_rates_is_found_again():
    checks, rates = deepep_checks(_world())
    assert rates.nic_gbps == pytest.approx(TRUE.nic_gbps, rel=0.05)
    away = held_out(checks)
    assert {regime.split(", ")[1] for regime in by_regime(away)} == {"4 nodes", "8 nodes"}
    assert spread([one.error for one in away]).median < 0.03
    assert all(one.fitted == ("1 node" in one.regime or "2 nodes" in one.regime) for one in checks)


def test_held_out_points_do_not_move_the_fit():
    honest = _world()
    wild = [replace(one, us=one.us * 7) if one.nodes > 2 else one for one in honest]
    assert deepep_checks(wild)[1] == deepep_checks(honest)[1]
    with pytest.raises(ConfigError, match="1 or 2 nodes"):
        deepep_checks(_world(nodes=(4,)))


def test_lines_send_the_rows_that_deepep_sends():
    """Of 8 choices half go to the other of two nodes, a row each; of 8 nodes 7/8 of them."""
    for nodes, away in ((2, 4.0), (8, 7.0)):
        line = reference_lines("low-latency", nodes, 256).dispatch
        rows_us = away * (7168 + 56 * 4 + 64) * 8e-3 / 400 / (nodes * 8)  # a token's share of each NIC at 400 Gb/s
        assert line.network_us == pytest.approx(rows_us, rel=0.15)  # headers, and the busiest of the NICs
        assert line.network_us > rows_us


def test_uniform_choices_are_distinct_and_within_four_nodes():
    ids_NK = uniform_choices(64, 256, 8, 8, 4).ids_NLK[:, 0]
    assert all(len(set(row)) == 8 for row in ids_NK.tolist())
    nodes = [len(set(row)) for row in (ids_NK // 32).tolist()]
    assert max(nodes) == 4
    assert np.bincount(ids_NK.ravel(), minlength=256).min() > 60  # of 128 on average


def test_our_own_figures_keep_their_target():
    checks = own_checks()
    assert spread([one.error for one in checks]).median <= OWN_TARGET
    assert spread([one.error for one in checks]).most < 0.2
    assert spread([one.error for one in checks if "layer" in one.regime]).most <= OWN_TARGET


def test_copies_are_one_point_and_repeats_are_noise():
    skipped = {}
    rows = [
        _row(),
        _row(tp_size="4.0", moe_tp_size="2.0"),  # the same two devices, written as their square
        _row(silicon_tpot_ms="10.0"),
        _row(silicon_data_source="", tp_size="1.0", attention_dp_size="2.0", batch_size="8"),  # 8 on each of two
        _row(attention_dp_size="", moe_tp_size="2.0"),  # split experts
        _row(model_path="other/model"),
        _row(precision="int4"),
        _row(silicon_tpot_ms=""),
    ]
    points = merged(rows, skipped)
    assert [(p.devices, p.tp, p.concurrency, p.repeats, p.tpot_ms) for p in points] == [
        (2, 2, 16, (8.0, 10.0), 9.0),
        (2, 1, 16, (8.0,), 8.0),
    ]
    assert sum(skipped.values()) == 4
    assert any("moe_tp" in why for why in skipped)


@given(st.floats(0.0, 5.0), st.floats(0.2, 4.0), st.floats(0.2, 4.0))
def test_weights_are_found_again(start, step, prompts):
    parts = [(1.0, 0.1), (2.0, 2.0), (4.0, 0.5), (8.0, 9.0), (16.0, 1.0), (32.0, 40.0)]
    measured = [start + step * a + prompts * b for a, b in parts]
    found = fit_weights(parts, measured)
    fitted = [found[0] + found[1] * a + found[2] * b for a, b in parts]
    assert fitted == pytest.approx(measured, rel=0.05)


def test_few_points_get_one_factor():
    assert fit_weights([], []) == (0.0, 1.0, 1.0)
    assert fit_weights([(1.0, 1.0), (2.0, 2.0)], [3.0, 6.0]) == pytest.approx((0.0, 1.5, 1.5))


def test_noise_is_of_values_under_one_key():
    rows = [_row(silicon_tpot_ms="8.0"), _row(silicon_tpot_ms="12.0"), _row(isl="8192")]
    assert noise_of(merged(rows, {})).count == 2
    assert noise_of(merged(rows, {})).median == pytest.approx(0.2)


@pytest.fixture(scope="module")
def served():
    rows = [
        _row(silicon_data_source=f"silicon_concurrency={n}", isl=isl, silicon_tpot_ms=f"{5 + n / 8}")
        for n in (2, 4, 8, 16, 32, 64, 128) for isl in ("1024", "8192")
    ]  # fmt: skip
    return serving_checks(
        [*rows, _row(mode="disagg"), _row(moe_ep_size="1.0")], lambda p: 3.0, on_point=lambda d, t: None
    )


def test_serving_points_are_split_and_judged_on_the_other_half(served):
    assert (served.rows, served.points) == (14, 14)
    assert 0 < len(served.scaled) < len(served.raw)
    judged = {(one.regime, one.name) for one in served.scaled}
    assert judged < {(one.regime, one.name) for one in served.raw}
    times = [one.predicted for one in served.raw if "1024+1024" in one.name]
    assert times == sorted(times)  # more sequences, longer steps
    prompts = {one.name: one.predicted for one in served.raw}
    assert prompts["2 devices, tp 2, 8192+1024, 64 at once"] > prompts["2 devices, tp 2, 1024+1024, 64 at once"]


def test_the_text_says_what_was_compared(served):
    checks, rates = deepep_checks(_world())
    found = replace(validate_own(), deepep=tuple(checks), rates=rates, serving=served)
    text = validation_text(found)
    assert "target 15%: met" in text
    assert "held out" in text
    assert "14 rows with expert parallelism on one group, 14 points" in text
    assert "AIConfigurator: not asked" in text


def validate_own():
    from bywash.planner.validate.run import Validation

    return Validation(own=tuple(own_checks()))


def test_without_tables_only_our_own_are_compared(monkeypatch):
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["plan", "validate"])
    assert done.exit_code == 0, done.output
    assert "our own figures, two H200" in done.output
    assert "not compared, no tables at hand" in done.output
    done = CliRunner().invoke(app, ["plan", "validate", "--json", "-"])
    data = json.loads(done.output)
    assert len(data["own"]) == len(own_checks())
    assert data["serving"] == []


def test_a_folder_without_tables_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"--data .*silicon_sample.csv"):
        validate(tmp_path)
    (tmp_path / "silicon_sample.csv").write_text("id\n")
    with pytest.raises(ConfigError, match=r"pyarrow is missing|has no h100_sxm"):
        validate(tmp_path)


def test_tables_are_read_as_they_are_meant(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is missing: pip install 'bywash[planner]'")
    from pyarrow import parquet

    (tmp_path / "silicon_sample.csv").write_text(",".join(COLUMNS) + "\n" + ",".join(_row().values()) + "\n")
    folder = tmp_path / "data/h100_sxm/comm/sglang/1"
    folder.mkdir(parents=True)
    shape = {"num_token": 128, "num_experts": 256}
    low = [shape | {"node_num": n, "dispatch_avg_t_us": 10.0 * n, "combine_avg_t_us": 20.0 * n} for n in (1, 2)]
    normal = [
        shape | {"node_num": n, "dispatch_sms": sms, "dispatch_transmit_us": 1000.0 / sms, "combine_transmit_us": 7.0}
        for n in (1, 2) for sms in (4, 20)
    ]  # fmt: skip
    for name, rows in (("ll", low), ("normal", normal)):
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"wideep_deepep_{name}_perf.parquet")
    found = tables.deepep_rows(tables.find_tables(tmp_path))
    by = {(one.mode, one.half, one.nodes): one.us for one in found}
    assert len(found) == len(by) == 8
    assert by["low-latency", "combine", 2] == 40.0
    assert by["normal", "dispatch", 1] == 50.0  # of 20 multiprocessors
    assert tables.serving_rows(tmp_path)[0]["backend"] == "trtllm"


def test_a_peer_that_is_missing_gives_no_answer(monkeypatch):
    monkeypatch.setattr(aic, "find_spec", lambda name: None)
    assert aic.aic_tpot_ms(merged([_row()], {})[0]) is None
    assert "aiconfigurator_core.sdk.engine" not in sys.modules


def test_errors_are_relative():
    one = Check(regime="r", name="n", measured=4.0, predicted=5.0, other=3.0)
    assert (one.error, one.other_error) == (0.25, 0.25)
    assert spread([0.1, 0.2, 0.3]).median == pytest.approx(0.2)
    assert str(spread([])) == "-"


def test_order_is_one_for_points_sorted_alike():
    def checks(predicted):
        return [Check(regime="r", name="n", measured=m, predicted=p) for m, p in zip((1.0, 2.0, 3.0, 4.0), predicted)]

    assert order(checks((10.0, 20.0, 25.0, 99.0))) == pytest.approx(1.0)
    assert order(checks((4.0, 3.0, 2.0, 1.0))) == pytest.approx(-1.0)
    assert order(checks((1.0, 1.0, 5.0, 4.0))) == pytest.approx(0.738, abs=0.01)  # scipy.stats.spearmanr
    assert np.isnan(order(checks((1.0, 2.0))))


@pytest.mark.slow
def test_public_tables_keep_their_targets():
    if tables.find_tables(None) is None:
        pytest.skip("aiconfigurator-core is missing: pip install 'bywash[planner]'")
    found = validate(None)
    assert spread([one.error for one in held_out(found.deepep)]).median <= 0.15
    both = [one for one in found.serving.scaled if one.other_error is not None]
    assert len(both) >= 50
