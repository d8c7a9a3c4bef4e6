"""What kernels on the register tile of ``tiles.py`` are made of besides it: bf16 bits, words and elements, exp.

Imports numba at its top and is itself imported inside functions only, as tiles.py is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .kernels import FAST_MATH, dispatcher

INLINE: dict[str, Any] = {"inline": "always", "error_model": "numpy", "fastmath": FAST_MATH}
_PARTS = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.rglob("*tile*.py"))))


def kernel(function: Callable) -> Any:
    """Decorator: a kernel ``(t, T, *args)`` for ``kernels.run_kernel``, compiled once and kept on disk.

    Parts of it that stand in another such file are copied into it, so the contents of all of them count there.
    """
    return dispatcher(function, _PARTS.hexdigest())


_intrinsic: Any = intrinsic  # its annotation counts the typing context among a caller's arguments

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


# ------------------------------------------------------------------------------------------------ words and elements


def per(words: Any) -> int:
    """Elements in a word: 2 of uint32, 1 of float32."""
    raise NotImplementedError("for kernels")


@overload(per)
def _per(words):  # type: ignore[no-untyped-def]
    n = 2 if words.dtype == types.uint32 else 1

    def written(words):  # type: ignore[no-untyped-def]
        return n

    return written


def elements(words: Any) -> Any:
    """The elements in flat words: bf16 bits (uint16) of uint32, float32 of float32."""
    raise NotImplementedError("for kernels")


@overload(elements)
def _elements(words):  # type: ignore[no-untyped-def]
    def halves(words):  # type: ignore[no-untyped-def]
        return words.view(np.uint16)

    def whole(words):  # type: ignore[no-untyped-def]
        return words

    return halves if words.dtype == types.uint32 else whole


def operand(floats: Any, words: Any) -> Any:
    """Where values computed in ``floats`` (float32) stand as words: where they are, or in ``words`` if that is bf16."""
    raise NotImplementedError("for kernels")


@overload(operand)
def _operand(floats, words):  # type: ignore[no-untyped-def]
    def apart(floats, words):  # type: ignore[no-untyped-def]
        return words

    def same(floats, words):  # type: ignore[no-untyped-def]
        return floats

    return apart if words.dtype == types.uint32 else same


_F32, _I32, _I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)


def _place(context: Any, b: ir.IRBuilder, kind: Any, array: Any, k: Any) -> Any:
    """A pointer to element k of a one-dimensional array."""
    held = context.make_array(kind)(context, b, array)
    return cgutils.get_item_pointer2(
        context, b, held.data, cgutils.unpack_tuple(b, held.shape), cgutils.unpack_tuple(b, held.strides),
        kind.layout, [k], wraparound=False, boundscheck=False,
    )  # fmt: skip


def _u32(n: int) -> ir.Constant:
    return ir.Constant(_I32, n)


@_intrinsic
def get(typing, x, k):  # type: ignore[no-untyped-def]
    """x[k] as a float32, of bf16 bits or float32.  In LLVM's words, for a call of a function ends vectorisation."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        value = b.load(_place(context, b, signature.args[0], *args))
        return value if x.dtype == types.float32 else b.bitcast(b.shl(b.zext(value, _I32), _u32(16)), _F32)

    return types.float32(x, types.intp), write


