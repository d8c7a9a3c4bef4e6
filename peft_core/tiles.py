"""A register tile of bf16 products (AVX512-BF16), and the small parts that kernels around it are made of.

This module imports numba at its top and is therefore itself imported inside functions only, after
``kernels.tiles_supported()`` said yes. A kernel built on it is a plain ``@njit(**FAST)`` function ``(t, T, *args)``
that ``kernels.run_kernel`` runs on the pool; prologues and epilogues are ordinary loops around ``tile_8x48``.

The tile reads its left operand row-major and unpacked, its right operand in rows of pairs: a uint32 holds two
consecutive bf16 of the summed dimension, the earlier one in the lower half. 8 x 48 keeps 24 of the 32 vector registers
in sums and reaches 98 % of the instruction peak. Rules that measurements taught:
- kernels name other jitted functions as module globals; a closure over one is never found again in numba's disk cache;
- a float32 constant stands in ``np.float32(...)``, or numba computes in float64 and nothing is vectorised;
- the stride of a scratch operand is never a power of two: its rows would share cache sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .kernels import FAST_MATH

FAST: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": FAST_MATH}
INLINE: dict[str, Any] = {"inline": "always", "error_model": "numpy", "fastmath": FAST_MATH}
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


_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
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


def _steps(b: ir.IRBuilder, sums: list, a_rows: list, w: Any, ldw: Any, kk: Any) -> list:
    """The sums after one more pair of the summed dimension."""
    dot = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_VF, [_VF, _VB, _VB]), "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    vectors = len(sums) // len(a_rows)
    row = b.bitcast(b.gep(w, [b.mul(kk, ldw)]), _VI.as_pointer())
    ws = [b.bitcast(_load(b, b.gep(row, [_int(j)])), _VB) for j in range(vectors)]
    out = []
    for i, a_row in enumerate(a_rows):
        one = b.insert_element(ir.Constant(_VI, ir.Undefined), _load(b, b.gep(a_row, [kk])), ir.Constant(_I32, 0))
        all16 = b.bitcast(b.shuffle_vector(one, ir.Constant(_VI, ir.Undefined), ir.Constant(_VI, None)), _VB)
        out += [b.call(dot, [sums[i * vectors + j], all16, ws[j]]) for j in range(vectors)]
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

    Flat arrays with a first element and a row stride each: a and w uint32 (pairs of bf16, k counts pairs), c float32.
    ``columns`` is a multiple of 16.  Nothing is checked: the caller owns every element that it names.
    """
    name = f"peft_core_tile_{rows}x{columns}"
    words, floats = _I32.as_pointer(), _F32.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [words, _I64, words, _I64, _I64, floats, _I64, _I64])

    @_intrinsic
    def tile(typing, a, a0, lda, w, w0, ldw, k, c, c0, ldc, add):  # type: ignore[no-untyped-def]
        n = types.intp
        signature = types.void(a, n, n, w, n, n, n, c, n, n, n)

        def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            fn = b.module.globals.get(name)
            if fn is None:  # one copy a module, not one a call: compile time
                fn = ir.Function(b.module, kind, name)
                fn.linkage = "internal"
                fn.attributes.add("noinline")
                _write_tile(fn, rows, columns)
            left = _at(context, b, signature, args, 0, args[1], _I32)
            right = _at(context, b, signature, args, 3, args[4], _I32)
            out = _at(context, b, signature, args, 7, args[8], _F32)
            b.call(fn, [left, args[2], right, args[5], args[6], out, args[9], args[10]])
            return context.get_dummy_value()

        return signature, write

    return tile


tile_8x48 = make_tile(8, 48)
tile_6x64 = make_tile(6, 64)
tile_8x16 = make_tile(8, 16)


# ------------------------------------------------------------------------------------------------ bf16 and float32


def _rounded(context: Any, b: ir.IRBuilder, signature: Any, args: Any, offset: Any) -> Any:
    floats = _at(context, b, signature, args, 0, offset, _F32)
    return b.bitcast(b.fptrunc(_load(b, b.bitcast(floats, _VF.as_pointer())), _VB16), _VH)


@_intrinsic
def round16(typing, src, s0, dst, d0):  # type: ignore[no-untyped-def]
    """dst[d0:d0+16] (uint16) = bf16 bits of src[s0:s0+16] (float32), to nearest even, NaN stays NaN."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out = _at(context, b, signature, args, 2, args[3], _I16)
        b.store(_rounded(context, b, signature, args, args[1]), b.bitcast(out, _VH.as_pointer())).align = 2
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


@_intrinsic
def prefetch(typing, w, i):  # type: ignore[no-untyped-def]
    """A hint: bring the cache line of w[i] (uint32) to the second-level cache."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        fn = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        line = b.bitcast(_at(context, b, signature, args, 0, args[1], _I32), _I8.as_pointer())
        b.call(fn, [line, *(ir.Constant(_I32, v) for v in (0, 2, 1))])  # read, second level, data
        return context.get_dummy_value()

    return types.void(w, types.intp), write


_U16, _F4 = np.uint32(16), np.float32
_HALF_UP, _BIT, _QUIET, _MAGNITUDE, _INF_BITS = (np.uint32(n) for n in (0x7FFF, 1, 0x0040, 0x7FFFFFFF, 0x7F800000))


@njit(**INLINE)
def bf16_bits(x):  # type: ignore[no-untyped-def]
    """The bf16 bits (uint16) of a float32, to nearest even; a NaN stays one whatever its payload."""
    u = np.float32(x).view(np.uint32)
    nearest = (u + _HALF_UP + ((u >> _U16) & _BIT)) >> _U16
    return np.uint16(((u >> _U16) | _QUIET) if (u & _MAGNITUDE) > _INF_BITS else nearest)


