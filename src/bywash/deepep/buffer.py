"""`ElasticBuffer`: dispatch and combine with DeepEP 2's names and meanings.

Arguments and results are as documented in DeepEP 2 (README and deep_ep/buffers/elastic.py); how rows travel is
`RowCarrier`'s business. Differences: rows arrive in the order of (source rank, token) always, so every call is
deterministic; nothing is dropped or trapped, a rank that does not come is a `RankLostError`; queue pairs do not exist.

Shapes: T tokens of this rank, K experts per token, D hidden, N rows received, X rows of the expanded layout, L local
experts, R ranks, W columns of a carried row, G scales of a row.
"""

from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from bywash.deepep.event import EventHandle, EventOverlap
from bywash.deepep.handle import EPHandle
from bywash.deepep.lane import Lane
from bywash.deepep.request import Request, Way, cached_request, first_request
from bywash.deepep.weights import PIECES
from bywash.deepep.work import Options, Work
from bywash.deepep.works import Works
from bywash.errors import ConfigError
from bywash.exchange import Group
from bywash.exchange.borrowed import BorrowedGroup
from bywash.exchange.payload import RowFormat
from bywash.exchange.peer_layout import PeerLayout

Rows = Tensor | tuple[Tensor, Tensor]
_BUFFER_ALIGNMENT = 2 << 20
_NOT_HERE = (
    *("engram_write", "engram_fetch", "get_engram_storage_size_hint"),
    *("pp_set_config", "pp_send", "pp_recv", "get_pp_buffer_size_hint"),
    *("create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config"),
    *("agrs_get_inplace_tensor", "all_gather", "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint"),
)
"""What DeepEP's buffer has beside expert parallelism."""


