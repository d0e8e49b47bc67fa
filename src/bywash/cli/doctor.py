"""`bywash doctor`: what stands between this host, or a snapshot of one, and zero-copy."""

import sys
from pathlib import Path

import typer

from bywash.cli.output import STDOUT, printing, replaceable, writable, write_json
from bywash.errors import ConfigError

_ARCHIVES = (".tar.gz", ".tgz")


def doctor(
    root: str | None = typer.Option(None, help="Judge this snapshot (directory or .tar.gz), not this host."),
    capture: str | None = typer.Option(None, help="Only write what the doctor reads here to this .tar.gz."),
    json_file: str | None = typer.Option(
        None, "--json", help="Write the report to this file; - prints it, and the text to stderr."
    ),
) -> None:
    """Check RDMA, RoCE, GPUDirect, PCIe and limits. Exit: 0 nothing wrong, 1 findings or things unseen, 2 bad use."""
    from bywash.doctor import examine, live, load, save
    from bywash.doctor.text import report_text

    if capture is not None:
        _check_capture(capture, root, json_file)
        snapshot = live()
        save(snapshot, capture)
        with printing():
            typer.echo(f"{capture}: {len(snapshot.files)} files; {len(snapshot.unread)} could not be read. {_INSIDE}")
        return
    writable(json_file, "--json", or_stdout=True)
    report = examine(load(root) if root is not None else live())
    if json_file is not None:
        write_json(json_file, report.as_dict())
    if json_file == STDOUT:
        print(report_text(report), file=sys.stderr)
    else:
        with printing():
            typer.echo(report_text(report))
    raise typer.Exit(report.exit_status)


_INSIDE = (
    "In it: device, link and driver facts, NCCL's variables, this host's MAC and IP addresses (as GIDs). No secrets."
)


def _check_capture(capture: str, root: str | None, json_file: str | None) -> None:
    for flag, value in (("--root", root), ("--json", json_file)):
        if value is not None:
            raise ConfigError(f"--capture: does not go with {flag}; capture here first, then use --root on the archive")
    if not capture.endswith(_ARCHIVES):
        raise ConfigError(f"--capture {capture}: must end in {' or '.join(_ARCHIVES)}")
    replaceable(Path(capture), "--capture")
