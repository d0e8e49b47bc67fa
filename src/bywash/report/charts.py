"""Charts of a report as inline SVG: 360 units wide, so that text is readable on a phone and cards tile on a desk.

Colours are CSS classes of the page (light and dark); nothing here names a colour. Pure functions from `document` blocks
to text. `page` calls `draw`.
"""

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from bywash.report.document import Bars, Heat, Lines, Timeline

WIDTH = 360
COLOURS = 6
"""Classes c0 to c5 of the page."""
MOST_POINTS = 240
STAGES = ("attention", "dense", "route", "shared expert", "experts", "finish", "dispatch", "combine")
_CHAR = 5.6
"""Width of a character, about."""


def draw(block: Bars | Lines | Heat | Timeline) -> str:
    """The SVG of one chart."""
    if isinstance(block, Bars):
        return _bars(block)
    if isinstance(block, Lines):
        return _lines(block)
    return _heat(block) if isinstance(block, Heat) else _timeline(block)


def legend(block: Bars | Lines | Heat | Timeline) -> list[tuple[str, str]]:
    """(class of the colour, name) pairs to stand under the chart."""
    if isinstance(block, Lines):
        return [(f"c{i % COLOURS}", one.name) for i, one in enumerate(block.series)]
    if isinstance(block, Timeline):
        used = {span.stage for lane in block.lanes for span in lane.spans}
        return [(stage_class(stage), stage) for stage in STAGES if stage in used]
    return []


def stage_class(stage: str) -> str:
    """The CSS class of a stage's colour."""
    return f"s{STAGES.index(stage)}" if stage in STAGES else "s5"


def number(value: float) -> str:
    """Three digits or so. Example: 12345.6 is 12,346; 0.01234 is 0.0123."""
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    extra = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _short(text: str, room: float) -> str:
    most = max(3, int(room / _CHAR))
    return text if len(text) <= most else text[: most - 1] + "…"


def _bars(block: Bars) -> str:
    left, right, row = 112.0, 62.0, 20
    most = max([*block.values, block.limit or 0.0, 1e-12])
    scale = (WIDTH - left - right) / most
    texts = block.texts or tuple(f"{number(value)} {block.unit}".strip() for value in block.values)
    parts = []
    for i, (name, value, text) in enumerate(zip(block.names, block.values, texts, strict=True)):
        y = i * row
        parts.append(f"<g><title>{escape(name)}: {escape(text)}</title>")
        parts.append(_text(left - 6, y + 14, _short(name, left - 8), "end"))
        parts.append(f'<rect class="c0" x="{left}" y="{y + 4}" width="{max(0.5, value * scale):.1f}" height="13"/>')
        end = left + value * scale
        parts.append(_text(end - 4, y + 14, text, "end", "on") if 2 * value > most else _text(end + 4, y + 14, text))
        parts.append("</g>")
    height = row * len(block.names) + 4
    if block.limit is not None:
        x = left + block.limit * scale
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        parts.append(_text(x, height + 12, _short(block.limit_name, x), "end", "dim"))
        height += 18
    return _svg(height, block.title, parts)


def _lines(block: Lines) -> str:
    left, top, bottom, height = 44.0, 16.0, 34.0, 190.0
    wide, high = WIDTH - left - 8, height - top - bottom
    most = round_up(max([y for one in block.series for y in one.y] or [0.0]))
    first, last = (block.x[0], block.x[-1]) if block.x else (0.0, 1.0)
    span = (last - first) or 1.0
    parts = []
    for i in range(4):
        value = most * i / 3
        y = top + high * (1 - i / 3)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 4, y + 4, number(value), "end", "dim"))
    for i in range(3):
        x = left + wide * i / 2
        parts.append(_text(x, height - 18, number(first + span * i / 2), ("start", "middle", "end")[i], "dim"))
    parts.append(_text(left + wide / 2, height - 4, block.x_name, "middle", "dim"))
    parts.append(_text(4, 9, block.y_name, css="dim"))
    for i, one in enumerate(block.series):
        points = " ".join(
            f"{left + wide * (x - first) / span:.1f},{top + high * (1 - y / most):.1f}"
            for x, y in thinned(block.x, one.y)
        )
        line = f'<polyline class="line l{i % COLOURS}" points="{points}"/>'
        parts.append(f"<g><title>{escape(one.name)}</title>{line}</g>")
    return _svg(height, block.title, parts)


