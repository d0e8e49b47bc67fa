"""Memory of one rank: every buffer with its arithmetic, against what the device has.

Shapes: R ranks, T the most tokens of a rank in a step, K experts per token, D hidden. Pure arithmetic. Within one host
the exchange's heap takes the worst case, as `exchange.peer_layout` allocates it; across hosts a fixed capacity of twice
the mean and waves beyond it, which is designed, not built. `search` and `cost` call it; the report shows it.
"""

from dataclasses import dataclass, replace

from bywash.planner.devices import Device
from bywash.planner.model import ModelShape

RESERVE = 0.08
"""Kept for the driver's context, the allocator's fragments and the serving engine's own buffers."""
NODE_CAPACITY = 2.0
GENERATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One buffer."""

    name: str
    bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One kind of rank: its buffers and its device's memory."""

    device: str
    entries: tuple[Entry, ...]
    have_bytes: int

    @property
    def need_bytes(self) -> int:
        """The sum; fixed at start, whatever the routing."""
        return sum(one.bytes for one in self.entries)

    @property
    def free_bytes(self) -> int:
        """What is left; negative where it does not fit."""
        return self.have_bytes - self.need_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """What a rank holds, beyond the model and the device.

    Attributes:
        ranks, hosts: of its group.
        tp: ranks that split its attention weights and, as far as there are heads, its cache.
        experts: at home, of each layer.
        tokens: the most of a step on this rank. sequences: that it decodes at once. context: longest of them.
        slots: for foreign experts. capacity_factor: most rows of an expert at once over the mean; 0 for no cap.
        reached: other ranks that compute for a token, on average.
    """

    ranks: int
    hosts: int
    tp: int
    experts: int
    tokens: int
    sequences: int
    context: int
    slots: int
    capacity_factor: float
    reached: float


def weights_bytes(model: ModelShape, tp: int) -> int:
    """Of all that is not a routed expert; ranks that split attention split the output matrix too."""
    return -(-model.dense_bytes // tp)


def make_ledger(model: ModelShape, device: Device, fill: Fill) -> Ledger:
    """Every buffer."""
    m, f = model, fill
    have = round(device.memory_gb * 1e9)
    split = min(f.tp, m.attention.kv_heads)
    kv_each = m.kv_bytes_per_token * f.context
    shared = f.tp * f.sequences  # the ranks that split attention hold each other's sequences
    held = _held_pairs(m, f)
    entries = (
        Entry(
            name="dense weights",
            bytes=weights_bytes(m, f.tp),
            arithmetic=f"attention, shared experts, embeddings: {m.dense_bytes / 1e9:.2f} GB / tp {f.tp}",
        ),
        Entry(
            name="home experts",
            bytes=m.moe_layers * f.experts * m.expert_bytes,
            arithmetic=f"{m.moe_layers} layers x {f.experts} experts x {m.expert_bytes / 1e6:.1f} MB ({m.dtype})",
        ),
        Entry(
            name="slots",
            bytes=f.slots * m.expert_bytes,
            arithmetic=f"{f.slots} x {m.expert_bytes / 1e6:.1f} MB, shared by all layers",
        ),
        Entry(
            name="KV cache",
            bytes=-(-shared * kv_each // split),
            arithmetic=f"{shared} sequences x {f.context:,} tokens x {m.kv_bytes_per_token:,} B / {split}",
        ),
        _heap(m, f),
        Entry(
            name="experts' rows",
            bytes=held * (2 * (m.hidden + m.intermediate) + 8),
            arithmetic=f"{held:,} pairs x ({m.hidden} outputs + {m.intermediate} intermediate) x 2 B + 8 B of index",
        ),
        Entry(
            name="logits",
            bytes=f.sequences * f.tp * m.vocab * 4 // f.tp,
            arithmetic=f"{f.sequences} sequences x {m.vocab} x 4 B",
        ),
        Entry(name="reserve", bytes=round(have * RESERVE), arithmetic=f"{RESERVE:.0%} for the driver and the engine"),
    )
    return Ledger(device=device.name, entries=entries, have_bytes=have)


def _held_pairs(model: ModelShape, fill: Fill) -> int:
    """(token, expert) pairs that a rank computes at once: all that may come, or C of each home expert and slot."""
    pairs = fill.ranks * fill.tokens * model.top_k
    if not fill.capacity_factor:
        share = pairs * fill.experts / model.experts
        return min(pairs, int(NODE_CAPACITY * share) + 1) if fill.hosts > 1 else pairs
    capacity = -int(-fill.capacity_factor * pairs // model.experts)
    return min(pairs, (fill.experts + fill.slots) * capacity)


def _heap(model: ModelShape, fill: Fill) -> Entry:
    row = model.hidden * 2
    others = fill.ranks if fill.hosts == 1 else min(float(fill.ranks), NODE_CAPACITY * (fill.reached + 1))
    size = round(GENERATIONS * 2 * others * fill.tokens * row)
    how = f"{fill.ranks} ranks" if fill.hosts == 1 else f"{others:.1f} rows a token (twice the mean, waves beyond)"
    return Entry(
        name="exchange heap",
        bytes=size,
        arithmetic=f"{GENERATIONS} generations x (arriving + returning) x {how} x {fill.tokens} tokens x {row:,} B",
    )


def most_experts(model: ModelShape, device: Device, fill: Fill) -> int:
    """How many experts of each layer fit on a rank with one sequence of cache, whatever `fill.experts` says; from 0."""
    bare = make_ledger(model, device, replace(fill, experts=0, sequences=1))
    return max(0, min(model.experts, bare.free_bytes // (model.moe_layers * model.expert_bytes)))
