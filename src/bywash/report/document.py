"""A report as data: sections of tables and charts, without a word of how they are drawn.

`of_plan`, `of_network`, `of_run` and `of_timeline` make it, `page` draws it, `report.json` beside a plan holds it so
that `bywash report` can draw it again. Values are already in the unit that is shown. Knows nothing of plans or HTML.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from bywash.errors import ConfigError

Number = Annotated[float, Field(allow_inf_nan=False)]


def _as_many(title: str, wanted: int, **given: int) -> None:
    """Raise `ValueError`, which pydantic reports, where a chart's parts differ in length."""
    for name, count in given.items():
        if count != wanted:
            raise ValueError(f"{title!r}: {count} {name}, must be {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text; the first column names the row.

    Attributes:
        columns, rows: cells as shown; every row as long as `columns`.
        title, note: above and below.
        words: columns of running text, which may wrap.
        chosen: the row that stands out.
        folded: whether it opens when its title is clicked.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    note: str = ""
    words: tuple[int, ...] = ()
    chosen: int | None = None
    folded: bool = False
    kind: Literal["table"] = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One bar a name.

    Attributes:
        names, values: of the bars, from 0.
        texts: what stands at a bar's end; the value and unit where empty.
        limit: where a line is drawn, such as the memory that there is; `limit_name` says what it is.
    """

    title: str
    names: tuple[str, ...]
    values: tuple[Number, ...]
    unit: str = ""
    texts: tuple[str, ...] = ()
    limit: Number | None = None
    limit_name: str = ""
    note: str = ""
    kind: Literal["bars"] = "bars"

    def __post_init__(self) -> None:
        _as_many(self.title, len(self.names), values=len(self.values), texts=len(self.texts) or len(self.names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart: a point for each of its chart's x."""

    name: str
    y: tuple[Number, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Lines over one x axis."""

    title: str
    x: tuple[Number, ...]
    series: tuple[Series, ...]
    x_name: str
    y_name: str
    note: str = ""
    kind: Literal["lines"] = "lines"

    def __post_init__(self) -> None:
        for one in self.series:
            _as_many(self.title, len(self.x), y=len(one.y))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """A matrix of cells; darker is more.

    Attributes:
        rows, columns: their names.
        values: one tuple a row; None where there is no such cell.
        most: the value of the darkest colour; the largest value where 0.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[Number | None, ...], ...]
    unit: str
    most: Number = 0.0
    note: str = ""
    kind: Literal["heat"] = "heat"

    def __post_init__(self) -> None:
        _as_many(self.title, len(self.rows), values=len(self.values))
        for line in self.values:
            _as_many(self.title, len(self.columns), values=len(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One bar of a timeline: `stage` gives the colour, `label` stands in it where there is room."""

    start_us: Number
    end_us: Number
    stage: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of a timeline."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What ran when."""

    title: str
    lanes: tuple[Lane, ...]
    note: str = ""
    kind: Literal["timeline"] = "timeline"


Block = Annotated[Table | Bars | Lines | Heat | Timeline, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and what stands under it."""

    title: str
    text: str = ""
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole page.

    Attributes:
        title, headline: what it is about, and its one sentence.
        facts: (name, value) pairs beneath.
        sections: in order.
        version: of this format.
    """

    title: str
    headline: str
    facts: tuple[tuple[str, str], ...] = ()
    sections: tuple[Section, ...] = ()
    version: Literal[1] = 1


_ADAPTER: TypeAdapter[Report] = TypeAdapter(Report)


def to_json(report: Report) -> str:
    """The text of `report.json`."""
    return json.dumps(_ADAPTER.dump_python(report, mode="json"), indent=1) + "\n"


def from_json(data: Any, where: str) -> Report:
    """Read it back. Raises `ConfigError` naming `where` and the field."""
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {path}: {first['msg']}; it was written by another version of bywash?") from error


def joined(reports: tuple[Report, ...]) -> Report:
    """One page of several: title and headline of the first, facts and sections of all in order."""
    first = reports[0]
    if len(reports) == 1:
        return first
    return Report(
        title=first.title,
        headline=first.headline,
        facts=tuple(fact for one in reports for fact in one.facts),
        sections=tuple(section for one in reports for section in one.sections),
    )
