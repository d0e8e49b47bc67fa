"""`DeviceCarrier`: rows to ranks and sums back between GPUs of one host, over `PeerDevice`.

Calls launch on torch's current stream. `finish` without `sync` never waits for the host; errors of the device are
looked for wherever the host waits anyway, and by `check`. See `carrier` for what this is for.

Shapes: T tokens, J ranks of a token, R ranks, N rows, W columns, B bytes, P = R x most tokens places.
"""

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from bywash.errors import BywashError, ConfigError
from bywash.exchange import peer_tensors
from bywash.exchange.carrier import Arrived, RowCarrier, Step
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import VEC_BYTES, Fp8, PeerLayout
from bywash.exchange.peer_tensors import DeviceReceived
from bywash.kernels.compile import MAX_BLOCKS
from bywash.memory.rendezvous import Members


class DeviceCarrier(RowCarrier):
    """Over `PeerDevice`, in which rank r takes the place of the only expert of rank r."""

    def __init__(
        self,
        members: Members,
        *,
        tokens: int,
        top_ranks: int,
        columns: int,
        dtype: torch.dtype,
        sent_bytes: int,
        narrow: bool = False,
        num_sms: int = 0,
    ) -> None:
        """Open the heaps. Every rank calls.

        Args:
            members: the ranks.
            tokens: the most that a rank may bring to a step.
            top_ranks: J.
            columns: the fewest that an output row has; it is rounded up to whole vectors.
            dtype: of output rows.
            sent_bytes: the fewest that a row on its way out has.
            narrow: rows go out with one byte for each column of an output row, for e4m3 rows.
            num_sms: see `PeerDevice`.

        Raises:
            ConfigError, RankLostError: see `PeerDevice`.
        """
        elements = VEC_BYTES // (1 if narrow else dtype.itemsize)
        needed = max(columns, sent_bytes if narrow else -(-sent_bytes // dtype.itemsize))
        columns = elements * -(-needed // elements)
        sent_bytes = columns if narrow else columns * dtype.itemsize
        super().__init__(rank=members.rank, ranks=members.ranks, columns=columns, dtype=dtype, sent_bytes=sent_bytes)
        fp8: Fp8 = "amax" if narrow else "off"
        layout = PeerLayout(
            ranks=members.ranks,
            experts=members.ranks,
            top_k=top_ranks,
            tokens=tokens,
            hidden=columns,
            dtype=dtype,
            exact=False,
            fp8=fp8,
        )
        self.room = tokens
        # Before `PeerDevice`, which waits for the device when it opens: other streams may read these at once.
        self._no_scales_TG = (
            torch.zeros((tokens, layout.groups), dtype=torch.float32, device=peer_tensors.GPU) if narrow else None
        )
        self._numbers = torch.arange(tokens + 1, dtype=torch.int32, device=peer_tensors.GPU)
        self._ones_TJ = torch.ones((tokens, top_ranks), dtype=torch.float32, device=peer_tensors.GPU)
        home_R = np.arange(members.ranks, dtype=np.int32)
        self._device = PeerDevice(members, layout, home_R, combine_mode="stable", num_sms=num_sms)
        self._own_sms = self._device.num_sms
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._most_sms = min(sms, MAX_BLOCKS)

    def use_multiprocessors(self, num_sms: int) -> None:
        """Let the next kernels take `num_sms`, the same on all ranks; 0 for as many as the layout asks for."""
        self._device.num_sms = min(num_sms, self._most_sms) if num_sms > 0 else self._own_sms

    def check(self) -> None:
        """See `RowCarrier.check`."""
        self._device.check()

    def _start(self, step: Step, rows_TB: Tensor) -> None:
        self._device.dispatch_start(**self._given(step, rows_TB))

    def _finish(self, step: Step, sync: bool) -> Arrived:
        return self._arrived(self._device.dispatch_finish(step.generation), sync)

    def _dispatch(self, step: Step, rows_TB: Tensor, sync: bool) -> Arrived:
        return self._arrived(self._device.dispatch(**self._given(step, rows_TB)), sync)

    def _given(self, step: Step, rows_TB: Tensor) -> dict[str, Any]:
        tokens, most = rows_TB.shape[0], self._device.layout.tokens
        if tokens > most:
            raise ConfigError(f"a step of {tokens} tokens; the exchange was opened for {most}")
        scales_TG = None
        if self._no_scales_TG is not None:
            scales_TG = self._no_scales_TG[:tokens]
        return {
            "x_TD": rows_TB.view(self.dtype if scales_TG is None else torch.float8_e4m3fn),
            "ids_TK": step.ranks_TJ,
            "weights_TK": self._ones_TJ[:tokens],
            "scales_TG": scales_TG,
            "tokens": self._numbers[tokens : tokens + 1],
            "generation": step.generation,
            "counts_first": False,
        }

    def _arrived(self, got: DeviceReceived, sync: bool) -> Arrived:
        from_R = got.counts_RE[:, self.rank]
        rows = None
        if sync:
            rows = sum(from_R.tolist())
            self._device.check()
        index_N = got.index_M[: self._device.layout.places if rows is None else rows]
        return Arrived(rows_PB=got.rows_PD.view(torch.uint8), at_N=index_N, from_R=from_R, rows=rows)

    def _start_back(self, step: Step, y_NW: Tensor) -> None:
        step.state["out"] = self._device.combine_start(y_NW, generation=step.generation)

    def _finish_back(self, step: Step) -> Tensor:
        self._device.combine_finish(step.generation)
        self._device.let_go(step.generation)
        out_TW: Tensor = step.state.pop("out")
        return out_TW

    def _combine(self, step: Step, y_NW: Tensor) -> Tensor:
        out_TW = self._device.combine(y_NW, generation=step.generation)
        self._device.let_go(step.generation)
        return out_TW

    def _refuse(self, step: Step, rows_TB: Tensor, error: BywashError) -> NoReturn:
        """One token and no room for it: kernels find that, and tell all ranks."""
        self._device.dispatch_start(**self._given(step, rows_TB) | {"tokens": self._numbers[1:2]})
        raise error

    def _no_rows(self) -> tuple[Tensor, Tensor]:
        rows_TB = torch.empty((0, self.sent_bytes), dtype=torch.uint8, device=peer_tensors.GPU)
        return rows_TB, torch.empty((0, self._ones_TJ.shape[1]), dtype=torch.int64, device=peer_tensors.GPU)

    def _nothing(self, step: Step) -> Tensor:
        return torch.zeros((self._device.layout.places, self.columns), dtype=self.dtype, device=peer_tensors.GPU)

    def close(self) -> None:
        """See `RowCarrier.close`."""
        self._device.close()
