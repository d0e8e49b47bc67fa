"""A small plan and a congested network, made once."""

import numpy as np
import pytest

from bywash.fabric.files import parse_scenario
from bywash.fabric.run import simulate
from bywash.planner.cluster import parse_cluster
from bywash.planner.model import load_model_shape
from bywash.planner.plan import make_plan
from bywash.planner.target import make_target, make_workload
from bywash.routing import RoutingTrace
from bywash.routing.trace import DECODE, PREFILL

CLUSTER = {
    "name": "small",
    "nodes": [{"name": "n", "count": 2, "device": "h100", "devices": 2, "nics": [{"gbps": 100, "count": 2}]}],
    "fabric": {"kind": "leaf-spine", "nodes_per_leaf": 1, "spines": 1, "links_per_pair": 2, "uplink_gbps": 100},
}


@pytest.fixture(scope="session")
def plan():
    """OLMoE on two hosts of two devices, from a random trace with its experts."""
    workload = make_workload({"prompt_tokens": 256, "output_tokens": 64, "chunk_tokens": 256, "sequences": 16})
    return make_plan(parse_cluster(CLUSTER), load_model_shape("olmoe"), _trace(), workload, make_target({}))


@pytest.fixture(scope="session")
def incast():
    """Eight senders to one receiver: queues, marks and pauses."""
    scenario = parse_scenario(
        {
            "profile": "rocev2",
            "topology": {"kind": "leaf-spine", "hosts": 16, "leaves": 2, "spines": 2, "gbps": 100, "length_m": 20},
            "traffic": [{"kind": "incast", "senders": list(range(12)), "receiver": 15, "bytes": 2_000_000}],
            "run": {"sample_us": 5},
        }
    )
    return simulate(scenario)


def _trace():
    """Six prompts, a prefill of 40 tokens each, three decode steps, in OLMoE's shape; half of the experts are hot."""
    rng, prompts, layers, experts, k = np.random.default_rng(0), 6, 16, 64, 8
    tokens_S = np.array([40 * prompts, prompts, prompts, prompts], np.int32)
    prompt_N = np.concatenate([np.repeat(np.arange(prompts), 40), *[np.arange(prompts)] * 3]).astype(np.int32)
    position_N = np.concatenate([np.tile(np.arange(40), prompts), *[np.full(prompts, 40 + i) for i in range(3)]])
    popularity_LE = np.where(np.arange(experts) % 2, 0.0, 1.5) + 0.1 * rng.standard_normal((layers, experts))
    noise_NLE = rng.gumbel(size=(prompt_N.size, layers, experts))
    ids_NLK = np.argsort(-(popularity_LE + noise_NLE), axis=2)[:, :, :k].astype(np.uint8)
    return RoutingTrace(
        ids_NLK=ids_NLK,
        step_tokens_S=tokens_S,
        step_phase_S=np.array([PREFILL, DECODE, DECODE, DECODE], np.uint8),
        token_prompt_N=prompt_N,
        token_position_N=position_N.astype(np.int32),
        layers=tuple(range(layers)),
        num_experts=experts,
        model="olmoe",
    )
