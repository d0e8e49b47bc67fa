"""Real expert counts for the tables: public ones where they were downloaded, and those that ship with bywash.

Shapes: L layers, E experts, T tokens, B sequences decoding together. Third-party data is read, never copied.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bywash.routing.shipped import SHIPPED_TRACES, shipped_trace

PUBLIC = Path(__file__).resolve().parents[3] / "shared" / "data" / "routing"


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Counts [L, E] of one data set, with the number of experts per token."""

    name: str
    counts_LE: np.ndarray
    top_k: int


def all_layers():
    """Every data set there is; all-zero layers are left out."""
    found = []
    for path in sorted((PUBLIC / "sglang_deepseek_v3_ep_statistics").glob("*.json")):
        found.append(Layers(name=f"deepseek-v3 {path.stem}", counts_LE=_json_counts(path), top_k=8))
    for path in sorted((PUBLIC / "olmoe_expert_counts").glob("olmoe*.json")):
        found.append(Layers(name=f"olmoe {path.stem}", counts_LE=_json_counts(path), top_k=8))
    llama = PUBLIC / "llama4_mmlu_traces" / "llama4_mmlu_top1.npz"
    if llama.exists():
        tokens_LT = np.load(llama)["tokens"]
        counts_LE = np.stack([np.bincount(ids_T, minlength=128) for ids_T in tokens_LT])
        found.append(Layers(name="llama-4 mmlu", counts_LE=counts_LE, top_k=1))
    for name in SHIPPED_TRACES:
        trace = shipped_trace(name)
        found.append(Layers(name=f"bywash-tiny {name}", counts_LE=trace.counts_LE(), top_k=trace.top_k))
    return found


def _json_counts(path):
    data = json.loads(path.read_text())
    if isinstance(data, dict):
        data = data["logical_count"] if "logical_count" in data else data["counts"]
    counts = np.array(data, dtype=np.float64)
    counts = counts.reshape(-1, counts.shape[-1])
    return counts[counts.any(axis=1)]


class Llama4Decode:
    """Decode steps of Llama-4 Maverick with B sequences at a time (continuous batching over recorded questions)."""

    experts, layers = 128, 24

    def __init__(self, batch, *, topic_every=0, seed=0):
        """`topic_every` steps the whole batch changes to the next of three subjects; 0 mixes them."""
        with np.load(PUBLIC / "llama4_mmlu_traces" / "llama4_mmlu_top1.npz") as data:
            self.tokens_LT = data["tokens"]
            begins, decoding = np.cumsum(data["ntok"]) - data["ntok"], data["step"] > 0
            keys = data["subject"].astype(np.int64) * 10_000 + data["question"]
        self._sequences = [begins[decoding & (keys == key)] for key in np.unique(keys)]
        self._subjects = np.array([key // 10_000 for key in np.unique(keys)])
        self.batch, self._topic_every, self._rng = batch, topic_every, np.random.default_rng(seed)

    def steps(self, number):
        """Yields ids [L, B]; sequence b belongs to rank b mod R."""
        current = [(np.empty(0, np.int64), 0)] * self.batch
        for step in range(number):
            anew = step == 0 or (self._topic_every and step % self._topic_every == 0)
            tokens_B = np.empty(self.batch, np.int64)
            for b, (sequence, place) in enumerate(current):
                if anew or place >= len(sequence):
                    sequence = self._draw(step)
                    place = int(self._rng.integers(len(sequence))) if anew else 0
                tokens_B[b], current[b] = sequence[place], (sequence, place + 1)
            yield self.tokens_LT[:, tokens_B]

    def _draw(self, step):
        pool = np.arange(len(self._sequences))
        if self._topic_every:
            pool = np.flatnonzero(self._subjects == step // self._topic_every % 3)
        while True:
            sequence = self._sequences[self._rng.choice(pool)]
            if len(sequence):
                return sequence
