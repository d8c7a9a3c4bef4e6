"""Reductions over one, several or all axes. Half types accumulate in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..dtypes import float32, is_float
from ..tape import op
from .common import normalized_axes, rounded, widen


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


@op
def sum(x: Array, *, axis: Any = None, keepdims: bool = False) -> Any:
    """The sum over ``axis``.  Retains nothing; the gradient is a broadcast view of gy."""
    xp, shape, axes = xp_of(x), x.shape, normalized_axes(axis, x.ndim)
    kept = _kept(shape, axes)
    y = widen(x).sum(axis=axes, keepdims=keepdims)
    dtype = x.dtype if is_float(x.dtype) else y.dtype
    return rounded(y, dtype, xp), (lambda gy: xp.broadcast_to(gy.reshape(kept), shape),)


@op
def mean(x: Array, *, axis: Any = None, keepdims: bool = False) -> Any:
    """The mean over ``axis``; integers give float32.  Retains nothing."""
    xp, shape, axes = xp_of(x), x.shape, normalized_axes(axis, x.ndim)
    dtype = x.dtype if is_float(x.dtype) else float32
    kept, count = _kept(shape, axes), _count(shape, axes)
    y = rounded(widen(x, dtype).mean(axis=axes, keepdims=keepdims), dtype, xp)

    def gx(gy: Array) -> Array:
        return xp.broadcast_to(rounded(widen(gy) / count, dtype, xp).reshape(kept), shape)

    return y, (gx,)


def _count(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return int(np.prod([shape[a] for a in axes], dtype=np.int64))


@op
def max(x: Array, *, axis: Any = None, keepdims: bool = False) -> Any:
    """The largest element over ``axis``, NaN if there is one; equal elements share the gradient.  Retains x and y."""
    return _extreme(x, "max", axis, keepdims)


@op
def min(x: Array, *, axis: Any = None, keepdims: bool = False) -> Any:
    """The smallest element over ``axis``, NaN if there is one; equal elements share the gradient.  Retains x and y."""
    return _extreme(x, "min", axis, keepdims)


def _extreme(x: Array, which: str, axis: Any, keepdims: bool) -> Any:
    xp, axes, dtype = xp_of(x), normalized_axes(axis, x.ndim), x.dtype
    kept = _kept(x.shape, axes)
    y = rounded(getattr(xp, which)(widen(x), axis=axes, keepdims=keepdims), dtype, xp)

    def gx(gy: Array) -> Array:
        hit = (x == y.reshape(kept)).astype(widen(x).dtype)
        return rounded(widen(gy).reshape(kept) * hit / hit.sum(axis=axes, keepdims=True), dtype, xp)

    return y, (gx,)


@op
def var(x: Array, *, axis: Any = None, keepdims: bool = False, correction: int = 1) -> Any:
    """The variance over ``axis``: sum((x - mean)^2) / (n - correction).  Retains x."""
    xp, axes, dtype = xp_of(x), normalized_axes(axis, x.ndim), x.dtype
    kept, count = _kept(x.shape, axes), _count(x.shape, axes) - correction
    y = rounded(widen(x).var(axis=axes, keepdims=keepdims, ddof=correction), dtype, xp)

    def gx(gy: Array) -> Array:
        centred = widen(x) - widen(x).mean(axis=axes, keepdims=True)
        return rounded(widen(gy).reshape(kept) * centred * (2 / count), dtype, xp)

    return y, (gx,)
