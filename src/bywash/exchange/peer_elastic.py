"""`ElasticDevice`: the `peer` exchange where rows may leave their expert's home, all decided on the device.

Around the dispatch and combine of `PeerDevice` it launches a handful of small kernels (`kernels/peer_assign.cu`,
`peer_fetch.cu`, and the planner's): count, plan, table, assign, fetch. docs/overflow.md tells the steps. No host in the
loop: captured graphs replay with other tokens, plans and fetches.

Shapes: T tokens of this rank, K experts per token, D hidden, R ranks, E experts as the router names them, S slots of a
rank, L own experts of a rank (the most of any rank), W waves (parts of a step).
Knows nothing of expert compute. `moe.elastic_layer` calls it.
"""

import re
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.errors import ConfigError
from bywash.exchange.names import Combine
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import GENERATIONS, PeerLayout
from bywash.exchange.peer_tensors import DeviceReceived
from bywash.kernels.compile import kernel_source
from bywash.memory.device_slots import DeviceSlots
from bywash.memory.rendezvous import Members

_PAIRS_PER_BLOCK = 1024
FETCH_BLOCKS = 16
"""Multiprocessors that copy weights, by default."""


class Planner(Protocol):
    """What makes plans: `kernels.plan.DevicePlanner`."""

    rows_ER: Tensor
    rows_R: Tensor
    fetch_RS: Tensor
    keys_RS: Tensor
    digest: Tensor

    def __call__(self, counts_RE: Tensor, layer: int = 0) -> None:
        """Plan from counts on the device."""


def elastic_names() -> tuple[str, ...]:
    """The fields of `Elastic` in the kernels' source, in order, without the homes' addresses that follow them."""
    text = kernel_source(("peer_elastic.cuh",))
    body = text[text.index("struct Elastic {") :]
    return tuple(re.findall(r"^  u64 (\w+);", body[: body.index("};")], re.MULTILINE))


def table_words(ranks: int, experts: int, slots: int) -> int:
    """32-bit words of the kernels' `Table`."""
    return 3 + experts + max(1, ranks * slots) * (4 + 3 * ranks)


def elastic_layout(
    home_E: NDArray[np.int32],
    *,
    ranks: int,
    slots: int,
    top_k: int,
    tokens: int,
    hidden: int,
    dtype: torch.dtype,
    combine_mode: Combine,
) -> PeerLayout:
    """The layout of an elastic exchange: E becomes R x (L + S) groups.

    Example: 256 experts on 2 ranks with 4 slots each are 264 groups, 132 on each rank.
    """
    own = int(np.bincount(home_E, minlength=ranks).max())
    return PeerLayout(
        ranks=ranks,
        experts=ranks * (own + slots),
        top_k=top_k,
        tokens=tokens,
        hidden=hidden,
        dtype=dtype,
        exact=combine_mode == "exact",
        real_experts=home_E.size,
        guests=slots,
        mixed=combine_mode == "stable",
    )


@dataclass(slots=True, kw_only=True)
class ElasticRecord:
    """What the kernels know of one layer, on the device.

    Attributes:
        layer: its number among those that share the slots.
        words: the kernels' `Elastic`.
        waves, tokens_W: parts of the last step, and this rank's tokens in each; int32.
        chunk: tokens of a rank in a part, where there are several.
        most_waves: parts that a step may have.
        counts_RE: int32 [R, E], that the last plan was made from.
        fetched: int64 [2], copies made and bytes, since the beginning.
        kept: tensors that the record names.
    """

    layer: int
    words: Tensor
    waves: Tensor
    tokens_W: Tensor
    chunk: int
    most_waves: int
    counts_RE: Tensor
    fetched: Tensor
    kept: tuple[Tensor, ...]


