"""Elementwise arithmetic, with broadcasting; scalars take the dtype of the Tensor they meet.

Half types are computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

from .. import backend
from ..backend import Array, xp_of
from ..dtypes import as_dtype
from ..tape import op
from .common import fit_like, operands, rounded, widen


@op
def add(a: Array, b: Array) -> Any:
    """a + b.  Retains nothing."""
    xp, dtype, (a, b) = operands(a, b)
    return rounded(widen(a, dtype) + widen(b, dtype), dtype, xp), (_through(a, dtype), _through(b, dtype))


@op
def sub(a: Array, b: Array) -> Any:
    """a - b.  Retains nothing."""
    xp, dtype, (a, b) = operands(a, b)
    to_b = fit_like(b)
    return rounded(widen(a, dtype) - widen(b, dtype), dtype, xp), (_through(a, dtype), lambda gy: to_b(-widen(gy)))


def _through(x: Array, dtype: Any) -> Any:
    """The vjp that hands gy on; a broadcast is summed in float32 for half types."""
    to_x, same = fit_like(x), x.dtype == dtype
    shape = x.shape
    return lambda gy: gy if same and gy.shape == shape else to_x(widen(gy))


@op
def mul(a: Array, b: Array) -> Any:
    """a * b.  Retains: b for ga; a for gb."""
    xp, dtype, (a, b) = operands(a, b)
    to_a, to_b = fit_like(a), fit_like(b)
    return rounded(widen(a, dtype) * widen(b, dtype), dtype, xp), (
        lambda gy: to_a(widen(gy) * widen(b, dtype)),
        lambda gy: to_b(widen(gy) * widen(a, dtype)),
    )


@op
def div(a: Array, b: Array) -> Any:
    """a / b; integers give float32.  Retains: b for ga; a and b for gb."""
    xp, dtype, (a, b) = operands(a, b, floating=True)
    to_a, to_b = fit_like(a), fit_like(b)

    def gb(gy: Array) -> Array:
        wide = widen(b, dtype)
        return to_b(-widen(gy) * widen(a, dtype) / (wide * wide))

    return rounded(widen(a, dtype) / widen(b, dtype), dtype, xp), (lambda gy: to_a(widen(gy) / widen(b, dtype)), gb)


@op
def neg(x: Array) -> Any:
    """-x.  Retains nothing."""
    dtype = x.dtype
    return rounded(-x, dtype, xp_of(x)), (lambda gy: (-gy).astype(dtype, copy=False),)


@op
def pow(x: Array, *, exponent: float) -> Any:
    """x ** exponent, the exponent a number.  Retains x."""
    exponent = exponent if isinstance(exponent, int) else float(exponent)  # a NumPy scalar would promote
    xp, dtype, (x, _) = operands(x, exponent)
    y = rounded(widen(x, dtype) ** exponent, dtype, xp)

    def gx(gy: Array) -> Array:
        if not exponent:  # 0 * 0 ** -1 would be NaN
            return rounded(widen(gy) * 0, dtype, xp)
        return rounded(widen(gy) * exponent * widen(x, dtype) ** (exponent - 1), dtype, xp)

    return y, (gx,)


@op
def power(a: Array, b: Array) -> Any:
    """a ** b, elementwise; the gradient at a = 0 is that of torch: 0 for b.  Retains: a and b; y besides for gb."""
    xp, dtype, (a, b) = operands(a, b)
    to_a, to_b = fit_like(a), fit_like(b)
    y = rounded(widen(a, dtype) ** widen(b, dtype), dtype, xp)

    def ga(gy: Array) -> Array:
        wide, exponent = widen(a, dtype), widen(b, dtype)
        slope = xp.where(exponent == 0, 0, exponent * wide ** xp.where(exponent == 0, 1, exponent - 1))
        return to_a(widen(gy) * slope)

    def gb(gy: Array) -> Array:
        wide = widen(a, dtype)
        return to_b(widen(gy) * widen(y) * xp.log(xp.where(wide == 0, 1, wide)))

    return y, (ga, gb)


@op
def exp(x: Array) -> Any:
    """e ** x.  Retains the output."""
    xp, dtype, (x,) = operands(x, floating=True)
    y = rounded(xp.exp(widen(x, dtype)), dtype, xp)
    return y, (lambda gy: rounded(widen(gy) * widen(y), dtype, xp),)


@op
def log(x: Array) -> Any:
    """The natural logarithm.  Retains x."""
    xp, dtype, (x,) = operands(x, floating=True)
    return rounded(xp.log(widen(x, dtype)), dtype, xp), (lambda gy: rounded(widen(gy) / widen(x), dtype, xp),)


@op
def log1p(x: Array) -> Any:
    """log(1 + x), exact for small x.  Retains x."""
    xp, dtype, (x,) = operands(x, floating=True)
    return rounded(xp.log1p(widen(x, dtype)), dtype, xp), (lambda gy: rounded(widen(gy) / (1 + widen(x)), dtype, xp),)


@op
def sqrt(x: Array) -> Any:
    """The square root.  Retains the output."""
    xp, dtype, (x,) = operands(x, floating=True)
    y = rounded(xp.sqrt(widen(x, dtype)), dtype, xp)
    return y, (lambda gy: rounded(widen(gy) / (2 * widen(y)), dtype, xp),)


@op
def rsqrt(x: Array) -> Any:
    """1 / sqrt(x).  Retains x."""
    xp, dtype, (x,) = operands(x, floating=True)
    y = rounded(1 / xp.sqrt(widen(x, dtype)), dtype, xp)
    return y, (lambda gy: rounded(-widen(gy) / (2 * widen(x) * xp.sqrt(widen(x))), dtype, xp),)


@op
def abs(x: Array) -> Any:
    """|x|; the gradient at 0 is 0.  Retains x."""
    xp, dtype = xp_of(x), x.dtype
    return rounded(xp.abs(x), dtype, xp), (lambda gy: rounded(widen(gy) * xp.sign(widen(x)), dtype, xp),)


@op
def sin(x: Array) -> Any:
    """sin x, in radians.  Retains x."""
    xp, dtype, (x,) = operands(x, floating=True)
    return rounded(xp.sin(widen(x, dtype)), dtype, xp), (lambda gy: rounded(widen(gy) * xp.cos(widen(x)), dtype, xp),)


@op
def cos(x: Array) -> Any:
    """cos x, in radians.  Retains x."""
    xp, dtype, (x,) = operands(x, floating=True)
    return rounded(xp.cos(widen(x, dtype)), dtype, xp), (lambda gy: rounded(-widen(gy) * xp.sin(widen(x)), dtype, xp),)


@op
def maximum(a: Array, b: Array) -> Any:
    """The larger of a and b, NaN if either is; equal elements share the gradient.  Retains a and b."""
    xp, dtype, (a, b) = operands(a, b)
    y = rounded(xp.maximum(widen(a, dtype), widen(b, dtype)), dtype, xp)
    return y, _selected(a, b, xp.greater, dtype)


@op
def minimum(a: Array, b: Array) -> Any:
    """The smaller of a and b, NaN if either is; equal elements share the gradient.  Retains a and b."""
    xp, dtype, (a, b) = operands(a, b)
    y = rounded(xp.minimum(widen(a, dtype), widen(b, dtype)), dtype, xp)
    return y, _selected(a, b, xp.less, dtype)


def _selected(a: Array, b: Array, wins: Any, dtype: Any) -> tuple:
    to_a, to_b = fit_like(a), fit_like(b)

    def share(one: Array, other: Array) -> Array:
        one, other = widen(one, dtype), widen(other, dtype)
        return wins(one, other) + (one == other) * one.dtype.type(0.5)

    return lambda gy: to_a(widen(gy) * share(a, b)), lambda gy: to_b(widen(gy) * share(b, a))


@op
def clip(x: Array, *, low: float | None = None, high: float | None = None) -> Any:
    """x limited to [low, high] (None: no limit); NaN stays NaN; no gradient outside.  Retains x."""
    xp, dtype = xp_of(x), x.dtype

    def gx(gy: Array) -> Array:
        wide = widen(x)
        outside = xp.zeros(x.shape, bool)
        if low is not None:
            outside |= wide < low
        if high is not None:
            outside |= wide > high
        return rounded(xp.where(outside, xp.zeros((), dtype), gy), dtype, xp)

    return rounded(xp.clip(widen(x), low, high), dtype, xp), (gx,)


@op
def where(condition: Array, a: Array, b: Array) -> Any:
    """a where ``condition`` (bool) holds, else b.  Retains condition."""
    xp, dtype, (a, b) = operands(a, b)
    to_a, to_b, zero = fit_like(a), fit_like(b), xp.zeros((), dtype)
    y = xp.where(condition, a.astype(dtype, copy=False), b.astype(dtype, copy=False))
    return xp.asarray(y), (
        None,
        lambda gy: to_a(widen(xp.where(condition, gy, zero))),
        lambda gy: to_b(widen(xp.where(condition, zero, gy))),
    )


@op
def masked_fill(x: Array, mask: Array, *, value: float) -> Any:
    """x with ``value`` where ``mask`` (bool, broadcastable to x) holds.  Retains mask."""
    xp, dtype = xp_of(x), x.dtype
    zero = xp.zeros((), dtype)
    y = xp.where(mask, xp.asarray(value, dtype=dtype), x)
    return xp.asarray(y), (lambda gy: xp.asarray(xp.where(mask, zero, gy)), None)


@op
def clone(x: Array) -> Any:
    """A copy of x.  Retains nothing."""
    return x.copy(), (lambda gy: gy,)


@op
def astype(x: Array, *, dtype: Any) -> Any:
    """x in another dtype; the gradient comes back in x's.  Retains nothing."""
    source, target = x.dtype, as_dtype(dtype)
    return x.astype(target, copy=False), (lambda gy: gy.astype(source, copy=False),)


@op
def to_device(x: Array, *, device: Any) -> Any:
    """x on another device; the gradient comes back to x's.  Retains nothing."""
    source = backend.device_of(x)
    return backend.to_device(x, device), (lambda gy: backend.to_device(gy, source),)


def _compare(name: str, symbol: str) -> Any:
    def compare(a: Array, b: Array) -> Any:
        xp, dtype, (a, b) = operands(a, b)
        return xp.asarray(getattr(xp, name)(widen(a, dtype), widen(b, dtype))), None

    compare.__name__ = compare.__qualname__ = name
    compare.__doc__ = f"a {symbol} b, elementwise: bool, without a gradient."
    return op(compare)


eq, ne = _compare("equal", "=="), _compare("not_equal", "!=")
lt, le = _compare("less", "<"), _compare("less_equal", "<=")
gt, ge = _compare("greater", ">"), _compare("greater_equal", ">=")
