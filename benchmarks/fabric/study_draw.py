"""The study's pictures: SVG from study.json. Bars with their least and most; the largest queue over time."""

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

COLOURS = ("#8c8c8c", "#c77d3b", "#3f7fb5", "#5a9e57", "#8b5fa8")
LINES = ("ECMP + PFC", "+ ECN/DCQCN", "+ adaptive routing", "+ rotated schedule", "paced")
WIDTH, LEFT, BAR = 760, 210, 20
HEAD = 44


def draw(study: dict[str, Any], out: Path) -> None:
    """Write fabric-NAME-exposed.svg and fabric-NAME-pause.svg for each case, and fabric-queue.svg."""
    for name, case in study["cases"].items():
        title = (
            f"{name}, {case['tokens']:,} tokens per rank: communication exposed, us per layer\nskew: {study['source']}"
        )
        (out / f"fabric-{name}-exposed.svg").write_text(bars(case["steps"], "exposed_us", title, mark="bound_us"))
        title = f"{name}, {case['tokens']:,} tokens per rank: time that ports were paused, us, summed over ports"
        (out / f"fabric-{name}-pause.svg").write_text(bars(case["steps"], "pause_us", title))
    sampled = {name: case for name, case in study["cases"].items() if any("queue" in s for s in case["steps"].values())}
    for name, case in sampled.items():
        series = {step: case["steps"][step]["queue"] for step in LINES if "queue" in case["steps"].get(step, {})}
        title = f"{name}, {case['tokens']:,} tokens per rank: the largest egress queue, MB, over time, us (first seed)"
        (out / "fabric-queue.svg").write_text(curves(series, title))


def bars(steps: dict[str, Any], key: str, title: str, mark: str = "") -> str:
    """One bar a step: mean, with a line from least to most; `mark` adds a tick, such as a bound."""
    top = max(max(s[key][2], s[mark][0] if mark else 0.0) for s in steps.values()) or 1.0
    scale = (WIDTH - LEFT - 110) / top
    body = []
    for place, (step, summed) in enumerate(steps.items()):
        y = HEAD + place * (BAR + 8)
        mean, least, most = (value * scale for value in summed[key])
        middle = y + BAR / 2
        body += [
            _text(LEFT - 8, middle + 4, step, "end"),
            f'<rect x="{LEFT}" y="{y}" width="{max(mean, 0.5):.1f}" height="{BAR}" fill="#3f7fb5"/>',
            f'<path d="M{LEFT + least:.1f} {middle}H{LEFT + most:.1f}" stroke="#222" stroke-width="1.5"/>',
            _text(LEFT + max(most, mean) + 8, middle + 4, f"{summed[key][0]:,.0f}"),
        ]
        if mark:
            at = LEFT + summed[mark][0] * scale
            body.append(f'<path d="M{at:.1f} {y - 3}V{y + BAR + 3}" stroke="#c0392b" stroke-width="2"/>')
    height = HEAD + len(steps) * (BAR + 8) + (22 if mark else 4)
    if mark:
        body.append(
            _text(LEFT, height - 8, "red: the bound of each exchange, added up as if all ranks waited for each other")
        )
    return _svg(height, title, body)


def curves(series: dict[str, list[float]], title: str) -> str:
    """Values sampled every 2 us, as lines."""
    height, bottom, left = 320, 286, 46
    long = max(map(len, series.values()))
    top = max(map(max, series.values())) or 1.0
    right = (WIDTH - left - 20) / long
    up = (bottom - HEAD - 20) / top
    body = [f'<path d="M{left} {HEAD}V{bottom}H{WIDTH - 10}" fill="none" stroke="#222"/>']
    for part in range(5):
        value, at = top * part / 4, long * part / 4
        body.append(_text(left - 6, bottom - value * up + 4, f"{value:.0f}", "end"))
        body.append(_text(left + at * right, bottom + 16, f"{2 * at:,.0f}", "middle"))
    for place, (name, values) in enumerate(series.items()):
        thin = max(1, len(values) // 250)  # the largest of each few samples: peaks stay
        points = [(i, max(values[i : i + thin])) for i in range(0, len(values), thin)]
        line = "L".join(f"{left + i * right:.1f} {bottom - value * up:.1f}" for i, value in points)
        colour = COLOURS[place % len(COLOURS)]
        body.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        body.append(f'<rect x="{left + 14 + place * 140}" y="{HEAD - 8}" width="12" height="4" fill="{colour}"/>')
        body.append(_text(left + 30 + place * 140, HEAD - 2, name))
    return _svg(height, title, body)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, title: str, body: list[str]) -> str:
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" {style}>',
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>',
            *(_text(10, 16 + 16 * place, row) for place, row in enumerate(title.split("\n"))),
            *body,
            "</svg>\n",
        ]
    )