class ElasticDevice(PeerDevice):
    """One rank's device end of an elastic exchange. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        members: Members,
        layout: PeerLayout,
        home_E: NDArray[np.int32],
        *,
        combine_mode: Combine = "exact",
        num_sms: int = 0,
        fetch_blocks: int = FETCH_BLOCKS,
    ) -> None:
        """See `PeerDevice`; `layout` is of `elastic_layout`, `home_E` the home of each of the E experts.

        Raises:
            ConfigError: see `PeerDevice`; or a layout that is not for these experts.
        """
        if layout.real_experts != home_E.size or layout.mixed != (combine_mode == "stable"):
            raise ConfigError(f"elastic exchange: a layout for {layout.real_experts} experts and not {combine_mode!r}")
        per_rank = layout.experts // layout.ranks
        rank_V = np.arange(layout.experts, dtype=np.int32) // per_rank
        super().__init__(members, layout, rank_V, combine_mode=combine_mode, num_sms=num_sms)
        self._counts_first = True
        self.own, self.fetch_blocks, self._home_E = per_rank - layout.guests, fetch_blocks, home_E
        device = self._channels[0].state.device
        with torch.inference_mode(False):
            order = np.argsort(home_E, kind="stable")
            local_E = np.empty_like(home_E)
            first_R = np.concatenate([[0], np.bincount(home_E, minlength=layout.ranks).cumsum()])
            local_E[order] = np.arange(home_E.size) - first_R[home_E[order]]
            self._tables_E = [torch.from_numpy(table.astype(np.int32)).to(device) for table in (home_E, local_E)]
            self._usable_R = torch.full((layout.ranks,), layout.guests, dtype=torch.int32, device=device)
            self._missing_S = torch.full((layout.guests + 1,), -1, dtype=torch.int32, device=device)
            self._filling_S = torch.zeros(layout.guests + 1, dtype=torch.int64, device=device)
            shape = (layout.tokens, layout.top_k)
            self._virtual = [
                (
                    torch.full(shape, -1, dtype=torch.int64, device=device),
                    torch.zeros(shape, dtype=torch.int32, device=device),
                    torch.zeros(layout.tokens, dtype=torch.int32, device=device),
                )
                for _ in range(GENERATIONS)
            ]

    def record(self, layer: int, slots: DeviceSlots, planner: Planner, *, capacity: int) -> ElasticRecord:
        """Describe a layer to the kernels.

        Args:
            layer: which of the slots' layers.
            slots: the weights.
            planner: makes the plans of this layer.
            capacity: pairs that the buffers of a rank hold; a step with more is done in waves.

        Raises:
            ConfigError: a capacity below one token of each rank.
        """
        layout, device = self.layout, self._channels[0].state.device
        chunk = min(layout.tokens, capacity // (layout.ranks * layout.top_k))
        if chunk < 1:
            raise ConfigError(
                f"elastic layer: room for {capacity} pairs; one token of each rank may bring "
                f"{layout.ranks * layout.top_k}"
            )
        most_waves = -(-layout.tokens // chunk)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode(False):
            counts_RE, fetched = zeros(layout.ranks, layout.real_experts), zeros(2, dtype=torch.int64)
            waves, tokens_W, counts_E = torch.ones_like(zeros(1)), zeros(most_waves), zeros(layout.real_experts)
            table = torch.full_like(zeros(table_words(layout.ranks, layout.real_experts, layout.guests)), -1)
            table[:2] = 0
            tensors = {
                "home_E": self._tables_E[0],
                "local_E": self._tables_E[1],
                "rows_ER": planner.rows_ER,
                "rows_R": planner.rows_R,
                "keys_RS": planner.keys_RS,
                "fetch_RS": planner.fetch_RS,
                "digest": planner.digest,
                "usable_R": self._usable_R,
                "counts_RE": counts_RE,
                "counts_E": counts_E,
                "table": table,
                "waves": waves,
                "tokens_W": tokens_W,
                "slots_gate": slots.gate_up_SGD,
                "slots_down": slots.down_SDF,
                "filling_S": self._filling_S,
                "missing_S": self._missing_S,
                "fetched": fetched,
            }
            values = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            values.update(slots.layout.offsets(layer), gate_bytes=slots.layout.gate_bytes)
            values.update(down_bytes=slots.layout.down_bytes, most_waves=most_waves, chunk=chunk, capacity=capacity)
            values.update(first_key=layer * layout.real_experts)
            values.update(own_experts=int((self._home_E == self.rank).sum()))
            words = torch.tensor([*(values[name] for name in elastic_names()), *slots.homes], device=device)
        return ElasticRecord(
            layer=layer,
            words=words,
            waves=waves,
            tokens_W=tokens_W,
            chunk=chunk,
            most_waves=most_waves,
            counts_RE=counts_RE,
            fetched=fetched,
            kept=tuple(tensors.values()),
        )

    def seal(self, record: ElasticRecord) -> None:
        """Make the checksums of this rank's own weights, once they are there; then all ranks may fetch them."""
        self._set(0, elastic=record.words.data_ptr())
        self._launch_small("elastic_sum", 0, self.num_sms)

    def set_usable(self, slots: int) -> None:
        """Say that every rank now has memory for the first `slots` slots. Between steps, on all ranks."""
        self._usable_R.fill_(slots)

    def begin(
        self,
        record: ElasticRecord,
        planner: Planner,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
    ) -> None:
        """With `counts_first` count, plan and make the table; else nothing is launched. Arguments as for dispatch."""
        self._prepare(x_TD, ids_TK, weights_TK, None, tokens, generation, counts_first)
        ids, homes, opened = self._virtual[generation]
        channel = self._channels[generation]
        self._set(
            generation,
            real_ids=channel.held[1].data_ptr(),
            ids=ids.data_ptr(),
            home_TK=homes.data_ptr(),
            open_T=opened.data_ptr(),
            elastic=record.words.data_ptr(),
            wave=0,
        )
        channel.held = (*channel.held, ids, homes, opened)
        self._counts_first = counts_first
        if counts_first:
            self._launch_small("elastic_count", generation, self._blocks(x_TD), early=False)
            planner(record.counts_RE, record.layer)
            self._launch_small("elastic_table", generation, 1)

    def assign(self, generation: int = 0) -> None:
        """Give each pair its virtual expert, by the layer's table."""
        blocks = self._blocks(self._channels[generation].held[0])
        self._launch_small("elastic_assign", generation, blocks, early=self._counts_first)

    def fetch(self, generation: int = 0) -> None:
        """Fill the slots that the layer's table names; on a stream that runs beside what does not need them."""
        self._launch_small("elastic_fetch", generation, self.fetch_blocks, early=False)

    def dispatch_wave(self, record: ElasticRecord, wave: int = 0, generation: int = 0) -> DeviceReceived:
        """Send and receive a part of the step's rows: all of them in part 0 where the step has only one."""
        channel, layout = self._channels[generation], self.layout
        x_TD, _, weights_TK = channel.held[:3]
        ids, homes, opened = channel.held[4:7]
        at = wave * record.chunk
        self._set(
            generation,
            x=x_TD.data_ptr() + at * layout.sent_bytes,
            ids=ids.data_ptr() + at * layout.top_k * 8,
            home_TK=homes.data_ptr() + at * layout.top_k * 4,
            open_T=opened.data_ptr() + at * 4,
            weights=weights_TK.data_ptr() + at * layout.top_k * 4,
            tokens=record.tokens_W.data_ptr() + 4 * wave,
            room=max(0, x_TD.shape[0] - at),
            counts_first=0,
            wave=wave,
        )
        return self._received("dispatch_both", generation)

    def combine_wave(
        self,
        record: ElasticRecord,
        y_MD: Tensor,
        out_TD: Tensor,
        wave: int = 0,
        generation: int = 0,
        *,
        pushed: bool = False,
    ) -> None:
        """Send a part's outputs, and sum this rank's tokens of it into `out_TD` [T or more, padded D].

        `pushed` as for `combine`.
        """
        at = wave * record.chunk * self.layout.padded * self.layout.dtype.itemsize
        self._set_outputs(generation, y_MD, out_TD, out_TD.data_ptr() + at, pushed)
        self._launch("combine_both", generation)

    def plan_next(self, record: ElasticRecord, planner: Planner, generation: int = 0) -> None:
        """From what dispatch received, plan the layer's next step and make its table. After assign and fetch."""
        self._set(generation, counts_first=0)
        self._launch_small("elastic_recount", generation, 1, early=False)
        planner(record.counts_RE, record.layer)
        self._launch_small("elastic_table", generation, 1, early=False)

    def virtual_parts(self, generation: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Of the last step: virtual ids [T, K], homes [T, K], open tokens [T]. For tests."""
        return self._virtual[generation]

    def _blocks(self, x_TD: Tensor) -> int:
        return max(1, min(self.num_sms, -(-x_TD.shape[0] * self.layout.top_k // _PAIRS_PER_BLOCK)))

    def _set(self, generation: int, **values: int) -> None:
        self._kernels.set(self._channels[generation].parameters, **values)

    def _launch_small(self, kernel: str, generation: int, blocks: int, *, early: bool = True) -> None:
        """The first launch of a step is not early: it may come behind a join of streams, and has to wait for both."""
        parameters = self._channels[generation].parameters
        self._kernels.launch(kernel, blocks, parameters, early=early and self.early_launch)
