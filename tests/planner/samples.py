"""Small clusters, models and trace samples for the planner's tests."""

import numpy as np

from bywash.planner.candidate import Problem
from bywash.planner.cluster import parse_cluster
from bywash.planner.model import load_model_shape
from bywash.planner.network import Network
from bywash.planner.sample import Sample
from bywash.planner.target import Target, Workload

FABRIC = {"kind": "leaf-spine", "nodes_per_leaf": 1, "spines": 2, "links_per_pair": 1, "uplink_gbps": 400}


def cluster_of(*nodes, fabric=FABRIC, **more):
    """Hosts as (name, device, devices, Gb/s of each NIC); one NIC for each device."""
    listed = [
        {"name": name, "device": device, "devices": gpus, "nics": [{"gbps": gbps, "count": gpus}]}
        for name, device, gpus, gbps in nodes
    ]
    return parse_cluster({"name": "small", "nodes": listed, "fabric": fabric} | more)


def drawn_sample(model, seed=0, tokens=2048, layers=2, skew=0.5):
    """Tokens of a Zipf law, quickly: K distinct experts by Gumbel noise."""
    rng = np.random.default_rng(seed)
    ids = np.empty((tokens, layers, model.top_k), np.uint16)
    for layer in range(layers):
        weight_E = rng.permutation(np.arange(1, model.experts + 1.0) ** -skew)
        score_NE = np.log(weight_E) + rng.gumbel(size=(tokens, model.experts))
        ids[:, layer] = np.argsort(-score_NE, axis=1)[:, : model.top_k]
    counts_LE = np.stack([np.bincount(ids[:, i].ravel(), minlength=model.experts) for i in range(layers)])
    return Sample(ids_NLK=ids, counts_LE=counts_LE, num_experts=model.experts, recorded=None, note="a test's Zipf law")


def problem_of(cluster, model="qwen3-235b", workload=None, target=None, sample=None):
    """A problem with a quick sample."""
    shape = load_model_shape(model)
    return Problem(
        model=shape,
        sample=sample or drawn_sample(shape),
        workload=workload or Workload(prompt_tokens=512, output_tokens=128, chunk_tokens=512),
        target=target or Target(),
        network=Network(cluster.topology) if cluster.topology is not None else None,
        ports=cluster.topology.hosts if cluster.topology is not None else 0,
    )
