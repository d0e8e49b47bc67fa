"""What `bywash report` can read: the folder of a plan, the JSON of a run, a timeline. Each becomes a `Report`.

Does the reading; `document`, `of_run` and `of_timeline` know the formats.
"""

import json
from pathlib import Path
from typing import Any

from bywash.errors import ConfigError
from bywash.report.document import Report, from_json

REPORT_FILE = "report.json"
"""What `bywash plan --out DIR` leaves for `bywash report DIR`."""


def load_report(path: Path) -> Report:
    """The report of a folder or file.

    Raises:
        ConfigError: it cannot be read, or is nothing that a report can be made of.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ConfigError(f"{path}: has no {REPORT_FILE}; give a folder of `bywash plan --out`")
    data = _read(file)
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: must hold a JSON object")
    if "traceEvents" in data:
        from bywash.report.of_timeline import timeline_report

        return timeline_report(data, str(file))
    if "rows_per_layer_and_rank" in data:
        from bywash.report.of_run import run_report

        return run_report(data, str(file))
    if "sections" in data:
        return from_json(data, str(file))
    raise ConfigError(
        f"{file}: is none of {REPORT_FILE}, the JSON of `bywash run --json`, or a timeline of `bywash run --timeline`"
    )


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot read it: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is no JSON: {error}") from error
