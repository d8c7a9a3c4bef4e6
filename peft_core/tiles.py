"""A register tile of products in bf16 or float32, and the parts that kernels on it are made of.

This module imports numba at its top and is therefore itself imported inside functions only, after
``kernels.tiles_supported()`` said yes. A kernel built on it is a plain ``@kernel`` function ``(t, T, *args)``
that ``kernels.run_kernel`` runs on the pool; prologues and epilogues are ordinary loops around ``tile_8x48``.

Operands are arrays of *words*: a uint32 holds two consecutive bf16 of the summed dimension, the earlier one in the
lower half; a float32 is itself. The tile reads its left operand row-major and its right operand in rows of words. One
kernel text serves both: the functions of ``tile_parts.py`` do what the words' dtype says.
8 x 48 keeps 24 of AVX-512's 32 registers in sums and reaches 98 % of the instruction peak; on other CPUs it consists of
smaller blocks, see ``tile_code.py``. Rules that measurements taught:
- kernels name other jitted functions as module globals; a closure over one is never found again in numba's disk cache;
- a float32 constant stands in ``np.float32(...)``, or numba computes in float64 and nothing is vectorised;
- the stride of a scratch operand is never a power of two: its rows would share cache sets.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .tile_code import F32, I16, I32, VF, VI, Machine, load, machine_of, round_bf16, tile_function
from .tile_parts import kernel

COLUMNS = 48  # of a panel of packed weights


_intrinsic: Any = intrinsic  # its annotation counts the typing context among a caller's arguments


def _machine(context: Any) -> Machine:
    """Read from what is part of the cache's key, so that no machine finds another's code on disk."""
    return machine_of(*context.codegen().magic_tuple())


def _at(context: Any, b: ir.IRBuilder, signature: Any, args: Any, i: int, offset: Any, element: ir.Type) -> Any:
    """A pointer to element ``offset`` of the array that is argument i."""
    data = context.make_array(signature.args[i])(context, b, args[i]).data
    return b.gep(b.bitcast(data, element.as_pointer()), [offset])


def make_tile(rows: int, columns: int) -> Any:
    """tile(a, a0, lda, w, w0, ldw, k, c, c0, ldc, add): c[rows, columns] = a[rows, k] w[k, columns], plus c if ``add``.

    Flat arrays with a first element and a row stride each: a and w words, k counts words, c float32.
    ``columns`` is a multiple of 16.  Nothing is checked: the caller owns every element that it names.
    """

    @_intrinsic
    def tile(typing, a, a0, lda, w, w0, ldw, k, c, c0, ldc, add):  # type: ignore[no-untyped-def]
        if a.dtype != w.dtype or a.dtype not in (types.uint32, types.float32) or c.dtype != types.float32:
            raise TypeError(f"a tile of {a.dtype} and {w.dtype} into {c.dtype}")
        n = types.intp
        signature = types.void(a, n, n, w, n, n, n, c, n, n, n)
        half = a.dtype == types.uint32
        word = I32 if half else F32

        def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            fn = tile_function(b.module, _machine(context), half, rows, columns)
            left = _at(context, b, signature, args, 0, args[1], word)
            right = _at(context, b, signature, args, 3, args[4], word)
            out = _at(context, b, signature, args, 7, args[8], F32)
            b.call(fn, [left, args[2], right, args[5], args[6], out, args[9], args[10]])
            return context.get_dummy_value()

        return signature, write

    return tile


tile_8x48 = make_tile(8, 48)
tile_6x64 = make_tile(6, 64)
tile_8x16 = make_tile(8, 16)
tile_12x32 = make_tile(12, 32)


# ------------------------------------------------------------------------------------------------ bf16 and float32


def _sixteen(context: Any, b: ir.IRBuilder, signature: Any, args: Any, offset: Any) -> Any:
    floats = _at(context, b, signature, args, 0, offset, F32)
    return load(b, b.bitcast(floats, VF.as_pointer()))


def _rounded(context: Any, b: ir.IRBuilder, signature: Any, args: Any, offset: Any) -> Any:
    return round_bf16(b, _sixteen(context, b, signature, args, offset), _machine(context))


@_intrinsic
def round16(typing, src, s0, dst, d0):  # type: ignore[no-untyped-def]
    """dst[d0:d0+16] = src[s0:s0+16] (float32): as it is, or bf16 bits (uint16), to nearest even, NaN stays NaN."""
    half = dst.dtype == types.uint16

    def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out = _at(context, b, signature, args, 2, args[3], I16 if half else F32)
        value = (_rounded if half else _sixteen)(context, b, signature, args, args[1])
        b.store(value, b.bitcast(out, value.type.as_pointer())).align = 2 if half else 4
        return context.get_dummy_value()

    return types.void(src, types.intp, dst, types.intp), write


@_intrinsic
def pair16(typing, src, s0, s1, dst, d0):  # type: ignore[no-untyped-def]
    """dst[d0:d0+16] (uint32) = bf16 bits of src[s0:] below those of src[s1:]: two rows become one row of pairs."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        low, high = (b.zext(_rounded(context, b, signature, args, args[i]), VI) for i in (1, 2))
        out = b.bitcast(_at(context, b, signature, args, 3, args[4], I32), VI.as_pointer())
        b.store(b.or_(low, b.shl(high, ir.Constant(VI, [16] * 16))), out).align = 4
        return context.get_dummy_value()

    return types.void(src, types.intp, types.intp, dst, types.intp), write


@kernel
def probe(t, T, a, w, c):  # type: ignore[no-untyped-def]
    """One tile, to see whether it can be compiled and run here."""
    if t == 0:
        tile_8x48(a, 0, 1, w, 0, COLUMNS, 1, c, 0, COLUMNS, 0)
