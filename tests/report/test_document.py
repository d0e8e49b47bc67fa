"""The report's format, its charts and its page."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.report.charts import draw, round_up, thinned
from bywash.report.document import (
    Bars,
    Heat,
    Lane,
    Lines,
    Report,
    Section,
    Series,
    Span,
    Table,
    Timeline,
    from_json,
    joined,
    to_json,
)
from bywash.report.page import render

NASTY = '<script>alert("x")</script> & "quotes"'
BLOCKS = (
    Table(columns=("a", "b", NASTY), rows=((NASTY, "1", "words"), ("y", "2", "")), words=(2,), chosen=1, title="T"),
    Bars(title=NASTY, names=("one", NASTY), values=(0.0, 3.0), unit="GB", limit=4.0, limit_name="there is 4"),
    Lines(title="L", x=(0.0, 1.0, 2.0), series=(Series(name=NASTY, y=(0.0, 5.0, 1.0)),), x_name="us", y_name="KB"),
    Heat(
        title="H", rows=("r0", NASTY), columns=("c0", "c0#2"), values=((0.0, None), (50.0, 100.0)), unit="%", most=100.0
    ),
    Timeline(title="G", lanes=(Lane(name=NASTY, spans=(Span(start_us=0, end_us=5, stage="experts", label=NASTY),)),)),
)
REPORT = Report(
    title=NASTY,
    headline="one sentence",
    facts=(("fact", NASTY),),
    sections=(Section(title="All kinds", text=NASTY, blocks=BLOCKS),),
)


def test_a_report_survives_its_file():
    assert from_json(json.loads(to_json(REPORT)), "report.json") == REPORT


@pytest.mark.parametrize(
    ("path", "value"),
    [("version", 2), ("sections", [{"title": "x", "blocks": [{"kind": "pie"}]}]), ("headline", None)],
)
def test_a_wrong_file_names_its_field(path, value):
    data = json.loads(to_json(REPORT)) | {path: value}
    with pytest.raises(ConfigError, match=rf"^r.json: {path}"):
        from_json(data, "r.json")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"kind": "bars", "title": "b", "names": ["a"], "values": [1, 2]}, "2 values, must be 1"),
        ({"kind": "bars", "title": "b", "names": ["a"], "values": [float("inf")]}, "finite"),
        ({"kind": "lines", "title": "l", "x": [0], "series": [{"name": "s", "y": []}], "x_name": "", "y_name": ""},
         "0 y, must be 1"),
        ({"kind": "heat", "title": "h", "rows": ["r"], "columns": ["c"], "values": [[]], "unit": ""}, "0 values"),
    ],
)  # fmt: skip
def test_charts_whose_parts_do_not_fit_are_refused(block, words):
    data = json.loads(to_json(REPORT)) | {"sections": [{"title": "x", "blocks": [block]}]}
    with pytest.raises(ConfigError, match=words):
        from_json(data, "r.json")


def test_the_page_fetches_nothing_and_escapes_everything():
    page = render(REPORT)
    assert "<script" not in page
    assert not re.search(r"https?:|//[a-z]|\bsrc=|@import|url\(", page)
    assert "default-src 'none'" in page
    assert page.count("<figure") == len(BLOCKS)
    assert re.search(r'<meta name="viewport" content="width=device-width', page)


@pytest.mark.parametrize("block", BLOCKS[1:], ids=lambda block: block.kind)
def test_charts_are_well_formed_and_inside_their_box(block):
    root = ElementTree.fromstring(draw(block))
    _, _, wide, high = map(float, root.attrib["viewBox"].split())
    for rect in root.iter("rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= wide + 0.5
        assert 0 <= y <= y + h <= high
    for line in root.iter("polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= wide
            assert 0 <= y <= high


def test_empty_charts_can_be_drawn():
    for block in (
        Bars(title="none", names=(), values=()),
        Lines(title="none", x=(), series=(), x_name="", y_name=""),
        Heat(title="none", rows=(), columns=(), values=(), unit=""),
        Timeline(title="none", lanes=()),
        Timeline(title="none", lanes=(Lane(name="a", spans=(Span(start_us=0, end_us=0, stage="experts"),)),)),
    ):
        ElementTree.fromstring(draw(block))


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=700), st.integers(1, 60))
def test_thinning_keeps_the_peak(y, most):
    kept = thinned(list(range(len(y))), y, most)
    assert len(kept) <= max(most, 1)
    assert max(value for _, value in kept) == max(y)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@given(st.floats(1e-6, 1e12))
def test_axes_end_just_above_their_values(value):
    assert value * 0.99999 <= round_up(value) <= 1.6 * value


def test_pages_of_several_sources_have_all_sections():
    other = replace(REPORT, title="other", sections=(Section(title="More"),))
    both = joined((REPORT, other))
    assert [one.title for one in both.sections] == ["All kinds", "More"]
    assert both.title == REPORT.title
    assert len(both.facts) == 2


def test_a_folded_table_opens_on_its_title():
    page = render(replace(REPORT, sections=(Section(title="s", blocks=(replace(BLOCKS[0], folded=True),)),)))
    assert "<details><summary>T</summary>" in page
    assert page.count("</details>") == 1


def test_columns_of_parallel_links_are_short():
    names = ("spine0", "spine0#2", "spine1", "spine1#2")
    columns = tuple(name for name in names for _ in range(4))
    chart = draw(Heat(title="H", rows=("leaf0",), columns=columns, values=((1.0,) * 16,), unit=""))
    assert ">s0</text>" in chart
    assert ">#2</text>" in chart
