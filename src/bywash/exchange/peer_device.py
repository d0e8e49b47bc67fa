"""The `peer` exchange as GPUs see it: tensors in, tensors out, no host in the loop, fit for CUDA graphs.

Every call only launches kernels on torch's current stream. Counts, plan, epochs and token counts stay on the device;
failures too, until `check` asks. docs/gpu-exchange.md explains the protocol, `kernels/*.cu` carry it out.

Shapes: T tokens of this rank, K experts per token, D hidden, R ranks, E experts, L experts of this rank, P places for
received rows (place = source * most tokens + token), M pairs (row, expert) computed here.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bywash.balance.plan import digest32
from bywash.errors import BywashError, ConfigError
from bywash.exchange.names import Combine
from bywash.exchange.peer_errors import read_failure
from bywash.exchange.peer_layout import GENERATIONS, PeerLayout
from bywash.kernels import KernelShape, load_kernels
from bywash.kernels.compile import MAX_CHUNKS
from bywash.memory.cuda_heap import open_cuda_heaps
from bywash.memory.rendezvous import Members

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_FAILURE_WORDS, _DEADLINE_WORD, _STATE_WORDS, _DIGEST_WORD = 5, 4, 4 + MAX_CHUNKS, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReceived:
    """What arrived, ready for a grouped GEMM that gathers. All on the device; M is known there only.

    Attributes:
        rows_PD: [P, padded D], each token once, at the place (source, token); other places hold old rows.
        index_M: int32 [capacity], the place that each pair reads: by expert, then source, then token.
        ends_L: int32 [L], one past each local expert's last pair: the offsets of `grouped_mm`.
        starts_E: int32 [E + 1], the first pair of every expert; the last is M.
        m_PK: int32 [P, K], where in M each pair stands, -1 if it is computed elsewhere. Valid below tokens_R.
        counts_RE: int32 [R, E].
        tokens_R: int32 [R].
    """

    rows_PD: Tensor
    index_M: Tensor
    ends_L: Tensor
    starts_E: Tensor
    m_PK: Tensor
    counts_RE: Tensor
    tokens_R: Tensor


@dataclass(slots=True, kw_only=True)
class _Channel:
    """One generation: its buffers, its parameters, and what it keeps alive while a step is in flight."""

    parameters: ctypes.Array[ctypes.c_uint64]
    received: DeviceReceived
    pairs_PK: Tensor
    mask_T: Tensor
    rank_E: Tensor
    slot_E: Tensor
    state: Tensor
    tokens: Tensor
    kept: tuple[Tensor, ...] = ()
    held: tuple[Tensor, ...] = ()


class PeerDevice:
    """One rank's device end of the exchange. Every rank makes the same calls in the same order.

    Generations are independent channels: two steps may be in flight, one in each. Within a generation a dispatch is
    followed by its combine; a captured graph uses the generation that it was captured with.
    """

    def __init__(
        self,
        members: Members,
        layout: PeerLayout,
        rank_E: NDArray[np.int32],
        *,
        combine_mode: Combine = "exact",
        num_sms: int = 0,
        build: Mapping[str, int] | None = None,
    ) -> None:
        """Compile, open the heaps on the current device, and be ready. Every rank calls.

        Args:
            members: the ranks; `deadline_s` bounds every wait on the device.
            layout: sizes, equal on all ranks.
            rank_E: int32 [E], the home of every expert.
            combine_mode: see `Exchange`.
            num_sms: multiprocessors that a kernel may take. By default all: the exchange is then the only thing that
                can run, and the wire needs many (two H200: 321 GB/s with 32, 360 GB/s with 132).
            build: for tests and tuning: `fault`, `chunks`, `senders` or `tail` of `KernelShape`.

        Raises:
            ConfigError: no GPU or package, shapes that differ between ranks, memory that does not fit, no peer access.
            RankLostError: a rank did not come.
        """
        if not torch.cuda.is_available():
            raise ConfigError("exchange peer: no CUDA device is visible; use --exchange shm or gloo on CPUs")
        if layout.dtype not in _DTYPES:
            raise ConfigError(f"exchange peer: rows of {layout.dtype}; float32, bfloat16 or float16")
        self.rank, self.ranks, self.layout = members.rank, members.ranks, layout
        self._members = members
        shape = KernelShape(
            ranks=layout.ranks,
            experts=layout.experts,
            top_k=layout.top_k,
            vecs=layout.vecs,
            dtype=_DTYPES[layout.dtype],
            exact=combine_mode == "exact",
            **(build or {}),
        )
        self._kernels = load_kernels(shape)
        facts = {"heap layout": layout.arithmetic, "--combine": combine_mode, "experts": layout.experts}
        self._heaps = open_cuda_heaps(members, layout.heap_bytes, arithmetic=layout.arithmetic, facts=facts)
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self.num_sms = min(num_sms, sms) if num_sms > 0 else sms
        with torch.inference_mode(False):  # buffers outlive the model's inference mode
            self._failure = torch.zeros(_FAILURE_WORDS, dtype=torch.int64, device="cuda")
            self._failure[_DEADLINE_WORD] = int(members.deadline_s * 1e9)
            self._channels = [self._open_channel(generation) for generation in range(GENERATIONS)]
        for generation in range(GENERATIONS):
            first_counts = np.zeros(layout.ranks * layout.experts, dtype=np.int32)
            self.set_plan(rank_E, digest32(np.concatenate([first_counts, rank_E])), generation)
        torch.cuda.synchronize()

    def set_plan(self, rank_E: NDArray[np.int32], digest: int, generation: int) -> None:
        """Say who computes each expert in the next steps of a generation, and the digest they are sent under.

        A step that counts first replaces the digest by its own.
        """
        channel = self._channels[generation]
        mine = rank_E == self.rank
        slots = np.where(mine, np.cumsum(mine) - 1, -1).astype(np.int32)
        channel.rank_E.copy_(torch.from_numpy(rank_E.astype(np.int32)))
        channel.slot_E.copy_(torch.from_numpy(slots))
        channel.state[_DIGEST_WORD] = digest - (digest >> 31 << 32)

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
    ) -> DeviceReceived:
        """Both halves in one launch: the shortest way when nothing runs in between."""
        self._prepare(x_TD, ids_TK, weights_TK, tokens, generation, counts_first)
        return self._received("dispatch_both", generation)

    def dispatch_start(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
    ) -> None:
        """Send rows.

        Args:
            x_TD: [T or more, D] on the device. Inputs must stay unchanged until the combine has finished.
            ids_TK: int64 [T or more, K], -1 for none.
            weights_TK: float32 [T or more, K].
            tokens: int32 [1] on the device, T; by default the rows of `x_TD`. Give it to replay a captured graph
                with another number of tokens.
            generation: which channel.
            counts_first: gather all counts and plan on the device before the release flag (prefill); otherwise the
                rows are sent under the channel's last plan and nobody is waited for (decode).
        """
        self._prepare(x_TD, ids_TK, weights_TK, tokens, generation, counts_first)
        self._launch("dispatch_send", generation)

    def dispatch_finish(self, generation: int = 0) -> DeviceReceived:
        """Wait, on the device, for the rows of all ranks, and build the index."""
        return self._received("dispatch_receive", generation)

    def combine(self, y_MD: Tensor, *, generation: int = 0) -> Tensor:
        """Both halves in one launch. `y_MD`: expert outputs in the order of `index_M`."""
        out = self._prepare_combine(y_MD, generation)
        self._launch("combine_both", generation)
        return out

    def combine_start(self, y_MD: Tensor, *, generation: int = 0) -> Tensor:
        """Send outputs; returns the tensor that `combine_finish` will fill."""
        out = self._prepare_combine(y_MD, generation)
        self._launch("combine_send", generation)
        return out

    def combine_finish(self, generation: int = 0) -> None:
        """Wait, on the device, and sum into the tensor that `combine_start` returned. Rows past T are not written."""
        self._launch("combine_receive", generation)

    def check(self) -> None:
        """Wait for the device and raise what went wrong on it, if anything did. Kernels after a failure do nothing.

        Raises:
            RankLostError, PlanMismatchError, ConfigError: with the ranks at fault.
        """
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> BywashError | None:
        """What `check` would raise, or None."""
        torch.cuda.current_stream().synchronize()
        return read_failure(self._failure.tolist(), self._members)

    def sent_parts(self, generation: int) -> tuple[Tensor, Tensor]:
        """Pairs as they arrived, int64 [P, K], and which ranks compute for each own token, int32 [T]."""
        channel = self._channels[generation]
        return channel.pairs_PK, channel.mask_T

    def digest(self, generation: int) -> int:
        """Of the plan that the generation's last rows were sent under. For tests: it waits for the device."""
        return int(self._channels[generation].state[_DIGEST_WORD]) & 0xFFFFFFFF

    def own_slots(self, generation: int) -> Tensor:
        """This rank's output slots [T, K or R, padded D]. For tests: nobody writes them before the next dispatch."""
        layout = self.layout
        per_token = layout.top_k if layout.exact else layout.ranks
        shape = (layout.tokens, per_token, layout.padded)
        return self._heaps[self.rank].tensor(layout.offsets(generation)["at_slots"], shape, layout.dtype)

    def close(self) -> None:
        """Drop the heaps; they are unmapped with the last tensor in them. Safe to call twice."""
        torch.cuda.synchronize()
        self._channels, self._heaps = [], []

    def _open_channel(self, generation: int) -> _Channel:
        layout, own = self.layout, self._heaps[self.rank]
        ranks, experts, top_k, places = layout.ranks, layout.experts, layout.top_k, layout.places
        offsets = layout.offsets(generation)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device="cuda")

        # Index entries past M are old ones or zero: always places that exist, so gathering up to the capacity is safe.
        received = DeviceReceived(
            rows_PD=own.tensor(offsets["at_rows"], (places, layout.padded), layout.dtype),
            index_M=zeros(places * top_k),
            ends_L=zeros(experts),
            starts_E=zeros(experts + 1),
            m_PK=zeros(places, top_k),
            counts_RE=zeros(ranks, experts),
            tokens_R=zeros(ranks),
        )
        pairs_PK = own.tensor(offsets["at_pairs"], (places, top_k), torch.int64)
        pair_M, mask_T, state, tokens = zeros(places * top_k), zeros(layout.tokens), zeros(_STATE_WORDS), zeros(1)
        rank_E, slot_E = zeros(experts), zeros(experts)
        tensors = {
            "failure": self._failure,
            "state": state,
            "rank_E": rank_E,
            "slot_E": slot_E,
            "pair_M": pair_M,
            "mask_T": mask_T,
            "index_M": received.index_M,
            "ends_L": received.ends_L,
            "starts_E": received.starts_E,
            "m_PK": received.m_PK,
            "counts_RE": received.counts_RE,
            "tokens_R": received.tokens_R,
        }
        values = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        values.update(offsets, rank=self.rank, max_tokens=layout.tokens)
        return _Channel(
            parameters=self._kernels.parameters(values, [heap.address for heap in self._heaps]),
            received=received,
            pairs_PK=pairs_PK,
            mask_T=mask_T,
            rank_E=rank_E,
            slot_E=slot_E,
            state=state,
            tokens=tokens,
            kept=(pair_M,),
        )

    def _prepare(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        tokens: Tensor | None,
        generation: int,
        counts_first: bool,
    ) -> None:
        """Check shapes, then fill in the parameters of the step."""
        channel, layout = self._channels[generation], self.layout
        rows = x_TD.shape[0]
        expected = {"x": (x_TD, (rows, layout.hidden), layout.dtype)}
        expected["ids"] = (ids_TK, (rows, layout.top_k), torch.int64)
        expected["weights"] = (weights_TK, (rows, layout.top_k), torch.float32)
        for name, (tensor, shape, dtype) in expected.items():
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_cuda:
                raise ConfigError(
                    f"exchange peer: {name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, not "
                    f"{list(shape)} {dtype} on the GPU; the exchange was opened for hidden {layout.hidden}, "
                    f"top-{layout.top_k}"
                )
        if rows > layout.tokens:
            raise ConfigError(
                f"exchange peer: a step of {rows} tokens, the heap was opened for {layout.tokens}; open the exchange "
                f"for more (one heap is {layout.arithmetic})"
            )
        if tokens is None:
            channel.tokens.fill_(rows)
            tokens = channel.tokens
        x_TD, ids_TK, weights_TK = self._rows(x_TD), ids_TK.contiguous(), weights_TK.contiguous()
        self._kernels.set(
            channel.parameters,
            x=x_TD.data_ptr(),
            ids=ids_TK.data_ptr(),
            weights=weights_TK.data_ptr(),
            tokens=tokens.data_ptr(),
            room=rows,
            counts_first=int(counts_first),
        )
        channel.held = (x_TD, ids_TK, weights_TK, tokens)

    def _prepare_combine(self, y_MD: Tensor, generation: int) -> Tensor:
        channel, layout = self._channels[generation], self.layout
        if y_MD.dim() != 2 or y_MD.shape[1] != layout.hidden or y_MD.dtype != layout.dtype or not y_MD.is_cuda:
            raise ConfigError(
                f"exchange peer: outputs {list(y_MD.shape)} {y_MD.dtype} on {y_MD.device}; "
                f"[pairs, {layout.hidden}] {layout.dtype} on the GPU are needed"
            )
        y_MD = self._rows(y_MD)
        out = torch.empty((channel.held[0].shape[0], layout.padded), dtype=layout.dtype, device=y_MD.device)
        self._kernels.set(channel.parameters, y=y_MD.data_ptr(), out=out.data_ptr())
        channel.held = (*channel.held[:4], y_MD, out)
        return out[:, : layout.hidden]

    def _rows(self, rows_ND: Tensor) -> Tensor:
        """Rows padded to whole vectors and aligned, by a copy where they are not."""
        missing = self.layout.padded - self.layout.hidden
        rows_ND = F.pad(rows_ND, (0, missing)) if missing else rows_ND.contiguous()
        return rows_ND if rows_ND.data_ptr() % 16 == 0 else rows_ND.clone()

    def _received(self, kernel: str, generation: int) -> DeviceReceived:
        self._launch(kernel, generation)
        return self._channels[generation].received

    def _launch(self, kernel: str, generation: int) -> None:
        self._kernels.launch(kernel, self.num_sms, self._channels[generation].parameters)
