"""What a dispatch and a combine do around the carrier: rows packed and taken apart, outputs packed and unpacked.

`Work` does it with torch's operations, on any device and for both layouts. `DeviceWork` does the plain layout on a GPU
in one launch for each of these, since at a decode step's sizes a dozen small operations cost more than the wire. The
expanded layout costs them still. `buffer.ElasticBuffer` calls it on the stream where the work belongs.

Shapes: T tokens of this rank, K experts per token, D hidden, N rows received, X rows of the expanded layout, L local
experts, R ranks, W columns of a carried row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bywash.deepep.handle import EPHandle
from bywash.deepep.layout import expanded_rows
from bywash.deepep.received import arranged, new_handle, outputs, unpacked
from bywash.deepep.request import Request
from bywash.deepep.weights import PIECES, check_returned, join_weights
from bywash.exchange.carrier import Arrived, RowCarrier, Step, ranks_of_experts
from bywash.exchange.carrier_device import DeviceCarrier
from bywash.exchange.device_rows import DeviceRows, Owners
from bywash.exchange.payload import RowFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of a dispatch, beside its request.

    Attributes:
        stats_L: int32 [L], to which the rows of each local expert are added, or None.
        column_major: received scales with the column as the slow dimension.
        copies_ids: whether the handle has ids of its own.
        num_sms: as given.
    """

    stats_L: Tensor | None
    column_major: bool
    copies_ids: bool
    num_sms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """What a dispatch gives: rows, scales and weights in the handle's layout."""

    x: Tensor
    scales: Tensor | None
    weights: Tensor | None
    handle: EPHandle


