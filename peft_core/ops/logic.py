"""Ops whose results have no slope: tests, bits, places of extremes, rounding."""

from __future__ import annotations

from typing import Any

from ..backend import Array, xp_of
from ..tape import op
from .common import fit_like, normalized_axes, operands, rounded, widen


def _test(name: str, text: str) -> Any:
    def test(x: Array) -> Any:
        xp = xp_of(x)
        return xp.asarray(getattr(xp, name)(widen(x))), None

    test.__name__ = test.__qualname__ = name
    test.__doc__ = f"True where an element is {text}; without a gradient."
    return op(test)


isnan, isinf, isfinite = _test("isnan", "NaN"), _test("isinf", "infinite"), _test("isfinite", "neither NaN nor inf")


def _bits(name: str, symbol: str) -> Any:
    def bits(a: Array, b: Array) -> Any:
        xp, dtype, (a, b) = operands(a, b)
        if dtype.kind not in "biu":
            raise TypeError(f"{symbol} of {dtype} elements; expected bool or integers. Compare first, as in x > 0.")
        return xp.asarray(getattr(xp, name)(a, b)), None

    bits.__name__ = bits.__qualname__ = name
    bits.__doc__ = f"a {symbol} b, of bools or bits of integers; without a gradient.  Raises TypeError for floats."
    return op(bits)


bitwise_and, bitwise_or, bitwise_xor = _bits("bitwise_and", "&"), _bits("bitwise_or", "|"), _bits("bitwise_xor", "^")


@op
def bitwise_not(x: Array) -> Any:
    """~x, of bools or of the bits of integers; without a gradient.  Raises TypeError for floats."""
    if x.dtype.kind not in "biu":
        raise TypeError(f"~ of {x.dtype} elements; expected bool or integers. Compare first, as in x > 0.")
    return xp_of(x).asarray(~x), None


def _quantifier(name: str, text: str) -> Any:
    def over(x: Array, *, axis: Any = None, keepdims: bool = False) -> Any:
        xp = xp_of(x)
        return xp.asarray(getattr(x != 0, name)(axis=normalized_axes(axis, x.ndim), keepdims=keepdims)), None

    over.__name__ = over.__qualname__ = name
    over.__doc__ = f"True where {text} over ``axis`` is not zero; without a gradient."
    return op(over)


any, all = _quantifier("any", "some element"), _quantifier("all", "every element")


def _place(name: str, text: str) -> Any:
    def place(x: Array, *, axis: int | None = None, keepdims: bool = False) -> Any:
        xp = xp_of(x)
        if axis is None and keepdims:
            return getattr(xp, name)(widen(x)).reshape((1,) * x.ndim), None
        found = xp.asarray(getattr(xp, name)(widen(x), axis=axis))
        return (xp.expand_dims(found, axis) if keepdims else found), None

    place.__name__ = place.__qualname__ = name
    place.__doc__ = (
        f"Where the {text} element over ``axis`` stands, int64: the first of equals, or of the NaN if there are any; "
        "over all of x in C order without ``axis``.  Without a gradient."
    )
    return op(place)


argmax, argmin = _place("argmax", "largest"), _place("argmin", "smallest")


@op
def argsort(x: Array, *, axis: int = -1, descending: bool = False) -> Any:
    """The places of the elements in order along ``axis``, int64; equal ones in theirs, NaN counts as the largest.

    Without a gradient.
    """
    xp, wide = xp_of(x), widen(x)
    if not descending:
        return xp.argsort(wide, axis=axis, kind="stable"), None
    back = xp.argsort(xp.flip(wide, axis), axis=axis, kind="stable")  # flipped twice, equal ones stay in their order
    return xp.flip(x.shape[axis] - 1 - back, axis), None


@op
def nonzero(x: Array) -> Any:
    """The places of the elements that are not zero, int64 (number of them, dimensions).  Without a gradient."""
    return xp_of(x).argwhere(x != 0), None


def _step(name: str, text: str) -> Any:
    def step(x: Array) -> Any:
        xp, dtype = xp_of(x), x.dtype
        return rounded(getattr(xp, name)(widen(x)), dtype, xp), (lambda gy: xp.zeros_like(gy),)

    step.__name__ = step.__qualname__ = name
    step.__doc__ = f"{text}; the gradient is 0 everywhere.  Retains nothing."
    return op(step)


floor, ceil = _step("floor", "The largest whole number <= x"), _step("ceil", "The smallest whole number >= x")
round, sign = _step("rint", "The nearest whole number, the even one of two"), _step("sign", "-1, 0 or 1, or NaN")


@op
def floor_divide(a: Array, b: Array) -> Any:
    """floor(a / b), elementwise, without a gradient."""
    xp, dtype, (a, b) = operands(a, b)
    return rounded(xp.floor_divide(widen(a, dtype), widen(b, dtype)), dtype, xp), None


@op
def remainder(a: Array, b: Array) -> Any:
    """a - b floor(a / b), with the sign of b.  Retains a and b for gb."""
    xp, dtype, (a, b) = operands(a, b)
    to_a, to_b = fit_like(a), fit_like(b)

    def gb(gy: Array) -> Array:
        return to_b(-widen(gy) * xp.floor_divide(widen(a, dtype), widen(b, dtype)))

    return rounded(xp.remainder(widen(a, dtype), widen(b, dtype)), dtype, xp), (lambda gy: to_a(widen(gy)), gb)
