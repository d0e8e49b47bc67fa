"""Which experts the tokens of every rank choose, layer by layer: recorded, drawn again from a recording, or drawn to
match expert counts.

Shapes: N tokens over all ranks, L layers, K experts per token, E experts, R ranks, G groups of experts.

Knows nothing of placements, bytes or networks. `moe_traffic` turns choices into bytes between hosts; the command line
and the fabric study make them. What drawing loses: tokens are independent here, while those of one prompt are not, and
counts summed over a long window hide the peaks of single steps, so real steps are at least as skewed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.routing.trace import Array, RoutingTrace, ids_dtype

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_DRAWS_AT_ONCE = 1 << 22
_FIT_TOKENS = 16_384
_FIT_ROUNDS = 12
_LEAST_SHARE = 1e-6
"""Of the mean: what an expert without any count gets, so that its logarithm exists."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenChoices:
    """The choices of one step. The constructor raises `ConfigError` naming the field that does not fit.

    Attributes:
        ids_NLK: unsigned [N, L, K], expert ids, distinct in a row, in the router's order.
        rank_N: int64 [N], the rank that holds each token.
        num_experts, ranks: E and R.
        note: where the choices come from, in words, for reports.
    """

    ids_NLK: Array
    rank_N: IntArray
    num_experts: int
    ranks: int
    note: str

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"ranks = {self.ranks}: must be at least 1")
        if self.ids_NLK.ndim != 3 or self.rank_N.shape != self.ids_NLK.shape[:1]:
            raise ConfigError(
                f"ids_NLK: shape {list(self.ids_NLK.shape)} does not fit {self.rank_N.size} tokens' ranks"
            )
        if not self.ids_NLK.size:
            raise ConfigError("choices: there are no tokens; choose another step, or more tokens per rank")
        if self.ids_NLK.max() >= self.num_experts:
            raise ConfigError(f"ids_NLK: holds expert {self.ids_NLK.max()}, but there are {self.num_experts}")
        if self.rank_N.min() < 0 or self.rank_N.max() >= self.ranks:
            raise ConfigError(f"rank_N: must be 0..{self.ranks - 1}")

    def counts_LE(self) -> IntArray:
        """Assignments per layer and expert: int64 [L, E]."""
        layers = range(self.ids_NLK.shape[1])
        return np.stack([np.bincount(self.ids_NLK[:, i].ravel(), minlength=self.num_experts) for i in layers])


def recorded_choices(trace: RoutingTrace, step: int, ranks: int) -> TokenChoices:
    """One step as it was recorded; prompt p lies on rank p mod R. Raises `TraceError` for a step that is not there."""
    tokens = trace.step_slice(step)
    return TokenChoices(
        ids_NLK=trace.ids_NLK[tokens],
        rank_N=trace.token_prompt_N[tokens].astype(np.int64) % ranks,
        num_experts=trace.num_experts,
        ranks=ranks,
        note=f"step {step} as recorded, prompt p on rank p mod {ranks}",
    )


