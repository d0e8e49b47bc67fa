"""Hints to the compiler and the processor, for the hot loop; they change no result.

`prefetch` starts to fetch a row that will be needed soon. `assume` lets LLVM take something for true: row lengths that
it then multiplies with as constants, and indices that are never negative, so that it leaves out numba's wrap-around.
`trailing_zeros` and the sorting networks are instructions that numba has no words for.
"""

# mypy: ignore-errors

import llvmlite.ir as ir
from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic
def prefetch(typing_context, array, row):
    """Fetch the first cache line of `array[row]`; any row number is allowed, since nothing is read."""

    def codegen(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        strides = cgutils.unpack_tuple(builder, view.strides, 2)
        byte = ir.IntType(8).as_pointer()
        place = builder.gep(builder.bitcast(view.data, byte), [builder.mul(arguments[1], strides[0])])
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(hint, [place, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(array, row), codegen


@intrinsic
def assume(typing_context, condition):
    """Nothing happens when the condition holds; anything may when it does not."""

    def codegen(context, builder, signature, arguments):
        builder.assume(context.cast(builder, arguments[0], signature.args[0], types.boolean))
        return context.get_dummy_value()

    return types.void(condition), codegen


@intrinsic
def trailing_zeros(typing_context, word):
    """How many low bits of a uint64 are 0; it has a bit set."""

    def codegen(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(word), codegen


def _sorter(size):
    """A sorting network over `array[start : start + size]`, size a power of two, without branches (Batcher 1968)."""
    pairs = []
    span = 1
    while span < size:
        step = span
        while step >= 1:
            for first in range(step % span, size - step, 2 * step):
                for low in range(first, first + min(step, size - first - step)):
                    if low // (2 * span) == (low + step) // (2 * span):
                        pairs.append((low, low + step))
            step //= 2
        span *= 2

    @intrinsic
    def sort(typing_context, array, start):
        def codegen(context, builder, signature, arguments):
            view = context.make_array(signature.args[0])(context, builder, arguments[0])
            first = builder.gep(view.data, [arguments[1]])
            places = [builder.gep(first, [ir.IntType(64)(i)]) for i in range(size)]
            values = [builder.load(place) for place in places]
            for low, high in pairs:
                a, b = values[low], values[high]
                less = builder.icmp_signed("<", a, b)
                values[low], values[high] = builder.select(less, a, b), builder.select(less, b, a)
            for place, value in zip(places, values):
                builder.store(value, place)
            return context.get_dummy_value()

        return types.void(array, start), codegen

    return sort


sort_8, sort_16 = _sorter(8), _sorter(16)
