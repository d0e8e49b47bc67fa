"""`bywash plan validate`: the planner's predictions against measurements. Thin. Registered by `cli.plan`."""

from pathlib import Path
from typing import Annotated

import typer

from bywash.cli.output import STDOUT, printing, writable, write_json


def validate(
    data: Annotated[
        Path | None, typer.Option(help="folder with AIConfigurator's tables; default: its package, if installed")
    ] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", help="write every point to a file, or - to print them")
    ] = None,
) -> None:
    """Hold predictions against our own figures; also against DeepEP's tables and serving points where they are."""
    writable(json_to, "--json", or_stdout=True)
    from bywash.cli.plan import plan_progress
    from bywash.planner.validate import validate as run
    from bywash.planner.validate.text import validation_json, validation_text

    with plan_progress() as progress:
        found = run(data, on_point=lambda done, total: progress("serving points", done, total))
    if json_to is not None:
        write_json(json_to, validation_json(found))
    if json_to != STDOUT:
        with printing():
            print(validation_text(found), end="")
