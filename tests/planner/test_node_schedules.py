"""Costs of the node leg's schedules: bounds hold, pacing keeps queues short under incast, and the command says it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from bywash.cli.fabric import app
from bywash.errors import ConfigError
from bywash.exchange.node_schedule import SCHEDULES, NodeSchedule
from bywash.fabric import single_switch
from bywash.fabric.profiles import profile
from bywash.planner import LayerBytes, Wire, round_trip_us
from bywash.planner.node_schedules import NODE_SCHEDULES, ScheduleCost, fastest, option, schedule_costs


def costs_of(bytes_HH):
    settings = profile("rocev2")
    settings = replace(settings, switch=replace(settings.switch, buffer_bytes=8 << 20))
    fabric = single_switch(hosts=len(bytes_HH), gbps=100.0, delay_ns=500.0)
    wire = Wire(topology=fabric, frame=settings.frame, rtt_us=round_trip_us(fabric, settings.switch.latency_ns))
    layer = LayerBytes(dispatch_HH=bytes_HH, combine_HH=bytes_HH.T.copy(), network_rows=1, local_rows=0)
    return {cost.schedule: cost for cost in schedule_costs([layer], wire, settings)}


def cost(schedule, layer_us):
    return ScheduleCost(schedule=schedule, layer_us=layer_us, bound_us=1.0, pauses=0, marks=0, peak_queue_bytes=0)


def test_schedules_are_those_of_the_exchange():
    assert tuple(NODE_SCHEDULES) == SCHEDULES
    for name in SCHEDULES:
        text = option(name).removeprefix("--node-schedule ")
        assert NodeSchedule.parse(text.replace("GBPS", "25")).name == name
        if text != name:
            with pytest.raises(ConfigError, match="give the rate"):
                NodeSchedule.parse(text)


def test_no_schedule_beats_the_bound_and_pacing_keeps_queues_short():
    bytes_HH = np.random.default_rng(1).integers(50_000, 800_000, (6, 6))
    np.fill_diagonal(bytes_HH, 0)
    costs = costs_of(bytes_HH)
    print({name: (one.layer_us / one.bound_us, one.peak_queue_bytes) for name, one in costs.items()})
    assert all(1.0 <= one.layer_us / one.bound_us < 2.0 for one in costs.values()), costs
    for name in ("paced", "by-counts"):
        assert costs[name].peak_queue_bytes < costs["together"].peak_queue_bytes / 4
    assert costs["by-counts"].layer_us < costs["paced"].layer_us


def test_the_fastest_must_be_worth_it():
    assert fastest([cost("together", 100.0), cost("rotated", 99.0)])[0].schedule == "together"
    best, why = fastest([cost("together", 100.0), cost("rotated", 80.0), cost("paced", 90.0)])
    assert (best.schedule, why) == ("rotated", "1.25x faster than together")


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_command_names_the_fastest(adaptive, tmp_path):
    fabric = "rail-optimised:servers=3,nics_per_server=2,spines=1,gbps=100,delay_ns=100"
    arguments = ["schedules", "--trace", "prose", "--topology", fabric, "--tokens", "32", "--hidden", "1024"]
    arguments += ["--layers", "0", "--json", str(tmp_path / "out.json"), *["--adaptive"] * adaptive]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["schedule"] for one in found["schedules"]] == list(SCHEDULES)
    assert f"--node-schedule {found['fastest']}" in done.output
    assert all(one["layer_us"] >= one["bound_us"] for one in found["schedules"])
