"""Time of one layer's compute stages on every rank of a group: experts by measured rates or roofline, the rest by
roofline. Each number carries its source and its arithmetic.

Shapes: R ranks, E experts, T tokens of a rank. A stage takes as long as on the rank that is slowest in it, since the
exchange makes all wait. Knows nothing of wires or schedules; `cost` calls it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.planner.devices import Device
from bywash.planner.figures import (
    CPU_STAGE_START_US,
    DENSE_SHARE,
    PEER_SHARE,
    READ_SHARE,
    STAGE_START_US,
    Figure,
    Rates,
    Source,
    bent,
    expert_rates,
    grouped_us,
)
from bywash.planner.group import Group
from bywash.planner.model import ModelShape

FloatArray = NDArray[np.float64]

COLLECTIVE_START_US = 10.0
"""Of one all-reduce half between the ranks that split attention: an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step of one rank, outside the experts.

    Attributes:
        tokens: T, on average over the ranks that split attention.
        context: cached tokens that each of them attends to.
        decode: one token a sequence; else a chunk of a prompt.
    """

    tokens: float
    context: float
    decode: bool


def attention(model: ModelShape, device: Device, work: Work, tp: int) -> Figure:
    """Projections, scores and the cache; with the all-reduce of the ranks that split it."""
    a = model.attention
    proj = _product(device, model, 2 * work.tokens * a.weights, a.weights / tp * model.dense_item_bytes)
    width = a.score_width if work.decode else a.prefill_score_width
    context = min(work.context, a.window) if a.window else work.context
    flop_us = 2 * work.tokens * context * width / (device.bf16_tflops * DENSE_SHARE) * 1e-6
    copies = tp / min(tp, a.kv_heads)
    cached = context * a.cached * model.item_bytes * copies * (work.tokens if work.decode else 1.0)
    read_us = cached / (device.memory_gbytes_per_s * READ_SHARE) * 1e-3
    reduce_us = 0.0
    if tp > 1:
        moved = 2 * (tp - 1) * work.tokens * model.hidden * model.item_bytes
        reduce_us = 2 * COLLECTIVE_START_US + moved / (device.peer_gbytes_per_s * PEER_SHARE) * 1e-3
    return Figure(
        us=start_us(device) + proj + bent(flop_us, read_us) + reduce_us,
        source="roofline",
        arithmetic=(
            f"{device.name}: projections {proj:.1f} + scores max({flop_us:.1f} flop, {read_us:.1f} cache) + tp "
            f"{reduce_us:.1f} + start {start_us(device):g} us"
        ),
    )


def shared(model: ModelShape, device: Device, work: Work) -> Figure:
    """The shared expert."""
    weights = 3 * model.hidden * model.shared_intermediate
    us = _product(device, model, 2 * work.tokens * weights, weights * model.dense_item_bytes)
    how = f"{device.name}: {work.tokens:.0f} tokens x {weights / 1e6:.1f} M weights"
    return Figure(us=us + start_us(device), source="roofline", arithmetic=how)


def dense(model: ModelShape, device: Device, work: Work) -> Figure:
    """The feed-forward part of a layer without experts."""
    weights = 3 * model.hidden * model.dense_intermediate
    us = _product(device, model, 2 * work.tokens * weights, weights * model.dense_item_bytes)
    how = f"{device.name}: {work.tokens:.0f} tokens x {weights / 1e6:.1f} M weights"
    return Figure(us=us + start_us(device), source="roofline", arithmetic=how)


def route(model: ModelShape, device: Device, work: Work) -> Figure:
    """The router's product and its choice."""
    weights = model.hidden * model.experts
    us = _product(device, model, 2 * work.tokens * weights, weights * 2.0)
    how = f"{device.name}: {work.tokens:.0f} tokens x {weights / 1e6:.2f} M weights"
    return Figure(us=us + start_us(device), source="roofline", arithmetic=how)


def finish(model: ModelShape, device: Device, work: Work) -> Figure:
    """Residual and norm: read twice, written once."""
    us = 3 * work.tokens * model.hidden * model.item_bytes / (device.memory_gbytes_per_s * READ_SHARE) * 1e-3
    return Figure(us=us + start_us(device), source="roofline", arithmetic=f"{device.name}: 3 passes over rows")


def head(model: ModelShape, device: Device, work: Work, tp: int) -> Figure:
    """The output matrix, once a step; a prefill chunk needs its last row only."""
    rows = work.tokens if work.decode else 1.0
    weights = model.vocab * model.hidden
    us = _product(device, model, 2 * rows * weights, weights / tp * 2.0)
    how = f"{device.name}: {rows:.0f} rows x {weights / 1e6:.0f} M weights"
    return Figure(us=us + start_us(device), source="roofline", arithmetic=how)


def experts_us_R(model: ModelShape, group: Group, rows_R: FloatArray, active_R: FloatArray) -> FloatArray:
    """Time of each rank's experts: float64 [R].

    Args:
        model, group: see there.
        rows_R: rows that each rank computes.
        active_R: experts that have any.
    """
    each = zip(group.device_R, rows_R, active_R, strict=True)
    return np.array([
        grouped_us(rows, active, model.expert_weights, model.expert_bytes, rates_of(model, device)) + start_us(device)
        for device, rows, active in each
    ])  # fmt: skip


def experts(model: ModelShape, group: Group, rows_R: FloatArray, active_R: FloatArray) -> Figure:
    """The slowest rank's experts."""
    us_R = experts_us_R(model, group, rows_R, active_R)
    slow = int(us_R.argmax())
    device = group.device_R[slow]
    rates = rates_of(model, device)
    return Figure(
        us=float(us_R[slow]),
        source=experts_source(model, group),
        arithmetic=(
            f"rank {slow} ({device.name}): {rows_R[slow]:,.0f} rows of {active_R[slow]:.1f} experts at "
            f"{rates.tflops:.3g} TFLOP/s, {rates.gbytes_per_s:.0f} GB/s"
        ),
    )


def experts_source(model: ModelShape, group: Group) -> Source:
    """Measured only where all devices of the group were."""
    kinds = {rates_of(model, device).source for device in set(group.device_R)}
    return "measured" if kinds == {"measured"} else "roofline"


def rates_of(model: ModelShape, device: Device) -> Rates:
    """Of grouped products on a device. An fp8 model on a device without fp8 is multiplied in bf16, read in fp8."""
    dtype = "fp8" if model.dtype == "fp8" and device.fp8_tflops else "bf16"
    if device.is_cpu:
        return Rates(
            tflops=device.bf16_tflops, gbytes_per_s=device.memory_gbytes_per_s, tile_rows=16, source="roofline"
        )
    return expert_rates(device.name, dtype, device.tflops(dtype), device.memory_gbytes_per_s)


def start_us(device: Device) -> float:
    """Of one stage."""
    return CPU_STAGE_START_US if device.is_cpu else STAGE_START_US


def _product(device: Device, model: ModelShape, flops: float, read_bytes: float) -> float:
    flop_us = flops / (device.tflops(model.dtype) * DENSE_SHARE) * 1e-6
    return bent(flop_us, read_bytes / (device.memory_gbytes_per_s * READ_SHARE) * 1e-3)
