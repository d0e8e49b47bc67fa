"""`ServingExchange`: the exchange of a serving engine's MoE layers, below the adapters for vLLM and SGLang.

An engine brings rows, expert ids and weights of a step, gets the rows for its own experts, computes them its own way,
and returns one row for each. All layers of a process share one; two steps may be in flight (micro-batches). Knows
nothing of engines or models; the adapters know what an engine wants its tensors to look like.

Shapes: T tokens of this rank, K experts per token, D hidden, G scales of a row, E experts, N rows received.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bywash import metrics
from bywash.errors import ConfigError
from bywash.exchange import Group
from bywash.exchange.carrier import Arrived, RowCarrier, Step, distinct_ranks
from bywash.exchange.carrier_device import DeviceCarrier
from bywash.exchange.carriers import open_carrier
from bywash.exchange.device_rows import DeviceRows, Owners
from bywash.exchange.payload import RowFormat, RowParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Rows for this rank's experts.

    Attributes:
        x_ND: [N, D], as they were sent.
        scales_NG: [N, G], or None.
        ids_NK: int64 [N, K], all experts of each token, also those of other ranks; -1 in rows past the real ones.
        weights_NK: float32 [N, K].
        rows: the real number of rows; None where only the device knows.
    """

    x_ND: Tensor
    scales_NG: Tensor | None
    ids_NK: Tensor
    weights_NK: Tensor
    rows: int | None


@dataclass(slots=True, kw_only=True, eq=False)
class InFlight:
    """One step of one layer. The calls come in this order: `wait`, `dispatched`, `give_back`, `result`."""

    carrier: RowCarrier
    form: RowFormat
    step: Step
    sync: bool
    most_rows: int
    experts: int
    _on_device: DeviceRows | None = None
    _arrived: Arrived | None = None

    def wait(self) -> None:
        """Wait for the rows of all ranks: on the host on CPUs and where the step syncs, else on the device."""
        if self._arrived is None:
            self._arrived = self.carrier.finish(self.step, sync=self.sync)

    def dispatched(self) -> Dispatched:
        """What arrived; waits if nobody has."""
        self.wait()
        arrived = self._arrived
        assert arrived is not None, "wait sets it"
        at_N = None if arrived.at_N is None else arrived.at_N[: self.most_rows]
        if self._on_device is not None and at_N is not None:
            ids_NK = torch.empty((at_N.shape[0], self.form.top_k), dtype=torch.int64, device=at_N.device)
            self._on_device.read(arrived, ids_NK, first=0, experts=self.experts)
            x_ND, scales_NG, weights_NK = self._on_device.copy(arrived, at_N.shape[0], weighted=True)
            assert weights_NK is not None, "asked for"
            return Dispatched(x_ND=x_ND, scales_NG=scales_NG, ids_NK=ids_NK, weights_NK=weights_NK, rows=arrived.rows)
        parts = self.form.unpack(arrived.rows_PB, at_N)
        assert parts.ids_NK is not None, "every row has them"
        assert parts.weights_NK is not None, "every row has them"
        ids_NK = parts.ids_NK.long()
        if arrived.rows is None:
            real_N = torch.arange(ids_NK.shape[0], device=ids_NK.device) < arrived.from_R.sum()
            ids_NK = torch.where(real_N[:, None], ids_NK, -1)
        return Dispatched(
            x_ND=parts.x_ND,
            scales_NG=parts.scales_NG,
            ids_NK=ids_NK,
            weights_NK=parts.weights_NK,
            rows=arrived.rows,
        )

    def give_back(self, y_ND: Tensor) -> None:
        """Begin returning outputs: for each received row the weighted sum over this rank's experts.

        Raises:
            ConfigError: another dtype, wider rows than there is room for, or fewer than came.
        """
        if y_ND.dtype != self.carrier.dtype:
            raise ConfigError(f"outputs are {y_ND.dtype}; this layer's exchange returns {self.carrier.dtype}")
        columns, rows = self.carrier.columns, None if self._arrived is None else self._arrived.rows
        if y_ND.shape[-1] > columns or y_ND.shape[0] < (rows or 0):
            raise ConfigError(f"outputs {list(y_ND.shape)} for {rows} rows that came; at most {columns} columns return")
        y_NW = y_ND
        if self._on_device is not None and self._arrived is not None:
            y_NW = self._on_device.pack_outputs(y_ND, self._arrived.from_R, columns)
        elif y_ND.shape[1] < columns:
            y_NW = y_ND.new_empty((y_ND.shape[0], columns))
            y_NW[:, : y_ND.shape[1]] = y_ND
            y_NW[:, y_ND.shape[1] :] = 0
        self.carrier.start_back(self.step, y_NW)

    def result(self) -> Tensor:
        """[T, D or more]: each token's sum over the ranks, in float32 in rank order, rounded once."""
        return self.carrier.finish_back(self.step)