@_intrinsic
def put(typing, out, k, value):  # type: ignore[no-untyped-def]
    """out[k] = value, a float32, rounded as ``bf16_bits`` does where out holds bf16 bits."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        place, bits = _place(context, b, signature.args[0], args[0], args[1]), args[2]
        if out.dtype == types.uint16:
            u = b.bitcast(bits, _I32)
            high = b.lshr(u, _u32(16))
            odd = b.and_(high, _u32(1))
            nearest = b.lshr(b.add(u, b.add(odd, _u32(0x7FFF))), _u32(16))
            nan = b.icmp_unsigned(">", b.and_(u, _u32(0x7FFFFFFF)), _u32(0x7F800000))
            bits = b.trunc(b.select(nan, b.or_(high, _u32(0x40)), nearest), _I16)
        b.store(bits, place)
        return context.get_dummy_value()

    return types.void(out, types.intp, types.float32), write


def _prefetch(write: int) -> Any:
    @_intrinsic
    def prefetch(typing, x, k):  # type: ignore[no-untyped-def]
        def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            place = b.bitcast(_place(context, b, signature.args[0], *args), ir.IntType(8).as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
            fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
            b.call(fetch, [place, _u32(write), _u32(3), _u32(1)])
            return context.get_dummy_value()

        return types.void(x, types.intp), emit

    return prefetch


_will_read, _will_write = _prefetch(0), _prefetch(1)


@njit(**INLINE)
def will_read(x, at, ld, rows, columns):  # type: ignore[no-untyped-def]
    """The cache lines of a block of a flat array, from x[at], are on their way while other work goes on."""
    for i in range(rows):
        for c in range(0, columns, 64 // x.itemsize):
            _will_read(x, at + i * ld + c)
        _will_read(x, at + i * ld + columns - 1)


@njit(**INLINE)
def will_write(x, at, ld, rows, columns):  # type: ignore[no-untyped-def]
    """``will_read`` for a block that is written."""
    for i in range(rows):
        for c in range(0, columns, 64 // x.itemsize):
            _will_write(x, at + i * ld + c)
        _will_write(x, at + i * ld + columns - 1)


def pair_rows(rows: Any, ld: int, n: int, width: int, out: Any, ldo: int) -> None:
    """n rows of elements (even for bf16), ``ld`` apart, become the right operand of a product that sums over rows."""
    raise NotImplementedError("for kernels")


@overload(pair_rows)
def _pair_rows(rows, ld, n, width, out, ldo):  # type: ignore[no-untyped-def]
    def halves(rows, ld, n, width, out, ldo):  # type: ignore[no-untyped-def]
        for q in range(n // 2):
            low = rows[2 * q * ld : 2 * q * ld + width]
            high = rows[(2 * q + 1) * ld : (2 * q + 1) * ld + width]
            to = out[q * ldo : q * ldo + width]
            for k in range(width):
                to[k] = np.uint32(low[k]) | (np.uint32(high[k]) << _U16)

    def whole(rows, ld, n, width, out, ldo):  # type: ignore[no-untyped-def]
        for q in range(n):
            row, to = rows[q * ld : q * ld + width], out[q * ldo : q * ldo + width]
            for k in range(width):
                to[k] = row[k]

    return halves if out.dtype == types.uint32 else whole


# ------------------------------------------------------------------------------------------------ exp

# exp(x) = 2^k e^f, |f| <= ln(2)/2, ln(2) in two parts (Cody and Waite); e^f by the Cephes polynomial for expf
_LOG2E, _LN2_HIGH, _LN2_LOW = _F4(1 / math.log(2)), _F4(0.693359375), _F4(-2.12194440e-4)
_E = tuple(_F4(c) for c in (0.5000000120, 0.1666666546, 0.04166579589, 0.008333451907, 0.001398199951, 1.987569150e-4))
_HALF, _ONE, _ZERO, _INF, _LOWEST = _F4(0.5), _F4(1), _F4(0), _F4(np.inf), _F4(-126)
_LARGEST, _SMALLEST = _F4(88.722836), _F4(-87.33654)  # the logarithms of the largest and the smallest normal float32
_P2 = tuple(_F4(c) for c in (1.0000026, 0.69299535, 0.24160436, 0.05174499, 0.01367652))  # of 2^f, 0 <= f < 1
_Q2 = tuple(_F4(c) for c in (0.99999992507, 0.69315307317, 0.24015361719, 0.05582631784, 0.00898934018, 0.00187757669))


@njit(**INLINE)
def power_of_two(k):  # type: ignore[no-untyped-def]
    """2^k as a float32, for an int32 k of -126 .. 127."""
    return np.int32((k + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(**INLINE)
def exp(x):  # type: ignore[no-untyped-def]
    """e^x of a float32, 3e-7 relative; NaN and inf come out as they should, 0 for what no normal number can hold.

    Without a multiply-add 5e-6: fast-math joins the two parts of ln(2) again, and k ln(2) is then rounded by itself.
    """
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
def exp2(x, exact):  # type: ignore[no-untyped-def]
    """2^x for x <= 0; below 2^-126 it stays there; a NaN stays.  2e-5 relative, which rounding to bf16 hides.

    ``exact``: 2e-7.  Where it is known at compile time, nothing is left of the other.
    """
    x = _LOWEST if x < _LOWEST else x
    k = np.floor(x)
    f = x - k
    if exact:
        p = ((((_Q2[5] * f + _Q2[4]) * f + _Q2[3]) * f + _Q2[2]) * f + _Q2[1]) * f + _Q2[0]
    else:
        p = (((_P2[4] * f + _P2[3]) * f + _P2[2]) * f + _P2[1]) * f + _P2[0]
    return p * power_of_two(np.int32(k))
