"""How a job's steps are split so that communication hides behind compute: `--overlap`, resolved for prefill and decode.

All ranks call with the same options and get the same answer, without asking each other. What the answer costs is
estimated by `moe.pipeline.cost`; this file only knows what the model and the job look like.
"""

from dataclasses import dataclass
from typing import Any

from bywash.exchange import Combine, DeviceKind, Link
from bywash.models.stages import LanguageModel
from bywash.moe.pipeline import SERIAL, Load, Split, decide, splits_of
from bywash.moe.pipeline.cost import cpu_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The split of the first step and of the others, and why each."""

    prefill: Split
    decode: Split
    why_prefill: str
    why_decode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """What of a job matters for overlap.

    Attributes:
        ranks: how many.
        batches: micro-batches of the rank that has most.
        batch_prompts, length: rows and columns of a micro-batch in prefill.
        combine, link, device: as in `JobOptions`.
    """

    ranks: int
    batches: int
    batch_prompts: int
    length: int
    combine: Combine
    link: Link | None
    device: DeviceKind


def overlap_for(mode: str, model: LanguageModel, job: JobShape) -> Overlap:
    """Resolve `--overlap`.

    Raises:
        ConfigError: unknown mode.
    """
    allowed = splits_of(mode, job.batches)
    split, why = _without_costs(mode, allowed, job)
    if split is not None:
        return Overlap(prefill=split, decode=split, why_prefill=why, why_decode=why)
    assert job.link is not None
    machine = cpu_rank(job.link.rate_gbps, job.link.latency_us)
    prefill, decode = (
        decide(_load(model, job, length, context), machine, allowed)
        for length, context in ((job.length, job.length // 2), (1, job.length))
    )
    return Overlap(prefill=prefill.split, decode=decode.split, why_prefill=prefill.why, why_decode=decode.why)


def _without_costs(mode: str, allowed: tuple[Split, ...], job: JobShape) -> tuple[Split | None, str]:
    """The answer where nothing has to be estimated; None where it has."""
    if mode == "off":
        return SERIAL, "asked for"
    if mode == "microbatch" and job.batches < 2:
        return allowed[0], "asked for; a rank has one micro-batch, so the others are empty: lower --micro-batch"
    if mode == "auto" and job.ranks == 1:
        return SERIAL, "one rank: nothing is sent"
    if mode == "auto" and job.device != "cpu":
        return SERIAL, "on GPUs a step waits for the host more than for its rows; ask for a split to see it overlap"
    if job.link is None and mode == "auto":
        return SERIAL, "without a link to wait for, rows are moved by the cores that compute: nothing to hide"
    if job.link is None:
        return allowed[0], "asked for"
    return None, ""


def _load(model: LanguageModel, job: JobShape, length: int, context: int) -> Load:
    """A MoE layer of the model, for the rank with most micro-batches."""
    shape: dict[str, Any] = model.layer_shape()
    return Load(
        ranks=job.ranks,
        tokens=job.batches * job.batch_prompts * length,
        hidden=model.hidden,
        top_k=model.top_k,
        experts=model.num_experts,
        combine=job.combine,
        context=context,
        **shape,
    )
