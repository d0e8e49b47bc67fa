"""Deadlock proofs: does PFC close a cycle of buffers on these routes, and what would open it?

`prove(topology, policy)` judges the healthy fabric and every single failure; `cures` proposes and re-proves.
Reading order: `graph`, `kernel`, `prover`, `cycle`, `cures`, `paths`; `naive` is the oracle.
"""

from bywash.fabric.prove.cures import Cure, cures
from bywash.fabric.prove.cycle import Cycle, Wait
from bywash.fabric.prove.paths import prove_paths
from bywash.fabric.prove.prover import (
    POLICIES,
    POLICY_WORDS,
    Classes,
    Policy,
    Proof,
    Verdict,
    one_class,
    prove,
    tagged_classes,
)

__all__ = [
    "POLICIES",
    "POLICY_WORDS",
    "Classes",
    "Cure",
    "Cycle",
    "Policy",
    "Proof",
    "Verdict",
    "Wait",
    "cures",
    "one_class",
    "prove",
    "prove_paths",
    "tagged_classes",
]
