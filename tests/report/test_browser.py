"""The page in headless Chromium: nothing runs over the edge, nothing is fetched, text can be read. With screenshots.

Needs playwright (extra `browser`) and Chromium (`make browser`). Screenshots go to $BYWASH_SCREENSHOTS,
else to pytest's temporary directory.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bywash.report.of_network import network_section
from bywash.report.of_plan import plan_report
from bywash.report.page import render

SMALLEST_TEXT_PX = 8.5

OVER_THE_EDGE = """() => [...document.querySelectorAll('figure, h1, h2, p, svg, dl div')]
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"""
TEXT_PX = """() => Math.min(...[...document.querySelectorAll('svg')].map(
  s => parseFloat(getComputedStyle(s).fontSize) * s.getBoundingClientRect().width / s.viewBox.baseVal.width))"""
OUTSIDE_ITS_CHART = """() => [...document.querySelectorAll('svg text')].filter(t => {
  const box = t.getBoundingClientRect(), chart = t.closest('svg').getBoundingClientRect();
  return box.width && (box.left < chart.left - 2 || box.right > chart.right + 2);
}).map(t => t.textContent)"""


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install 'bywash[browser]'")
    system = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as play:
        if system is None and not Path(play.chromium.executable_path).exists():
            pytest.skip("no Chromium: run `make browser`")
        browser = play.chromium.launch(executable_path=system, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(plan, incast, tmp_path_factory):
    report = plan_report(plan)
    section = network_section(incast, title="A congested network")
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(render(replace(report, sections=(*report.sections, section))))
    return file


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "light"), (1280, "dark")])
def test_the_page_can_be_read(chromium, page_file, tmp_path, width, scheme):
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked, faults = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(page_file.as_uri())
    folder = Path(os.environ.get("BYWASH_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    shot = page.screenshot(path=folder / f"report-{width}-{scheme}.png", full_page=True)
    assert shot[:4] == b"\x89PNG"
    assert asked == [page_file.as_uri()]
    assert faults == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVER_THE_EDGE) == []
    assert page.evaluate(OUTSIDE_ITS_CHART) == []
    assert page.evaluate(TEXT_PX) >= SMALLEST_TEXT_PX
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(dark) < 200) == (scheme == "dark")
    page.close()
