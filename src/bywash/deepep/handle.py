"""`EPHandle`: what a dispatch leaves behind for its combine, and for later dispatches by the same routing.

Shapes: T tokens of this rank, K experts per token, N rows received, L local experts, R ranks.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bywash.exchange.carrier import Step


@dataclass(slots=True, kw_only=True, eq=False)
class EPHandle:
    """The attributes are DeepEP's, those without a leading underscore; rows are in the order of (source rank, token).

    Attributes:
        do_expand: whether received rows stand in the expanded layout, one for each (row, expert).
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: as given to the dispatch.
        topk_idx: [T, K], this rank's routing.
        num_recv_tokens: N; without a host sync the most there may be.
        num_expanded_tokens: rows of the expanded layout; without a host sync the most there may be.
        num_recv_tokens_per_expert_list: rows of each local expert, rounded up to the alignment; empty without a host
            sync.
        psum_num_recv_tokens_per_scaleup_rank: int32 [R], received rows up to and with each source rank.
        psum_num_recv_tokens_per_expert: int32 [L], see `ExpertLayout.psum_L`.
        num_unaligned_recv_tokens_per_expert: int32 [L], rows of each local expert; None in the plain layout.
        recv_src_metadata: int32 [N, 2 + K]: source rank x most tokens + token; the row's own number; in the expanded
            layout each pair's slot, else -1.
        dst_buffer_slot_idx, token_metadata_at_forward, channel_linked_list: DeepEP's own bookkeeping; None here.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor | None
    recv_src_metadata: Tensor
    _recv_topk_idx: Tensor
    _counts_L: Tensor
    _step: Step
    _work: Any
    dst_buffer_slot_idx: Any = None
    token_metadata_at_forward: Any = None
    channel_linked_list: Any = None

    @property
    def slots_NK(self) -> Tensor:
        """Each pair's row in the expanded layout."""
        return self.recv_src_metadata[:, 2:]

    def tensors(self) -> list[Tensor | None]:
        """All that lie in memory of the communication stream."""
        return [
            self.topk_idx,
            self.recv_src_metadata,
            self._recv_topk_idx,
            self._counts_L,
            self.psum_num_recv_tokens_per_scaleup_rank,
            self.psum_num_recv_tokens_per_expert,
        ]
