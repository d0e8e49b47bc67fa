"""A proof for people and for programs: lines of text, and plain data for JSON. Called by the command line."""

from typing import Any

from bywash.fabric.prove.cures import Cure
from bywash.fabric.prove.cycle import Cycle
from bywash.fabric.prove.prover import POLICY_WORDS, Proof
from bywash.fabric.topology import Topology


def _cycle_json(cycle: Cycle) -> list[dict[str, Any]]:
    return [
        {"switch": w.switch, "port": w.port, "priority": w.priority, "flow": list(w.flow), "path": list(w.path)}
        for w in cycle.waits
    ]


def proof_json(network: Topology, proof: Proof, proposed: tuple[Cure, ...]) -> dict[str, Any]:
    """A proof as `bywash fabric prove --json` has it."""
    return {
        "topology": network.describe(),
        "policy": proof.policy,
        "routes": POLICY_WORDS[proof.policy],
        "deadlock_free": proof.deadlock_free,
        "deadlock_free_healthy": proof.verdicts[0].deadlock_free,
        "buffers": proof.buffers,
        "dependencies": proof.dependencies,
        "failures_proved": len(proof.verdicts) - 1,
        "cycles": [
            {"failure": verdict.failure.name, "buffers": _cycle_json(verdict.cycle)}
            for verdict in proof.hazards
            if verdict.cycle is not None
        ],
        "unreachable": {verdict.failure.name: verdict.unreachable for verdict in proof.verdicts if verdict.unreachable},
        "cures": [
            {"name": one.name, "change": one.words, "price": one.price, "deadlock_free": one.proof.deadlock_free}
            for one in proposed
        ],
    }


def proof_text(network: Topology, proof: Proof, proposed: tuple[Cure, ...]) -> list[str]:
    """A proof in lines for a person."""
    lines = [network.describe(), f"routes: {POLICY_WORDS[proof.policy]}"]
    lines.append(
        f"{proof.buffers:,} buffers, {proof.dependencies:,} dependencies, {len(proof.verdicts) - 1:,} single failures"
    )
    if proof.deadlock_free:
        return [*lines, "deadlock-free: no cycle of buffers, healthy and under every failure proved"]
    lines.append(f"HAZARD: a cycle of buffers in {len(proof.hazards)} of {len(proof.verdicts)} cases")
    for verdict in proof.hazards[:3]:
        if verdict.cycle is not None:
            lines += [f"{verdict.failure.kind} {verdict.failure.name}: {verdict.cycle}", *_flows(verdict.cycle)]
    if len(proof.hazards) > 3:
        lines.append(f"... and {len(proof.hazards) - 3} more; --json has them all")
    for one in proposed:
        verdict_words = "deadlock-free" if one.proof.deadlock_free else "still a hazard"
        lines.append(f"cure, {one.name}: {one.words}: {verdict_words}; price: {one.price}")
    return [
        *lines,
        "a cycle is necessary for a deadlock, not sufficient: `bywash fabric simulate` shows whether traffic closes it",
    ]


def _flows(cycle: Cycle) -> list[str]:
    return [f"  {w.port} is held by {w.flow[0]} to {w.flow[1]} via {', '.join(w.path)}" for w in cycle.waits]


def paths_json(network: Topology, cycle: Cycle | None) -> dict[str, Any]:
    """The verdict on given paths, as JSON."""
    cycles = [] if cycle is None else [{"failure": "none", "buffers": _cycle_json(cycle)}]
    return {
        "topology": network.describe(),
        "routes": "the paths given",
        "deadlock_free": cycle is None,
        "cycles": cycles,
    }


def paths_text(cycle: Cycle | None) -> list[str]:
    """The verdict on given paths, in lines."""
    if cycle is None:
        return ["deadlock-free: these paths make no cycle of buffers"]
    return [f"HAZARD: {cycle}", *_flows(cycle)]