@njit(**INLINE)
def widen(h):  # type: ignore[no-untyped-def]
    """The float32 of bf16 bits."""
    return np.uint32(np.uint32(h) << _U16).view(np.float32)


# ------------------------------------------------------------------------------------------------ exp

# exp(x) = 2^k e^f, |f| <= ln(2)/2, ln(2) in two parts (Cody and Waite); e^f by the Cephes polynomial for expf
_LOG2E, _LN2_HIGH, _LN2_LOW = _F4(1 / math.log(2)), _F4(0.693359375), _F4(-2.12194440e-4)
_E = tuple(_F4(c) for c in (0.5000000120, 0.1666666546, 0.04166579589, 0.008333451907, 0.001398199951, 1.987569150e-4))
_HALF, _ONE, _ZERO, _INF, _LOWEST = _F4(0.5), _F4(1), _F4(0), _F4(np.inf), _F4(-126)
_LARGEST, _SMALLEST = _F4(88.722836), _F4(-87.33654)  # the logarithms of the largest and the smallest normal float32
_P2 = tuple(_F4(c) for c in (1.0000026, 0.69299535, 0.24160436, 0.05174499, 0.01367652))  # of 2^f, 0 <= f < 1


@njit(**INLINE)
def power_of_two(k):  # type: ignore[no-untyped-def]
    """2^k as a float32, for an int32 k of -126 .. 127."""
    return np.int32((k + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(**INLINE)
def exp(x):  # type: ignore[no-untyped-def]
    """e^x of a float32, 3e-7 relative; NaN and inf come out as they should, 0 for what no normal number can hold."""
    y = _LARGEST if x > _LARGEST else x  # this way round a NaN stays
    y = _SMALLEST if y < _SMALLEST else y
    k = np.floor(y * _LOG2E + _HALF)
    f = y - k * _LN2_HIGH - k * _LN2_LOW
    p = ((((_E[5] * f + _E[4]) * f + _E[3]) * f + _E[2]) * f + _E[1]) * f + _E[0]
    p = p * f * f + f + _ONE
    # k goes into the exponent's bits, for 2^128 is no float32; as factors fast-math would join them again
    e = np.int32(np.float32(p).view(np.int32) + np.int32(np.int32(k) << np.int32(23))).view(np.float32)
    e = _ZERO if x < _SMALLEST else e
    return _INF if x > _LARGEST else e


@njit(**INLINE)
def exp2(x):  # type: ignore[no-untyped-def]
    """2^x for x <= 0, 2e-5 relative, which rounding to bf16 hides; below 2^-126 it stays there; a NaN stays."""
    x = _LOWEST if x < _LOWEST else x
    k = np.floor(x)
    f = x - k
    p = (((_P2[4] * f + _P2[3]) * f + _P2[2]) * f + _P2[1]) * f + _P2[0]
    return p * power_of_two(np.int32(k))


# ------------------------------------------------------------------------------------------------ packed weights


@njit(**FAST)
def pack_rows(t, T, w, out):  # type: ignore[no-untyped-def]
    """w (O, I) bf16 bits -> out [O/48][ceil(I/2)][48] pairs, zero padded: the right operand of x w^T."""
    n_out, n_in = w.shape
    pairs = (n_in + 1) // 2
    panels = (n_out + COLUMNS - 1) // COLUMNS
    for p in range(panels * t // T, panels * (t + 1) // T):
        for j in range(COLUMNS):
            o, at = p * COLUMNS + j, p * pairs * COLUMNS + j
            for k in range(pairs):
                pair = np.uint32(0)
                if o < n_out:
                    pair = np.uint32(w[o, 2 * k])
                    if 2 * k + 1 < n_in:
                        pair |= np.uint32(w[o, 2 * k + 1]) << _U16
                out[at + k * COLUMNS] = pair


@njit(**FAST)
def pack_columns(t, T, w, out):  # type: ignore[no-untyped-def]
    """w (O, I) bf16 bits -> out [I/48][ceil(O/2)][48] pairs, zero padded: the right operand of g w."""
    n_out, n_in = w.shape
    pairs = (n_out + 1) // 2
    panels = (n_in + COLUMNS - 1) // COLUMNS
    for k in range(pairs * t // T, pairs * (t + 1) // T):
        for p in range(panels):
            at = (p * pairs + k) * COLUMNS
            for j in range(COLUMNS):
                i, pair = p * COLUMNS + j, np.uint32(0)
                if i < n_in:
                    pair = np.uint32(w[2 * k, i])
                    if 2 * k + 1 < n_out:
                        pair |= np.uint32(w[2 * k + 1, i]) << _U16
                out[at + j] = pair


@njit(**FAST)
def unpack_rows(t, T, packed, w):  # type: ignore[no-untyped-def]
    """The inverse of pack_rows, bit for bit: a packed frozen weight needs no second copy to be saved or merged."""
    n_out, n_in = w.shape
    pairs = (n_in + 1) // 2
    for o in range(n_out * t // T, n_out * (t + 1) // T):
        at = o // COLUMNS * pairs * COLUMNS + o % COLUMNS
        for k in range(n_in):
            w[o, k] = np.uint16(packed[at + k // 2 * COLUMNS] >> np.uint32(k % 2 * 16))


@njit(**FAST)
def probe(t, T, a, w, c):  # type: ignore[no-untyped-def]
    """One tile, to see whether it can be compiled and run here."""
    if t == 0:
        tile_8x48(a, 0, 1, w, 0, COLUMNS, 1, c, 0, COLUMNS, 0)
