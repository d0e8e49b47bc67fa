"""A plan's page: every section, with the plan's own numbers."""

import json

import numpy as np
import pytest

from bywash.errors import ConfigError
from bywash.report.document import Heat, Lines, Table, Timeline
from bywash.report.of_network import network_section
from bywash.report.of_plan import plan_report
from bywash.report.of_skew import busiest_L
from bywash.report.page import report_files
from bywash.report.sources import load_report
from bywash.report.what_if import price_at


def _section(report, title):
    return next(one for one in report.sections if one.title == title)


def _blocks(section, kind):
    return [one for one in section.blocks if isinstance(one, kind)]


def test_a_plan_has_every_section(plan):
    titles = [one.title for one in plan_report(plan).sections]
    assert titles == ["Deployment", "Timeline of a layer", "Network", "Skew", "Memory ledger", "What if"] or (
        titles == ["Deployment", "Timeline of a layer", "Skew", "Memory ledger", "What if"]
        and plan.fabric.chosen is None
    )


def test_timelines_have_the_plans_stages(plan):
    section = _section(plan_report(plan), "Timeline of a layer")
    timelines = _blocks(section, Timeline)
    phases = [p for one in plan.groups[:1] for p in (one.outcome.prefill, one.outcome.decode)]
    for timeline, phase in zip(timelines, phases):
        spans = [span for lane in timeline.lanes for span in lane.spans]
        stages = {str(kind) for kind in phase.split_stages}
        assert {span.stage for span in spans} == stages
        for kind, figure in phase.split_stages.items():
            longest = max(span.end_us - span.start_us for span in spans if span.stage == str(kind))
            assert longest == pytest.approx(figure.us, abs=0.01)


def test_ledgers_sum_to_what_the_plan_needs(plan):
    section = _section(plan_report(plan), "Memory ledger")
    bars = [one for one in section.blocks if one.kind == "bars"]
    ledgers = plan.groups[0].outcome.ledgers
    assert sum(bars[0].values[:-1]) == pytest.approx(bars[0].values[-1])
    assert bars[0].values[-1] == pytest.approx(ledgers[0].need_bytes / 1e9)
    assert bars[0].limit == pytest.approx(ledgers[0].have_bytes / 1e9)


def test_skew_by_layer_is_of_the_trace(plan):
    lines = next(b for b in _blocks(_section(plan_report(plan), "Skew"), Lines) if "before and after" in b.title)
    counts_LE = plan.sample.recorded.counts_LE()
    by_name = {one.name: one.y for one in lines.series}
    group = plan.groups[0]
    for layer in (0, len(counts_LE) - 1):
        rows_R = np.bincount(group.homes[layer].home_E, weights=counts_LE[layer])
        assert by_name["placed by load, each layer"][layer] == pytest.approx(rows_R.max() / rows_R.mean())
    assert np.mean(by_name["placed by load, each layer"]) < np.mean(by_name["consecutive experts"])


def test_busiest_counts_speed():
    counts, home = np.array([[3, 1]]), np.array([[0, 1]])
    assert busiest_L(counts, home, np.array([1, 1])) == pytest.approx([1.5])
    assert busiest_L(counts, home, np.array([3, 1])) == pytest.approx([1.0])


def test_a_faster_network_is_never_slower(plan):
    one = plan.groups[0]
    base = one.cost.price(one.outcome.candidate.sequences, one.outcome.candidate.rule)
    rates = [price_at(one.cost, base, net, 1.0).tokens_per_s for net in (0.5, 1.0, 2.0)]
    assert rates[0] <= rates[1] <= rates[2]
    assert rates[1] == pytest.approx(base.tokens_per_s)


def test_the_folder_of_a_plan_can_be_drawn_again(plan, tmp_path):
    for name, text in report_files(plan).items():
        (tmp_path / name).write_text(text)
    assert load_report(tmp_path) == plan_report(plan)


def test_network_shows_what_the_simulator_counted(incast):
    section = network_section(incast)
    queues = _blocks(section, Lines)[0]
    deepest = incast.queue_bytes_TP.max()
    unit = {"MB": 1e6, "KB": 1e3, "bytes": 1.0}[queues.y_name]
    assert max(max(one.y) for one in queues.series) == pytest.approx(deepest / unit)
    table = _blocks(section, Table)[0]
    port = int(np.lexsort((-incast.peak_bytes_PQ.max(1), -incast.marks_PQ.sum(1), -incast.drops_PQ.sum(1),
                           -incast.paused_ps_PQ.sum(1)))[0])  # fmt: skip
    assert table.rows[0][0] == incast.scenario.topology.port_name(port)
    assert f"{int(incast.marks_PQ.sum()):,} ECN marks" in table.note
    assert incast.marks_PQ.sum() > 0
    use = [value for one in _blocks(section, Heat) if "busy" in one.title for line in one.values for value in line]
    assert sorted(v for v in use if v is not None) == pytest.approx(sorted(incast.link_use_P() * 100))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "is no JSON"),
        ("[]", "JSON object"),
        ("{}", "is none of"),
        ("1" * 5000, "is no JSON"),
        ('{"rows_per_layer_and_rank": [[1]]}', "model: Field required"),
        ('{"traceEvents": []}', "no timeline"),
        ('{"sections": 3}', "title: Field required"),
    ],
)
def test_what_is_no_source_says_so(tmp_path, text, words):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_report(tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"no report\.json"):
        load_report(tmp_path)


def test_a_run_and_its_timeline(tmp_path):
    from bywash.moe.pipeline.order import build_schedule
    from bywash.moe.pipeline.schedule import LayerForm, Split
    from bywash.moe.pipeline.simulate import simulate
    from bywash.report.timeline import chrome_trace, tracks_of

    phase = {"split": "serial", "why": "x", "communication_fraction": 0.1, "exposed_fraction": 0.1, "hidden_share": 0.0}
    layer = {"layer": 0, "rows_home": 30, "rows_spilled": 10, "rows_waited": 0, "busiest_home": 30, "busiest": 20,
             "fetches": 1, "most_waves": 1}  # fmt: skip
    run = {
        "model": "m", "ranks": 2, "exchange": "shm", "dtype": "float32", "prompts": 1, "generated_tokens": 4,
        "rows_sent": 9, "wire_bytes": 10, "logical_bytes": 20, "imbalance_max_over_mean": 1.5,
        "imbalance_worst_layer": 1.5,
        "rows_per_layer_and_rank": [[30, 10]], "prefill_s": 0.1, "decode_s": 0.2, "load_s": 0.3, "tokens_per_s": 13.0,
        "overlap": {"mode": "off", "prefill": phase, "decode": phase},
        "overflow": {"slots": 2, "imbalance_at_home": 1.5, "imbalance": 1.0, "layers": [layer]},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    report = load_report(tmp_path / "run.json")
    assert [one.title for one in report.sections] == ["Measured load", "Measured overlap", "Measured overflow"]
    assert report.sections[0].blocks[0].values == (1.5,)
    schedule = build_schedule([LayerForm()] * 3, Split(lanes=2))
    trace = chrome_trace(tracks_of([simulate(schedule, lambda op: 1000)] * 2), {"note": "made up"})
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    timeline = load_report(tmp_path / "trace.json").sections[0]
    assert [one.title for one in timeline.blocks] == ["layer 1, rank 0", "layer 1, rank 1"]
    assert timeline.text == "note: made up"