def round_up(value: float) -> float:
    """The next number whose thirds are short ones: 1.2, 1.5, 1.8, 2.4, 3, 4.5, 6, 9, 12 times a power of ten.

    Example: 1.32 is 1.5, 0.084 is 0.09; 0 is 1.
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        step * power for step in (1.2, 1.5, 1.8, 2.4, 3.0, 4.5, 6.0, 9.0, 12.0) if step * power >= value * 0.999999
    )


def thinned(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: the largest of each part, so that peaks stay.

    Example: x 0..3, y 1, 5, 2, 0, two points: (1, 5) and (2, 2).
    """
    count = len(x)
    if count <= most:
        return list(zip(x, y, strict=True))
    edges = [count * i // most for i in range(most + 1)]
    peaks = [max(range(a, b), key=lambda i: y[i]) for a, b in pairwise(edges) if b > a]
    return [(x[i], y[i]) for i in peaks]


def _heat(block: Heat) -> str:
    left = min(120.0, 8 + _CHAR * max((len(name) for name in block.rows), default=0))
    wide = (WIDTH - left - 2) / max(1, len(block.columns))
    row, top = 17.0, 14.0
    most = block.most or max([v for line in block.values for v in line if v is not None] or [0.0]) or 1.0
    parts = []
    for j, column in enumerate(block.columns):
        _, twin, count = column.partition("#")  # a parallel link: its number says enough
        fits = wide > _CHAR * len(column)
        short = twin + count or (column if fits else column[0] + column.lstrip("abcdefghijklmnopqrstuvwxyz"))
        if wide > _CHAR * len(short):
            parts.append(_text(left + (j + 0.5) * wide, 10, short, "middle", "dim"))
    for i, (name, line) in enumerate(zip(block.rows, block.values, strict=True)):
        y = top + i * row
        parts.append(_text(left - 4, y + 12, _short(name, left - 4), "end"))
        for j, value in enumerate(line):
            if value is not None:
                parts.append(
                    _cell(left + j * wide, y, wide, row, value, most, f"{name}, {block.columns[j]}", block.unit)
                )
    return _svg(top + row * len(block.rows) + 2, block.title, parts)


def _cell(x: float, y: float, wide: float, high: float, value: float, most: float, name: str, unit: str) -> str:
    share = min(1.0, max(0.0, value / most))
    box = (
        f'<rect class="heat" x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{wide - 1:.1f}" height="{high - 1:.1f}" '
        f'fill-opacity="{0.06 + 0.94 * share:.2f}"/>'
    )
    text = f"{value:.0f}" if most >= 10 else number(value)
    inside = _text(x + wide / 2, y + 12, text, "middle", "on" if share > 0.55 else "off")
    shown = inside if wide > _CHAR * len(text) + 2 else ""
    return f"<g><title>{escape(name)}: {text} {escape(unit)}</title>{box}{shown}</g>"


def _timeline(block: Timeline) -> str:
    row, top = 24, 4
    last = max((span.end_us for lane in block.lanes for span in lane.spans), default=1.0) or 1.0
    scale = (WIDTH - 8) / last
    parts, y = [], float(top)
    for lane in block.lanes:
        parts.append(_text(4, y + 10, lane.name, css="dim"))
        y += 14
        parts.append(f'<rect class="empty" x="4" y="{y}" width="{WIDTH - 8}" height="{row - 4}"/>')
        for span in lane.spans:
            x, wide = 4 + span.start_us * scale, max(0.6, (span.end_us - span.start_us) * scale)
            took = f"{number(span.end_us - span.start_us)} us"
            parts.append(f"<g><title>{escape(span.stage)} {escape(span.label)}: {took}</title>")
            parts.append(
                f'<rect class="{stage_class(span.stage)} edge" x="{x:.1f}" y="{y}" width="{wide:.1f}" '
                f'height="{row - 4}"/>'
            )
            if wide > _CHAR * len(span.label) + 4:
                parts.append(_text(x + wide / 2, y + 14, span.label, "middle", "ink"))
            parts.append("</g>")
        y += row
    for i in range(4):
        x = 4 + (WIDTH - 8) * i / 3
        anchor = "start" if i == 0 else "end" if i == 3 else "middle"
        parts.append(_text(x, y + 10, f"{number(last * i / 3)}{' us' if i == 3 else ''}", anchor, "dim"))
    return _svg(y + 16, block.title, parts)
