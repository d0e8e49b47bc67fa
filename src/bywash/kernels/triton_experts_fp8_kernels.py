"""Triton source of the grouped expert product in e4m3, and of the quantisation of rows. Needs triton.

Shapes as in `triton_experts_kernels.py`; C = K / 128 rounded up. A slice of 128 along K has one scale per row of x and
one per 128 rows of W, so its sum is scaled and added in float32: that also bounds what Hopper's tensor cores lose (they
sum e4m3 products in about 14 bits).

Tokens are the 64-row side here, unlike in bf16: a thread then needs the scales of 2 tokens, not of 32. Tiles have MAIN
tokens or 64, never fewer: Hopper would take another instruction for them, which rounds otherwise, so that a row's bits
would depend on its tile. Scales of the next slice are read while the current one is multiplied. A tile has ROWS weight
rows or, as a PAIR, twice as many in a second accumulator: without it, what tiles read came to 6 TB/s over an H200's
measured times in every shape, with tensor cores busy for a third of them; a pair reads a fourth less for the same
products.
"""

# mypy: ignore-errors
# Triton's language has no types.

import triton
import triton.language as tl

from bywash.kernels.triton_experts_kernels import places, token_tiles

FEWEST: tl.constexpr = tl.constexpr(64)
E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
SMALLEST_AMAX: tl.constexpr = tl.constexpr(2.0**-110)


