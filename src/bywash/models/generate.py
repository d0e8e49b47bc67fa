"""Our own greedy generation loop over stages: transformers' `generate` cannot interleave micro-batches, and hangs the
others when one rank has no prompt.

All ranks call `generate` together, with their own (possibly empty) list of micro-batches. Serially, one exchange per
MoE layer and step carries the tokens of all of a rank's micro-batches; split in lanes, the micro-batches of one lane
compute while those of another travel. Either way a `Schedule` says what runs when, and an executor runs it.
Knows nothing of processes or transports beyond the `ExpertParallel` layers it is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.errors import BywashError
from bywash.exchange import DEADLINE_S
from bywash.models.stages import LanguageModel, MicroBatch
from bywash.moe import ExpertParallel
from bywash.moe.pipeline import SERIAL, Forward, Schedule, Span, Split, ThreadExecutor, build_schedule
from bywash.routing import Routing

FILLER = -1
EXCHANGE_WAITS = 5
"""An exchange call has up to four waits (counts, rows, rows again, heaps), each with a deadline and a better error."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """What one rank's prompts gave.

    Attributes:
        tokens: prompt index to generated ids.
        prefill_logits: prompt index to float32 [prompt length, V], if they were asked for.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    prefill_logits: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Observer:
    """Hooks into a generation; each may be None.

    Attributes:
        on_step: called before each step with (step, micro-batches); step 0 is prefill.
        on_layer: called after each MoE layer with (layer index, routing of all local tokens, expert rows that each rank
            computed, int64 [R]).
        on_spans: called after each step with (step, when each of its ops ran).
    """

    on_step: Callable[[int, Sequence[MicroBatch]], None] | None = None
    on_layer: Callable[[int, Routing, NDArray[np.int64]], None] | None = None
    on_spans: Callable[[int, Sequence[Span]], None] | None = None


def make_micro_batches(
    prompts: Sequence[Sequence[int]], size: int, rank: int, ranks: int, device: torch.device | None = None
) -> list[MicroBatch]:
    """This rank's micro-batches: consecutive prompts in groups of `size`, groups dealt to ranks in turn.

    All are left-padded to the longest prompt of the job and filled up to `size` rows, so that their shapes depend
    neither on the number of ranks nor on which prompts a rank got. They are made on `device`, by default the CPU.
    """
    length = max(len(prompt) for prompt in prompts)
    batches = []
    for first in range(rank * size, len(prompts), ranks * size):
        members = list(range(first, min(first + size, len(prompts))))
        ids = torch.zeros(size, length, dtype=torch.long)
        keep = torch.zeros(size, length, dtype=torch.bool)
        for row, prompt in enumerate(members):
            ids[row, length - len(prompts[prompt]) :] = torch.tensor(prompts[prompt])
            keep[row, length - len(prompts[prompt]) :] = True
        real = keep.clone()
        keep[len(members) :, -1] = True  # a filler row looks at itself and is routed nowhere
        members += [FILLER] * (size - len(members))
        ids, keep, real = (tensor.to(device) for tensor in (ids, keep, real))
        batches.append(MicroBatch(prompts=members, ids_BS=ids, keep_BC=keep, real_BS=real))
    return batches


