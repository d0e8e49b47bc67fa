"""Seeded generators of routing traces with a known law: uniform, Zipf, a hot set, topics that drift.

Shapes: E experts, K experts per token, L layers, S steps, T tokens per step.
Knows nothing of models: the result is marked `generated`. Benchmarks, tests and the planner use it where no
recording is at hand. Pure numpy.

Each layer has popularities p_E that sum to one, placed on expert ids by a seeded permutation of its own, so
that hot experts lie elsewhere in every layer. A token draws K distinct experts one after the other, each with
probability proportional to p among those it has not drawn yet (Gumbel top-k), and keeps them in the order
drawn.

What share an expert gets: a token's K experts are distinct, so one expert is in at most every token and gets
at most 1 / K of the assignments, and h experts at most h / K; K = 1 gives exactly p, K = E gives 1 / E each.
Between, the draw flattens the law: hot experts get less than p, and cold ones more. With K = 2 of E = 3,
p = (0.8, 0.1, 0.1), the first expert is among a token's two with probability
0.8 + 2 x 0.1 x 0.8 / 0.9 = 0.98, so its share is 0.49, not 0.8. For the same reason a Zipf exponent fitted to
a K > 1 trace lies below the one asked for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.routing.trace import DECODE, Array, RoutingTrace, ids_dtype

Floats = NDArray[np.float64]
OnStep = Callable[[int, int], None]
"""(steps made, steps in all), called after each step."""

# Draws (tokens x experts) made at once: bounds the memory of a long trace to some 100 MB.
_DRAWS_AT_ONCE = 1 << 23
_MAX_TOKENS = 2**31 - 1  # tokens and prompts are numbered in int32


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """The size of a generated trace. The constructor raises `ConfigError` naming the wrong field.

    Attributes:
        num_experts: E of each layer.
        top_k: K, experts per token.
        layers: L; they are numbered 0..L-1.
        tokens: T, tokens of each step, one from each of T prompts (all steps are decode steps).
        steps: S.
    """

    num_experts: int
    top_k: int
    layers: int = 1
    tokens: int = 256
    steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "layers", "tokens", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.num_experts > 65536:
            raise ConfigError(f"num_experts = {self.num_experts}: a trace holds at most 65536")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k = {self.top_k}: there are only {self.num_experts} experts to choose from")
        if self.tokens * self.steps > _MAX_TOKENS:
            raise ConfigError(
                f"tokens = {self.tokens} x steps = {self.steps}: a trace holds at most {_MAX_TOKENS} tokens in all"
            )

    @property
    def ids_bytes(self) -> int:
        """Bytes of the expert ids of the whole trace."""
        return self.steps * self.tokens * self.layers * self.top_k * ids_dtype(self.num_experts).itemsize


def uniform(shape: TraceShape, *, seed: int, on_step: OnStep | None = None) -> RoutingTrace:
    """Every expert equally popular: the load of an ideal router, with the noise of sampling."""
    return _one_topic(shape, np.full(shape.num_experts, 1.0 / shape.num_experts), seed, "uniform", on_step)


def zipf(shape: TraceShape, *, exponent: float, seed: int, on_step: OnStep | None = None) -> RoutingTrace:
    """The r-th most popular expert of each layer has popularity proportional to r ** -exponent.

    Real layers fit 0.25 to 0.65 with K = 8 and about 0.9 with K = 1.
    """
    return _one_topic(shape, zipf_popularity(shape.num_experts, exponent), seed, f"zipf exponent={exponent:g}", on_step)


def hot_set(shape: TraceShape, *, hot: int, share: float, seed: int, on_step: OnStep | None = None) -> RoutingTrace:
    """`hot` experts of each layer together take `share` (0..1) of the first choices, the rest is even.

    Their share of all assignments is `share` for K = 1 and at most min(share, hot / K) if `share` is above
    hot / E.
    """
    if not 1 <= hot < shape.num_experts:
        raise ConfigError(f"hot = {hot}: must be 1..{shape.num_experts - 1}, fewer than the experts")
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"share = {share}: must be 0..1")
    popularity = np.full(shape.num_experts, (1.0 - share) / (shape.num_experts - hot))
    popularity[:hot] = share / hot
    if (popularity > 0).sum() < shape.top_k:
        raise ConfigError(f"share = {share:g}: leaves fewer than top_k = {shape.top_k} experts with any popularity")
    return _one_topic(shape, popularity, seed, f"hot_set hot={hot} share={share:g}", on_step)


def drifting(
    shape: TraceShape, *, topics: int, period: int, seed: int, exponent: float = 0.9, on_step: OnStep | None = None
) -> RoutingTrace:
    """Zipf popularity whose hot experts change with the topic, and the topic changes every `period` steps.

    Step s has topic (s // period) mod `topics`; each change brings T new prompts, labelled `topic-0`,
    `topic-1`, ... A topic that returns has the same hot experts as before.
    """
    for name, value in (("topics", topics), ("period", period)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 1")
    rng = _rng(seed)
    popularity_E = zipf_popularity(shape.num_experts, exponent)
    placed_KLE = np.stack([_place(popularity_E, shape.layers, rng) for _ in range(topics)])
    turns = -(-shape.steps // period)
    labels = tuple(f"topic-{turn % topics}" for turn in range(turns) for _ in range(shape.tokens))
    note = f"drifting topics={topics} period={period} exponent={exponent:g}"
    return _generate(shape, lambda step: placed_KLE[step // period % topics], rng, seed, note, period, labels, on_step)


def zipf_popularity(num_experts: int, exponent: float) -> Floats:
    """r ** -exponent for r = 1..E, divided by its sum: float64 [E], falling."""
    if not (math.isfinite(exponent) and 0.0 <= exponent <= 10.0):
        raise ConfigError(f"exponent = {exponent}: must be 0..10")
    weight = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    popularity: Floats = weight / weight.sum()
    return popularity


def draw_distinct(popularity_E: Floats, tokens: int, top_k: int, rng: np.random.Generator) -> Array:
    """Draw K distinct experts per token without replacement: ids [tokens, K] in the order drawn.

    Gumbel top-k, written as a race: expert e arrives after an exponential time of rate p_e, and the first K
    count. ln p - ln(time) is ln p plus a Gumbel variable, so its K greatest are the K earliest, without the
    logarithms.
    """
    with np.errstate(divide="ignore"):
        arrival_TE = rng.standard_exponential((tokens, popularity_E.size), np.float32) * (1.0 / popularity_E).astype(
            np.float32
        )
    if top_k < popularity_E.size:
        first_TK = np.argpartition(arrival_TE, top_k - 1, axis=1)[:, :top_k]
    else:
        first_TK = np.broadcast_to(np.arange(top_k), (tokens, top_k))
    order_TK = np.argsort(np.take_along_axis(arrival_TE, first_TK, axis=1), axis=1, kind="stable")
    ids_TK: Array = np.take_along_axis(first_TK, order_TK, axis=1)
    return ids_TK


def _rng(seed: int) -> np.random.Generator:
    if seed < 0:
        raise ConfigError(f"seed = {seed}: must not be negative")
    return np.random.default_rng(seed)


def _place(popularity_E: Floats, layers: int, rng: np.random.Generator) -> Floats:
    """The popularities on seeded random expert ids, another permutation for each layer: [L, E]."""
    return np.stack([rng.permutation(popularity_E) for _ in range(layers)])


def _one_topic(shape: TraceShape, popularity_E: Floats, seed: int, note: str, on_step: OnStep | None) -> RoutingTrace:
    rng = _rng(seed)
    placed_LE = _place(popularity_E, shape.layers, rng)
    return _generate(shape, lambda step: placed_LE, rng, seed, note, shape.steps, (), on_step)


def _generate(
    shape: TraceShape,
    popularity_of_step: Callable[[int], Floats],
    rng: np.random.Generator,
    seed: int,
    note: str,
    period: int,
    topics: tuple[str, ...],
    on_step: OnStep | None,
) -> RoutingTrace:
    """Draw all steps; every `period` steps T new prompts take the place of the old ones."""
    tokens = shape.tokens
    ids_NLK = np.empty((shape.steps * tokens, shape.layers, shape.top_k), ids_dtype(shape.num_experts))
    chunk = max(1, _DRAWS_AT_ONCE // shape.num_experts)
    for step in range(shape.steps):
        popularity_LE = popularity_of_step(step)
        for layer in range(shape.layers):
            for start in range(0, tokens, chunk):
                count = min(chunk, tokens - start)
                ids_TK = draw_distinct(popularity_LE[layer], count, shape.top_k, rng)
                ids_NLK[step * tokens + start : step * tokens + start + count, layer] = ids_TK
        if on_step is not None:
            on_step(step + 1, shape.steps)
    step_S = np.arange(shape.steps, dtype=np.int32)
    prompt_ST = (step_S // period * tokens)[:, None] + np.arange(tokens, dtype=np.int32)
    return RoutingTrace(
        ids_NLK=ids_NLK,
        step_tokens_S=np.full(shape.steps, tokens, np.int32),
        step_phase_S=np.full(shape.steps, DECODE, np.uint8),
        token_prompt_N=prompt_ST.astype(np.int32).reshape(-1),
        token_position_N=np.repeat(step_S % period, tokens).astype(np.int32),
        layers=tuple(range(shape.layers)),
        num_experts=shape.num_experts,
        note=note,
        topics=topics,
        source="generated",
        seed=seed,
    )
