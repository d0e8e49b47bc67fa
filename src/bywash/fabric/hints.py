"""Hints to the compiler and the processor, for the hot loop; they change no result.

`prefetch` starts to fetch a row that will be needed soon. `assume` lets LLVM take something for true: row lengths that
it then multiplies with as constants, and indices that are never negative, so that it leaves out numba's wrap-around.
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