@triton.jit(do_not_specialize=["experts", "scales_stride"], do_not_specialize_on_alignment=["index_ptr", "ends_ptr"])
def grouped_product_fp8(
    x_ptr,
    x_scales_ptr,
    index_ptr,
    ends_ptr,
    weights,
    w_scales_ptr,
    y_ptr,
    experts,
    depth,
    columns,
    stride,
    scales_stride,
    GATED: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    PAIR: tl.constexpr,
    MAIN: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same as `grouped_product` from e4m3: y[m] = W[expert of m] x[index[m]] or its SwiGLU, in y's dtype.

    Args:
        x_ptr, x_scales_ptr: e4m3 [P, K], rows `stride` apart; float32 [P, C], rows `scales_stride` apart.
        weights, w_scales_ptr: descriptor as in `grouped_product` with DEPTH 128; float32 [L, 2 or 1, N / 128, C], both
            divisions rounded up.
        ROWS: weight rows of one box, at most 128.
        PAIR: a tile has two boxes.
        MAIN: tokens of a tile, 64 or a multiple.
    """
    WIDTH: tl.constexpr = (2 if PAIR else 1) * ROWS // (2 if GATED else 1)
    lane_L = tl.arange(0, LANES)
    ends_L = tl.load(ends_ptr + lane_L, mask=lane_L < experts, other=0)
    starts_L = tl.load(ends_ptr + lane_L - 1, mask=(lane_L > 0) & (lane_L < experts), other=0)
    tiles_L = token_tiles(ends_L - starts_L, MAIN, 0)
    blocks = tl.cdiv(columns, WIDTH)
    last_L = tl.cumsum(tiles_L, 0) * blocks
    total = tl.sum(tiles_L, 0) * blocks
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert = tl.sum((last_L <= tile).to(tl.int32), 0)
        tile -= tl.sum(tl.where(last_L <= tile, tiles_L, 0), 0) * blocks
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        rows = tl.load(ends_ptr + expert) - start
        tiles = token_tiles(rows, MAIN, 0)
        row = tile % tiles * MAIN
        column = tile // tiles * WIDTH
        left = tl.minimum(rows - row, MAIN)
        if left <= FEWEST:
            _tile(x_ptr, x_scales_ptr, index_ptr, weights, w_scales_ptr, y_ptr, expert, start + row, left, column,
                  depth, columns, stride, scales_stride, GATED, ROWS, PAIR, FEWEST, EVEN, STAGES)  # fmt: skip
        elif MAIN > FEWEST:
            _tile(x_ptr, x_scales_ptr, index_ptr, weights, w_scales_ptr, y_ptr, expert, start + row, left, column,
                  depth, columns, stride, scales_stride, GATED, ROWS, PAIR, MAIN, EVEN, STAGES)  # fmt: skip


@triton.jit
def _tile(x_ptr, x_scales_ptr, index_ptr, weights, w_scales_ptr, y_ptr, expert, row, rows, column, depth, columns,
          stride, scales_stride, GATED: tl.constexpr, ROWS: tl.constexpr, PAIR: tl.constexpr, MAIN: tl.constexpr,
          EVEN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    HALVES: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = ROWS // HALVES
    k = tl.arange(0, 128)
    slices = tl.cdiv(depth, 128)
    place = places(index_ptr, row, rows, MAIN, GATED)
    x = x_ptr + place[:, None] * stride + k[None, :]
    x_scales = x_scales_ptr + place * scales_stride
    bands = tl.cdiv(columns, 128)
    # Two scales of W are needed: of gate and up, whose two boxes share a band, or of the bands of the two boxes.
    other = bands + column // 128 if GATED else tl.minimum((column + WIDTH) // 128, bands - 1)
    w_scales = w_scales_ptr + expert * HALVES * bands * slices
    w_scales, others = w_scales + column // 128 * slices, w_scales + other * slices
    x_scale, w_scale, w_other = tl.load(x_scales), tl.load(w_scales), tl.load(others)
    is_gate = tl.arange(0, ROWS) // 8 % 2 == 0
    acc = tl.zeros((MAIN, ROWS), dtype=tl.float32)
    acc2 = tl.zeros((MAIN, ROWS), dtype=tl.float32)
    for c in tl.range(0, slices, num_stages=STAGES):
        a = tl.load(x) if EVEN else tl.load(x, mask=(c * 128 + k < depth)[None, :], other=0.0)
        w = weights.load([expert, column // 8, 0, 0, c * 128]).reshape(ROWS, 128)
        part = tl.dot(a, tl.trans(w))
        ahead = tl.minimum(c + 1, slices - 1)
        next_x, next_w, next_other = tl.load(x_scales + ahead), tl.load(w_scales + ahead), tl.load(others + ahead)
        by_half = tl.where(is_gate, w_scale, w_other)[None, :]
        acc += part * (x_scale[:, None] * (by_half if GATED else w_scale))
        if PAIR:
            w = weights.load([expert, (column + WIDTH) // 8, 0, 0, c * 128]).reshape(ROWS, 128)
            part = tl.dot(a, tl.trans(w))
            acc2 += part * (x_scale[:, None] * (by_half if GATED else w_other))
        x_scale, w_scale, w_other = next_x, next_w, next_other
        x += 128
    _write(acc, y_ptr, row, rows, column, columns, GATED)
    if PAIR:
        _write(acc2, y_ptr, row, rows, column + WIDTH, columns, GATED)


@triton.jit
def _write(acc, y_ptr, row, rows, column, columns, GATED: tl.constexpr):
    """Store [tokens, weight rows], through SwiGLU if GATED."""
    if GATED:
        gate, up = tl.split(acc.reshape(acc.shape[0], acc.shape[1] // 16, 2, 8).permute(0, 1, 3, 2))
        acc = (gate * tl.sigmoid(gate) * up).reshape(acc.shape[0], acc.shape[1] // 2)
    m = tl.arange(0, acc.shape[0])
    n = column + tl.arange(0, acc.shape[1])
    at = (row + m).to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit(do_not_specialize_on_alignment=["count_ptr"])
def quantise_rows(x_ptr, count_ptr, values_ptr, scales_ptr, columns, ROWS: tl.constexpr):
    """The first `count` rows of x [P, columns] as `exchange.fp8_rows.quantise_rows` gives them, bit for bit."""
    count = tl.load(count_ptr)
    slices = tl.cdiv(columns, 128)
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, ROWS) * slices, tl.num_programs(0)):
        m = tile // slices * ROWS + tl.arange(0, ROWS)
        c = tile % slices
        n = c * 128 + tl.arange(0, 128)
        at = m.to(tl.int64)[:, None] * columns + n[None, :]
        mask = (m < count)[:, None] & (n < columns)[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST_AMAX)
        scale = tl.math.div_rn(largest, tl.full((ROWS,), E4M3_MAX, tl.float32))
        values = x * tl.math.div_rn(tl.full((ROWS,), E4M3_MAX, tl.float32), largest)[:, None]
        tl.store(values_ptr + at, values.to(tl.float8e4nv), mask=mask)
        tl.store(scales_ptr + m.to(tl.int64) * slices + c, scale, mask=m < count)
