"""The page: one HTML file of a `Report`, with everything inside it and nothing fetched.

jinja2 fills `page.html`; charts come from `charts`. A content security policy in the page forbids any request.
`bywash plan --out` and `bywash report` write it.
"""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from bywash.report.charts import draw, legend
from bywash.report.document import Block, Report, Table, to_json
from bywash.report.sources import REPORT_FILE

if TYPE_CHECKING:
    from bywash.planner.plan import Plan


def report_files(plan: "Plan") -> dict[str, str]:
    """The report of a plan, by file name: the page, and the data that `bywash report DIR` draws again."""
    from bywash.report.of_plan import plan_report

    report = plan_report(plan)
    return {"report.html": render(report), REPORT_FILE: to_json(report)}


def render(report: Report) -> str:
    """The page's text."""
    return _template().render(report=report, svg=_svg, legend=_legend, slug=_slug)


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files("bywash.report").joinpath("page.html").read_text("utf-8"))


def _svg(block: Block) -> Markup:
    assert not isinstance(block, Table)
    return Markup(draw(block))  # charts escape every text


def _legend(block: Block) -> list[tuple[str, str]]:
    return [] if isinstance(block, Table) else legend(block)


def _slug(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())
