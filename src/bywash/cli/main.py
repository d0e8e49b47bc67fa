"""The `bywash` command. Sub-commands load what they need when they run, so that `--help` answers at once."""

import gc
import sys

import typer

from bywash import __version__
from bywash.cli import bench, bench_layer, bench_overflow, doctor, fabric, plan, report, run, trace
from bywash.cli.output import OutputClosedError, drop_stdout, fill_closed_streams, printing
from bywash.errors import BywashError, ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fast Mixture-of-Experts inference on private clusters.",
)
app.command("run")(run.run)
app.add_typer(trace.app, name="trace")
bench.app.command("layer")(bench_layer.layer)
bench.app.command("overflow")(bench_overflow.overflow)
app.add_typer(bench.app, name="bench")
app.add_typer(plan.app, name="plan")
app.add_typer(fabric.app, name="fabric")
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)

_INTERRUPTED = 130


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
    fill_closed_streams()
    try:
        code = _run_app()
        with printing():  # flushes: Python would only complain about it at exit
            pass
    except OutputClosedError as error:
        code = error.exit_code
    except BywashError as error:
        print(f"bywash: {error}", file=sys.stderr)
        code = error.exit_code
    gc.freeze()  # Python's last collections cost a second with torch loaded; ending returns the memory anyway
    sys.exit(code)


def _run_app() -> int:
    """The exit code of the command; typer leaves with SystemExit, and turns Ctrl-C into exit code 130."""
    try:
        app()
    except OSError as error:  # of typer's own printing, --help and --version: bywash's errors are its own
        drop_stdout()
        raise BywashError(str(error)) from error
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        raise ConfigError(  # installed read-only, by a user without a home: numba keeps compiled code in either
            f"NUMBA_CACHE_DIR: {error}; set it to a directory that can be written"
        ) from error
    except SystemExit as done:
        if done.code == _INTERRUPTED:
            print("bywash: interrupted", file=sys.stderr)
        return done.code if isinstance(done.code, int) else 1 if done.code else 0
    return 0


if __name__ == "__main__":
    main()
