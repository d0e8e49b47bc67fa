"""`RoutingTrace`: which experts every token chose, layer by layer and step by step.

Shapes: N tokens of the whole trace, L recorded layers, K experts per token, E experts, S steps, P prompts, R
ranks. Tokens lie step after step; within a step they are ordered by (prompt, position).
Knows nothing of models, devices or placements; needs numpy alone. `TraceRecorder` and the skew generators
make traces, `trace_file` reads and writes them, the summary and the planner use them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bywash.errors import TraceError

PREFILL = 0
DECODE = 1
PHASE_NAMES = ("prefill", "decode")

Array = NDArray[Any]
IntArray = NDArray[np.int64]
TraceSource = Literal["recorded", "generated"]

# Rows of ids looked at together by the check for repeated experts: keeps its copy in the cache.
_CHECK_ROWS = 1 << 14


def ids_dtype(num_experts: int) -> np.dtype[Any]:
    """The smallest unsigned dtype that holds the ids: uint8 up to 256 experts, uint16 up to 65536."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """Every routing choice of a run. The constructor raises `TraceError` naming the field that does not fit.

    Attributes:
        ids_NLK: uint8 (E <= 256) or uint16 [N, L, K], expert ids, distinct within a row, in the router's
            order.
        step_tokens_S: int32 [S], tokens of each step; they sum to N, and a step may have none.
        step_phase_S: uint8 [S], 0 (`PREFILL`) or 1 (`DECODE`).
        token_prompt_N: int32 [N], the prompt a token belongs to, 0..P-1.
        token_position_N: int32 [N], the token's place in its sequence, from 0.
        layers: the model's layer numbers behind axis L, rising; dense layers are not in it.
        num_experts: E of each layer, up to 65536.
        weights_NLK: float16 [N, L, K] gate weights, or None when they were not kept.
        model: name of the model, "" when there is none.
        note: free text: what was run, or the law of a generated trace.
        topics: one label per prompt (P of them), or empty when prompts are not labelled.
        source: `recorded` from a model or `generated` from a law.
        seed: the seed of a generated trace, None for a recorded one.

    The arrays are made read-only.
    """

    ids_NLK: Array
    step_tokens_S: Array
    step_phase_S: Array
    token_prompt_N: Array
    token_position_N: Array
    layers: tuple[int, ...]
    num_experts: int
    weights_NLK: Array | None = None
    model: str = ""
    note: str = ""
    topics: tuple[str, ...] = ()
    source: TraceSource = "recorded"
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_header(self)
        _check_arrays(self)
        for name in ("ids_NLK", "step_tokens_S", "step_phase_S", "token_prompt_N", "token_position_N"):
            getattr(self, name).setflags(write=False)
        if self.weights_NLK is not None:
            self.weights_NLK.setflags(write=False)

    @property
    def tokens(self) -> int:
        """N, the tokens of the whole trace (a token decoded in a later step counts there)."""
        return int(self.ids_NLK.shape[0])

    @property
    def top_k(self) -> int:
        """K, the experts of each token."""
        return int(self.ids_NLK.shape[2])

    @property
    def steps(self) -> int:
        """S, the forward steps."""
        return int(self.step_tokens_S.shape[0])

    @property
    def prompts(self) -> int:
        """P, the prompts: as many as there are topics, else one more than the greatest prompt seen."""
        if self.topics or not self.tokens:
            return len(self.topics)
        return int(self.token_prompt_N.max()) + 1

    def step_slice(self, step: int) -> slice:
        """The tokens of one step, as a slice of axis N. Raises `TraceError` unless 0 <= step < S."""
        if not 0 <= step < self.steps:
            raise TraceError(f"step = {step}: the trace has steps 0..{self.steps - 1}")
        start = int(self.step_tokens_S[:step].sum(dtype=np.int64))
        return slice(start, start + int(self.step_tokens_S[step]))

    def layer_index(self, layer: int) -> int:
        """The index on axis L of the model's layer number. Raises `TraceError` when it was not recorded."""
        if layer not in self.layers:
            raise TraceError(f"layer = {layer}: the trace has layers {', '.join(map(str, self.layers))}")
        return self.layers.index(layer)

    def counts_SLE(self) -> NDArray[np.int32]:
        """Assignments (token, expert) per step, layer and expert: int32 [S, L, E]."""
        layers, experts = len(self.layers), self.num_experts
        base_N = np.repeat(np.arange(self.steps, dtype=np.int64) * experts, self.step_tokens_S)
        counts_SLE = np.zeros((self.steps, layers, experts), np.int32)
        for i in range(layers):  # layer by layer, so that the int64 keys stay L times smaller than the trace
            keys = base_N[:, None] + self.ids_NLK[:, i]
            counts = np.bincount(keys.reshape(-1), minlength=self.steps * experts)
            counts_SLE[:, i] = counts.reshape(self.steps, experts)
        return counts_SLE

    def counts_LE(self, phase: int | None = None) -> IntArray:
        """Assignments per layer and expert, int64 [L, E], over all steps or those of one phase (0 or 1)."""
        ids_NLK = self.ids_NLK
        if phase is not None:
            ids_NLK = ids_NLK[np.repeat(self.step_phase_S == phase, self.step_tokens_S)]
        return _counts_LE(ids_NLK, self.num_experts)

    def counts_by_topic(self) -> dict[str, IntArray]:
        """Assignments int64 [L, E] of each topic, in order of first appearance; {} if unlabelled."""
        names = tuple(dict.fromkeys(self.topics))
        topic_P = np.array([names.index(t) for t in self.topics], np.int64)
        return {
            name: _counts_LE(self.ids_NLK[topic_P[self.token_prompt_N] == i], self.num_experts)
            for i, name in enumerate(names)
        }

    def counts_RE(
        self, step: int, layer: int, ranks: int, rank_of_prompt: Sequence[int] | IntArray | None = None
    ) -> NDArray[np.int32]:
        """The count matrix that a step's plan is made from: rows that source rank r sends to expert e.

        Args:
            step: 0..S-1.
            layer: the model's layer number, one of `layers`.
            ranks: R.
            rank_of_prompt: the rank that holds each prompt, [P] of 0..R-1; None deals them out, prompt p to p
                mod R.

        Returns:
            int32 [R, E].

        Raises:
            TraceError: no such step or layer, or `rank_of_prompt` too short or out of range.
        """
        if ranks < 1:
            raise TraceError(f"ranks = {ranks}: must be at least 1")
        tokens = self.step_slice(step)
        ids_TK = self.ids_NLK[tokens, self.layer_index(layer)]
        prompt_T = self.token_prompt_N[tokens]
        if rank_of_prompt is None:
            rank_T = prompt_T.astype(np.int64) % ranks
        else:
            rank_P = np.asarray(rank_of_prompt, np.int64)
            if rank_P.shape != (self.prompts,):
                raise TraceError(f"rank_of_prompt: {rank_P.size} entries, but the trace has {self.prompts} prompts")
            if rank_P.size and not 0 <= rank_P.min() <= rank_P.max() < ranks:
                raise TraceError(f"rank_of_prompt: entries must be 0..{ranks - 1}")
            rank_T = rank_P[prompt_T]
        keys = (rank_T[:, None] * self.num_experts + ids_TK).reshape(-1)
        counts = np.bincount(keys, minlength=ranks * self.num_experts)
        return counts.reshape(ranks, self.num_experts).astype(np.int32)

    def save(self, path: str | Path) -> None:
        """Write the trace to one file, all or nothing; same content, same bytes. Raises `TraceError`."""
        from bywash.routing import trace_file

        trace_file.save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> "RoutingTrace":
        """Read a trace file. Raises `TraceError` naming the file, the field and what to do."""
        from bywash.routing import trace_file

        return trace_file.load(Path(path))


