"""Fabric operations: what a switch, a NIC and NCCL must be told, and whether what they were told holds.

One values file (`values`) and one topology give a `FabricPlan` (`plan`): headroom, thresholds and maps of every
port, each number with its arithmetic. Every writer (`sonic`, `cumulus`, `nic`, `nccl`) reads that plan and nothing
else, so that switches, NICs and libraries cannot disagree. `audit` goes the other way: it reads configuration that
exists and holds it against the same arithmetic. Nothing here talks to a switch. Knows nothing of torch or MoE.

Reading order: `asic`, `headroom`, `thresholds`, `values`, `plan`, `sonic`, `yang`, `audit`.
"""