@dataclass(slots=True, kw_only=True)
class ServingExchange:
    """This process's exchange for all MoE layers of an engine. Every rank makes the same calls in the same order.

    Attributes:
        group: the ranks among which experts are spread.
        steps, tokens: that this rank has sent, for metrics.
    """

    group: Group
    steps: int = 0
    tokens: int = 0
    _carriers: dict[tuple[object, ...], RowCarrier] = field(default_factory=dict)
    _stop_metrics: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._stop_metrics = metrics.watch(self.counters, rank=str(self.group.rank))

    def start(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        rank_E: Tensor,
        *,
        out_dtype: torch.dtype,
        most_tokens: int,
        step_tokens: int | None = None,
        scales_TG: Tensor | None = None,
        sync: bool = True,
    ) -> InFlight:
        """Begin a step: send each token once to every rank that has one of its experts.

        Args:
            x_TD: [T, D], in the model's dtype, or float8_e4m3fn with scales.
            ids_TK: [T, K], -1 for none.
            weights_TK: float32 [T, K]; they travel, and are applied by whoever computes.
            rank_E: int64 [E], the rank that owns each expert, where the ids are.
            out_dtype: of the layer's output.
            most_tokens: the most that any rank will ever bring; the same on all ranks.
            step_tokens: the most that any rank brings to this step, if that is known: bounds N without a host sync.
            scales_TG: float32 [T, G].
            sync: wait on the host for the number of rows; off for CUDA graphs.

        Raises:
            ConfigError: shapes or dtypes that do not fit; or a rank, on all of them, that brings more tokens than were
                announced, after which the exchange is of no more use.
            RankLostError: a rank is lost (with `sync`, or on CPUs).
        """
        tokens, most_now = x_TD.shape[0], most_tokens if step_tokens is None else step_tokens
        if ids_TK.shape[0] != tokens or weights_TK.shape != ids_TK.shape:
            raise ConfigError(f"ids {list(ids_TK.shape)} and weights {list(weights_TK.shape)} for {tokens} tokens")
        if scales_TG is not None and scales_TG.dtype != torch.float32:
            raise ConfigError(f"scales are {scales_TG.dtype}; float32 ones are carried")
        form = RowFormat(
            columns=x_TD.shape[1],
            dtype=x_TD.dtype,
            scales=0 if scales_TG is None else scales_TG.shape[1],
            top_k=ids_TK.shape[1],
        )
        carrier = self._carrier(form, x_TD.is_cuda, out_dtype, most_tokens)
        if tokens > most_now:
            what = f"rank {self.group.rank} brings {tokens} tokens to a step, where no rank was to bring more than"
            carrier.refuse(ConfigError(f"{what} {most_now}"))
        on_device = DeviceRows(form) if isinstance(carrier, DeviceCarrier) else None
        ranks, weights_TK = self.group.ranks, weights_TK.float()
        if on_device is not None:
            owners = Owners(ranks=ranks, rank_E=rank_E)
            packed_TB, ranks_TJ = on_device.pack(
                x_TD, scales_TG, ids_TK, weights_TK, owners, row_bytes=carrier.sent_bytes, source=0
            )
        else:
            ranks_TJ = distinct_ranks(torch.where(ids_TK >= 0, rank_E[ids_TK.long().clamp(min=0)], -1), ranks)
            number_T = torch.arange(x_TD.shape[0], dtype=torch.int32, device=x_TD.device)
            parts = RowParts(
                x_ND=x_TD, scales_NG=scales_TG, source_N=number_T, ids_NK=ids_TK.int(), weights_NK=weights_TK
            )
            packed_TB = form.pack(parts, carrier.sent_bytes)
        step = carrier.start(packed_TB, ranks_TJ)
        self.steps += 1
        self.tokens += tokens
        return InFlight(
            carrier=carrier,
            form=form,
            step=step,
            sync=sync,
            most_rows=ranks * most_now,
            experts=rank_E.numel(),
            _on_device=on_device,
        )

    def counters(self) -> dict[str, float]:
        """For metrics: sums since the start, on this rank."""
        found = {"moe_steps": self.steps, "moe_tokens": self.tokens, "moe_extra_steps": 0}
        for carrier in list(self._carriers.values()):  # asked from a thread that serves metrics: steps may open more
            found["moe_extra_steps"] += carrier.extra_steps
            for name, value in carrier.traffic().items():
                found[name] = found.get(name, 0) + value
        return dict(found)

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        for carrier in self._carriers.values():
            carrier.close()
        self._carriers.clear()
        if self._stop_metrics is not None:
            self._stop_metrics()
            self._stop_metrics = None

    def _carrier(self, form: RowFormat, cuda: bool, out_dtype: torch.dtype, most_tokens: int) -> RowCarrier:
        key = (form, cuda, out_dtype, most_tokens)
        if key not in self._carriers:
            self._carriers[key] = open_carrier(
                self.group,
                cuda=cuda,
                tokens=most_tokens,
                top_ranks=min(form.top_k, self.group.ranks),
                columns=form.columns,
                dtype=out_dtype,
                sent_bytes=form.bytes,
                narrow=form.dtype.itemsize == 1,
            )
        return self._carriers[key]
