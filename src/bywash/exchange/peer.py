"""`peer`: the exchange between GPUs of one host, through memory that all of them map, in the terms of `Exchange`.

This is the portable interface: it asks the device after each half whether all went well and hands out compact rows, so
it waits for the host. Engines that must not wait, or that capture CUDA graphs, use `peer_device.PeerDevice`, on which
it is built. It knows nothing of kernels or addresses.

Shapes: T tokens, K experts per token, D hidden, R ranks, E experts, N rows received, M pairs computed here, P places.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan
from bywash.errors import BywashError, ConfigError, ExchangeError
from bywash.exchange.base import Exchange, Handle, Received
from bywash.exchange.group import Group
from bywash.exchange.names import Combine
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import GENERATIONS, PAIR_BYTES, VEC_BYTES, PeerLayout
from bywash.kernels import require_cuda
from bywash.routing import Routing


class PeerExchange(Exchange):
    """One-sided puts into peers' GPU memory. Up to two steps may be in flight, finished in the order they began."""

    name = "peer"

    def __init__(self, group: Group, *, combine_mode: Combine = "exact", tokens: int = 0, num_sms: int = 0) -> None:
        """Prepare; the heaps are opened by the first step, when its shape is known.

        Args:
            group: the ranks, all on this host. Its `deadline_s` bounds every wait.
            combine_mode: see `Exchange`.
            tokens: the most tokens a rank may bring to a step; at least those of the first step on any rank.
            num_sms: see `PeerDevice`.

        Raises:
            ConfigError: packages or GPU missing.
        """
        require_cuda()
        if not torch.cuda.is_available():
            raise ConfigError("--exchange peer: no CUDA device is visible; use --exchange shm or gloo on CPUs")
        super().__init__(rank=group.rank, ranks=group.ranks, combine_mode=combine_mode)
        self._group, self._tokens, self._num_sms = group, tokens, num_sms
        self._device: PeerDevice | None = None
        self._failure: BywashError | None = None
        self._steps_begun = 0
        self._closed = False

    def counts(self, counts_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """See `Exchange.counts`. Counts that are on the host already go through the group, not through the device."""
        self._raise_if_dead()
        counts_RE = self._group.gather_counts(counts_E)
        self.traffic.wire_bytes += (self.ranks - 1) * counts_E.nbytes
        return counts_RE

    def dispatch_start(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> Handle:
        """See `Exchange.dispatch_start`."""
        self._raise_if_dead()
        if plan.rows_R.size != self.ranks or plan.rank_E.size != routing.num_experts:
            raise ConfigError(
                f"exchange peer: a plan for {plan.rows_R.size} ranks and {plan.rank_E.size} experts; this step has "
                f"{self.ranks} and {routing.num_experts}"
            )
        device = self._open(x_TD, routing, plan)
        generation = self._steps_begun % GENERATIONS
        device.set_plan(plan.rank_E, plan.digest, generation)
        device.dispatch_start(
            x_TD.detach(), routing.ids_TK, routing.weights_TK.detach(), generation=generation, counts_first=False
        )
        self._steps_begun += 1
        return Handle(routing=routing, plan=plan, state={"generation": generation, "x_TD": x_TD})

    def dispatch_finish(self, handle: Handle) -> Received:
        """See `Exchange.dispatch_finish`."""
        handle.advance("dispatch_finish", "combine_start")
        device, generation = self._alive(), handle.state["generation"]
        parts = device.dispatch_finish(generation)
        self._check(device)
        pairs_PK, mask_T = device.sent_parts(generation)
        tokens_R, most, hidden = parts.tokens_R.tolist(), device.layout.tokens, device.layout.hidden
        place_N = torch.cat([torch.arange(n, device="cuda") + s * most for s, n in enumerate(tokens_R)])
        m_NK = parts.m_PK[place_N].long()
        here_N = (m_NK >= 0).any(dim=1)
        place_N, m_NK = place_N[here_N], m_NK[here_N]
        pair_NK = pairs_PK[place_N]
        handle.state["m_M"] = m_NK[m_NK >= 0]
        away_NK = m_NK[place_N // most != self.rank] >= 0
        handle.state["returned"] = int(away_NK.sum()) if self.combine_mode == "exact" else away_NK.shape[0]
        self._count(handle, mask_T[: handle.routing.tokens], device.layout)
        return Received(
            rows_ND=parts.rows_PD[place_N, :hidden],
            ids_NK=torch.where(m_NK >= 0, pair_NK >> 20 & 0xFFF, -1),
            weights_NK=(pair_NK >> 32).to(torch.int32).view(torch.float32),
            rows_from_R=torch.bincount(place_N // most, minlength=self.ranks).tolist(),
            counts_RE=parts.counts_RE.cpu().numpy(),
        )

    def combine_start(self, handle: Handle, y_MD: Tensor) -> None:
        """See `Exchange.combine_start`."""
        device, m_M = self._alive(), handle.state.get("m_M")
        if m_M is not None and y_MD.shape[0] != m_M.numel():
            raise ConfigError(f"exchange peer: {y_MD.shape[0]} outputs for {m_M.numel()} pairs computed here")
        handle.advance("combine_start", "combine_finish")
        by_expert_MD = torch.empty_like(y_MD)
        by_expert_MD[m_M] = y_MD.detach()
        handle.state["out_TD"] = device.combine_start(by_expert_MD, generation=handle.state["generation"])
        returned = handle.state["returned"]
        self.traffic.rows_returned += returned
        self.traffic.wire_bytes += returned * device.layout.vecs * VEC_BYTES + 8 * (self.ranks - 1)

    def combine_finish(self, handle: Handle) -> Tensor:
        """See `Exchange.combine_finish`."""
        handle.advance("combine_finish", "done")
        device = self._alive()
        device.combine_finish(handle.state["generation"])
        self._check(device)
        out_TD: Tensor = handle.state["out_TD"]
        handle.state.clear()
        return out_TD

    def close(self) -> None:
        """See `Exchange.close`."""
        if self._device is not None and self._failure is None:
            self._device.close()
        self._device, self._closed = None, True

    def _open(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> PeerDevice:
        """The device end, opened by the first step for the most tokens that any rank brings."""
        if self._device is None:
            during = "opening the GPU exchange"
            most = max(int(tokens) for tokens in self._group.share(str(x_TD.shape[0]), during))
            layout = PeerLayout(
                ranks=self.ranks,
                experts=routing.num_experts,
                top_k=routing.top_k,
                tokens=max(most, self._tokens, 1),
                hidden=x_TD.shape[1],
                dtype=x_TD.dtype,
                exact=self.combine_mode == "exact",
            )
            self._device = PeerDevice(
                self._group, layout, plan.rank_E, combine_mode=self.combine_mode, num_sms=self._num_sms
            )
        return self._device

    def _count(self, handle: Handle, mask_T: Tensor, layout: PeerLayout) -> None:
        """Add a step to the traffic."""
        row_bytes, traffic = layout.vecs * VEC_BYTES, self.traffic
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        sent = sum(int((mask_T >> rank & 1).sum()) for rank in others)
        index_bytes = handle.routing.ids_TK.numel() * PAIR_BYTES + 8 * (layout.experts + 3)
        traffic.steps += 1
        traffic.rows_sent += sent
        traffic.wire_bytes += sent * row_bytes + len(others) * index_bytes
        pairs = int((handle.routing.ids_TK >= 0).sum())
        traffic.logical_bytes += 2 * pairs * layout.hidden * layout.dtype.itemsize

    def _check(self, device: PeerDevice) -> None:
        try:
            device.check()
        except BywashError as error:
            self._failure = error
            raise

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            first = self._failure
            raise type(first)(str(first), first.ranks) if isinstance(first, ExchangeError) else type(first)(str(first))
        if self._closed:
            raise ConfigError("exchange peer: closed; open a new one")

    def _alive(self) -> PeerDevice:
        self._raise_if_dead()
        assert self._device is not None, "dispatch_start opens it"
        return self._device
