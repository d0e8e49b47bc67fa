"""Triton source of the grouped expert product in bf16 and fp16. `triton_experts.py` launches it; needs triton.

Shapes: L experts, K depth of the product (D for gate_up, F for down), N output columns (F for gate_up, D for down),
M pairs by expert, P places.

Design, for Hopper:
- Operands are swapped: y^T = W x^T. Weights fill the 64-row side of the tensor core instruction, tokens the side that
  goes in steps of 8, so 261 rows cost 256 + 16 and not 384.
- Weights come by TMA through a 5-D descriptor [L, N/8, gate|up, 8, K]. Its box interleaves gate and up in groups of
  8 rows, so that both values of a column land in the same thread's accumulators and SwiGLU needs no exchange.
- Tokens are gathered by cp.async, 16 bytes a piece, straight from where the exchange put them.
- A tile's tokens are MAIN, or MAIN and TAIL more in a second accumulator fed by the same weights, or MAIN / 2. What
  tiles read comes to 6 to 7 TB/s over an H200's measured times, so L2 seems to be the limit and bytes to decide: with
  226 to 296 rows per expert gate_up takes 5.3 ms in tiles of 256 tokens, 3.6 ms in 256 + 32, 5.1 ms in smaller ones.
- Programs stay (grid = SMs) and take tiles in the order expert, columns, tokens: token tiles of one weight tile run
  side by side and share it in L2. Every program finds its tiles from the ends in device memory.
- On Hopper the weights go on to registers (ldmatrix), since Triton 3.6 does not reshape a box in shared memory for that
  operand; the reads of shared memory are the same in number.
- K goes in one fixed order, 16 at a time into one float32 sum, no split, by the same instruction in every tile (wgmma
  on Hopper, tcgen05 on Blackwell, mma.sync before): a row's bits depend neither on the rows beside it nor on the tiles.
"""

