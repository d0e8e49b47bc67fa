"""The `peer` exchange as GPUs see it: tensors in, tensors out, no host in the loop, fit for CUDA graphs.

Every call only launches kernels on torch's current stream. Counts, plan, epochs and token counts stay on the device;
failures too, until `check` asks. docs/gpu-exchange.md explains the protocol, `kernels/*.cu` carry it out.

Shapes: T tokens of this rank, K experts per token, D hidden, G groups of 128 columns, R ranks, E experts, L experts of
this rank, P places for received rows (place = source * most tokens + token), M pairs (row, expert) computed here, C
capacity of an expert's batch.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance.plan import digest32
from bywash.errors import BywashError, ConfigError
from bywash.exchange.names import Combine
from bywash.exchange.peer_errors import read_failure
from bywash.exchange.peer_layout import (
    DEADLINE_WORD,
    DIGEST_WORD,
    FAILURE_WORDS,
    GENERATIONS,
    STATE_WORDS,
    PeerLayout,
)
from bywash.exchange.peer_tensors import GPU, Channels, DeviceReceived, ExpertBatches, expect, padded
from bywash.kernels import load_kernels
from bywash.kernels.compile import MAX_BLOCKS
from bywash.memory.cuda_heap import open_cuda_heaps
from bywash.memory.rendezvous import Members

__all__ = ["DeviceReceived", "ExpertBatches", "PeerDevice"]


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
    experts_here: int = 0
    batched: bool = False
    kept: tuple[Tensor, ...] = ()
    held: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()


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
            num_sms: multiprocessors that a kernel may take, the same on all ranks; 0 for
                `PeerLayout.multiprocessors`.
            build: for tests and tuning: other fields of `KernelShape`, such as `fault`.

        Raises:
            ConfigError: no GPU or package, shapes that differ between ranks, memory that does not fit, no peer access.
            RankLostError: a rank did not come.
        """
        if not torch.cuda.is_available():
            raise ConfigError("exchange peer: no CUDA device is visible; use --exchange shm or gloo on CPUs")
        layout.check_use(members.ranks, combine_mode)
        self.rank, self.ranks, self.layout = members.rank, members.ranks, layout
        self._members = members
        self._kernels = load_kernels(layout.kernel_shape(**(build or {})))
        self.early_launch = torch.cuda.get_device_capability() >= (9, 0)  # see `Kernels.launch`; off to compare
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        # Peers look for a flag of each block, so all must launch as many: read before every launch, for tuning.
        self.num_sms = min(num_sms, sms, MAX_BLOCKS) if num_sms > 0 else layout.multiprocessors(sms)
        facts = {"heap layout": layout.arithmetic, "--combine": combine_mode, "experts": layout.experts}
        facts.update({"fp8": layout.fp8, "num_sms": self.num_sms})
        self._heaps = open_cuda_heaps(members, layout.heap_bytes, arithmetic=layout.arithmetic, facts=facts)
        with torch.inference_mode(False):  # buffers outlive the model's inference mode
            self._failure = torch.zeros(FAILURE_WORDS, dtype=torch.int64, device=GPU)
            self._failure[DEADLINE_WORD] = int(members.deadline_s * 1e9)
            channels = [self._open_channel(generation) for generation in range(GENERATIONS)]
        self._channels = Channels("exchange peer", channels)
        for generation in range(GENERATIONS):
            first_counts = np.zeros(layout.ranks * layout.experts, dtype=np.int32)
            self.set_plan(rank_E, digest32(np.concatenate([first_counts, rank_E])), generation)
        torch.cuda.synchronize()

    def set_plan(self, rank_E: NDArray[np.int32], digest: int, generation: int) -> None:
        """Say who computes each expert in the next steps of a generation, and the digest they are sent under.

        A step that counts first replaces the digest by its own.

        Raises:
            ConfigError: not one rank for each expert.
        """
        self.layout.check_home(rank_E)
        channel = self._channels[generation]
        mine = rank_E == self.rank
        slots = np.where(mine, np.cumsum(mine) - 1, -1).astype(np.int32)
        channel.experts_here = int(mine.sum())
        channel.rank_E.copy_(torch.from_numpy(rank_E.astype(np.int32)))
        channel.slot_E.copy_(torch.from_numpy(slots))
        channel.state[DIGEST_WORD] = digest - (digest >> 31 << 32)

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        scales_TG: Tensor | None = None,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
    ) -> DeviceReceived:
        """Both halves in one launch: the shortest way when nothing runs in between."""
        self._prepare(x_TD, ids_TK, weights_TK, scales_TG, tokens, generation, counts_first)
        return self._received("dispatch_both", generation)

    def dispatch_start(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        scales_TG: Tensor | None = None,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
    ) -> None:
        """Send rows.

        Args:
            x_TD: [T or more, D] on the device. Inputs must stay unchanged until the combine has finished.
            ids_TK: int64 [T or more, K], -1 for none.
            weights_TK: float32 [T or more, K].
            scales_TG: float32 [T or more, G] if `x_TD` is float8_e4m3fn already, for an exchange opened with fp8.
            tokens: int32 [1] on the device, T; by default the rows of `x_TD`. Give it to replay a captured graph
                with another number of tokens.
            generation: which channel.
            counts_first: gather all counts and plan on the device before the release flag (prefill); otherwise the
                rows are sent under the channel's last plan and nobody is waited for (decode).
        """
        self._prepare(x_TD, ids_TK, weights_TK, scales_TG, tokens, generation, counts_first)
        self._launch("dispatch_send", generation)

    def dispatch_finish(self, generation: int = 0) -> DeviceReceived:
        """Wait, on the device, for the rows of all ranks, and build the index."""
        return self._received("dispatch_receive", generation)

    def batch(self, capacity: int, *, generation: int = 0) -> ExpertBatches:
        """The received rows by expert, C for each, after a dispatch; combine then takes outputs [L * C, D].

        An expert with more rows than C is never cut: it is a failure that `check` raises as a `ConfigError`, and no
        output is sent.

        Args:
            capacity: C.
            generation: which channel.

        Raises:
            ConfigError: a negative capacity.
        """
        if capacity < 0:
            raise ConfigError(f"exchange peer: batches of {capacity} rows; at least 0")
        channel = self._channels[generation]
        with torch.inference_mode(False):
            index_LC = torch.empty((channel.experts_here, capacity), dtype=torch.int32, device=GPU)
            counts_L = torch.empty(channel.experts_here, dtype=torch.int32, device=GPU)
        addresses = {"index_LC": index_LC.data_ptr(), "counts_L": counts_L.data_ptr()}
        self._kernels.set(channel.parameters, capacity=capacity, **addresses)
        self._launch("dispatch_batch", generation)
        channel.batched = True
        return ExpertBatches(index_LC=index_LC, counts_L=counts_L)

    def combine(self, y_MD: Tensor, *, generation: int = 0, pushed: bool = False) -> Tensor:
        """Both halves in one launch.

        Args:
            y_MD: expert outputs in the order of `index_M`, or after `batch` [L * C, D].
            generation: which channel.
            pushed: whether outputs that have a target were written there, on this stream, and are not in `y_MD`. Ranks
                may differ.

        Raises:
            ConfigError: shapes that do not fit, no dispatch before, or pushed where there are no targets or after
                `batch`.
        """
        out = self._prepare_combine(y_MD, generation, pushed)
        self._launch("combine_both", generation)
        return out

    def combine_start(self, y_MD: Tensor, *, generation: int = 0, pushed: bool = False) -> Tensor:
        """Send outputs; returns the tensor that `combine_finish` will fill."""
        out = self._prepare_combine(y_MD, generation, pushed)
        self._launch("combine_send", generation)
        return out

    def combine_finish(self, generation: int = 0) -> None:
        """Wait, on the device, and sum into the tensor that `combine_start` returned. Rows past T are not written."""
        self._launch("combine_receive", generation)

    def let_go(self, generation: int) -> None:
        """Drop the references to a step's tensors once its combine is launched on the stream that uses them.

        Without it they are kept until the next step of the generation, for callers with several streams.
        """
        channel = self._channels[generation]
        channel.held, channel.outputs = (), ()

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
        return int(self._channels[generation].state[DIGEST_WORD]) & 0xFFFFFFFF

    def own_slots(self, generation: int) -> Tensor:
        """This rank's output slots [T, K or R, padded D]. For tests: nobody writes them before the next dispatch."""
        layout = self.layout
        shape = (layout.tokens, layout.slots_of_token, layout.padded)
        return self._heaps[self.rank].tensor(layout.offsets(generation)["at_slots"], shape, layout.dtype)

    def close(self) -> None:
        """Drop the heaps; they are unmapped with the last tensor in them. Safe to call twice."""
        torch.cuda.synchronize()
        self._channels, self._heaps = Channels("exchange peer"), []

    def _open_channel(self, generation: int) -> _Channel:
        layout, own = self.layout, self._heaps[self.rank]
        ranks, experts, top_k, places = layout.ranks, layout.experts, layout.top_k, layout.places
        offsets = layout.offsets(generation)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=GPU)

        # Index entries past M are old ones or zero: always places that exist, so gathering up to the capacity is safe.
        rows_PD = own.tensor(offsets["at_rows"], (places, layout.sent_bytes), torch.uint8)
        scales_PG = None
        if layout.groups:
            scales_PG = own.tensor(offsets["at_scales"], (places, layout.scale_bytes // 4), torch.float32)
            scales_PG = scales_PG[:, : layout.groups]
        target_M = zeros(places * top_k).to(torch.int64) if layout.apart else None
        received = DeviceReceived(
            rows_PD=rows_PD.view(torch.float8_e4m3fn if layout.groups else layout.dtype),
            scales_PG=scales_PG,
            index_M=zeros(places * top_k),
            ends_L=zeros(experts),
            starts_E=zeros(experts + 1),
            m_PK=zeros(places, top_k),
            counts_RE=zeros(ranks, experts),
            tokens_R=zeros(ranks),
            target_M=target_M,
        )
        pairs_PK = own.tensor(offsets["at_pairs"], (places, top_k), torch.int64)
        pair_M, mask_T, state, tokens = zeros(places * top_k), zeros(layout.tokens), zeros(STATE_WORDS), zeros(1)
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
        values["target_M"] = 0 if target_M is None else target_M.data_ptr()
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
        scales_TG: Tensor | None,
        tokens: Tensor | None,
        generation: int,
        counts_first: bool,
    ) -> None:
        """Check shapes, then fill in the parameters of the step."""
        channel, layout = self._channels[generation], self.layout
        rows = x_TD.shape[0]
        if scales_TG is not None and not layout.groups:
            raise ConfigError("exchange peer: rows with scales, but the exchange was opened without fp8")
        dtype = layout.dtype if scales_TG is None else torch.float8_e4m3fn
        expect("x", x_TD, (rows, layout.hidden), dtype)
        expect("ids", ids_TK, (rows, layout.top_k), torch.int64)
        expect("weights", weights_TK, (rows, layout.top_k), torch.float32)
        if scales_TG is not None:
            expect("scales", scales_TG, (rows, layout.groups), torch.float32)
            scales_TG = scales_TG.contiguous()
        if rows > layout.tokens:
            raise ConfigError(
                f"exchange peer: a step of {rows} tokens, the heap was opened for {layout.tokens}; open the exchange "
                f"for more (one heap is {layout.arithmetic})"
            )
        if tokens is None:
            channel.tokens.fill_(rows)
            tokens = channel.tokens
        expect("tokens", tokens, (1,), torch.int32)
        x_TD = padded(x_TD, layout.padded if scales_TG is None else layout.sent_bytes)
        ids_TK, weights_TK = ids_TK.contiguous(), weights_TK.contiguous()
        self._kernels.set(
            channel.parameters,
            x=x_TD.data_ptr(),
            scales=0 if scales_TG is None else scales_TG.data_ptr(),
            ids=ids_TK.data_ptr(),
            weights=weights_TK.data_ptr(),
            tokens=tokens.data_ptr(),
            room=rows,
            counts_first=int(counts_first),
        )
        channel.held = (x_TD, ids_TK, weights_TK, tokens) + (() if scales_TG is None else (scales_TG,))

    def _prepare_combine(self, y_MD: Tensor, generation: int, pushed: bool) -> Tensor:
        channel, layout = self._channels[generation], self.layout
        if not channel.held:
            raise ConfigError(f"exchange peer: combine before any dispatch in generation {generation}")
        out = torch.empty((channel.held[0].shape[0], layout.padded), dtype=layout.dtype, device=y_MD.device)
        self._set_outputs(generation, y_MD, out, out.data_ptr(), pushed)
        return out[:, : layout.hidden]

    def _set_outputs(self, generation: int, y_MD: Tensor, out_TD: Tensor, address: int, pushed: bool) -> None:
        """Check outputs and say where they are, and where in `out_TD` their sums go."""
        channel, layout = self._channels[generation], self.layout
        if pushed and not layout.apart:
            raise ConfigError("exchange peer: outputs that were pushed, but in this exchange all travel summed")
        if pushed and channel.batched:
            raise ConfigError("exchange peer: outputs that were pushed after `batch`, which puts them elsewhere")
        expect("outputs", y_MD, (y_MD.shape[0], layout.hidden), layout.dtype)
        y_MD = padded(y_MD, layout.padded)
        self._kernels.set(channel.parameters, y=y_MD.data_ptr(), out=address, pushed=int(pushed))
        channel.outputs = (y_MD, out_TD)

    def _received(self, kernel: str, generation: int) -> DeviceReceived:
        self._launch(kernel, generation)
        channel = self._channels[generation]
        channel.batched = False
        return channel.received

    def _launch(self, kernel: str, generation: int) -> None:
        self._kernels.launch(kernel, self.num_sms, self._channels[generation].parameters, early=self.early_launch)
