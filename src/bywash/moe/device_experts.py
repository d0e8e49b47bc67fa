"""Expert compute on a GPU, from rows where they arrived and an index: one interface, three ways.

`hopper` (CUDA C++, sm_90) and `triton` read rows through the index; `grouped_mm` expands the rows first and runs
torch's grouped product, and is the baseline of the other two. None of them asks the host how many pairs there are, so
all can be captured in a CUDA graph.

Shapes: L experts of this rank, D hidden, F intermediate, G = 2F (first F rows gate, next F up), P places for received
rows, M (row, expert) pairs computed here, ordered by expert.
Knows nothing of ranks. `DeviceLayer` and `ExpertParallel` call it.
"""

from contextlib import suppress
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from bywash.errors import ConfigError
from bywash.kernels.expand import Expand

Backend = Literal["hopper", "triton", "grouped_mm"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
_DTYPES: dict[Backend, tuple[torch.dtype, ...]] = {
    "hopper": (torch.bfloat16,),
    "triton": (torch.bfloat16, torch.float16),
    "grouped_mm": (torch.bfloat16,),
}
ROW_INDEPENDENT: tuple[Backend, ...] = ("hopper", "triton")
"""A row's result has the same bits whatever rows stand beside it, which `exact` and `stable` need. `grouped_mm` picks
its tiles by the number of rows."""
SIZE_STEP = 16
"""D and F must be multiples of this."""
_LEAST_PAIRS = 256


class DeviceExperts(Protocol):
    """What computes: rows by index in, one output per pair out."""

    def __call__(self, rows_PD: Tensor, index_M: Tensor, ends_L: Tensor, out_MD: Tensor | None = None) -> Tensor:
        """y[m] = (silu(x Wg^T) * (x Wu^T)) Wd^T with x = rows[index[m]], [pairs, D]; what lies past M is undefined."""


@runtime_checkable
class PushingExperts(Protocol):
    """Device experts that can also write outputs straight to who adds them up; see `HopperExperts`."""

    can_push: ClassVar[Literal[True]]

    def __call__(
        self,
        rows_PD: Tensor,
        index_M: Tensor,
        ends_L: Tensor,
        out_MD: Tensor | None = None,
        *,
        targets_M: Tensor | None = None,
    ) -> Tensor:
        """As `DeviceExperts`, but y[m] goes to the address `targets_M[m]` and nowhere else, unless it is 0."""


class GroupedMmExperts:
    """torch's grouped product over expanded rows: the rows of every pair are copied side by side first.

    On a GPU our own kernels copy them and multiply by the gate, up to the last pair; elsewhere torch does, up to the
    capacity.
    """

    def __init__(self, gate_up_LGD: Tensor, down_LDF: Tensor, *, pairs: int) -> None:
        """Hold weights (not copied) and make room for `pairs` expanded rows.

        Args:
            gate_up_LGD: [L, G, D].
            down_LDF: [L, D, F].
            pairs: the most (row, expert) pairs that can arrive.
        """
        self._inner = down_LDF.shape[2]
        self._gate_up_LDG, self._down_LFD = gate_up_LGD.transpose(1, 2), down_LDF.transpose(1, 2)
        self._expand = Expand(gate_up_LGD.dtype) if gate_up_LGD.is_cuda else None
        with torch.inference_mode(False):  # outlives the model's inference mode
            self._x_MD = gate_up_LGD.new_zeros(pairs, gate_up_LGD.shape[2])
            self._h_MF = gate_up_LGD.new_zeros(pairs, self._inner)

    def __call__(self, rows_PD: Tensor, index_M: Tensor, ends_L: Tensor, out_MD: Tensor | None = None) -> Tensor:
        """See `DeviceExperts`. Entries of `index_M` past M must be places that exist."""
        pairs, last = index_M.shape[0], ends_L[-1:]
        x_MD, h_MF = self._x_MD[:pairs], self._h_MF[:pairs]
        if self._expand is not None:
            self._expand.gather_rows(rows_PD, index_M, last, x_MD)
        else:
            torch.index_select(rows_PD, 0, index_M, out=x_MD)
        gate_up_MG = F.grouped_mm(x_MD, self._gate_up_LDG, offs=ends_L)
        if self._expand is not None:
            self._expand.multiply_gate(gate_up_MG, last, h_MF)
        else:
            torch.mul(F.silu(gate_up_MG[:, : self._inner]), gate_up_MG[:, self._inner :], out=h_MF)
        y_MD: Tensor = F.grouped_mm(h_MF, self._down_LFD, offs=ends_L)
        return y_MD if out_MD is None else out_MD.copy_(y_MD)


class GrowingExperts:
    """Device experts for pairs in any order and number: sorts them by expert, and opens room for more when more come.

    This is for callers whose pairs the host counts anyway; `DeviceLayer` gets its index from the exchange.
    """

    def __init__(self, gate_up_LGD: Tensor, down_LDF: Tensor, *, backend: Backend) -> None:
        """Hold weights [L, G, D] and [L, D, F] (not copied).

        Raises:
            ConfigError: see `open_device_experts`.
        """
        self.backend, self._weights, self._pairs = backend, (gate_up_LGD, down_LDF), _LEAST_PAIRS
        self._compute = open_device_experts(*self._weights, pairs=self._pairs, backend=backend)

    def __call__(self, rows_ND: Tensor, row_M: Tensor, slots_M: Tensor) -> Tensor:
        """Pair m's row `row_M[m]` through the expert in `slots_M[m]`: [M, D]. Both int64; `slots_M` in 0..L-1."""
        pairs = slots_M.numel()
        if pairs > self._pairs:
            self._pairs = 1 << (pairs - 1).bit_length()
            self._compute = open_device_experts(*self._weights, pairs=self._pairs, backend=self.backend)
        order_M = torch.argsort(slots_M, stable=True)
        index_M = torch.zeros(self._pairs, dtype=torch.int32, device=rows_ND.device)
        index_M[:pairs] = row_M[order_M]
        ends_L = torch.bincount(slots_M, minlength=self._weights[0].shape[0]).cumsum(0).int()
        y_MD = rows_ND.new_empty(pairs, rows_ND.shape[1])
        if pairs:
            y_MD[order_M] = self._compute(rows_ND, index_M, ends_L)[:pairs]
        return y_MD


def grouped_experts(gate_up_LGD: Tensor, down_LDF: Tensor, *, row_independent: bool) -> GrowingExperts | None:
    """The best that this device has for these weights, or None if it has nothing: then one product per expert does.

    Args:
        gate_up_LGD, down_LDF: weights on the device.
        row_independent: only what gives a row the same bits whatever rows stand beside it (`exact` and `stable`).
    """
    if gate_up_LGD.shape[0] == 0:
        return None
    for backend in ROW_INDEPENDENT if row_independent else BACKENDS:
        with suppress(ConfigError):
            return GrowingExperts(gate_up_LGD, down_LDF, backend=backend)
    return None


def open_device_experts(
    gate_up_LGD: Tensor,
    down_LDF: Tensor,
    *,
    pairs: int,
    rows_per_expert: float | None = None,
    backend: Backend | Literal["auto"] = "auto",
) -> DeviceExperts:
    """Experts on the weights' device, computed by `backend`.

    Args:
        gate_up_LGD: [L, G, D], contiguous.
        down_LDF: [L, D, F], contiguous.
        pairs: the most (row, expert) pairs that can arrive.
        rows_per_expert: rows that an expert usually gets, for the choice of tiles; by default `pairs` / L.
        backend: `auto` takes the first of `BACKENDS` that runs here.

    Raises:
        ConfigError: sizes or dtype that the backend does not compute, or a backend that does not run here.
    """
    hidden, inner = gate_up_LGD.shape[2], down_LDF.shape[2]
    if hidden % SIZE_STEP or inner % SIZE_STEP:
        raise ConfigError(f"experts: hidden {hidden} and intermediate {inner} must be multiples of {SIZE_STEP}")
    if backend != "auto":
        return _open(backend, gate_up_LGD, down_LDF, pairs, rows_per_expert)
    reasons = []
    for name in BACKENDS:
        try:
            return _open(name, gate_up_LGD, down_LDF, pairs, rows_per_expert)
        except ConfigError as error:
            reasons.append(f"{name}: {error}")
    raise ConfigError("experts: nothing computes them on this device; " + "; ".join(reasons))


def _open(
    backend: Backend, gate_up_LGD: Tensor, down_LDF: Tensor, pairs: int, rows_per_expert: float | None
) -> DeviceExperts:
    if backend not in BACKENDS:
        raise ConfigError(f"experts: backend {backend!r}: choose one of auto, {', '.join(BACKENDS)}")
    if gate_up_LGD.dtype not in _DTYPES[backend]:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES[backend])
        raise ConfigError(f"experts: {backend} computes {known}, not {gate_up_LGD.dtype}")
    if backend == "grouped_mm":
        return GroupedMmExperts(gate_up_LGD, down_LDF, pairs=pairs)
    if backend == "hopper":
        from bywash.kernels.experts import HopperExperts  # late: compiles, and needs the driver's bindings

        return HopperExperts(gate_up_LGD, down_LDF, pairs=pairs, rows_per_expert=rows_per_expert)
    from bywash.kernels.triton_experts import TritonExperts

    return TritonExperts(gate_up_LGD, down_LDF, pairs=pairs, rows_per_expert=rows_per_expert)
