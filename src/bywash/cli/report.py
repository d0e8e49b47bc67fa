"""`bywash report`: one self-contained page of a plan, a run, or both. Thin: reads, draws, writes."""

from pathlib import Path
from typing import Annotated

import typer

from bywash.cli.output import apart, printing, replaceable
from bywash.errors import ConfigError


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(help="folders of `bywash plan --out`, files of `bywash run --json` or `--timeline`"),
    ],
    out: Annotated[Path, typer.Option(help="the page")] = Path("report.html"),
    dashboard: Annotated[
        Path | None, typer.Option(help="also write a Grafana dashboard for the metrics of a running job")
    ] = None,
) -> None:
    """Draw plans and runs as one HTML page that needs no network."""
    replaceable(out, "--out")
    replaceable(dashboard, "--dashboard")
    _check_apart(sources, out, dashboard)
    from bywash.report.document import joined
    from bywash.report.page import render
    from bywash.report.sources import load_report

    page = render(joined(tuple(load_report(source) for source in sources)))
    _write(out, page, "--out")
    if dashboard is not None:
        from bywash.report.grafana import dashboard_json

        _write(dashboard, dashboard_json(), "--dashboard")
    with printing():
        print(f"{out}: {len(page) / 1e3:,.0f} kB, nothing in it is fetched from elsewhere")


def _check_apart(sources: list[Path], out: Path, dashboard: Path | None) -> None:
    """Refuse to write over what is read, or one file over the other."""
    apart({"--out": out, "--dashboard": dashboard})
    for flag, file in (("--out", out), ("--dashboard", dashboard)):
        if file is not None and file.exists() and any(one.exists() and one.samefile(file) for one in sources):
            raise ConfigError(f"{flag} {file}: is read here and would be overwritten; give another name")


def _write(path: Path, text: str, flag: str) -> None:
    try:
        path.write_text(text, "utf-8", errors="replace")  # JSON may hold half a character
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot write it: {error.strerror or error}") from error
