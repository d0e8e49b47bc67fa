"""Overlap: micro-batches whose rows travel while others compute, as a schedule that executors run.

`schedule` says what an order of stages is and checks it, `order` makes one, `simulate` times it, `cost` decides how to
split a step, `run_threads` runs it on two threads, `forward` does what each stage is, `naive` is the oracle.
docs/overlap.md explains all of it.
"""

from bywash.moe.pipeline.cost import MODES, Decision, Load, Machine, decide, splits_of
from bywash.moe.pipeline.forward import Forward, LayerStages
from bywash.moe.pipeline.naive import forward_naive
from bywash.moe.pipeline.order import IN_FLIGHT, build_schedule
from bywash.moe.pipeline.run_threads import ThreadExecutor
from bywash.moe.pipeline.schedule import SERIAL, Kind, LayerForm, Op, Schedule, Semaphore, Split, Stream, check
from bywash.moe.pipeline.simulate import Span, Usage, critical_path, simulate, usage

__all__ = [
    "IN_FLIGHT",
    "MODES",
    "SERIAL",
    "Decision",
    "Forward",
    "Kind",
    "LayerForm",
    "LayerStages",
    "Load",
    "Machine",
    "Op",
    "Schedule",
    "Semaphore",
    "Span",
    "Split",
    "Stream",
    "ThreadExecutor",
    "Usage",
    "build_schedule",
    "check",
    "critical_path",
    "decide",
    "forward_naive",
    "simulate",
    "splits_of",
    "usage",
]