# mypy: ignore-errors
# Triton's language has no types.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["index_ptr", "ends_ptr"])
def grouped_product(
    x_ptr,
    index_ptr,
    ends_ptr,
    weights,
    y_ptr,
    experts,
    depth,
    columns,
    stride,
    GATED: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[m] = W[expert of m] x[index[m]], or SwiGLU of its two halves.

    Args:
        x_ptr: [P, K], rows `stride` elements apart.
        index_ptr: int32 [M], read if GATED; otherwise pair m reads row m.
        ends_ptr: int32 [L].
        weights: descriptor [L, N / 8, 2 or 1, 8, K], box [1, ROWS / 8 / (2 or 1), 2 or 1, 8, DEPTH].
        y_ptr: [M, N].
        experts, depth, columns: L, K and N.
        LANES: a power of two >= L.
        ROWS: weight rows of a tile (gate and up together).
        EVEN: K is a multiple of DEPTH.
        STAGES: slices of K in flight.
    """
    WIDTH: tl.constexpr = ROWS // 2 if GATED else ROWS
    lane_L = tl.arange(0, LANES)
    ends_L = tl.load(ends_ptr + lane_L, mask=lane_L < experts, other=0)
    starts_L = tl.load(ends_ptr + lane_L - 1, mask=(lane_L > 0) & (lane_L < experts), other=0)
    tiles_L = token_tiles(ends_L - starts_L, MAIN, TAIL)
    blocks = tl.cdiv(columns, WIDTH)
    last_L = tl.cumsum(tiles_L, 0) * blocks
    total = tl.sum(tiles_L, 0) * blocks
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        expert = tl.sum((last_L <= tile).to(tl.int32), 0)
        tile -= tl.sum(tl.where(last_L <= tile, tiles_L, 0), 0) * blocks
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        rows = tl.load(ends_ptr + expert) - start
        tiles = token_tiles(rows, MAIN, TAIL)
        row = tile % tiles * MAIN
        column = tile // tiles * WIDTH
        left = rows - row
        if (left > MAIN) & (left <= MAIN + TAIL):
            _tile(x_ptr, index_ptr, weights, y_ptr, expert, start + row, left, column, depth, columns, stride,
                  GATED, ROWS, MAIN, TAIL, DEPTH, EVEN, STAGES)  # fmt: skip
        elif left > MAIN // 2:
            _tile(x_ptr, index_ptr, weights, y_ptr, expert, start + row, tl.minimum(left, MAIN), column, depth, columns,
                  stride, GATED, ROWS, MAIN, 0, DEPTH, EVEN, STAGES)  # fmt: skip
        else:
            _tile(x_ptr, index_ptr, weights, y_ptr, expert, start + row, left, column, depth, columns, stride,
                  GATED, ROWS, MAIN // 2, 0, DEPTH, EVEN, STAGES)  # fmt: skip


@triton.jit
def token_tiles(rows, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Tiles of an expert's rows: with MAIN 256 and TAIL 32, 0 rows take 0, 288 take 1, 289 take 2."""
    return tl.where(rows > 0, tl.maximum(tl.cdiv(rows - TAIL, MAIN), 1), 0)


@triton.jit
def _tile(x_ptr, index_ptr, weights, y_ptr, expert, row, rows, column, depth, columns, stride,
          GATED: tl.constexpr, ROWS: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr,
          EVEN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    k = tl.arange(0, DEPTH)
    x = x_ptr + places(index_ptr, row, rows, MAIN, GATED)[:, None] * stride + k[None, :]
    acc = tl.zeros((ROWS, MAIN), dtype=tl.float32)
    if TAIL > 0:
        x2 = x_ptr + places(index_ptr, row + MAIN, rows - MAIN, TAIL, GATED)[:, None] * stride + k[None, :]
        acc2 = tl.zeros((ROWS, TAIL), dtype=tl.float32)
        for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
            w = weights.load([expert, column // 8, 0, 0, start]).reshape(ROWS, DEPTH)
            acc = tl.dot(w, tl.trans(_load(x, start + k, depth, EVEN)), acc)
            acc2 = tl.dot(w, tl.trans(_load(x2, start + k, depth, EVEN)), acc2)
            x += DEPTH
            x2 += DEPTH
        _write(acc, y_ptr, row, MAIN, column, columns, GATED)
        _write(acc2, y_ptr, row + MAIN, rows - MAIN, column, columns, GATED)
    else:
        for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
            w = weights.load([expert, column // 8, 0, 0, start]).reshape(ROWS, DEPTH)
            acc = tl.dot(w, tl.trans(_load(x, start + k, depth, EVEN)), acc)
            x += DEPTH
        _write(acc, y_ptr, row, rows, column, columns, GATED)


@triton.jit
def places(index_ptr, row, rows, SIZE: tl.constexpr, GATHER: tl.constexpr):
    """The rows that SIZE pairs from `row` on read, as int64. Pairs past `rows` read some valid row; nobody stores
    what comes of it."""
    m = tl.arange(0, SIZE)
    place = tl.load(index_ptr + row + m, mask=m < rows, other=0) if GATHER else tl.where(m < rows, row + m, row)
    return place.to(tl.int64)


@triton.jit
def _load(x, k, depth, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x)
    return tl.load(x, mask=(k < depth)[None, :], other=0.0)


@triton.jit
def _write(acc, y_ptr, row, rows, column, columns, GATED: tl.constexpr):
    """Store [ROWS, tokens] as [tokens, columns], through SwiGLU if GATED."""
    if GATED:
        split = acc.reshape(acc.shape[0] // 16, 2, 8, acc.shape[1]).permute(0, 2, 3, 1)
        gate, up = tl.split(split)
        acc = (gate * tl.sigmoid(gate) * up).reshape(acc.shape[0] // 2, acc.shape[1])
    values = tl.trans(acc.to(y_ptr.dtype.element_ty))
    m = tl.arange(0, values.shape[0])
    n = column + tl.arange(0, values.shape[1])
    at = (row + m).to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(y_ptr + at, values, mask=(m < rows)[:, None] & (n < columns)[None, :])
