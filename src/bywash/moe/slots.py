"""`SlotPool`: the slots for foreign experts' weights, filled as plans say, shared by all layers of a model.

Shapes: R ranks, E experts, S slots per rank, B bytes of a slot. The directory is part of every plan, so all ranks
change it alike; this rank's slots are views that its experts compute with. Weights come straight from their home
through `Exchange.fetch`, each with a checksum that is compared before anything is computed with them. They are fetched
when the layer's next step begins: then every rank has ended the steps that computed from the slots they replace.
`ExpertParallel` calls it. Knows nothing of tokens.
"""

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import Limits, Placement, SlotDirectory, StepPlan, plan_step
from bywash.balance.counters import LayerCounters
from bywash.balance.limits import MOST_ROWS
from bywash.errors import ConfigError, ExchangeError
from bywash.exchange import Exchange
from bywash.moe.experts import Experts, GatedExperts

_ALIGN, _SUM_BYTES = 64, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """Where an expert's tensors lie in a slot: bytes from `begins[i]`, each part aligned, a checksum at the end."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    begins: tuple[int, ...]
    slot_bytes: int

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> "SlotLayout":
        """Of tensors with experts first."""
        begins, end = [], 0
        for part in parts:
            begins.append(end)
            end += -(-math.prod(part.shape[1:]) * part.element_size() // _ALIGN) * _ALIGN
        return cls(
            shapes=tuple(tuple(part.shape[1:]) for part in parts),
            dtypes=tuple(part.dtype for part in parts),
            begins=tuple(begins),
            slot_bytes=end + _SUM_BYTES,
        )

    def views(self, slots_SB: Tensor) -> list[Tensor]:
        """The tensors in every slot, [S, ...]."""
        found = []
        for shape, dtype, begin in zip(self.shapes, self.dtypes, self.begins, strict=True):
            size = math.prod(shape) * dtype.itemsize
            found.append(slots_SB[:, begin : begin + size].view(dtype).view(slots_SB.shape[0], *shape))
        return found

    def packed(self, parts: Sequence[Tensor], expert: int) -> Tensor:
        """uint8 [B]: one expert as it lies in a slot."""
        slot_B = torch.zeros(self.slot_bytes, dtype=torch.uint8)
        for view, part in zip(self.views(slot_B[None]), parts, strict=True):
            view[0].copy_(part[expert])
        slot_B[-8:].view(torch.int64)[0] = _checksum(slot_B)
        return slot_B

    def intact(self, slot_B: Tensor) -> bool:
        """Whether a slot holds what was packed."""
        return int(slot_B[-8:].view(torch.int64)[0]) == _checksum(slot_B)


class SlotPool:
    """This rank's slots, the common directory, and what was done with them.

    Attributes:
        limits: when rows leave home.
        most_pairs: (row, expert) pairs that a rank is given at once, so that its outputs have a bound: a step that
            would give more to some rank is done in waves, parts of its tokens one after another.
        directory: what the slots of all ranks hold, by the last plan.
        counters: what became of the rows of each layer.
    """

    def __init__(
        self,
        exchange: Exchange,
        limits: Limits,
        *,
        slots: int,
        experts: int,
        layers: int = 1,
        most_pairs: int = MOST_ROWS,
        ahead_pairs: int = MOST_ROWS,
    ) -> None:
        """Prepare `slots` slots on each rank; they are opened when the first weights come.

        Args:
            exchange: between the ranks; one that copies weights (gloo, shm) unless `slots` is 0.
            limits: see `Limits`; `keep` is seen to here.
            slots: of each rank.
            experts: E of a layer.
            layers: that share the slots.
            most_pairs: see the class.
            ahead_pairs: the most pairs over all ranks of a step under the plan of the step before, as the caller knows;
                with more than `most_pairs` such steps count first, since nobody could tell that they need waves.
        """
        self.directory = SlotDirectory.empty(ranks=exchange.ranks, slots=slots, experts=experts, layers=layers)
        self.limits, self.most_pairs, self._ahead_pairs = limits, most_pairs, ahead_pairs
        self.counters = [LayerCounters() for _ in range(layers)]
        self._exchange, self._slots = exchange, slots
        # Decode plans a layer's next step while other layers' plans are still to run; none of their slots may go.
        self._ahead = replace(limits, keep=max(limits.keep, layers))
        self._layout: SlotLayout | None = None
        self._slots_SB: Tensor | None = None
        self._missing_RS = np.full_like(self.directory.keys_RS, -1)  # the donor of what a slot does not hold yet

    def plan(self, counts_RE: NDArray[np.int32], placement: Placement, layer: int, *, ahead: bool) -> StepPlan:
        """Plan a step of `layer`.

        Args:
            counts_RE: what to plan for.
            placement: the homes.
            layer: which of the layers.
            ahead: whether layers run under the plan of the step before.
        """
        begun_ns = time.perf_counter_ns()
        limits = self._ahead if ahead else self.limits
        plan = plan_step(counts_RE, placement, limits, self.directory, layer=layer)
        assert plan.directory is not None, "it was given one"
        self.directory = plan.directory
        self.counters[layer].plan_us += (time.perf_counter_ns() - begun_ns) / 1e3
        self._missing_RS = np.where(plan.fetch_RS >= 0, plan.fetch_RS, self._missing_RS)
        return plan

    def may_reuse(self, plan: StepPlan) -> bool:
        """Whether a step may run under an earlier plan: its slots are there, no rank can get too much. Alike on all."""
        return self._ahead_pairs <= self.most_pairs and self.still_holds(plan)

    def still_holds(self, plan: StepPlan) -> bool:
        """Whether every slot that an earlier plan computes from is still meant to hold the same. Alike on all ranks."""
        assert plan.directory is not None, "it was made here"
        used_RS = plan.directory.ages_RS == 0
        return bool((self.directory.keys_RS[used_RS] == plan.directory.keys_RS[used_RS]).all())

    def fill(self, layer: int, digest: int, home: GatedExperts, place_E: NDArray[np.int64]) -> None:
        """Get what the slots of `layer` do not hold yet, before its step. Every rank calls.

        Args:
            layer: which of the layers.
            digest: of the plan that the step runs under.
            home: this rank's own experts.
            place_E: int64 [E], their places in `home`.

        Raises:
            ExchangeError: weights arrived damaged.
        """
        keys_RS, experts = self.directory.keys_RS, self.directory.experts
        wanted_RS = (self._missing_RS >= 0) & (keys_RS // experts == layer)
        if not wanted_RS.any():
            return
        donor_RS = np.where(wanted_RS, self._missing_RS, -1)
        self._missing_RS[wanted_RS] = -1
        layout, me = self._open(home), self._exchange.rank

        def read(rank: int, slot: int) -> Tensor:
            return layout.packed(home.parts, int(place_E[int(keys_RS[rank, slot]) % experts]))

        self._exchange.fetch(donor_RS, digest, read)
        fetches = int(np.count_nonzero(wanted_RS))
        self.counters[layer].fetches += fetches
        self.counters[layer].fetched_bytes += fetches * layout.slot_bytes
        assert self._slots_SB is not None, "opened above"
        for slot, donor in enumerate(donor_RS[me].tolist()):
            if donor >= 0 and not layout.intact(self._slots_SB[slot]):
                raise ExchangeError(
                    f"weights of expert {int(keys_RS[me, slot]) % experts}, layer {layer}, arrived damaged from rank "
                    f"{donor} in slot {slot} of rank {me}",
                    [donor],
                )

    def with_guests(self, home: GatedExperts) -> Experts:
        """`home` and, behind its experts, those in the slots."""
        if not self._slots:
            return home
        layout = self._open(home)
        assert self._slots_SB is not None, "opened above"
        return _HomeAndGuests(home, home.with_parts(layout.views(self._slots_SB)))

    def _open(self, home: GatedExperts) -> SlotLayout:
        """Open the slots on the first call, all ranks alike; later ones check that layers have experts of one shape."""
        layout = SlotLayout.of(home.parts)
        if self._layout is None:
            self._layout = layout
            self._slots_SB = self._exchange.open_slots(self._slots, layout.slot_bytes)
        if layout != self._layout:
            raise ConfigError(
                f"slots: a layer with experts {layout.shapes} {layout.dtypes}; the pool was opened for "
                f"{self._layout.shapes} {self._layout.dtypes}; layers that differ need a pool each"
            )
        return layout


class _HomeAndGuests:
    """Experts at home first, then those in slots."""

    def __init__(self, home: GatedExperts, guests: GatedExperts) -> None:
        self.hidden, self._home, self._guests = home.hidden, home, guests
        self._own = home.parts[0].shape[0]

    def forward(self, slot: int, rows_ND: Tensor) -> Tensor:
        """See `Experts.forward`."""
        if slot < self._own:
            return self._home.forward(slot, rows_ND)
        return self._guests.forward(slot - self._own, rows_ND)


def _checksum(slot_B: Tensor) -> int:
    return zlib.crc32(slot_B[:-_SUM_BYTES].numpy().data)
