"""A register tile of products in bf16 (AVX512-BF16) or float32 (AVX-512), and the parts that kernels on it are made of.

This module imports numba at its top and is therefore itself imported inside functions only, after
``kernels.tiles_supported()`` said yes. A kernel built on it is a plain ``@njit(**FAST)`` function ``(t, T, *args)``
that ``kernels.run_kernel`` runs on the pool; prologues and epilogues are ordinary loops around ``tile_8x48``.

Operands are arrays of *words*: a uint32 holds two consecutive bf16 of the summed dimension, the earlier one in the
lower half; a float32 is itself. The tile reads its left operand row-major and its right operand in rows of words. One
kernel text serves both: the functions of ``tile_parts.py`` do what the words' dtype says.
8 x 48 keeps 24 of the 32 vector registers in sums and reaches 98 % of the instruction peak. Rules that measurements
taught:
- kernels name other jitted functions as module globals; a closure over one is never found again in numba's disk cache;
- a float32 constant stands in ``np.float32(...)``, or numba computes in float64 and nothing is vectorised;
- the stride of a scratch operand is never a power of two: its rows would share cache sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .tile_parts import FAST

COLUMNS = 48  # of a panel of packed weights


_intrinsic: Any = intrinsic  # its annotation counts the typing context among a caller's arguments


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VF, _VI, _VH = ir.VectorType(_F32, 16), ir.VectorType(_I32, 16), ir.VectorType(_I16, 16)
_VB, _VB16 = ir.VectorType(_BFloat(), 32), ir.VectorType(_BFloat(), 16)


def _int(n: int) -> ir.Constant:
    return ir.Constant(_I64, n)


def _load(b: ir.IRBuilder, pointer: Any, align: int = 4) -> Any:
    value = b.load(pointer)
    value.align = align
    return value


def _phi(b: ir.IRBuilder, *incoming: tuple) -> Any:
    phi = b.phi(incoming[0][0].type)
    for value, block in incoming:
        phi.add_incoming(value, block)
    return phi


def _at(context: Any, b: ir.IRBuilder, signature: Any, args: Any, i: int, offset: Any, element: ir.Type) -> Any:
    """A pointer to element ``offset`` of the array that is argument i."""
    data = context.make_array(signature.args[i])(context, b, args[i]).data
    return b.gep(b.bitcast(data, element.as_pointer()), [offset])


# ------------------------------------------------------------------------------------------------ the tile


def _broadcast(b: ir.IRBuilder, value: Any, vector: ir.Type) -> Any:
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(_VI, None))


def _steps(b: ir.IRBuilder, sums: list, a_rows: list, w: Any, ldw: Any, kk: Any) -> list:
    """The sums after one more word of the summed dimension."""
    half = a_rows[0].type.pointee == _I32
    vector = _VI if half else _VF
    kind = ir.FunctionType(_VF, [_VF, _VB, _VB] if half else [_VF, _VF, _VF])
    name = "llvm.x86.avx512bf16.dpbf16ps.512" if half else "llvm.fma.v16f32"
    multiply = cgutils.get_or_insert_function(b.module, kind, name)
    vectors = len(sums) // len(a_rows)
    row = b.bitcast(b.gep(w, [b.mul(kk, ldw)]), vector.as_pointer())
    ws = [_load(b, b.gep(row, [_int(j)])) for j in range(vectors)]
    ws = [b.bitcast(x, _VB) for x in ws] if half else ws
    out = []
    for i, a_row in enumerate(a_rows):
        one = _broadcast(b, _load(b, b.gep(a_row, [kk])), vector)
        for total, x in zip(sums[i * vectors :], ws, strict=False):
            out.append(b.call(multiply, [total, b.bitcast(one, _VB), x] if half else [one, x, total]))
    return out


def _loop(b: ir.IRBuilder, sums: list, edges: tuple, k0: Any, k1: Any, by: int, step: Callable) -> list:
    """sums after steps k0, k0 + by .. k1 (at least one).  ``edges``: the blocks before, of and after the loop."""
    before, block, after = edges
    b.position_at_end(block)
    kk = _phi(b, (k0, before))
    rolling = [_phi(b, (s, before)) for s in sums]
    out = rolling
    for u in range(by):
        out = step(out, b.add(kk, _int(u)))
    following = b.add(kk, _int(by))
    kk.add_incoming(following, block)
    for phi, value in zip(rolling, out, strict=True):
        phi.add_incoming(value, block)
    b.cbranch(b.icmp_signed("<", following, k1), block, after)
    return out


def _write_tile(fn: ir.Function, rows: int, columns: int) -> None:
    """The body: load or zero the sums, two steps a turn, one more if k is odd, store."""
    b = ir.IRBuilder(fn.append_basic_block("entry"))
    a, lda, w, ldw, k, c, ldc, add = fn.args
    a_rows = [b.gep(a, [b.mul(lda, _int(i))]) for i in range(rows)]
    places = [b.gep(c, [b.add(b.mul(ldc, _int(i)), _int(j))]) for i in range(rows) for j in range(0, columns, 16)]
    places = [b.bitcast(p, _VF.as_pointer()) for p in places]
    entry = b.block
    load, start, main, mid, tail, done = (
        b.append_basic_block(n) for n in ("load", "start", "main", "mid", "tail", "done")
    )
    b.cbranch(b.icmp_signed("!=", add, _int(0)), load, start)
    b.position_at_end(load)
    old = [_load(b, p) for p in places]
    b.branch(start)
    b.position_at_end(start)
    first = [_phi(b, (ir.Constant(_VF, None), entry), (value, load)) for value in old]
    even = b.and_(k, _int(-2))
    b.cbranch(b.icmp_signed(">", even, _int(0)), main, mid)

    def step(sums: list, kk: Any) -> list:
        return _steps(b, sums, a_rows, w, ldw, kk)

    turned = _loop(b, first, (start, main, mid), _int(0), even, 2, step)
    b.position_at_end(mid)
    between = [_phi(b, (x, start), (y, main)) for x, y in zip(first, turned, strict=True)]
    b.cbranch(b.icmp_signed("<", even, k), tail, done)
    last = _loop(b, between, (mid, tail, done), even, k, 1, step)
    b.position_at_end(done)
    sums = [_phi(b, (x, mid), (y, tail)) for x, y in zip(between, last, strict=True)]
    for place, value in zip(places, sums, strict=True):
        b.store(value, place).align = 4
    b.ret_void()


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
        word, name = (_I32, "bf16") if a.dtype == types.uint32 else (_F32, "float32")
        kind = [word.as_pointer(), _I64, word.as_pointer(), _I64, _I64, _F32.as_pointer(), _I64, _I64]
        name = f"peft_core_tile_{rows}x{columns}_{name}"

        def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            fn = b.module.globals.get(name)
            if fn is None:  # one copy a module, not one a call: compile time
                fn = ir.Function(b.module, ir.FunctionType(ir.VoidType(), kind), name)
                fn.linkage = "internal"
                fn.attributes.add("noinline")
                _write_tile(fn, rows, columns)
            left = _at(context, b, signature, args, 0, args[1], word)
            right = _at(context, b, signature, args, 3, args[4], word)
            out = _at(context, b, signature, args, 7, args[8], _F32)
            b.call(fn, [left, args[2], right, args[5], args[6], out, args[9], args[10]])
            return context.get_dummy_value()

        return signature, write

    return tile


tile_8x48 = make_tile(8, 48)
tile_6x64 = make_tile(6, 64)
tile_8x16 = make_tile(8, 16)


# ------------------------------------------------------------------------------------------------ bf16 and float32


def _sixteen(context: Any, b: ir.IRBuilder, signature: Any, args: Any, offset: Any) -> Any:
    floats = _at(context, b, signature, args, 0, offset, _F32)
    return _load(b, b.bitcast(floats, _VF.as_pointer()))


def _rounded(context: Any, b: ir.IRBuilder, signature: Any, args: Any, offset: Any) -> Any:
    return b.bitcast(b.fptrunc(_sixteen(context, b, signature, args, offset), _VB16), _VH)


@_intrinsic
def round16(typing, src, s0, dst, d0):  # type: ignore[no-untyped-def]
    """dst[d0:d0+16] = src[s0:s0+16] (float32): as it is, or bf16 bits (uint16), to nearest even, NaN stays NaN."""
    half = dst.dtype == types.uint16

    def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out = _at(context, b, signature, args, 2, args[3], _I16 if half else _F32)
        value = (_rounded if half else _sixteen)(context, b, signature, args, args[1])
        b.store(value, b.bitcast(out, value.type.as_pointer())).align = 2 if half else 4
        return context.get_dummy_value()

    return types.void(src, types.intp, dst, types.intp), write


@_intrinsic
def pair16(typing, src, s0, s1, dst, d0):  # type: ignore[no-untyped-def]
    """dst[d0:d0+16] (uint32) = bf16 bits of src[s0:] below those of src[s1:]: two rows become one row of pairs."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        low, high = (b.zext(_rounded(context, b, signature, args, args[i]), _VI) for i in (1, 2))
        out = b.bitcast(_at(context, b, signature, args, 3, args[4], _I32), _VI.as_pointer())
        b.store(b.or_(low, b.shl(high, ir.Constant(_VI, [16] * 16))), out).align = 4
        return context.get_dummy_value()

    return types.void(src, types.intp, types.intp, dst, types.intp), write


@njit(**FAST)
def probe(t, T, a, w, c):  # type: ignore[no-untyped-def]
    """One tile, to see whether it can be compiled and run here."""
    if t == 0:
        tile_8x48(a, 0, 1, w, 0, COLUMNS, 1, c, 0, COLUMNS, 0)
