"""From routing to network traffic: who sends how many bytes to whom in the dispatch and the combine of MoE layers.

Shapes: N tokens over all ranks, K experts per token, E experts, R ranks, H hosts of the fabric, F flows.

A rank is one GPU with its own NIC; rank n is host n of the fabric (`Topology`'s hosts are NIC ports, numbered server by
server). Rows for the own GPU or for GPUs of the same server travel over NVLink and do not enter the fabric; NVLink
itself takes no time here.

Knows tokens, placements and the fabric's traffic type; knows nothing of how packets move, nor of kernels. `bywash
fabric traffic` and `benchmarks/fabric/study.py` call it; `naive` is its oracle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bywash.balance.placement import Placement
from bywash.errors import ConfigError
from bywash.planner.choices import TokenChoices

Array = NDArray[np.integer]
IntArray = NDArray[np.int64]

Rows = Literal["per-expert", "per-rank", "per-node"]
"""How often a token's row is sent: once for each chosen expert, each rank, or each server that holds one."""

Path = Literal["flat", "hierarchical"]
"""`flat`: from the token's rank straight to the rank that computes. `hierarchical`: on one rail only, with a hop over
NVLink at the end that changes rail: at the destination for `per-node` rows (as DeepEP's normal kernels do), else at the
source (as NCCL's PXN does)."""

_BYTES = {"fp8": 1, "bf16": 2, "fp32": 4}
_SCALE_COLUMNS = 128
MAX_HIDDEN = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """What one token's row takes on the wire, without packet headers.

    Attributes:
        hidden: elements of a row.
        dispatch, combine: `fp8` (a float32 scale for every 128 elements goes with it), `bf16` or `fp32`.
        index_bytes: sent with each dispatched row: which token it is, which experts read it.
    """

    hidden: int = 7168
    dispatch: str = "fp8"
    combine: str = "bf16"
    index_bytes: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.hidden <= MAX_HIDDEN:
            raise ConfigError(f"hidden = {self.hidden}: must be 1..{MAX_HIDDEN}")
        for name in ("dispatch", "combine"):
            if getattr(self, name) not in _BYTES:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(_BYTES)}")
        if not 0 <= self.index_bytes <= 1 << 16:
            raise ConfigError(f"index_bytes = {self.index_bytes}: must be 0..65536")

    @property
    def dispatch_bytes(self) -> int:
        """Of a dispatched row: 7,168 + 56 x 4 + 16 = 7,408 for DeepSeek-V3 in fp8."""
        return self._payload(self.dispatch) + self.index_bytes

    @property
    def combine_bytes(self) -> int:
        """Of a row that comes back: 14,336 for DeepSeek-V3 in bf16. Its place is agreed on: no index."""
        return self._payload(self.combine)

    def _payload(self, dtype: str) -> int:
        scales = 4 * -(-self.hidden // _SCALE_COLUMNS) if dtype == "fp8" else 0
        return self.hidden * _BYTES[dtype] + scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How rows travel: `gpus_per_server` consecutive ranks share a server; see `Rows` and `Path`."""

    gpus_per_server: int
    rows: Rows = "per-rank"
    path: Path = "flat"

    def __post_init__(self) -> None:
        if self.gpus_per_server < 1:
            raise ConfigError(f"gpus_per_server = {self.gpus_per_server}: must be at least 1")
        if self.rows not in ("per-expert", "per-rank", "per-node"):
            raise ConfigError(f"rows = {self.rows!r}: must be per-expert, per-rank or per-node")
        if self.path not in ("flat", "hierarchical"):
            raise ConfigError(f"path = {self.path!r}: must be flat or hierarchical")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBytes:
    """One layer's exchange.

    Attributes:
        dispatch_HH, combine_HH: int64 [H, H], bytes from host to host over the fabric.
        network_rows: rows dispatched over the fabric. local_rows: rows that stayed on their server.
    """

    dispatch_HH: IntArray
    combine_HH: IntArray
    network_rows: int
    local_rows: int


def layer_bytes(
    choices: TokenChoices, placements: Sequence[Placement], method: Method, row: RowFormat
) -> tuple[LayerBytes, ...]:
    """Bytes of dispatch and combine for every layer of `choices`.

    The combine sends one row back for each row dispatched: what a rank (or a server, with `per-node`) computed for a
    token is summed there first.

    Args:
        placements: one for each layer, or one for all.

    Raises:
        ConfigError: placements, servers and choices do not fit together.
    """
    layers = choices.ids_NLK.shape[1]
    if len(placements) not in (1, layers):
        raise ConfigError(f"placements: {len(placements)} for {layers} layers; give one, or one for each")
    if choices.ranks % method.gpus_per_server:
        raise ConfigError(f"ranks = {choices.ranks}: must be a multiple of gpus_per_server = {method.gpus_per_server}")
    made = []
    for layer in range(layers):
        placement = placements[layer % len(placements)]
        if placement.num_experts != choices.num_experts or placement.ranks != choices.ranks:
            raise ConfigError(
                f"placements[{layer}]: is for {placement.num_experts} experts on {placement.ranks} ranks, the choices "
                f"for {choices.num_experts} on {choices.ranks}"
            )
        rows_HH, local = rows_between(
            choices.ids_NLK[:, layer], choices.rank_N, placement.home_E, choices.ranks, method
        )
        made.append(
            LayerBytes(
                dispatch_HH=rows_HH * row.dispatch_bytes,
                combine_HH=rows_HH.T * row.combine_bytes,
                network_rows=int(rows_HH.sum()),
                local_rows=local,
            )
        )
    return tuple(made)


def rows_between(ids_NK: Array, rank_N: IntArray, home_E: Array, ranks: int, method: Method) -> tuple[IntArray, int]:
    """Rows that one layer's dispatch sends over the fabric: (int64 [R, R], rows that stay on their server).

    With `per-node` and `flat`, a row lands on the rank of the token's first expert there, in the router's order.

    Example: 2 servers of 2 GPUs, 4 experts at home on ranks 0..3, one token on rank 0 that chose experts 3, 2 and 1.
    Per rank: rows 0->3 and 0->2 over the fabric, one local row (to rank 1). Per node: 0->3 flat; hierarchical it goes
    to rank 2, which has the source's place in its server.
    """
    gpus = method.gpus_per_server
    home_NK = home_E[ids_NK].astype(np.int64)
    key_NK = home_NK // gpus if method.rows == "per-node" else home_NK
    sent_NK = np.ones(key_NK.shape, np.bool_) if method.rows == "per-expert" else _first_in_row(key_NK)
    src = np.broadcast_to(rank_N[:, None], home_NK.shape)[sent_NK]
    dst = home_NK[sent_NK]
    away = src // gpus != dst // gpus
    src, dst = src[away], dst[away]
    if method.path == "hierarchical":
        if method.rows == "per-node":
            dst = dst // gpus * gpus + src % gpus
        else:
            src = src // gpus * gpus + dst % gpus
    rows_RR = np.bincount(src * ranks + dst, minlength=ranks * ranks).reshape(ranks, ranks)
    return rows_RR.astype(np.int64), int((~away).sum())


def _first_in_row(key_NK: IntArray) -> NDArray[np.bool_]:
    """Where a key comes up for the first time in its row."""
    first_NK = np.ones(key_NK.shape, np.bool_)
    for later in range(1, key_NK.shape[1]):
        for earlier in range(later):
            first_NK[:, later] &= key_NK[:, later] != key_NK[:, earlier]
    return first_NK