def resampled_choices(
    trace: RoutingTrace, *, ranks: int, tokens: int, seed: int, phase: int | None = None
) -> TokenChoices:
    """`tokens` per rank drawn from a trace with replacement: its skew and its joint choices, at any size.

    A token brings its choices in all layers. `phase` keeps to prefill (0) or decode (1) steps.
    """
    _check_size(ranks, tokens, seed)
    pool = np.arange(trace.tokens)
    if phase is not None:
        pool = pool[np.repeat(trace.step_phase_S == phase, trace.step_tokens_S)]
    if not pool.size:
        raise ConfigError("trace: holds no tokens of that phase; choose the other one, or none")
    drawn = np.random.default_rng(seed).choice(pool, ranks * tokens)
    return TokenChoices(
        ids_NLK=trace.ids_NLK[drawn],
        rank_N=np.repeat(np.arange(ranks), tokens),
        num_experts=trace.num_experts,
        ranks=ranks,
        note=f"{tokens:,} tokens per rank drawn from {pool.size:,} recorded ones, seed {seed}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a token may choose: K experts, from at most `top_groups` of `groups` equal groups of consecutive experts.

    DeepSeek-V3 is `Router(top_k=8, groups=8, top_groups=4)`; one group is no limit.
    """

    top_k: int
    groups: int = 1
    top_groups: int = 1

    def check(self, num_experts: int) -> None:
        """Raise `ConfigError` when no token of a layer with E experts can choose so."""
        if self.groups < 1 or num_experts % self.groups:
            raise ConfigError(f"groups = {self.groups}: must divide the {num_experts} experts")
        if not 1 <= self.top_groups <= self.groups:
            raise ConfigError(f"top_groups = {self.top_groups}: must be 1..{self.groups}")
        most = num_experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= most:
            raise ConfigError(f"top_k = {self.top_k}: must be 1..{most}, the experts a token may choose from")
        if self.groups > 1 and num_experts // self.groups < 2:
            raise ConfigError(f"groups = {self.groups}: leaves one expert to a group; a group's score needs two")


def drawn_choices(
    counts_LE: FloatArray, router: Router, *, ranks: int, tokens: int, seed: int, note: str
) -> TokenChoices:
    """`tokens` per rank whose experts come up as often as in `counts_LE`.

    Each token ranks the experts by log-weight plus Gumbel noise, keeps the `top_groups` groups with the greatest sums
    of their two best (as DeepSeek-V3's router does with its scores), and takes the K best there. A plain draw with
    p ~ counts would flatten the skew (an expert can be chosen once per token), so the log-weights are fitted first, on
    16,384 tokens, until frequencies match the counts: to about 1 / sqrt(choices of an expert among them).

    Args:
        counts_LE: whole or real numbers [L, E], not negative; every layer has some.
        router: K and the limit on groups.
        note: where the counts come from.

    Raises:
        ConfigError: counts that no such router can produce: an expert in more than every token.
    """
    _check_size(ranks, tokens, seed)
    layers, experts = counts_LE.shape
    router.check(experts)
    share_LE = _shares(counts_LE, router.top_k)
    rng = np.random.default_rng(seed)
    ids_NLK = np.empty((ranks * tokens, layers, router.top_k), ids_dtype(experts))
    for layer in range(layers):
        ids_NLK[:, layer] = _draw(_fit(share_LE[layer], router, seed), router, ranks * tokens, rng)
    limit = f", from {router.top_groups} of {router.groups} groups" if router.groups > 1 else ""
    return TokenChoices(
        ids_NLK=ids_NLK,
        rank_N=np.repeat(np.arange(ranks), tokens),
        num_experts=experts,
        ranks=ranks,
        note=f"{tokens:,} tokens per rank, top-{router.top_k}{limit}, drawn to match {note}, seed {seed}",
    )


def _check_size(ranks: int, tokens: int, seed: int) -> None:
    for name, value, least in (("ranks", ranks, 1), ("tokens", tokens, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(f"{name} = {value}: must be at least {least}")


def _shares(counts_LE: FloatArray, top_k: int) -> FloatArray:
    if (counts_LE < 0).any() or not counts_LE.any(axis=1).all():
        raise ConfigError("counts: must not be negative, and every layer needs some")
    share_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    layer, expert = np.unravel_index(int(share_LE.argmax()), share_LE.shape)
    if share_LE[layer, expert] * top_k > 1:
        raise ConfigError(
            f"counts[{layer}][{expert}]: is {share_LE[layer, expert]:.1%} of its layer; with top_k = {top_k} "
            f"distinct experts no expert can have more than {1 / top_k:.1%}"
        )
    floored = np.maximum(share_LE, _LEAST_SHARE / share_LE.shape[1])
    return np.asarray(floored / floored.sum(axis=1, keepdims=True))


def _fit(share_E: FloatArray, router: Router, seed: int) -> FloatArray:
    """Log-weights whose draws have the given shares; the same noise in every round, so that rounds compare."""
    weight_E = np.log(share_E)
    for _ in range(_FIT_ROUNDS):
        ids_TK = _draw(weight_E, router, _FIT_TOKENS, np.random.default_rng([seed, 1]))
        seen_E = np.bincount(ids_TK.ravel(), minlength=share_E.size) + 0.5  # never 0
        weight_E += np.log(share_E * seen_E.sum() / seen_E)
    return weight_E


def _draw(weight_E: FloatArray, router: Router, tokens: int, rng: np.random.Generator) -> Array:
    """Expert ids [tokens, K], best first."""
    ids_TK = np.empty((tokens, router.top_k), np.int64)
    chunk = max(1, _DRAWS_AT_ONCE // weight_E.size)
    for start in range(0, tokens, chunk):
        rows = slice(start, min(start + chunk, tokens))
        noise = rng.standard_exponential((rows.stop - rows.start, weight_E.size), np.float32)
        noise = np.maximum(noise, np.finfo(np.float32).tiny)  # a float32 draw may be 0
        ids_TK[rows] = _choose(weight_E.astype(np.float32) - np.log(noise), router)
    return ids_TK


def _choose(score_TE: Array, router: Router) -> Array:
    tokens, experts = score_TE.shape
    if router.top_groups < router.groups:
        score_TGe = score_TE.reshape(tokens, router.groups, -1)
        best_TG = np.partition(score_TGe, -2, axis=2)[:, :, -2:].sum(axis=2)
        dropped_TG = np.argpartition(-best_TG, router.top_groups - 1, axis=1)[:, router.top_groups :]
        np.put_along_axis(score_TGe, dropped_TG[:, :, None], -np.inf, axis=1)
    k = router.top_k
    first_TK = (
        np.argpartition(-score_TE, k - 1, axis=1)[:, :k] if k < experts else np.tile(np.arange(experts), (tokens, 1))
    )
    order_TK = np.argsort(-np.take_along_axis(score_TE, first_TK, axis=1), axis=1, kind="stable")
    return np.take_along_axis(first_TK, order_TK, axis=1)
