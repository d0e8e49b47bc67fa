"""`gloo`: the exchange between CPU processes over sockets, through torch.distributed.

The portable path, and the baseline that the shared-memory exchange is measured against. Each step makes one small
exchange of sizes and plan digests, checked before rows are read, then one message of rows with their index and
weights, and one message back.

Shapes: T tokens, K experts per token, D hidden, R ranks, N rows received, M pairs computed here.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan
from bywash.errors import BywashError, ConfigError, PlanMismatchError
from bywash.exchange.base import Exchange, Handle, Received
from bywash.exchange.group import Group
from bywash.exchange.mixed import add_mixed, mixed_outputs, mixed_rows_per_rank, outputs_per_row, read_ids, wire_ids
from bywash.exchange.names import Combine
from bywash.exchange.rows import SendList, pairs_per_rank, send_lists, weighted_sum
from bywash.routing import Routing

_REFUSED = -1
"""Where the others read how many rows come."""


class GlooExchange(Exchange):
    """Deduplicated rows by `all_to_all_single`, one destination's rows, ids and weights in one message."""

    name = "gloo"
    _slots_SB: Tensor  # made by open_slots

    def __init__(self, group: Group, *, combine_mode: Combine = "exact") -> None:
        super().__init__(rank=group.rank, ranks=group.ranks, combine_mode=combine_mode)
        self.group, self._torch = group, group.process_group

    def counts(self, counts_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """See `Exchange.counts`."""
        counts_RE = self.group.gather_counts(counts_E)
        self.traffic.wire_bytes += (self.ranks - 1) * counts_E.nbytes
        return counts_RE

    def dispatch_start(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> Handle:
        """See `Exchange.dispatch_start`."""
        handle = Handle(routing=routing, plan=plan)
        lists = send_lists(routing, plan, source=self.rank, mixed=self._mixed(plan))
        send_rows = [sent.tokens_N.numel() for sent in lists]
        counts_E = routing.counts_E()
        recv_rows, counts_RE = self._agree_on_sizes(send_rows, plan.digest, counts_E)
        record = _record_bytes(x_TD, routing.top_k)
        send = torch.cat([_pack(x_TD, sent, routing.num_experts) for sent in lists])
        recv = torch.empty(sum(recv_rows), record, dtype=torch.uint8)
        handle.state.update(x_TD=x_TD, lists=lists, recv=recv, recv_rows=recv_rows, counts_RE=counts_RE)
        with self.group.blame("dispatching rows"):
            handle.state["work"] = dist.all_to_all_single(
                recv, send, recv_rows, send_rows, async_op=True, group=self._torch
            )
        handle.state["send"] = send  # gloo reads it until the work is done
        self._count_dispatch(send_rows, record, pairs_per_rank(lists), x_TD)
        return handle

    def dispatch_finish(self, handle: Handle) -> Received:
        """See `Exchange.dispatch_finish`."""
        handle.advance("dispatch_finish", "combine_start")
        self._wait(handle, "waiting for dispatched rows")
        x_TD = handle.state["x_TD"]
        received = _unpack(handle.state, x_TD, handle.routing.top_k)
        if self._mixed(handle.plan):
            ids_NK, handle.state["alone_NK"] = read_ids(received.ids_NK, handle.routing.num_experts)
            received = replace(received, ids_NK=ids_NK)
        handle.state["received"] = received
        self.traffic.steps += 1
        return received

    def combine_start(self, handle: Handle, y_MD: Tensor) -> None:
        """See `Exchange.combine_start`."""
        handle.advance("combine_start", "combine_finish")
        received: Received = handle.state["received"]
        lists: list[SendList] = handle.state["lists"]
        if self.combine_mode == "exact":
            pairs_N = (received.ids_NK >= 0).sum(dim=1)
            send_rows = [int(part.sum()) for part in pairs_N.split(received.rows_from_R)]
            recv_rows = pairs_per_rank(lists)
            send = y_MD
        elif self._mixed(handle.plan):
            alone_NK = handle.state["alone_NK"]
            outputs_N = torch.from_numpy(outputs_per_row(received.ids_NK, alone_NK))
            send_rows = [int(part.sum()) for part in outputs_N.split(received.rows_from_R)]
            recv_rows = mixed_rows_per_rank(lists)
            send = mixed_outputs(y_MD, received.ids_NK, alone_NK, received.weights_NK)
        else:
            send_rows = received.rows_from_R
            recv_rows = [sent.tokens_N.numel() for sent in lists]
            send = weighted_sum(y_MD, received.ids_NK, received.weights_NK)
        row_bytes = send.shape[1] * send.element_size()
        recv = torch.empty(sum(recv_rows), row_bytes, dtype=torch.uint8)
        handle.state.update(recv=recv, recv_rows=recv_rows, send=send)
        with self.group.blame("returning outputs"):
            handle.state["work"] = dist.all_to_all_single(
                recv, _as_bytes(send), recv_rows, send_rows, async_op=True, group=self._torch
            )
        returned = sum(send_rows) - send_rows[self.rank]
        self.traffic.rows_returned += returned
        self.traffic.wire_bytes += returned * row_bytes

    def combine_finish(self, handle: Handle) -> Tensor:
        """See `Exchange.combine_finish`."""
        handle.advance("combine_finish", "done")
        self._wait(handle, "waiting for outputs")
        x_TD, lists = handle.state["x_TD"], handle.state["lists"]
        y = handle.state["recv"].view(x_TD.dtype).view(-1, x_TD.shape[1])
        recv_rows, routing = handle.state["recv_rows"], handle.routing
        if self.combine_mode == "exact":
            out = _sum_exact(y.split(recv_rows), lists, routing)
        elif self._mixed(handle.plan):
            first_R = [sum(recv_rows[:rank]) for rank in range(self.ranks)]
            out = add_mixed(y, lists, first_R, routing.ids_TK, routing.weights_TK.detach(), handle.plan)
        else:
            out = _sum_fast(y.split(recv_rows), lists, x_TD)
        handle.state.clear()
        return out

    def open_slots(self, slots: int, slot_bytes: int) -> Tensor:
        """See `Exchange.open_slots`."""
        try:
            self._slots_SB = torch.empty(slots, slot_bytes, dtype=torch.uint8)
        except RuntimeError as error:  # torch has no class of its own for CPU memory
            raise ConfigError(
                f"exchange gloo: rank {self.rank} has no memory for {slots} slots x {slot_bytes:,} B of an expert's "
                f"weights; use fewer slots"
            ) from error
        return self._slots_SB

    def fetch(self, donor_RS: NDArray[np.int32], digest: int, read: Callable[[int, int], Tensor]) -> None:
        """See `Exchange.fetch`."""
        self._agree_on_sizes([0] * self.ranks, digest, torch.empty(0, dtype=torch.int64))
        gives = [np.flatnonzero(donor_S == self.rank).tolist() for donor_S in donor_RS]
        takes = [np.flatnonzero(donor_RS[self.rank] == donor).tolist() for donor in range(self.ranks)]
        rows = [read(rank, slot) for rank, slots in enumerate(gives) for slot in slots]
        slot_bytes = self._slots_SB.shape[1]
        send = torch.stack(rows) if rows else torch.empty(0, slot_bytes, dtype=torch.uint8)
        recv = torch.empty(sum(map(len, takes)), slot_bytes, dtype=torch.uint8)
        with self.group.blame("copying weights into slots"):
            sizes = [len(slots) for slots in takes], [len(slots) for slots in gives]
            self.group.end(dist.all_to_all_single(recv, send, *sizes, group=self._torch, async_op=True))
        self._slots_SB[[slot for slots in takes for slot in slots]] = recv
        self.traffic.weight_bytes += send.numel()

    def refuse(self, plan: StepPlan, error: BywashError) -> NoReturn:
        """See `Exchange.refuse`."""
        counts_E = torch.zeros(plan.rank_E.size, dtype=torch.int64)
        with suppress(ConfigError):  # of another rank that refuses as well
            self._agree_on_sizes([_REFUSED] * self.ranks, plan.digest, counts_E)
        raise error

    def _mixed(self, plan: StepPlan) -> bool:
        """Whether some outputs travel summed and others alone."""
        return self.combine_mode == "stable" and plan.spilled > 0

    def close(self) -> None:
        """See `Exchange.close`. The group belongs to the caller and stays open."""

    def _agree_on_sizes(
        self, send_rows: list[int], digest: int, counts_E: Tensor
    ) -> tuple[list[int], NDArray[np.int32]]:
        """Tell each rank how many rows it will get, under which plan, and the step's counts; return what arrived."""
        sizes = torch.tensor([[rows, digest] for rows in send_rows], dtype=torch.int64)
        send = torch.cat([sizes, counts_E.expand(self.ranks, -1)], dim=1)
        recv = torch.empty_like(send)
        with self.group.blame("agreeing on the plan"):
            self.group.end(dist.all_to_all_single(recv, send, group=self._torch, async_op=True))
        self.traffic.wire_bytes += (self.ranks - 1) * send.shape[1] * 8
        refused = [r for r in range(self.ranks) if int(recv[r, 0]) == _REFUSED and r != self.rank]
        if refused:
            raise ConfigError(f"rank {refused[0]} refused this step before it sent a row: its own error says why")
        odd = [r for r in range(self.ranks) if int(recv[r, 1]) != digest]
        if odd:
            raise PlanMismatchError(
                f"rank {odd[0]} planned this step differently (digest {int(recv[odd[0], 1]):#010x}, rank {self.rank} "
                f"has {digest:#010x}); no row was read. All ranks must run the same bywash with the same options",
                odd,
            )
        return [int(rows) for rows in recv[:, 0]], recv[:, 2:].numpy().astype(np.int32)

    def _wait(self, handle: Handle, during: str) -> None:
        with self.group.blame(during):
            self.group.end(handle.state.pop("work"))
        handle.state.pop("send")

    def _count_dispatch(self, send_rows: list[int], record: int, pairs: list[int], x_TD: Tensor) -> None:
        remote = sum(send_rows) - send_rows[self.rank]
        self.traffic.rows_sent += remote
        self.traffic.wire_bytes += remote * record
        self.traffic.logical_bytes += 2 * sum(pairs) * x_TD.shape[1] * x_TD.element_size()


def _record_bytes(x_TD: Tensor, top_k: int) -> int:
    """One row on the wire: hidden vector, K int32 ids, K float32 weights."""
    return x_TD.shape[1] * x_TD.element_size() + 8 * top_k


def _as_bytes(rows: Tensor) -> Tensor:
    if rows.shape[0] == 0:  # a tensor of no rows may have any strides, which view() refuses
        return torch.empty(0, rows.shape[1] * rows.element_size(), dtype=torch.uint8)
    return rows.contiguous().view(torch.uint8)


def _pack(x_TD: Tensor, sent: SendList, experts: int) -> Tensor:
    parts: tuple[Any, ...] = (x_TD[sent.tokens_N], wire_ids(sent, experts).to(torch.int32), sent.weights_NK)
    return torch.cat([_as_bytes(part) for part in parts], dim=1)


def _unpack(state: dict[str, Any], x_TD: Tensor, top_k: int) -> Received:
    recv: Tensor = state.pop("recv")
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    rows, ids, weights = (
        part.clone(memory_format=torch.contiguous_format)
        for part in recv.split([row_bytes, 4 * top_k, 4 * top_k], dim=1)
    )
    return Received(
        rows_ND=rows.view(x_TD.dtype),
        ids_NK=ids.view(torch.int32).long(),
        weights_NK=weights.view(torch.float32),
        rows_from_R=state["recv_rows"],
        counts_RE=state["counts_RE"],
    )


def _sum_exact(parts: tuple[Tensor, ...], lists: list[SendList], routing: Routing) -> Tensor:
    """Put every (token, k) output in its place, then sum in k order, wherever it was computed."""
    valid_TK = routing.ids_TK >= 0
    position_TK = (valid_TK.reshape(-1).cumsum(0) - 1).view_as(valid_TK)
    y_MD = torch.empty(sum(p.shape[0] for p in parts), parts[0].shape[1], dtype=parts[0].dtype)
    for part, sent in zip(parts, lists, strict=True):
        y_MD[position_TK[sent.tokens_N][sent.ids_NK >= 0]] = part
    return weighted_sum(y_MD, routing.ids_TK, routing.weights_TK)


def _sum_fast(parts: tuple[Tensor, ...], lists: list[SendList], x_TD: Tensor) -> Tensor:
    """Add each rank's partial sums, in rank order, in float32."""
    total = torch.zeros(x_TD.shape, dtype=torch.float32)
    for part, sent in zip(parts, lists, strict=True):
        total[sent.tokens_N] += part.float()
    return total.to(x_TD.dtype)
