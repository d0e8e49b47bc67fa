"""The `bywash` command. Sub-commands load what they need when they run, so that `--help` answers at once."""

import sys

import typer

from bywash import __version__
from bywash.cli import bench, run, trace
from bywash.errors import BywashError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fast Mixture-of-Experts inference on private clusters.",
)
app.command("run")(run.run)
app.add_typer(trace.app, name="trace")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bywash {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    pass


def main() -> None:
    """Entry point: a bywash error is one message and an exit code, never a traceback."""
    try:
        app()
    except BywashError as error:
        print(f"bywash: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("bywash: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
