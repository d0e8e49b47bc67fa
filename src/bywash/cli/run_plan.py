"""`bywash run --plan`: what a plan decided for a group, put into the request of a run.

Taken over: ranks, placement, speeds, slots with alpha and break-even, overlap, exchange, the schedule between hosts,
combine and micro-batch. What a person gives on the command line goes before the plan. Left alone: tp, queue pairs and
switch settings, of which a run has none, and the capacity, which is for steps of the workload: in a shorter run it
would be below the break-even. Called by `cli.run`.
"""

from dataclasses import fields, replace
from typing import Any

import typer

from bywash.cli.run import RunRequest
from bywash.errors import ConfigError


def under_plan(request: RunRequest, path: str, group: str, context: typer.Context) -> RunRequest:
    """The request with what the plan says.

    Raises:
        ConfigError: no such plan or group, or an option that contradicts the plan's placement.
    """
    from bywash.planner.output.plan_file import load_plan_file

    chosen = load_plan_file(path).group(group)
    given = {one.name for one in fields(request) if _given(context, one.name)}
    slots = request.slots if "slots" in given else chosen.slots
    wanted: dict[str, Any] = {
        "ranks": chosen.ranks,
        "exchange": chosen.exchange,
        "node_schedule": chosen.node_schedule,
        "combine": chosen.combine,
        "micro_batch": chosen.micro_batch,
        "overlap": chosen.overlap,
        "slots": chosen.slots,
        "speeds": tuple(chosen.speeds),
        "alpha": chosen.alpha if slots else None,
        "break_even": chosen.break_even if slots else None,
    }
    if "ranks" in given and request.ranks != chosen.ranks:
        raise ConfigError(f"--ranks {request.ranks}: the plan places experts on {chosen.ranks} ranks; leave it out")
    if "speeds" in given:
        raise ConfigError("--speeds: the plan has its own placement; leave out --speeds or --plan")
    taken = {name: value for name, value in wanted.items() if name not in given}
    return replace(request, plan=path, home=tuple(chosen.home), **taken)


def _given(context: typer.Context, name: str) -> bool:
    """Whether the option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
