"""`route` against the naive oracle and, bit for bit, against each family's own router."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import ConfigError, RoutingError
from bywash.routing import Gate, route
from bywash.routing.naive import route_token


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


GATES = {
    "qwen3": Gate(kind="softmax", top_k=3, round_to_logits=True),
    "olmoe": Gate(kind="softmax", top_k=3, renormalise=False, round_to_logits=True),
    "mixtral": Gate(kind="softmax", top_k=2),
    "deepseek": Gate(kind="sigmoid", top_k=3, groups=4, top_groups=2, scale=2.5),
    "deepseek-raw": Gate(kind="sigmoid", top_k=4, groups=2, top_groups=2, renormalise=False, scale=16.0),
    "one-group": Gate(kind="sigmoid", top_k=3),
    "gpt-oss": Gate(kind="topk_softmax", top_k=4),
}


def _distinct_logits(tokens: int, experts: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random logits without ties, exact in bfloat16: the oracle and top-k may order equals differently."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.linspace(-3, 3, 2 * experts).to(torch.bfloat16).float().unique()
    assert levels.numel() >= experts
    rows = [levels[torch.randperm(levels.numel(), generator=generator)[:experts]] for _ in range(tokens)]
    return torch.stack(rows).to(dtype) if rows else torch.empty(0, experts, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (13, 20), (0, 8), (37, 60)])
@pytest.mark.parametrize("name", GATES)
def test_equals_the_oracle(name, tokens, experts, dtype):
    gate = GATES[name]
    logits = _distinct_logits(tokens, experts, dtype, seed=experts)
    bias = None
    if gate.kind == "sigmoid":
        bias = torch.linspace(-0.3, 0.4, experts)[torch.randperm(experts, generator=torch.Generator().manual_seed(7))]
    routing = route(gate, logits, bias).check()
    assert routing.ids_TK.shape == (tokens, gate.top_k)
    # A weight is rounded to the logits' dtype once (softmax) or in each operation (topk_softmax).
    rounded = dtype is torch.bfloat16 and (gate.round_to_logits or gate.kind == "topk_softmax")
    tolerance = 2**-7 if rounded else 2e-6
    for token in range(tokens):
        ids, weights = route_token(gate, logits[token].tolist(), None if bias is None else bias.tolist())
        got = dict(zip(routing.ids_TK[token].tolist(), routing.weights_TK[token].tolist()))
        assert sorted(got) == sorted(ids)
        assert [got[e] for e in ids] == pytest.approx(weights, rel=tolerance)
        if gate.kind != "sigmoid":
            assert routing.ids_TK[token].tolist() == ids


def _router(family: str, hidden: int, experts: int, top_k: int, **extra):
    """One router module of transformers, with its gate."""
    transformers = pytest.importorskip("transformers")
    from importlib import import_module

    module = import_module(f"transformers.models.{family}.modeling_{family}")
    classes = {
        "qwen3_moe": (transformers.Qwen3MoeConfig, "Qwen3MoeTopKRouter", "num_experts"),
        "olmoe": (transformers.OlmoeConfig, "OlmoeTopKRouter", "num_experts"),
        "mixtral": (transformers.MixtralConfig, "MixtralTopKRouter", "num_local_experts"),
        "deepseek_v3": (transformers.DeepseekV3Config, "DeepseekV3TopkRouter", "n_routed_experts"),
        "gpt_oss": (transformers.GptOssConfig, "GptOssTopKRouter", "num_local_experts"),
    }
    config_class, router_class, experts_field = classes[family]
    options = {experts_field: experts, "hidden_size": hidden, "num_experts_per_tok": top_k, **extra}
    router = getattr(module, router_class)(config_class(**options))
    generator = torch.Generator().manual_seed(11)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return router


def _case(family: str, experts: int, top_k: int, gate: Gate, label: str = "", **extra):
    return pytest.param(family, experts, top_k, gate, extra, id=f"{family}{label}-E{experts}K{top_k}")


def _deepseek(experts, top_k, groups, top_groups, norm, label=""):
    gate = Gate(kind="sigmoid", top_k=top_k, groups=groups, top_groups=top_groups, renormalise=norm, scale=2.5)
    extra = {"n_group": groups, "topk_group": top_groups, "norm_topk_prob": norm}
    return _case("deepseek_v3", experts, top_k, gate, label, routed_scaling_factor=2.5, **extra)


CASES = [
    *(
        _case(
            family,
            experts,
            top_k,
            Gate(kind="softmax", top_k=top_k, renormalise=norm, round_to_logits=True),
            label="-norm" if norm else "",
            norm_topk_prob=norm,
        )
        for family in ("qwen3_moe", "olmoe")
        for experts, top_k in ((7, 3), (128, 8))
        for norm in (True, False)
    ),
    _case("mixtral", 8, 2, Gate(kind="softmax", top_k=2)),
    _case("mixtral", 13, 5, Gate(kind="softmax", top_k=5)),
    _deepseek(256, 8, 8, 4, True),
    _deepseek(21, 4, 7, 3, True),
    _deepseek(21, 4, 7, 3, False, label="-raw"),
    _deepseek(15, 6, 1, 1, True, label="-one-group"),
    _case("gpt_oss", 32, 4, Gate(kind="topk_softmax", top_k=4)),
    _case("gpt_oss", 11, 11, Gate(kind="topk_softmax", top_k=11)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("family", "experts", "top_k", "gate", "extra"), CASES)
def test_bitwise_equal_to_the_familys_router(family, experts, top_k, gate, extra, dtype):
    router = _router(family, 48, experts, top_k, **extra)
    if family != "deepseek_v3":  # its router computes in float32 whatever the model's dtype
        router = router.to(dtype)
    hidden = torch.randn(173, 48, generator=torch.Generator().manual_seed(5)).to(dtype)
    with torch.no_grad():
        logits, weights, ids = router(hidden)
        bias = router.e_score_correction_bias if family == "deepseek_v3" else None
        routing = route(gate, logits, bias).check()
    assert torch.equal(routing.ids_TK, ids)
    assert torch.equal(routing.weights_TK, weights.float())
    # float32 loses nothing of the router's dtype, so rounding back gives its own bits
    assert torch.equal(routing.weights_TK.to(weights.dtype), weights)
    assert weights.dtype is (torch.float32 if family in ("mixtral", "deepseek_v3") else dtype)


def test_the_bias_moves_the_choice_and_not_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    gate = Gate(kind="sigmoid", top_k=1, renormalise=False)
    assert route(gate, logits).ids_TK.tolist() == [[0]]
    biased = route(gate, logits, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert biased.ids_TK.tolist() == [[3]]
    assert biased.weights_TK.item() == torch.tensor(-1.0).sigmoid().item()


def test_a_group_is_scored_by_its_two_best():
    # group 0 has the single best expert, group 1 the better pair
    logits = torch.tensor([[4.0, -4.0, -4.0, 1.0, 1.5, -4.0]])
    routing = route(Gate(kind="sigmoid", top_k=2, groups=2, top_groups=1), logits)
    assert sorted(routing.ids_TK[0].tolist()) == [3, 4]


def test_logits_are_left_as_they_were():
    for gate in GATES.values():
        logits = _distinct_logits(5, 8, torch.float32, seed=1)
        before = logits.clone()
        route(gate, logits)
        assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kind": "argmax", "top_k": 1}, "kind"),
        ({"kind": "softmax", "top_k": 0}, "top_k"),
        ({"kind": "sigmoid", "top_k": 1, "groups": 0}, "groups"),
        ({"kind": "sigmoid", "top_k": 1, "groups": 2, "top_groups": 3}, "top_groups"),
        ({"kind": "sigmoid", "top_k": 1, "scale": float("nan")}, "scale"),
        ({"kind": "softmax", "top_k": 1, "scale": 2.0}, "scale"),
        ({"kind": "softmax", "top_k": 1, "groups": 2, "top_groups": 1}, "groups"),
        ({"kind": "topk_softmax", "top_k": 1, "renormalise": False}, "renormalise"),
        ({"kind": "sigmoid", "top_k": 1, "round_to_logits": True}, "round_to_logits"),
    ],
)
def test_a_wrong_gate_names_its_field(options, field):
    with pytest.raises(ConfigError, match=rf"^gate\.{field} = "):
        Gate(**options)


@pytest.mark.parametrize(
    ("gate", "experts", "field"),
    [
        (Gate(kind="softmax", top_k=9), 8, "top_k"),
        (Gate(kind="sigmoid", top_k=1, groups=3, top_groups=1), 8, "groups"),
        (Gate(kind="sigmoid", top_k=1, groups=8, top_groups=1), 8, "groups"),
        (Gate(kind="sigmoid", top_k=5, groups=4, top_groups=2), 8, "top_k"),
    ],
)
def test_a_gate_that_does_not_fit_the_layer_names_its_field(gate, experts, field):
    with pytest.raises(ConfigError, match=rf"^gate\.{field} = "):
        route(gate, torch.zeros(2, experts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", GATES)
def test_nan_logits_name_the_token(name, dtype):
    logits = _distinct_logits(6, 8, dtype, seed=2)
    for expert in range(8):
        broken = logits.clone()
        broken[4, expert] = float("nan")
        with pytest.raises(RoutingError, match="token 4 "):
            route(GATES[name], broken)


def test_infinite_logits_of_a_softmax_name_the_token():
    logits = torch.zeros(3, 8)
    logits[2, 5] = float("inf")
    for name in ("qwen3", "mixtral", "gpt-oss"):
        with pytest.raises(RoutingError, match="token 2 "):
            route(GATES[name], logits)


def test_minus_infinity_bars_an_expert():
    logits = _distinct_logits(9, 8, torch.float32, seed=3)
    logits[:, 2] = float("-inf")
    for gate in GATES.values():
        if gate.groups == 1:
            assert not (route(gate, logits).ids_TK == 2).any()


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(8), torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.int64)],
    ids=["one-dim", "float64", "int64"],
)
def test_wrong_logits_are_refused(logits):
    with pytest.raises(RoutingError, match="router logits must be"):
        route(GATES["mixtral"], logits)


def test_a_bias_that_does_not_fit_is_refused():
    logits = torch.zeros(2, 8)
    with pytest.raises(ConfigError, match=r"^gate\.kind"):
        route(GATES["mixtral"], logits, torch.zeros(8))
    with pytest.raises(RoutingError, match="bias_E"):
        route(GATES["deepseek"], logits, torch.zeros(7))
    with pytest.raises(RoutingError, match="bias_E"):
        route(GATES["deepseek"], logits, torch.full((8,), float("nan")))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(GATES)), st.integers(1, 40), st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_laws_of_every_gate(name, tokens, group_size, seed):
    gate = GATES[name]
    # torch's sigmoid gives other bits in the last, incomplete vector of a tensor: whole vectors for that kind
    experts = 32 * group_size if gate.kind == "sigmoid" else 4 * group_size
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 3
    routing = route(gate, logits).check()
    assert int(routing.counts_E().sum()) == tokens * gate.top_k
    # a token is routed by its own logits alone: any part of the tokens in any order gives the same rows
    part = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed + 1))[: 1 + seed % tokens]
    alone = route(gate, logits[part])
    assert torch.equal(alone.ids_TK, routing.ids_TK[part])
    assert torch.equal(alone.weights_TK, routing.weights_TK[part])
    if gate.renormalise:
        total = routing.weights_TK.sum(dim=1)
        assert torch.allclose(total, torch.full_like(total, gate.scale), rtol=1e-5)
