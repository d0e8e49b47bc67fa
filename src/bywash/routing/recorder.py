"""`TraceRecorder`: collects one rank's routing while a model runs; `merge_traces` joins the ranks of a run.

Shapes: T rows of one rank's batch, L recorded layers, K experts per token, S steps, N tokens of a trace.
Knows nothing of models or of how ranks talk: a finished trace is pickled, or saved and loaded, to reach the
rank that merges. The model runner calls it; needs numpy alone, and takes tensors of any device.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bywash.errors import RoutingError, TraceError
from bywash.routing.trace import DECODE, PREFILL, Array, RoutingTrace, ids_dtype

if TYPE_CHECKING:
    from torch import Tensor


class TraceRecorder:
    """Collects one rank's routing while a model runs; `finish` makes the trace, `merge_traces` joins ranks.

    For each forward step call `begin_step` once and then `add` once per MoE layer, in any order of layers. A
    rank without tokens still begins every step. A row whose prompt is negative is padding and leaves no mark.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int],
        num_experts: int,
        top_k: int,
        keep_weights: bool = False,
        model: str = "",
        note: str = "",
        topics: Sequence[str] = (),
    ) -> None:
        self._layers = tuple(sorted(layers))
        self._num_experts, self._top_k, self._keep_weights = num_experts, top_k, keep_weights
        self._labels = {"model": model, "note": note, "topics": tuple(topics)}
        self._phases: list[int] = []
        self._prompts: list[Array] = []
        self._positions: list[Array] = []
        self._ids: list[Array] = []  # per step [T, L, K]
        self._weights: list[Array] = []
        self._kept: Array = np.zeros(0, np.bool_)  # rows of the open step that are no padding
        self._missing: set[int] = set()  # layers the open step still waits for; asked by membership only

    def begin_step(
        self,
        phase: int,
        token_prompt_T: "Tensor | Array | Sequence[int]",
        token_position_T: "Tensor | Array | Sequence[int]",
    ) -> None:
        """Open the next step.

        Args:
            phase: `PREFILL` or `DECODE`.
            token_prompt_T: [T], the prompt of each row of this rank's batch, numbered over all ranks;
                negative for padding.
            token_position_T: [T], each row's place in its sequence.

        Raises:
            TraceError: the step before lacks a layer, or the arguments do not fit each other.
        """
        self._check_complete()
        prompt = _host(token_prompt_T).astype(np.int32)
        position = _host(token_position_T).astype(np.int32)
        if phase not in (PREFILL, DECODE):
            raise TraceError(f"phase = {phase}: must be 0 (prefill) or 1 (decode)")
        if prompt.ndim != 1 or prompt.shape != position.shape:
            raise TraceError(
                f"token_prompt_T {list(prompt.shape)} and token_position_T {list(position.shape)} must both be [tokens]"
            )
        self._kept = prompt >= 0
        self._missing = set(self._layers) if self._kept.any() else set()
        self._phases.append(phase)
        self._prompts.append(prompt[self._kept])
        self._positions.append(position[self._kept])
        shape = (int(self._kept.sum()), len(self._layers), self._top_k)
        self._ids.append(np.zeros(shape, ids_dtype(self._num_experts)))
        if self._keep_weights:
            self._weights.append(np.zeros(shape, np.float16))

    def add(self, layer: int, ids_TK: "Tensor | Array", weights_TK: "Tensor | Array | None" = None) -> None:
        """Record one layer of the open step: integer ids [T, K] and, if they are kept, weights [T, K].

        Raises:
            TraceError: no open step, a layer that is unknown or already added, missing weights.
            RoutingError: wrong shape, or a token that is no padding has an id that is no expert.
        """
        if not self._phases or layer not in self._layers:
            raise TraceError(f"layer = {layer}: call begin_step first, and add only layers {list(self._layers)}")
        if self._kept.any() and layer not in self._missing:
            raise TraceError(f"layer = {layer}: added twice in step {len(self._phases) - 1}")
        ids = _host(ids_TK)
        if ids.shape != (self._kept.size, self._top_k):
            raise RoutingError(
                f"layer {layer}: ids {list(ids.shape)} must be [{self._kept.size} tokens, top_k {self._top_k}]"
            )
        ids = ids[self._kept]
        if ids.size and not 0 <= ids.min() <= ids.max() < self._num_experts:
            raise RoutingError(f"layer {layer}: ids must be 0..{self._num_experts - 1}, got {ids.min()}..{ids.max()}")
        index = self._layers.index(layer)
        self._ids[-1][:, index] = ids
        if self._keep_weights:
            if weights_TK is None:
                raise TraceError(f"layer {layer}: this recorder keeps weights; pass weights_TK")
            weights = _host(weights_TK)
            if weights.shape != (self._kept.size, self._top_k):
                raise RoutingError(f"layer {layer}: weights {list(weights.shape)}, must be shaped as its ids")
            self._weights[-1][:, index] = weights[self._kept]
        self._missing.discard(layer)

    def finish(self) -> RoutingTrace:
        """The trace of this rank so far. Raises `TraceError` when the last step lacks a layer."""
        self._check_complete()
        shape = (0, len(self._layers), self._top_k)
        no_ids, none = np.zeros(shape, ids_dtype(self._num_experts)), np.zeros(0, np.int32)
        trace = RoutingTrace(
            ids_NLK=np.concatenate([no_ids, *self._ids]),
            weights_NLK=np.concatenate([np.zeros(shape, np.float16), *self._weights]) if self._keep_weights else None,
            step_tokens_S=np.array([p.size for p in self._prompts], np.int32),
            step_phase_S=np.array(self._phases, np.uint8),
            token_prompt_N=np.concatenate([none, *self._prompts]),
            token_position_N=np.concatenate([none, *self._positions]),
            layers=self._layers,
            num_experts=self._num_experts,
            model=str(self._labels["model"]),
            note=str(self._labels["note"]),
            topics=tuple(self._labels["topics"]),
        )
        return merge_traces([trace])

    def _check_complete(self) -> None:
        if self._missing:
            raise TraceError(f"step {len(self._phases) - 1}: layers {sorted(self._missing)} were not recorded")