class Work:
    """With torch's operations.

    Attributes:
        carrier: that moves the rows.
    """

    def __init__(self, carrier: RowCarrier) -> None:
        self.carrier = carrier

    @staticmethod
    def of(carrier: RowCarrier, form: RowFormat) -> "Work":
        """The quickest for rows of a format that a carrier moves."""
        return DeviceWork(carrier, form) if isinstance(carrier, DeviceCarrier) else Work(carrier)

    def dispatch(self, request: Request, options: Options) -> Got:
        """Send the request's rows and receive."""
        carrier, handle = self.carrier, request.handle
        ranks_TJ = ranks_of_experts(request.topk_idx, request.num_experts // carrier.ranks, carrier.ranks)
        rows_TB = request.packed(carrier.rank, carrier.sent_bytes)
        step, arrived = carrier.dispatch(rows_TB, ranks_TJ, sync=request.sync)
        rows = arrived.rows if request.sync else carrier.ranks * request.most
        got = unpacked(request.way.format, arrived, handle.num_recv_tokens if handle else rows or 0)
        if handle is None:
            kept = request.topk_idx.clone() if options.copies_ids else request.topk_idx
            handle = new_handle(
                request,
                got,
                arrived,
                step=step,
                ranks=carrier.ranks,
                rank=carrier.rank,
                kept_idx=kept,
                num_sms=options.num_sms,
                work=self,
            )
        else:
            handle._step, handle._work = step, self
        if options.stats_L is not None:
            options.stats_L.add_(handle._counts_L)
        x, scales, weights = arranged(got, handle, column_major=options.column_major)
        return Got(x=x, scales=scales, weights=weights, handle=handle)

    def combine(self, x: Tensor, weights: Tensor | None, handle: EPHandle) -> tuple[Tensor, Tensor | None]:
        """[T, D], the sums; and float32 [T, K], the weights that came back, if some were given."""
        y_NW = outputs(x, weights, handle, self.carrier.columns)
        out_TW, hidden = self._returned(y_NW, handle), x.shape[1]
        back = None
        if weights is not None:
            back = join_weights(out_TW[:, hidden : hidden + PIECES * handle.topk_idx.shape[1]])
        return out_TW[:, :hidden].contiguous(), back

    def _returned(self, y_NW: Tensor, handle: EPHandle) -> Tensor:
        handle._step = self.carrier.reopened(handle._step)
        return self.carrier.combine(handle._step, y_NW)


class DeviceWork(Work):
    """With one launch for each step of it, in the plain layout; as `Work` in the expanded one."""

    def __init__(self, carrier: RowCarrier, form: RowFormat) -> None:
        super().__init__(carrier)
        self._rows = DeviceRows(form)

    def dispatch(self, request: Request, options: Options) -> Got:
        """See `Work.dispatch`."""
        if request.expand:
            return super().dispatch(request, options)
        carrier, rows = self.carrier, self._rows
        ranks, experts, handle = carrier.ranks, request.num_experts // carrier.ranks, request.handle
        summary = None
        if handle is None:
            summary = torch.empty(ranks + 2 * experts + 1, dtype=torch.int32, device=request.x.device)
        packed_TB, ranks_TJ = rows.pack(
            request.x,
            request.scales,
            request.topk_idx,
            request.topk_weights,
            Owners(ranks=ranks, per_rank=experts),
            row_bytes=carrier.sent_bytes,
            source=carrier.rank * request.most,
            summary=summary,
        )
        step, arrived = carrier.dispatch(packed_TB, ranks_TJ, sync=False)
        if handle is None:
            assert summary is not None
            handle = self._new_handle(request, options, summary, step, arrived)
        else:
            handle._step, handle._work = step, self
            if options.stats_L is not None:
                options.stats_L.add_(handle._counts_L)
        x, scales, weights = rows.copy(
            arrived,
            handle.num_recv_tokens,
            ids_NK=handle._recv_topk_idx,
            weighted=request.topk_weights is not None,
            column_major=options.column_major,
        )
        return Got(x=x, scales=scales, weights=weights, handle=handle)

    def _new_handle(
        self, request: Request, options: Options, summary: Tensor, step: Step, arrived: Arrived
    ) -> EPHandle:
        """Ids and counts from the device. All there is room for are read, so that the host waits once, afterwards."""
        carrier, kept = self.carrier, request.topk_idx
        ranks, experts = carrier.ranks, request.num_experts // carrier.ranks
        most, top_k = ranks * request.most, kept.shape[1]
        local_NK = kept.new_empty((most, top_k))
        metadata = torch.empty((most, 2 + top_k), dtype=torch.int32, device=kept.device)
        self._rows.read(
            arrived,
            local_NK,
            first=carrier.rank * experts,
            experts=experts,
            metadata=metadata,
            summary=summary,
            alignment=request.alignment,
            stats_L=options.stats_L,
        )
        found, counts = most, []
        total = expanded_rows(experts, request.alignment, most, top_k)
        if request.sync:
            on_host = summary.tolist()
            carrier.check()
            found = on_host[ranks - 1]
            counts = [-(-n // request.alignment) * request.alignment for n in on_host[ranks : ranks + experts]]
            total = sum(counts)
        return EPHandle(
            do_expand=False,
            num_experts=request.num_experts,
            expert_alignment=request.alignment,
            num_max_tokens_per_rank=request.most,
            num_sms=options.num_sms,
            topk_idx=kept.clone() if options.copies_ids else kept,
            num_recv_tokens=found,
            num_expanded_tokens=total,
            num_recv_tokens_per_expert_list=counts,
            psum_num_recv_tokens_per_scaleup_rank=summary[:ranks],
            psum_num_recv_tokens_per_expert=summary[ranks + experts : ranks + 2 * experts],
            num_unaligned_recv_tokens_per_expert=None,
            recv_src_metadata=metadata[:found],
            _recv_topk_idx=local_NK[:found],
            _counts_L=summary[ranks : ranks + experts],
            _step=step,
            _work=self,
        )

    def combine(self, x: Tensor, weights: Tensor | None, handle: EPHandle) -> tuple[Tensor, Tensor | None]:
        """See `Work.combine`."""
        if handle.do_expand:
            return super().combine(x, weights, handle)
        local_NK, columns = handle._recv_topk_idx, self.carrier.columns
        if weights is not None:
            check_returned(weights, local_NK.shape, x.dtype)
        total = handle.psum_num_recv_tokens_per_scaleup_rank[-1:]
        y_NW = self._rows.pack_outputs(x, total, columns, ids_NK=local_NK, weights=weights)
        return self._rows.unpack_outputs(self._returned(y_NW, handle), x.shape[1], weighted=weights is not None)
