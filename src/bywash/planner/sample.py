"""`Sample`: a pool of tokens with their experts, from which traffic of any size is drawn.

Shapes: N tokens of the pool, L sampled layers, K experts per token, E experts, R ranks.

A trace of the planned model (same E, K and number of MoE layers) gives the tokens themselves. One of another model
gives its skew: the Zipf exponent of each layer, with the planned model's E and K, hot experts at other places in each
layer. Without a trace the exponent is 0.45, as in the study of the fabric (DeepSeek-V3's counts have 0.43 to 0.58).
Knows nothing of placements or networks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.planner.choices import Router, TokenChoices, drawn_choices
from bywash.planner.model import ModelShape
from bywash.routing.skew import zipf_popularity
from bywash.routing.summary import zipf_exponent
from bywash.routing.trace import RoutingTrace

ZIPF, MOST_ZIPF = 0.45, 10.0
LAYERS = 2
"""Layers that stand for all: as far apart as the model allows."""
POOL_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """See the module.

    Attributes:
        ids_NLK: unsigned [N, L, K].
        counts_LE: int64 [L, E], what placements may be fitted to: of a trace's other prompts, or of the pool.
        num_experts: E.
        recorded: the trace, when its own tokens are the pool. Only then is it known which experts are hot.
        note: in words, for reports.
    """

    ids_NLK: NDArray[np.unsignedinteger]
    counts_LE: NDArray[np.int64]
    num_experts: int
    recorded: RoutingTrace | None
    note: str

    def choices(self, tokens_R: NDArray[np.int64], seed: int = 0) -> TokenChoices:
        """Tokens for every rank, drawn from the pool with replacement; a smaller draw is a part of no larger one."""
        total = int(tokens_R.sum())
        drawn = np.random.default_rng([seed, total]).integers(0, self.ids_NLK.shape[0], total)
        return TokenChoices(
            ids_NLK=self.ids_NLK[drawn],
            rank_N=np.repeat(np.arange(tokens_R.size), tokens_R),
            num_experts=self.num_experts,
            ranks=tokens_R.size,
            note=self.note,
        )


def make_sample(model: ModelShape, trace: RoutingTrace | None, seed: int = 0) -> Sample:
    """The pool for a model. Raises `ConfigError` when the trace has no tokens."""
    if trace is None:
        exponents, note = [ZIPF] * LAYERS, f"Zipf law of exponent {ZIPF}, no trace"
    elif not trace.tokens:
        raise ConfigError("--trace: holds no tokens; record a run that generates some")
    elif (trace.num_experts, trace.top_k, len(trace.layers)) == (model.experts, model.top_k, model.moe_layers):
        return _recorded(trace, seed)
    else:
        picked = _spread(len(trace.layers))
        fitted = np.clip(np.nan_to_num(zipf_exponent(trace.counts_LE()[picked])), 0.0, MOST_ZIPF)  # even: -1e-17
        exponents = [float(x) for x in fitted]
        note = (
            f"Zipf laws of exponents {', '.join(f'{x:.2f}' for x in exponents)}, fitted to a trace of another model "
            f"({trace.num_experts} experts, top-{trace.top_k}, {len(trace.layers)} layers)"
        )
    return _drawn(model, exponents, note, seed)


def _recorded(trace: RoutingTrace, seed: int) -> Sample:
    """Tokens of every other prompt to judge with; placements are fitted to those of the others."""
    picked = _spread(len(trace.layers))
    fit_N = trace.token_prompt_N % 2 == 0
    if fit_N.all() or not fit_N.any():
        fit_N, pool, held = np.ones(trace.tokens, np.bool_), np.arange(trace.tokens), "the same"
    else:
        pool, held = np.flatnonzero(~fit_N), "other"
    if pool.size > POOL_TOKENS:
        pool = np.sort(np.random.default_rng(seed).choice(pool, POOL_TOKENS, replace=False))
    fitted = trace.ids_NLK[fit_N][:, picked]
    counts_LE = np.stack([np.bincount(fitted[:, i].ravel(), minlength=trace.num_experts) for i in range(len(picked))])
    return Sample(
        ids_NLK=trace.ids_NLK[pool][:, picked],
        counts_LE=counts_LE,
        num_experts=trace.num_experts,
        recorded=trace,
        note=(
            f"{pool.size:,} tokens of the trace itself, layers {', '.join(str(trace.layers[i]) for i in picked)}; "
            f"placements fitted to {held} prompts"
        ),
    )


def _drawn(model: ModelShape, exponents: list[float], note: str, seed: int) -> Sample:
    popularity_LE = np.stack(
        [_law(model, exponent, np.random.default_rng([seed, i])) for i, exponent in enumerate(exponents)]
    )
    router = Router(top_k=model.top_k, groups=model.groups, top_groups=model.top_groups)
    choices = drawn_choices(popularity_LE, router, ranks=1, tokens=POOL_TOKENS, seed=seed, note=note)
    return Sample(
        ids_NLK=choices.ids_NLK, counts_LE=choices.counts_LE(), num_experts=model.experts, recorded=None, note=note
    )


def _law(model: ModelShape, exponent: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Shares of the experts, none above what K distinct choices allow."""
    share_E = zipf_popularity(model.experts, exponent)
    share_E, most = share_E / share_E.sum(), 0.9 / model.top_k
    full_E = np.zeros(model.experts, np.bool_)
    while (share_E > most).any():  # what is cut off goes to the others, which may then be too large themselves
        full_E |= share_E > most
        if full_E.all():
            break
        share_E[full_E] = most
        share_E[~full_E] *= (1 - most * full_E.sum()) / share_E[~full_E].sum()
    share_E = np.minimum(share_E, most)
    return np.asarray(rng.permutation(share_E / share_E.sum()))


def _spread(layers: int) -> list[int]:
    count = min(LAYERS, layers)
    return [round((i + 0.5) * layers / count - 0.5) for i in range(count)]