def merge_traces(parts: Sequence[RoutingTrace]) -> RoutingTrace:
    """Join the ranks' recordings of one run into one trace, the same whatever the order of the parts.

    Tokens are ordered by (step, prompt, position), so a run on one rank and on many gives the same trace.

    Raises:
        TraceError: the parts disagree on layers, experts, top-k, steps, phases or labels, or two hold the
            same token.
    """
    _check_one_run(parts)
    first = parts[0]
    step = np.concatenate([np.repeat(np.arange(part.steps), part.step_tokens_S) for part in parts])
    prompt = np.concatenate([part.token_prompt_N for part in parts])
    position = np.concatenate([part.token_position_N for part in parts])
    order = np.lexsort((position, prompt, step))
    keys = np.stack([step, prompt, position])[:, order]
    same = (keys[:, 1:] == keys[:, :-1]).all(axis=0)
    if same.any():
        s, p, at = keys[:, int(same.argmax())].tolist()
        raise TraceError(f"step {s} holds prompt {p}, position {at} twice; each token is recorded by one rank")
    weights = [part.weights_NLK for part in parts if part.weights_NLK is not None]
    return RoutingTrace(
        ids_NLK=np.concatenate([part.ids_NLK for part in parts])[order],
        weights_NLK=np.concatenate(weights)[order] if weights else None,
        step_tokens_S=np.stack([part.step_tokens_S for part in parts]).sum(axis=0, dtype=np.int32),
        step_phase_S=first.step_phase_S,
        token_prompt_N=prompt[order],
        token_position_N=position[order],
        layers=first.layers,
        num_experts=first.num_experts,
        model=first.model,
        note=first.note,
        topics=first.topics,
        source=first.source,
        seed=first.seed,
    )


def _check_one_run(parts: Sequence[RoutingTrace]) -> None:
    if not parts:
        raise TraceError("parts: nothing to merge")
    first = parts[0]
    for i, part in enumerate(parts):
        for name in ("layers", "num_experts", "top_k", "steps", "model", "note", "topics", "source", "seed"):
            if getattr(part, name) != getattr(first, name):
                raise TraceError(
                    f"{name}: part 0 has {getattr(first, name)!r}, part {i} has {getattr(part, name)!r}; "
                    "merge the ranks of one run"
                )
        if not np.array_equal(part.step_phase_S, first.step_phase_S):
            raise TraceError(f"step_phase_S: parts 0 and {i} disagree; merge the ranks of one run")
        if (part.weights_NLK is None) != (first.weights_NLK is None):
            raise TraceError(f"weights_NLK: only one of parts 0 and {i} has weights")


def _host(values: Any) -> Array:
    """A numpy array of a tensor on any device, an array or a list."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point():
            values = values.float()  # numpy has no bfloat16
        values = values.numpy()
    return np.asarray(values)
