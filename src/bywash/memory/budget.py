"""How much memory one rank of an expert-parallel layer needs, every buffer with its arithmetic. Fixed before the first
step: nothing here depends on where tokens go.

Shapes: R ranks, T the most tokens of a rank in a step, K experts per token, E experts, L of them at home, D hidden, F
intermediate, S slots per rank, C capacity. Pure arithmetic on numbers; `bywash plan memory` prints it. The exchange's
heap is passed in, since its layout knows its own size.
"""

from dataclasses import dataclass

from bywash.balance.limits import ATTEMPTS, MOST_ROWS
from bywash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One buffer: its name, its bytes, and how they come about."""

    name: str
    bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetShape:
    """What decides the sizes.

    Attributes:
        hidden, intermediate, experts, top_k, moe_layers: of the model.
        ranks, tokens: R, and the most tokens that a rank brings to a step.
        slots: for foreign experts on each rank, shared by all layers.
        capacity_factor: the most rows of one expert that a rank holds at once, as a multiple of the mean; 0 for no cap.
        alpha_1024: see `Limits`.
        item_bytes: of a weight and of an element of a row.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    moe_layers: int
    ranks: int
    tokens: int
    slots: int
    capacity_factor: float
    alpha_1024: int = 1024
    item_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "top_k", "moe_layers", "ranks", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"memory.{name} = {getattr(self, name)}: must be at least 1")
        if self.slots < 0:
            raise ConfigError(f"memory.slots = {self.slots}: must be 0 or more")
        if self.top_k > self.experts:
            raise ConfigError(f"memory.top_k = {self.top_k}: there are only {self.experts} experts")
        if not 0 <= self.capacity_factor < MOST_ROWS:
            raise ConfigError(f"memory.capacity_factor = {self.capacity_factor}: must be 0 or more")

    @property
    def pairs(self) -> int:
        """The most (token, expert) pairs of a step over all ranks; one rank may be asked for all of them."""
        return self.ranks * self.tokens * self.top_k

    @property
    def home_experts(self) -> int:
        """L, rounded up."""
        return -(-self.experts // self.ranks)

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert: gate, up, down."""
        return 3 * self.hidden * self.intermediate * self.item_bytes

    @property
    def capacity(self) -> int:
        """C in rows: no expert can have more than one row of each token, capped or not."""
        most = self.ranks * self.tokens
        if not self.capacity_factor:
            return most
        return min(most, max(1, -int(-self.capacity_factor * self.pairs // self.experts)))

    @property
    def held_pairs(self) -> int:
        """The most pairs that a rank holds at once: C of each home expert, and what slots may get (see `naive.py`)."""
        share = -(-self.tokens * self.top_k * self.alpha_1024 * 452 // (1024 * 256)) + 1 if self.slots else 0
        spilled = min(self.slots * self.capacity, share)
        return min(self.pairs, self.home_experts * self.capacity + spilled)


def memory_budget(shape: BudgetShape, heap: Buffer) -> list[Buffer]:
    """Every buffer of one rank, the exchange's heap first. Their sum is the peak, whatever the routing."""
    s, held, item = shape, shape.held_pairs, shape.item_bytes
    weights = f"3 x {s.hidden} x {s.intermediate} x {item} B"
    cap = f"capacity {s.capacity:,} rows"
    how = f"min({s.pairs:,} pairs of a step, {s.home_experts} home experts x {cap} + spilled rows) = {held:,} pairs"
    plan = 4 * s.ranks * s.experts * 2 + 8 * s.ranks + 4 * s.experts * 2 + 4 * 3 * s.ranks * s.slots
    scratch = 8 * ATTEMPTS * s.ranks * s.slots
    return [
        heap,
        Buffer(
            name="home weights",
            bytes=s.moe_layers * s.home_experts * s.expert_bytes,
            arithmetic=f"{s.moe_layers} layers x {s.home_experts} experts x {weights}",
        ),
        Buffer(
            name="slots",
            bytes=s.slots * s.expert_bytes,
            arithmetic=f"{s.slots} slots x {weights}, shared by all layers",
        ),
        Buffer(name="index", bytes=8 * held, arithmetic=f"{how} x 8 B"),
        Buffer(
            name="intermediate",
            bytes=held * s.intermediate * item,
            arithmetic=f"{held:,} pairs x {s.intermediate} x {item} B",
        ),
        Buffer(name="outputs", bytes=held * s.hidden * item, arithmetic=f"{held:,} pairs x {s.hidden} x {item} B"),
        Buffer(
            name="plans",
            bytes=2 * plan + scratch + 4 * s.moe_layers * s.experts,
            arithmetic=f"2 x (counts and rows 2 x {s.ranks} x {s.experts} x 4 B, homes, loads, 3 words for each of "
            f"{s.ranks} x {s.slots} slots) + {ATTEMPTS} attempts x {s.ranks} x {s.slots} pieces x 8 B + "
            f"averages of {s.moe_layers} x {s.experts} experts x 4 B",
        ),
    ]