@torch.inference_mode()
def generate(
    model: LanguageModel,
    experts: dict[int, ExpertParallel],
    batches: Sequence[MicroBatch],
    *,
    new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    keep_logits: bool = False,
    check_router: bool = False,
    prefill: Split = SERIAL,
    decode: Split = SERIAL,
    deadline_s: float = DEADLINE_S,
    observer: Observer | None = None,
) -> Generation:
    """Prefill and greedy decoding of this rank's prompts; every rank calls it with the same `new_tokens`.

    Args:
        model: the stages.
        experts: layer index to its expert-parallel layer.
        batches: from `make_micro_batches`; consumed (their caches and tokens advance).
        new_tokens: tokens to generate for each prompt, at least 1; all ranks run that many steps.
        stop_ids: ids that end a prompt (the id itself is kept); it stops being routed.
        keep_logits: keep the prefill logits of every real position.
        check_router: compare our gates with the model's own router at every layer and step.
        prefill, decode: how the first and the other steps are split, the same on all ranks.
        deadline_s: of the exchange.
        observer: hooks for traces and progress.
    """
    observer = observer or Observer()
    model.check_routers(check_router)
    forms = [layer.form for layer in model.layers]
    schedules = {split: build_schedule(forms, split) for split in {prefill, decode}}
    result = Generation(tokens={p: [] for batch in batches for p in batch.prompts if p != FILLER})
    with ThreadExecutor(deadline_s=EXCHANGE_WAITS * deadline_s, device=model.device) as executor:
        for step in range(new_tokens):
            if observer.on_step:
                observer.on_step(step, batches)
            # Decode steps are short: rows go under the last step's plan rather than wait for this step's counts.
            schedule, reuse_plan = (schedules[decode], True) if step else (schedules[prefill], False)
            spans = _forward(model, experts, batches, executor, schedule, reuse_plan, observer)
            if observer.on_spans:
                observer.on_spans(step, spans)
            for batch in batches:
                logits_BSV = model.head(batch, last_only=step > 0 or not keep_logits)
                _check_finite(logits_BSV[:, -1], batch, step)
                if step == 0 and keep_logits:
                    _keep_logits(logits_BSV, batch, result)
                _advance(batch, logits_BSV[:, -1].argmax(dim=-1), result, stop_ids)
    return result


def _forward(
    model: LanguageModel,
    experts: dict[int, ExpertParallel],
    batches: Sequence[MicroBatch],
    executor: ThreadExecutor,
    schedule: Schedule,
    reuse_plan: bool,
    observer: Observer,
) -> list[Span]:
    """One step through all layers, from embedding to the residual stream before the head."""
    for batch in batches:
        model.embed(batch)
    split = schedule.split
    ends = [len(batches) * lane // split.lanes for lane in range(split.lanes + 1)]
    work = Forward(
        model.layers,
        experts,
        [batches[begin:end] for begin, end in pairwise(ends)],
        chunks=split.chunks,
        nothing=model.nothing,
        reuse_plan=reuse_plan,
        on_routed=observer.on_layer,
    )
    return executor.run(schedule, work)


def _keep_logits(logits_BSV: Tensor, batch: MicroBatch, result: Generation) -> None:
    for row, prompt in enumerate(batch.prompts):
        if prompt != FILLER:
            result.prefill_logits[prompt] = logits_BSV[row, batch.real_BS[row]].float().cpu()


def _check_finite(logits_BV: Tensor, batch: MicroBatch, step: int) -> None:
    """A NaN behind the last router would otherwise come out as text."""
    bad_B = (batch.real_BS[:, -1] & ~logits_BV.isfinite().all(dim=1)).tolist()
    for row, prompt in enumerate(batch.prompts):
        if prompt != FILLER and bad_B[row]:
            raise BywashError(
                f"prompt {prompt}, step {step}: the logits are not finite; look at the weights or the dtype"
            )


def _advance(batch: MicroBatch, next_B: Tensor, result: Generation, stop_ids: frozenset[int]) -> None:
    """Record the chosen tokens and make them the next step's input."""
    alive_B, tokens_B = batch.real_BS[:, -1].tolist(), next_B.tolist()
    for row, prompt in enumerate(batch.prompts):
        if alive_B[row]:
            result.tokens[prompt].append(tokens_B[row])
            alive_B[row] = tokens_B[row] not in stop_ids
    batch.ids_BS = next_B[:, None]
    batch.real_BS = torch.tensor(alive_B, device=next_B.device)[:, None]
    batch.keep_BC = torch.cat([batch.keep_BC, torch.ones_like(batch.real_BS)], dim=1)
