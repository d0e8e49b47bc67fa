"""One rank's end of the `shm` exchange below the steps: heaps, flags, waiting, and failing together.

Knows nothing of tokens or sums; `shm.ShmExchange` says what is in a message.
Shapes: R ranks, E experts.
"""

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.errors import BywashError, ConfigError, ExchangeError, PlanMismatchError
from bywash.exchange.group import Group
from bywash.exchange.link import LinkClocks, Links, describe
from bywash.exchange.shm_layout import GENERATIONS, Control, ControlLayout, Message, RowsHeap, RowsLayout
from bywash.exchange.shm_watch import Watch
from bywash.memory import (
    arrived,
    epoch_of_step,
    flag,
    low32,
    open_heaps,
    require_store_order,
    sleep_until_ns,
    store_release,
    wait_until,
)

SIGNAL_BYTES = 16
"""A flag and its delivery time."""
_MAX_RANKS = 64


class ShmEndpoint:
    """Heaps of all ranks as this one sees them, and the flags in them.

    Attributes:
        rank, ranks: this process and how many there are.
        peers: the other ranks, from the right neighbour on, so that not all write into the same heap at once.
        emulated: what the emulated link does, in words; None without one.
    """

    def __init__(self, group: Group, combine_mode: str, link: Links | None) -> None:
        require_store_order()
        _check_group(group)
        self.rank, self.ranks = group.rank, group.ranks
        self.peers = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        self.emulated = describe(link)
        self._group, self._combine_mode = group, combine_mode
        self._clocks = LinkClocks(link, self.rank, self.ranks)
        self._experts = 0
        self._counts_begun = 0
        self._control: Control | None = None
        self._watch: Watch | None = None
        self._failure: BywashError | None = None
        self._closed = False

    @property
    def control(self) -> Control:
        """The control heaps.

        Raises:
            ExchangeError: the exchange has failed before; the first error again.
            ConfigError: it is closed.
        """
        if self._failure is not None:
            first = self._failure
            raise type(first)(str(first), first.ranks) if isinstance(first, ExchangeError) else type(first)(str(first))
        if self._closed or self._control is None:
            raise ConfigError("exchange shm: closed; open a new one")
        return self._control

    def open_control(self, experts: int) -> None:
        """Open the control heaps before the first step, when the number of experts is known. Every rank calls."""
        if self._control is not None or self._failure is not None or self._closed:
            if experts != self._experts and not self._failure and not self._closed:
                raise ConfigError(f"exchange shm: {experts} experts, but it was opened for {self._experts}")
            return
        layout = ControlLayout(self.ranks, experts)
        facts = {"--combine": self._combine_mode, "experts": experts, "link": self.emulated}
        try:
            heaps = open_heaps(self._group, layout.heap_bytes, arithmetic=layout.arithmetic, facts=facts)
        except BywashError as error:
            self.fail(error)
        self._experts = experts
        self._control = Control(heaps, layout)
        self._watch = Watch(self._group, self._control)

    def open_rows(self, layout: RowsLayout) -> RowsHeap:
        """Open heaps for rows. Every rank calls, with the same layout."""
        facts = {"heap layout": layout.arithmetic}
        try:
            heaps = open_heaps(self._group, layout.heap_bytes, arithmetic=layout.arithmetic, facts=facts)
        except BywashError as error:
            self.fail(error)
        return RowsHeap(heaps, layout)

    def open_slots(self, slots: int, slot_bytes: int) -> list[Tensor]:
        """Open heaps for weights: every rank's slots, uint8 [slots, slot_bytes]. Every rank calls alike."""
        arithmetic = f"{slots} slots x {slot_bytes:,} B of an expert's weights"
        try:
            size = max(1, slots * slot_bytes)
            heaps = open_heaps(self._group, size, arithmetic=arithmetic, facts={"slots": arithmetic})
        except BywashError as error:
            self.fail(error)
        taken = slots * slot_bytes
        return [torch.frombuffer(heap.buffer, dtype=torch.uint8)[:taken].view(slots, slot_bytes) for heap in heaps]

    def exchange_counts(self, counts_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """Every rank's counts, [R, E]. Each travels in a word with its epoch: no flag, nothing to reset."""
        control, layout = self.control, self.control.layout
        generation, epoch = self._counts_begun % GENERATIONS, epoch_of_step(self._counts_begun)
        self._counts_begun += 1
        cells_E = counts_E.astype(np.uint64) | np.uint64(epoch << 32)
        mine = layout.count_cells(generation, self.rank)
        for peer in self.peers:
            due_ns = self._clocks.due_ns(peer, cells_E.nbytes)
            control.words[peer][layout.dues(Message.COUNTS, generation) + self.rank] = due_ns
            control.arrays[peer][mine] = cells_E
        control.arrays[self.rank][mine] = cells_E
        cells_RE = control.arrays[self.rank][layout.count_cells_of_all(generation)].reshape(self.ranks, -1)
        self._await_counts(cells_RE, generation, epoch)
        return (cells_RE & np.uint64(0xFFFFFFFF)).astype(np.int32)

    def signal(self, message: Message, step: int, digest: int, peer: int, size_bytes: int, begun_ns: int) -> int:
        """Release all that was written for `peer`, to be seen when the emulated link, if any, has delivered it.

        Args:
            message: its kind.
            step: which step it belongs to.
            digest: hash of the plan it was made under.
            peer: the destination rank.
            size_bytes: what was written, without the flag.
            begun_ns: when writing began, CLOCK_MONOTONIC: a real network card would have begun to send then.

        Returns:
            Bytes sent, the flag included.
        """
        words, layout, generation = self.control.words[peer], self.control.layout, step % GENERATIONS
        size_bytes += SIGNAL_BYTES
        words[layout.dues(message, generation) + self.rank] = self._clocks.due_ns(peer, size_bytes, begun_ns)
        word = flag(epoch_of_step(step), digest)
        store_release(words, layout.flags(message, generation) + self.rank, word)
        return size_bytes

    def await_flags(self, message: Message, step: int, during: str) -> None:
        """Wait for every peer's `message` of `step`.

        Raises:
            RankLostError: a rank is gone, stopped, or later than the deadline; named.
            BywashError: what another rank reports.
        """
        words, generation, epoch = self.control.words[self.rank], step % GENERATIONS, epoch_of_step(step)
        first = self.control.layout.flags(message, generation)
        self._wait(lambda: [r for r in self.peers if not arrived(words[first + r], epoch)], during)
        self._until_delivered(message, generation)

    def check_plans(self, message: Message, step: int, digest: int) -> None:
        """Compare the plan in every peer's flag with this rank's, before anything else of the message is read.

        Raises:
            PlanMismatchError: names the ranks that differ; this one, if it differs from the majority.
        """
        first = self.control.layout.flags(message, step % GENERATIONS)
        digests = {rank: low32(self.control.words[self.rank][first + rank]) for rank in sorted(self.peers)}
        odd = [rank for rank, theirs in digests.items() if theirs != digest]
        if not odd:
            return
        alone = 2 * len(odd) > self.ranks
        who = f"rank {self.rank} (this one)" if alone else f"rank {odd[0]}"
        text = (
            f"{who} planned this step differently (digest {digests[odd[0]]:#010x} on rank {odd[0]}, {digest:#010x} on "
            f"rank {self.rank}); no row was read. All ranks must run the same bywash with the same options"
        )
        self.fail(PlanMismatchError(text, [self.rank] if alone else odd))

    def fail(self, error: BywashError) -> NoReturn:
        """Tell every rank, remember, and raise `error`."""
        if self._watch is not None:
            self._watch.tell(error)
        self._failure = error
        raise error

    def close(self) -> None:
        """Let ranks that still wait for this one know, and drop the heaps; they go with their last view."""
        if self._watch is not None:
            self._watch.tell_closed()
        self._closed = True
        self._control = self._watch = None

    def _await_counts(self, cells_RE: NDArray[np.uint64], generation: int, epoch: int) -> None:
        high, wanted = np.uint64(32), np.uint64(epoch)
        self._wait(
            lambda: [rank for rank in self.peers if not (cells_RE[rank] >> high == wanted).all()], "gathering counts"
        )
        self._until_delivered(Message.COUNTS, generation)

    def _wait(self, pending: Callable[[], list[int]], during: str) -> None:
        """Wait until nobody is pending, or fail with an error that names who is at fault."""
        watch = self._watch
        assert watch is not None

        def check(left: list[int], waited_ns: int) -> None:
            error = watch.check(left, waited_ns, during)
            # Look again: a rank may have sent its message and then ended, between our two looks.
            if error is not None and pending() == left:
                raise error

        try:
            wait_until(pending, check)
        except BywashError as error:
            self.fail(error)
        finally:
            watch.done_waiting()

    def _until_delivered(self, message: Message, generation: int) -> None:
        """Sleep until the emulated link has delivered; the time stands beside the flag."""
        if self.emulated is None:
            return
        words, first = self.control.words[self.rank], self.control.layout.dues(message, generation)
        sleep_until_ns(max((words[first + rank] for rank in self.peers), default=0))


def _check_group(group: Group) -> None:
    if group.ranks > _MAX_RANKS:
        raise ConfigError(f"--exchange shm: {group.ranks} ranks, at most {_MAX_RANKS} share one host's memory")
    here = group.peers[group.rank].host
    away = [rank for rank, peer in enumerate(group.peers) if peer.host != here]
    if away:
        raise ConfigError(
            f"--exchange shm: rank {away[0]} runs on another host or in another container than rank {group.rank}; "
            "they share no memory. Use --exchange gloo"
        )
