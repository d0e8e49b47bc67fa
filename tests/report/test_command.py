"""`bywash report`: files in, one page out, errors in words."""

import json
import re

import pytest
from typer.testing import CliRunner

from bywash.cli.main import app
from bywash.errors import ConfigError
from bywash.report.document import Report, Section, Table, to_json

PAGE = Report(title="t", headline="h", sections=(Section(title="s", blocks=(Table(columns=("a",), rows=(("1",),)),)),))


def test_a_folder_becomes_a_page_and_a_dashboard(tmp_path):
    (tmp_path / "report.json").write_text(to_json(PAGE))
    page, dashboard = tmp_path / "out.html", tmp_path / "dashboard.json"
    arguments = ["report", str(tmp_path), "--out", str(page), "--dashboard", str(dashboard)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "<!DOCTYPE html>" in page.read_text()
    assert json.loads(dashboard.read_text())["title"] == "bywash"
    assert "nothing in it is fetched" in done.output


@pytest.mark.parametrize(
    ("out", "dashboard", "words"),
    [("x.json", "d.json", "--out .* is read here"), ("x.html", "x.json", "--dashboard"), ("y", "y", "is --out too")],
)
def test_what_is_read_is_not_written_over(tmp_path, out, dashboard, words):
    source = tmp_path / "x.json"
    source.write_text(to_json(PAGE))
    arguments = ["report", source, "--out", tmp_path / out, "--dashboard", tmp_path / dashboard]
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert isinstance(done.exception, ConfigError)
    assert re.search(words, str(done.exception))
    assert source.read_text() == to_json(PAGE)


def test_half_a_character_is_no_traceback(tmp_path):
    (tmp_path / "x.json").write_text(to_json(PAGE).replace('"h"', r'"\ud800"'))
    done = CliRunner().invoke(app, ["report", str(tmp_path / "x.json"), "--out", str(tmp_path / "x.html")])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("source", "out", "words"),
    [
        ("missing", "x.html", "missing: cannot read it"),
        (".", "x.html", "has no report.json"),
        (".", "no/x.html", "--out"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, source, out, words):
    done = CliRunner().invoke(app, ["report", str(tmp_path / source), "--out", str(tmp_path / out)])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert not (tmp_path / "x.html").exists()
