"""What differs between the model families that bywash runs: where the router is, and how it chooses.

Everything else (norms, attention, residuals, expert weights) has one shape in transformers' models, and
`stages.py` handles it for all. Adding a family means adding a row here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from bywash.errors import CheckpointError
from bywash.routing import Gate, Routing, route


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        experts: name of the config field that holds the number of experts.
        gate: from the config, how ids and weights follow from router logits.
        router: name of the router in the MoE block.
    """

    experts: str
    gate: Callable[[Any], Gate]
    router: str = "gate"

    def num_experts(self, config: Any) -> int:
        """E of one layer."""
        return int(getattr(config, self.experts))

    def route(self, block: Any, x_TD: Tensor, gate: Gate) -> Routing:
        """Route tokens with bywash's own gate on the router's logits."""
        router = getattr(block, self.router)
        x, weight = x_TD, router.weight
        if gate.kind == "sigmoid":
            x, weight = x.float(), weight.float()
        logits_TE = F.linear(x, weight, getattr(router, "bias", None))
        return route(gate, logits_TE, getattr(router, "e_score_correction_bias", None))

    def own_routing(self, block: Any, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, weights) as the model's own router gives them; `--check` compares the two."""
        _, weights_TK, ids_TK = getattr(block, self.router)(x_TD)
        return ids_TK, weights_TK


def _softmax_gate(config: Any) -> Gate:
    """Qwen3-MoE and OLMoE: normalised or not as the config says, in the logits' dtype."""
    return Gate(
        kind="softmax",
        top_k=config.num_experts_per_tok,
        renormalise=config.norm_topk_prob,
        round_to_logits=True,
    )


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(experts="num_experts", gate=_softmax_gate),
    "mixtral": Family(
        experts="num_local_experts",
        gate=lambda config: Gate(kind="softmax", top_k=config.num_experts_per_tok),
    ),
    "olmoe": Family(experts="num_experts", gate=_softmax_gate),
    "deepseek_v3": Family(
        experts="n_routed_experts",
        gate=lambda config: Gate(
            kind="sigmoid",
            top_k=config.num_experts_per_tok,
            renormalise=config.norm_topk_prob,
            groups=config.n_group,
            top_groups=config.topk_group,
            scale=config.routed_scaling_factor,
        ),
    ),
    "gpt_oss": Family(
        experts="num_local_experts",
        gate=lambda config: Gate(kind="topk_softmax", top_k=config.num_experts_per_tok),
        router="router",
    ),
}


def family_of(config: Any, where: str) -> Family:
    """The family of a transformers config.

    Raises:
        CheckpointError: bywash does not run this family; the message lists those it runs.
    """
    try:
        return FAMILIES[config.model_type]
    except KeyError:
        raise CheckpointError(
            f"{where}/config.json: model_type {config.model_type!r} is not a family that bywash runs; it runs "
            f"{', '.join(sorted(FAMILIES))}"
        ) from None