def _counts_LE(ids_NLK: Array, num_experts: int) -> IntArray:
    layers = [np.bincount(ids_NLK[:, i].reshape(-1), minlength=num_experts) for i in range(ids_NLK.shape[1])]
    return np.array(layers, np.int64).reshape(len(layers), num_experts)


def _check_header(trace: RoutingTrace) -> None:
    if not 1 <= trace.num_experts <= 65536:
        raise TraceError(f"num_experts = {trace.num_experts}: must be 1..65536")
    if not trace.layers or any(n < 0 for n in trace.layers) or list(trace.layers) != sorted(set(trace.layers)):
        raise TraceError(f"layers = {list(trace.layers)}: must be rising layer numbers, at least one")
    if trace.source not in get_args(TraceSource):
        raise TraceError(f"source = {trace.source!r}: must be one of {', '.join(get_args(TraceSource))}")
    if (trace.source == "generated") != (trace.seed is not None):
        raise TraceError(f"seed = {trace.seed}: a generated trace has a seed, a recorded one has none")


def _check_arrays(trace: RoutingTrace) -> None:
    ids = trace.ids_NLK
    if ids.ndim != 3 or ids.shape[1] != len(trace.layers) or ids.shape[2] < 1:
        raise TraceError(f"ids_NLK: shape {list(ids.shape)}, must be [tokens, {len(trace.layers)} layers, top_k >= 1]")
    count = ids.shape[0]
    _check_array("ids_NLK", ids, ids_dtype(trace.num_experts), ids.shape)
    _check_array("step_tokens_S", trace.step_tokens_S, np.dtype(np.int32), trace.step_tokens_S.shape[:1])
    _check_array("step_phase_S", trace.step_phase_S, np.dtype(np.uint8), trace.step_tokens_S.shape)
    _check_array("token_prompt_N", trace.token_prompt_N, np.dtype(np.int32), (count,))
    _check_array("token_position_N", trace.token_position_N, np.dtype(np.int32), (count,))
    total = int(trace.step_tokens_S.sum(dtype=np.int64))
    if total != count or (trace.step_tokens_S < 0).any():
        raise TraceError(f"step_tokens_S: sums to {total} tokens (none may be negative), but ids_NLK has {count}")
    if (trace.step_phase_S > DECODE).any():
        raise TraceError(f"step_phase_S: holds {trace.step_phase_S.max()}; must be 0 (prefill) or 1 (decode)")
    if count and (trace.token_prompt_N.min() < 0 or trace.token_position_N.min() < 0):
        raise TraceError("token_prompt_N and token_position_N: must not be negative")
    if trace.topics and count and trace.token_prompt_N.max() >= len(trace.topics):
        raise TraceError(
            f"topics: {len(trace.topics)} labels, but token_prompt_N names prompt {trace.token_prompt_N.max()}"
        )
    if trace.weights_NLK is not None:
        _check_array("weights_NLK", trace.weights_NLK, np.dtype(np.float16), ids.shape)
        if not np.isfinite(trace.weights_NLK).all():
            raise TraceError("weights_NLK: holds values that are not finite")
    _check_ids(ids, trace.num_experts)


def _check_array(name: str, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise TraceError(f"{name}: is {array.dtype} {list(array.shape)}, must be {dtype} {list(shape)}")


def _check_ids(ids_NLK: Array, num_experts: int) -> None:
    for start in range(0, ids_NLK.shape[0], _CHECK_ROWS):
        ids = np.sort(ids_NLK[start : start + _CHECK_ROWS], axis=-1)
        bad = (ids[..., -1] >= num_experts) | (ids[..., 1:] == ids[..., :-1]).any(axis=-1)
        if bad.any():
            token, layer = (int(i) for i in np.argwhere(bad)[0])
            raise TraceError(
                f"ids_NLK[{start + token}, {layer}] = {ids_NLK[start + token, layer].tolist()}: must be "
                f"distinct experts 0..{num_experts - 1}"
            )
