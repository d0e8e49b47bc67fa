"""A trace small enough to check by hand, and field-by-field comparison, for the tests beside."""

import numpy as np

from bywash.routing import DECODE, PREFILL, RoutingTrace

EXPERTS, TOP_K = 12, 3
REPEATED = np.zeros((5, 2, TOP_K), np.uint8)


def small_trace(**changes) -> RoutingTrace:
    """5 tokens: a prefill step of two prompts, an empty step, a decode step."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((5, 2, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.uint8)
    fields = {
        "ids_NLK": ids,
        "step_tokens_S": np.array([3, 0, 2], np.int32),
        "step_phase_S": np.array([PREFILL, PREFILL, DECODE], np.uint8),
        "token_prompt_N": np.array([0, 0, 1, 0, 1], np.int32),
        "token_position_N": np.array([0, 1, 0, 2, 1], np.int32),
        "layers": (3, 7),
        "num_experts": EXPERTS,
    }
    return RoutingTrace(**{**fields, **changes})


def assert_same(a: RoutingTrace, b: RoutingTrace) -> None:
    for name in RoutingTrace.__slots__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, name
            assert np.array_equal(x, y), name
        else:
            assert x == y, name
