"""Our own greedy generation loop over stages: transformers' `generate` cannot interleave micro-batches, and hangs the
others when one rank has no prompt.

All ranks call `generate` together, with their own (possibly empty) list of micro-batches. One exchange per MoE layer
and step carries the tokens of all of a rank's micro-batches.
Knows nothing of processes or transports beyond the `ExpertParallel` layers it is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bywash.errors import BywashError
from bywash.models.stages import DecoderLayer, LanguageModel, MicroBatch
from bywash.moe import ExpertParallel
from bywash.routing import Routing

FILLER = -1


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
        on_layer: called after each MoE layer with (layer index, routing of all local tokens, the layer).
    """

    on_step: Callable[[int, Sequence[MicroBatch]], None] | None = None
    on_layer: Callable[[int, Routing, ExpertParallel], None] | None = None


def make_micro_batches(prompts: Sequence[Sequence[int]], size: int, rank: int, ranks: int) -> list[MicroBatch]:
    """This rank's micro-batches: consecutive prompts in groups of `size`, groups dealt to ranks in turn.

    All are left-padded to the longest prompt of the job and filled up to `size` rows, so that their shapes depend
    neither on the number of ranks nor on which prompts a rank got.
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
        observer: hooks for traces and progress.
    """
    observer = observer or Observer()
    result = Generation(tokens={p: [] for batch in batches for p in batch.prompts if p != FILLER})
    for step in range(new_tokens):
        if observer.on_step:
            observer.on_step(step, batches)
        _forward(model, experts, batches, step, check_router, observer)
        for batch in batches:
            logits_BSV = model.head(batch, last_only=step > 0 or not keep_logits)
            _check_finite(logits_BSV[:, -1], batch, step)
            if step == 0 and keep_logits:
                for row, prompt in enumerate(batch.prompts):
                    if prompt != FILLER:
                        result.prefill_logits[prompt] = logits_BSV[row, batch.real_BS[row]].float()
            _advance(batch, logits_BSV[:, -1].argmax(dim=-1), result, stop_ids)
    return result


def _forward(
    model: LanguageModel,
    experts: dict[int, ExpertParallel],
    batches: Sequence[MicroBatch],
    step: int,
    check_router: bool,
    observer: Observer,
) -> None:
    for batch in batches:
        model.embed(batch)
    for layer in model.layers:
        for batch in batches:
            layer.attention(batch)
        if not layer.is_moe:
            for batch in batches:
                layer.dense(batch)
            continue
        routed = [layer.route(batch, check=check_router) for batch in batches]
        shared = [layer.shared_expert(batch) for batch in batches]
        x_TD, routing = _joined(model, layer, routed)
        # Decode steps are short: rows go under the last step's plan rather than wait for this step's counts.
        out_TD = experts[layer.index](x_TD, routing, reuse_plan=step > 0)
        if observer.on_layer:
            observer.on_layer(layer.index, routing, experts[layer.index])
        parts = out_TD.split([r.tokens for _, r in routed]) if routed else ()
        for batch, part, extra in zip(batches, parts, shared, strict=True):
            layer.finish(batch, part, extra)


def _joined(model: LanguageModel, layer: DecoderLayer, routed: list[tuple[Tensor, Routing]]) -> tuple[Tensor, Routing]:
    """All micro-batches' tokens as one batch; a rank without prompts takes part with none."""
    if not routed:
        nothing = torch.empty(0, model.hidden, dtype=layer.experts_module.down_proj.dtype)
        ids = torch.empty(0, model.top_k, dtype=torch.long)
        return nothing, Routing(ids_TK=ids, weights_TK=torch.empty(ids.shape), num_experts=model.num_experts)
    ids = torch.cat([r.ids_TK for _, r in routed])
    weights = torch.cat([r.weights_TK for _, r in routed])
    return torch.cat([x for x, _ in routed]), Routing(ids_TK=ids, weights_TK=weights, num_experts=model.num_experts)


def _check_finite(logits_BV: Tensor, batch: MicroBatch, step: int) -> None:
    """A NaN behind the last router would otherwise come out as text."""
    bad_B = ~logits_BV.isfinite().all(dim=1)
    for row, prompt in enumerate(batch.prompts):
        if prompt != FILLER and bad_B[row] and batch.real_BS[row, -1]:
            raise BywashError(
                f"prompt {prompt}, step {step}: the logits are not finite; look at the weights or the dtype"
            )


def _advance(batch: MicroBatch, next_B: Tensor, result: Generation, stop_ids: frozenset[int]) -> None:
    """Record the chosen tokens and make them the next step's input."""
    alive_B = batch.real_BS[:, -1].clone()
    for row, prompt in enumerate(batch.prompts):
        if alive_B[row]:
            token = int(next_B[row])
            result.tokens[prompt].append(token)
            alive_B[row] = token not in stop_ids
    batch.ids_BS = next_B[:, None]
    batch.real_BS = alive_B[:, None]
    batch.keep_BC = torch.cat([batch.keep_BC, torch.ones(len(batch.prompts), 1, dtype=torch.bool)], dim=1)
