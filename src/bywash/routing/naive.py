"""The obvious gate: one token at a time, Python floats, no tensor operation. The oracle for `gates.route`.

Knows nothing of speed. Only tests call it.

It computes in float64 and rounds at the end, so its weights agree with `route` to rounding, not to the bit.
Among equal scores it takes the lower expert id. `torch.topk` promises no order among equals, so compare
choices only where the scores differ.
"""

import math
from collections.abc import Sequence

from bywash.routing.gates import Gate


def route_token(
    gate: Gate, logits_E: Sequence[float], bias_E: Sequence[float] | None = None
) -> tuple[list[int], list[float]]:
    """Choose for one token.

    Args:
        gate: the rule.
        logits_E: E logits of the token.
        bias_E: E biases of the choice, for kind `sigmoid`.

    Returns:
        K expert ids, best score first, and their K weights, before any rounding to the logits' dtype.
    """
    if gate.kind == "topk_softmax":
        ids = _best(logits_E, gate.top_k)
        return ids, _softmax([logits_E[e] for e in ids])
    if gate.kind == "softmax":
        scores = choice = _softmax(logits_E)
    else:
        scores = [1.0 / (1.0 + math.exp(-x)) for x in logits_E]
        choice = scores if bias_E is None else [s + b for s, b in zip(scores, bias_E)]
        if gate.groups > 1:
            choice = _bar_groups(gate, choice)
    ids = _best(choice, gate.top_k)
    weights = [scores[e] for e in ids]
    if gate.renormalise:
        total = sum(weights)
        weights = [w / total for w in weights]
    return ids, [w * gate.scale for w in weights]


def _best(values: Sequence[float], count: int) -> list[int]:
    """Positions of the `count` greatest values, greatest first, the lower position first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def _softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(v - top) for v in values]
    return [p / sum(powers) for p in powers]


def _bar_groups(gate: Gate, choice: Sequence[float]) -> list[float]:
    size = len(choice) // gate.groups
    group_scores = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(gate.groups)]
    kept = _best(group_scores, gate.top_groups)
    return [c if e // size in kept else -math.inf for e, c in enumerate(choice)]
