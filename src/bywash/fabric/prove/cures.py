"""What opens a cycle: restrict the routes, or give packets that bounce a lossless priority of their own.

Every cure is re-proved on the same fabric and failures, with what it costs. Called by the command line.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bywash.fabric.prove.prover import Policy, Proof, prove, tagged_classes
from bywash.fabric.topology import Topology

MOST_BOUNCES = 3
LOSSLESS_PRIORITIES = (3, 4, 2, 5)
"""In this order: SONiC's default pair first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """A change, its proof, and its price in words."""

    name: str
    words: str
    price: str
    proof: Proof


def cures(
    topology: Topology,
    policy: Policy,
    *,
    pairs: tuple[tuple[int, int], ...] | None = None,
    failures: Literal["none", "links", "switches", "single"] = "single",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Cure, ...]:
    """Cures of a fabric whose proof found a cycle, each re-proved: up-down routes, then bounce priorities.

    Of the latter the fewest that leave no packet without a lossless class are taken, `MOST_BOUNCES` + 1 at most.
    """
    found = []
    if policy != "up-down":
        proof = prove(topology, "up-down", pairs=pairs, failures=failures, progress=progress)
        cut = max(verdict.unreachable for verdict in proof.verdicts)
        price = (
            f"up to {cut} pairs of switches have no up-down path under some failure"
            if cut
            else "no pair loses its path"
        )
        found.append(Cure(name="up-down", words="allow no path that goes up after down", price=price, proof=proof))
    for bounces in range(1, MOST_BOUNCES + 1):
        priorities = LOSSLESS_PRIORITIES[: bounces + 1]
        classes = tagged_classes(topology.switches, priorities)
        proof = prove(topology, policy, classes=classes, pairs=pairs, failures=failures, progress=progress)
        lossy = max(verdict.lossy_turns for verdict in proof.verdicts)
        if not lossy or bounces == MOST_BOUNCES:
            break
    names = ", ".join(map(str, priorities))
    loss = f"; turns at which a packet becomes lossy: {lossy}" if lossy else "; no packet becomes lossy"
    found.append(
        Cure(
            name="bounce priority",
            words=f"lossless priorities {names} in place of one: a packet takes the next one at each turn from down to "
            f"up, and goes on lossy after {bounces}",
            price=f"headroom of {bounces} more at every port{loss}",
            proof=proof,
        )
    )
    return tuple(found)
