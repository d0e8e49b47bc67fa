"""Gates: from router logits to `Routing`, with the same bits as each family's own router.

Shapes: T tokens, E experts, K experts per token (top-k), G groups of experts.
Knows nothing of checkpoints, ranks or how the logits were made. Model adapters build a `Gate` from their
configuration and call `route` once per layer and batch.

| family | Gate |
|---|---|
| Qwen3-MoE, OLMoE | `kind="softmax"`, `renormalise=norm_topk_prob`, `round_to_logits=True` |
| Mixtral | `kind="softmax"` |
| DeepSeek-V3 | `kind="sigmoid"`, `groups=n_group`, `top_groups=topk_group`, `scale=routed_scaling_factor` |
| gpt-oss | `kind="topk_softmax"` |

Worked example, `softmax`, top-2 of 3, renormalised: logits [0, ln 2, ln 5] give probabilities [1/8, 2/8,
5/8]; the choice is experts [2, 1] with weights [5/7, 2/7].
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bywash.errors import ConfigError, RoutingError
from bywash.routing.routing import Routing

GateKind = Literal["softmax", "topk_softmax", "sigmoid"]

# Every value of these dtypes is a float32 value, so weights stored as float32 lose nothing.
_LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How one family turns logits into a choice. The constructor raises `ConfigError` naming the wrong field.

    Attributes:
        kind: `softmax`: softmax over all experts in float32, then top-k. `topk_softmax`: top-k of the logits,
            then softmax over the chosen ones in the logits' own dtype. `sigmoid`: sigmoid scores in float32,
            a bias that moves the choice but not the weights, and a choice within the best groups.
        top_k: K, experts per token.
        renormalise: divide the chosen weights by their sum (`topk_softmax` always sums to one, so it must be
            True).
        groups: G, `sigmoid` only: the experts are G equal runs of consecutive ids.
        top_groups: `sigmoid` only: the groups a token may choose from; a group's score is the sum of its two
            best.
        scale: `sigmoid` only: the factor on the weights after renormalisation.
        round_to_logits: `softmax` only: round the weights to the logits' dtype, as Qwen3-MoE and OLMoE do;
            Mixtral keeps float32. It matters for bfloat16 and float16 models alone.
    """

    kind: GateKind
    top_k: int
    renormalise: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    round_to_logits: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(GateKind):
            raise ConfigError(f"gate.kind = {self.kind!r}: choose one of {', '.join(get_args(GateKind))}")
        if self.top_k < 1:
            raise ConfigError(f"gate.top_k = {self.top_k}: a token needs at least one expert")
        if self.groups < 1:
            raise ConfigError(f"gate.groups = {self.groups}: must be at least 1")
        if not 1 <= self.top_groups <= self.groups:
            raise ConfigError(f"gate.top_groups = {self.top_groups}: must be 1..groups, and groups = {self.groups}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"gate.scale = {self.scale}: must be finite and above 0")
        if self.kind != "sigmoid" and (self.groups > 1 or self.scale != 1.0):
            field = "groups" if self.groups > 1 else "scale"
            raise ConfigError(f"gate.{field} = {getattr(self, field)}: only kind 'sigmoid' uses it, not {self.kind!r}")
        if self.kind == "topk_softmax" and not self.renormalise:
            raise ConfigError("gate.renormalise = False: weights of kind 'topk_softmax' always sum to one")
        if self.kind != "softmax" and self.round_to_logits:
            raise ConfigError(f"gate.round_to_logits = True: only kind 'softmax' uses it, not {self.kind!r}")

    def check_experts(self, num_experts: int) -> None:
        """Raise `ConfigError`, naming the field, unless this gate can choose among E experts."""
        if self.top_k > num_experts:
            raise ConfigError(f"gate.top_k = {self.top_k}: the layer has only {num_experts} experts")
        if self.groups == 1:
            return
        if num_experts % self.groups:
            raise ConfigError(f"gate.groups = {self.groups}: does not divide the layer's {num_experts} experts")
        size = num_experts // self.groups
        if size < 2:
            raise ConfigError(
                f"gate.groups = {self.groups}: leaves {size} expert in a group, and a group's score needs two"
            )
        if self.top_k > self.top_groups * size:
            raise ConfigError(
                f"gate.top_k = {self.top_k}: {self.top_groups} groups of {size} experts leave only "
                f"{self.top_groups * size} to choose from"
            )


def route(gate: Gate, logits_TE: Tensor, bias_E: Tensor | None = None) -> Routing:
    """Choose K experts for each token, bitwise as the family's own router does.

    On the CPU with one thread, a token's bits do not depend on the tokens beside it, so ranks may split a batch
    anyhow; for kind `sigmoid` only if E is a multiple of 32. Otherwise torch computes the sigmoid of the last few
    numbers of the whole tensor with another instruction, which differs in the last bit, here as in the family's
    own router.

    Args:
        gate: the rule.
        logits_TE: float32, bfloat16 or float16 [T, E], the router's output; T may be 0. Not modified.
        bias_E: float32 [E], added to the scores for the choice only (`e_score_correction_bias`); kind
            `sigmoid` only.

    Returns:
        Routing with ids in the router's own order (kind `sigmoid`: unsorted) and the exact weights as
        float32.

    Raises:
        ConfigError: the gate does not fit E, or a bias is given to a kind that has none.
        RoutingError: wrong shape or dtype; on the CPU also a token whose logits hold NaN or infinity such
            that its weights are NaN. Logits on a device are not looked at, since that would wait for the
            device: `Routing.check` does it on demand.
    """
    if logits_TE.dim() != 2 or logits_TE.dtype not in _LOGITS_DTYPES:
        raise RoutingError(
            f"router logits must be float32, bfloat16 or float16 of shape [tokens, experts], got "
            f"{logits_TE.dtype} {list(logits_TE.shape)}"
        )
    num_experts = logits_TE.shape[1]
    gate.check_experts(num_experts)
    if bias_E is not None:
        _check_bias(gate, bias_E, num_experts)
    if gate.kind == "softmax":
        ids_TK, weights_TK = _softmax_then_choose(gate, logits_TE)
    elif gate.kind == "topk_softmax":
        ids_TK, weights_TK = _choose_then_softmax(gate, logits_TE)
    else:
        ids_TK, weights_TK = _sigmoid_grouped(gate, logits_TE, bias_E)
    if logits_TE.device.type == "cpu":
        _check_numbers(weights_TK)
    return Routing(ids_TK=ids_TK, weights_TK=weights_TK.float(), num_experts=num_experts)


def _softmax_then_choose(gate: Gate, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    # Two spellings of one formula: on a GPU `dtype=` runs a fused kernel that may add in another order than a
    # conversion followed by a float32 softmax, and each family's bits come from its own spelling.
    if gate.round_to_logits:
        probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    else:
        probs_TE = torch.softmax(logits_TE.float(), dim=-1)
    weights_TK, ids_TK = torch.topk(probs_TE, gate.top_k, dim=-1)
    if gate.renormalise:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    if gate.round_to_logits:
        weights_TK = weights_TK.to(logits_TE.dtype)
    return ids_TK, weights_TK


def _choose_then_softmax(gate: Gate, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    chosen_TK, ids_TK = torch.topk(logits_TE, gate.top_k, dim=-1)
    return ids_TK, torch.softmax(chosen_TK, dim=-1)


def _sigmoid_grouped(gate: Gate, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    scores_TE = logits_TE.float().sigmoid()
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if gate.groups > 1:
        choice_TE = _keep_best_groups(gate, choice_TE)
    # sorted=False as in the family's router: the order of a token's experts is the order of its weighted sum.
    ids_TK = torch.topk(choice_TE, gate.top_k, dim=-1, sorted=False).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if gate.renormalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * gate.scale


def _keep_best_groups(gate: Gate, choice_TE: Tensor) -> Tensor:
    """Set the scores of experts outside each token's best groups to -inf."""
    tokens, experts = choice_TE.shape
    choice_TGe = choice_TE.reshape(tokens, gate.groups, experts // gate.groups)
    best_two_TG = choice_TGe.topk(2, dim=-1).values.sum(dim=-1)
    kept = torch.topk(best_two_TG, gate.top_groups, dim=-1, sorted=False).indices
    barred_TG = torch.ones_like(best_two_TG, dtype=torch.bool).scatter_(1, kept, False)
    return choice_TGe.masked_fill(barred_TG.unsqueeze(-1), -math.inf).reshape(tokens, experts)


def _check_bias(gate: Gate, bias_E: Tensor, num_experts: int) -> None:
    if gate.kind != "sigmoid":
        raise ConfigError(f"gate.kind = {gate.kind!r}: takes no bias_E; only 'sigmoid' has a bias for the choice")
    if bias_E.shape != (num_experts,) or bias_E.dtype != torch.float32:
        raise RoutingError(
            f"bias_E must be float32 [{num_experts}] for this layer, got {bias_E.dtype} {list(bias_E.shape)}"
        )
    if bias_E.device.type == "cpu" and math.isnan(float(bias_E.sum())):
        raise RoutingError("bias_E holds NaN or both infinities; the checkpoint's e_score_correction_bias is damaged")


def _check_numbers(weights_TK: Tensor) -> None:
    """Raise for the first token with NaN weights.

    Looking at the T x K weights is enough and E/K times cheaper than looking at the logits: top-k ranks NaN
    above all numbers, so a NaN logit is always chosen, and softmax turns an infinite one into NaN. The sum is
    one pass; the search for the token runs only when it has failed.
    """
    if not math.isnan(float(weights_TK.sum(dtype=torch.float32))):
        return
    bad_T = weights_TK.isnan().any(dim=1)
    if not bad_T.any():
        return
    token = int(bad_T.nonzero()[0, 0])
    raise RoutingError(
        f"router logits of token {token} hold NaN or infinity ({int(bad_T.sum())} of {bad_T.numel()} tokens "
        "do); look at the hidden states that entered the router and at the router's weight"
    )