class ElasticBuffer:
    """One rank's end. Every rank of the group makes the same calls in the same order.

    Attributes:
        group: as given.
        rank_idx, num_ranks: of this process in the group, and how many there are.
        num_max_tokens_per_rank: the default for dispatches; one that asks for more opens more memory.
        num_bytes: what `get_buffer_size_hint` says for the sizes given here; memory is taken by the first dispatch.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Group,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        """Meet the other ranks.

        `deterministic`, `allow_hybrid_mode`, `prefer_overlap_with_compute`, `sl_idx`, `num_allocated_qps` and
        `explicitly_destroy` are accepted and change nothing: calls are always deterministic, there is no hybrid mode
        and no queue pair, and `destroy` may be called or not.

        Args:
            group: a torch process group, or a bywash `Group`.
            num_bytes: sizes nothing here; kept for code that compares it with a hint.
            num_cpu_bytes: 0; buffers in CPU memory beside the GPU's are not supported.
            num_max_tokens_per_rank: the most tokens of a rank in any dispatch that does not say otherwise.
            hidden, num_topk, use_fp8_dispatch: for `num_bytes` only; a dispatch brings its own.
            allow_multiple_reduction: False is supported for plain layouts, where it changes nothing.
            num_cpu_timeout_secs, num_gpu_timeout_secs: the shorter one bounds every wait on other ranks of a torch
                group; a bywash `Group` has its own deadline.

        Raises:
            ConfigError: what is not supported.
            RankLostError: a rank did not come.
        """
        if num_cpu_bytes:
            _unsupported("num_cpu_bytes", "buffers are in the memory where the rows are")
        self.group = group
        deadline_s = min(num_cpu_timeout_secs, num_gpu_timeout_secs)
        self._borrowed = BorrowedGroup(group, deadline_s=deadline_s) if isinstance(group, dist.ProcessGroup) else None
        self._group = self._borrowed or cast(Group, group)
        self.rank_idx, self.num_ranks = self._group.rank, self._group.ranks
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.allow_multiple_reduction, self.allow_hybrid_mode = allow_multiple_reduction, allow_hybrid_mode
        self.explicitly_destroy, self.num_allocated_qps = explicitly_destroy, num_allocated_qps
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        if num_bytes is None and num_max_tokens_per_rank and hidden:
            num_bytes = self.get_buffer_size_hint(
                self._group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch=use_fp8_dispatch
            )
        self.num_bytes = num_bytes or 0
        self._lane = Lane()
        self._works = Works(self._group, num_max_tokens_per_rank)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_HERE:
            _unsupported(name, "this face has dispatch and combine only")
        raise AttributeError(f"ElasticBuffer has no {name!r}")

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup | Group,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of a rank's buffer on a GPU, rounded up to 2 MB. The number of experts does not matter."""
        ranks = group.size() if isinstance(group, dist.ProcessGroup) else group.ranks
        top_k = num_topk or 32  # the most that DeepEP supports
        dtype = torch.float8_e4m3fn if use_fp8_dispatch else torch.bfloat16
        scales = -(-hidden // 32) if use_fp8_dispatch else 0
        way = Way(cuda=True, format=RowFormat(columns=hidden, dtype=dtype, scales=scales, top_k=top_k))
        columns = max(way.columns, way.format.bytes if way.narrow else -(-way.format.bytes // 2))
        layout = PeerLayout(
            ranks=ranks,
            experts=ranks,
            top_k=min(top_k, ranks),
            tokens=num_max_tokens_per_rank,
            hidden=columns,
            dtype=torch.bfloat16,
            exact=False,
            fp8="amax" if way.narrow else "off",
        )
        return _BUFFER_ALIGNMENT * -(-layout.heap_bytes // _BUFFER_ALIGNMENT)

    @staticmethod
    def capture() -> EventHandle:
        """The current point of the current stream, for `previous_event`."""
        return EventHandle()

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, R): every rank reaches every other directly."""
        return 1, self.num_ranks

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(hosts, ranks of this one's host)."""
        hosts = self._group.hosts
        return hosts.hosts, len(hosts.neighbours(self.rank_idx))

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that asynchronous calls on GPUs run on; others run on their caller's."""
        return self._lane.stream

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *_: Any, **__: Any) -> int:
        """0: a dispatch takes as many multiprocessors as its rows need to fill the wire (docs/gpu-exchange.md)."""
        return 0

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: there are no queue pairs."""
        return 0

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait for all that was begun here, then for every rank. On the host, whatever the arguments say."""
        self.check()
        self._group.share("here", "a barrier")

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send each token to the ranks that own its experts.

        `previous_event_before_epilogue` is waited for at the start already. Padding of the expanded layout is always
        zero. Results belong to the communication stream. `num_qps` changes nothing.

        Args:
            x: [T, D], or (e4m3 rows [T, D], scales [T, G] of 4 bytes each).
            topk_idx: [T, K], -1 for none; None with a handle.
            topk_weights: float32 [T, K], moved along, not applied.
            cumulative_local_expert_recv_stats: int32 [L], this step's rows are added to it.
            num_experts: a multiple of R; rank r owns the r-th part.
            handle: of an earlier dispatch, whose routing is used again without a host sync.
            do_cpu_sync: learn on the host how many rows came, for outputs of exactly that size.
            do_expand: one row for each (row, expert), by expert.
            use_tma_aligned_col_major_sf: received scales with the column as the slow dimension.
            num_max_tokens_per_rank, expert_alignment, num_sms, async_with_compute_stream, previous_event,
            allocate_on_comm_stream, do_handle_copy, do_zero_padding: as DeepEP documents them.

        Returns:
            Received rows (with scales if `x` has them), local expert ids [N, K] (None if expanded), weights ([N, K] or
            [X]; None if none were given), handle, event.

        Raises:
            ConfigError: shapes that do not fit, or what is not supported, by name; or a rank, on all of them, that
                brings more tokens than `num_max_tokens_per_rank`, after which this buffer is of no more use.
            RoutingError: an id that is no expert (found on CPUs; on GPUs by the next call that waits).
            RankLostError: a rank died or was later than the deadline.
        """
        request = self._request(
            x,
            topk_idx,
            topk_weights,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            handle,
            do_cpu_sync,
            do_expand,
        )
        _check_stats(cumulative_local_expert_recv_stats, request, self.num_ranks)
        work = self._works.fitting(request.way, request.most, num_sms)
        if request.x.shape[0] > request.most:
            self._lane.settle()  # the last call may have run on another stream
            work.carrier.refuse(
                ConfigError(
                    f"deepep: rank {self.rank_idx} brings {request.x.shape[0]} tokens to a dispatch, "
                    f"num_max_tokens_per_rank is {request.most}"
                )
            )
        options = Options(
            stats_L=cumulative_local_expert_recv_stats,
            column_major=use_tma_aligned_col_major_sf,
            copies_ids=do_handle_copy,
            num_sms=num_sms,
        )
        kept = () if handle is None else handle.tensors()
        takes = (request.x, request.scales, request.topk_idx, topk_weights, options.stats_L, *kept)
        after = (previous_event, previous_event_before_epilogue)
        with self._lane.call(takes, after, is_async=async_with_compute_stream) as call:
            got = work.dispatch(request, options)
            call.gives += [got.x, got.scales, got.weights, *got.handle.tensors()]
        return (
            got.x if got.scales is None else (got.x, got.scales),
            None if do_expand else got.handle._recv_topk_idx,
            None if topk_weights is None else got.weights,
            got.handle,
            call.event,
        )

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return one row for each received one, and sum them where their tokens came from, without weights.

        In the expanded layout a rank first sums its rows of a token in k order. Sums are made in float32 and rounded
        once on each rank and once at the source; a bias is added after that. Calls that follow a dispatch with the same
        handle cost nothing extra; a second combine, or one after two other dispatches, first sends rows nobody reads.

        Args:
            x: [N, D] or [X, D], in the dtype that the dispatch had (bfloat16 for e4m3).
            handle: of the dispatch.
            topk_weights: float32 [N, K] or [X], moved back, not applied; exact where finite.
            bias: none, one or two [T, D].
            num_sms: 0 for those of the dispatch.
            num_qps, previous_event, previous_event_before_epilogue, async_with_compute_stream,
            allocate_on_comm_stream: see `dispatch`.

        Returns:
            [T, D], weights [T, K] (None if none were given), event.

        Raises:
            ConfigError: shapes that do not fit the handle, or what is not supported, by name.
            RankLostError: a rank died or was later than the deadline.
        """
        if handle.do_expand and not self.allow_multiple_reduction:
            _unsupported("allow_multiple_reduction=False", "expanded rows are summed per rank before they travel")
        work: Work = handle._work
        if work not in self._works:
            raise ConfigError("deepep: combine with a handle of another buffer, or of one that was destroyed")
        rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        if x.dim() != 2 or x.shape[0] != rows or x.dtype != work.carrier.dtype:
            raise ConfigError(
                f"deepep: combine of {list(x.shape)} {x.dtype}; the handle is for {rows} rows of {work.carrier.dtype}"
            )
        room = work.carrier.columns - PIECES * handle.topk_idx.shape[1]
        if x.shape[1] > room or x.device != handle.topk_idx.device:
            raise ConfigError(
                f"deepep: combine of {list(x.shape)} on {x.device}; the dispatch was on {handle.topk_idx.device} and "
                f"left room for {room} columns"
            )
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        shape = (handle.topk_idx.shape[0], x.shape[1])
        for part in biases:
            if part.shape != shape or part.device != x.device:
                raise ConfigError(
                    f"deepep: combine with a bias {list(part.shape)} on {part.device}; {list(shape)} is due"
                )
        work.carrier.use_multiprocessors(num_sms or handle.num_sms)
        takes = (x, topk_weights, *biases, *handle.tensors())
        after = (previous_event, previous_event_before_epilogue)
        with self._lane.call(takes, after, is_async=async_with_compute_stream) as call:
            combined, weights = work.combine(x, topk_weights, handle)
            if biases:
                combined = sum((part.float() for part in biases), combined.float()).to(x.dtype)
            call.gives += [combined, weights]
        return combined, weights, call.event

    def check(self) -> None:
        """Wait for the device and raise what went wrong on it. Beyond DeepEP: calls without a host sync cannot know."""
        self._lane.settle()  # a carrier waits for the current stream, which an asynchronous call did not run on
        for work in self._works:
            work.carrier.check()

    @property
    def extra_steps(self) -> int:
        """Steps that were closed or opened only for the protocol's sake, see `carrier`. Beyond DeepEP."""
        return sum(work.carrier.extra_steps for work in self._works)

    def destroy(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._works.close()
        if self._borrowed is not None:
            self._borrowed.close()

    def _request(
        self,
        x: Rows,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int | None,
        most: int | None,
        alignment: int | None,
        handle: EPHandle | None,
        sync: bool | None,
        expand: bool,
    ) -> Request:
        rows, scales = x if isinstance(x, tuple) else (x, None)
        if handle is None:
            return first_request(
                rows,
                scales,
                topk_idx,
                topk_weights,
                ranks=self.num_ranks,
                num_experts=num_experts,
                alignment=alignment,
                most=most or self.num_max_tokens_per_rank,
                expand=expand,
                sync=sync,
            )
        if topk_idx is not None or sync:
            raise ConfigError("deepep: dispatch with a handle takes neither topk_idx nor do_cpu_sync=True")
        return cached_request(rows, scales, topk_weights, expand=expand, handle=handle)


def _check_stats(stats_L: Tensor | None, request: Request, ranks: int) -> None:
    """Counts are added to it wherever it lies: it must be what the kernels take it for."""
    if stats_L is None:
        return
    experts = request.num_experts // ranks
    fits = stats_L.shape == (experts,) and stats_L.dtype == torch.int32 and stats_L.is_contiguous()
    if not fits or stats_L.device != request.x.device:
        raise ConfigError(
            f"deepep: cumulative_local_expert_recv_stats {list(stats_L.shape)} {stats_L.dtype} on {stats_L.device}; "
            f"contiguous int32 [{experts}] on {request.x.device} is needed"
        )


def _unsupported(name: str, why: str) -> NoReturn:
    raise ConfigError(f"deepep: {name} is not supported: {why} (docs/deepep.md)")
