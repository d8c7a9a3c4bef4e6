"""Choosing elements by place: triangles, elements along an axis, repeated rows, running sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..dtypes import accumulate_dtype, is_float
from ..tape import op
from .common import rounded, widen


def _triangle(name: str, text: str) -> Any:
    def triangle(x: Array, *, diagonal: int = 0) -> Any:
        if x.ndim < 2:
            raise ValueError(f"{name} of shape {x.shape}; expected at least two dimensions.")
        cut = getattr(xp_of(x), name)
        return cut(x, diagonal), (lambda gy: cut(gy, diagonal),)

    triangle.__name__ = triangle.__qualname__ = name
    triangle.__doc__ = f"The last two dimensions with zeros {text} the diagonal (0: the main one).  Retains nothing."
    return op(triangle)


tril, triu = _triangle("tril", "above"), _triangle("triu", "below")


@op
def gather(x: Array, index: Array, *, axis: int) -> Any:
    """y[..., i, ...] = x[..., index[..., i, ...], ...] along ``axis``; index has x's number of dimensions.

    Gradients of elements taken several times add up.  Retains index.  Raises ValueError for shapes that do not fit,
    IndexError for an index outside x.
    """
    xp, shape, dtype, axis = xp_of(x), x.shape, x.dtype, axis % max(x.ndim, 1)
    fits = all(m <= n or i == axis for i, (m, n) in enumerate(zip(index.shape, shape, strict=False)))
    if index.ndim != len(shape) or index.dtype.kind not in "iu" or not fits:
        raise ValueError(
            f"gather of x {shape} by index {index.shape} ({index.dtype}) along axis {axis}; expected integers in "
            "as many dimensions, no larger than x outside the axis."
        )
    if index.size and (int(index.min()) < 0 or int(index.max()) >= shape[axis]):
        raise IndexError(
            f"gather got indices from {int(index.min())} to {int(index.max())}; expected 0 to {shape[axis] - 1}."
        )
    size = index.shape

    def at(index: Array) -> tuple:
        return tuple(index if i == axis else g for i, g in enumerate(xp.ogrid[tuple(slice(n) for n in size)]))

    def gx(gy: Array) -> Array:
        g = xp.zeros(shape, accumulate_dtype(dtype))
        xp.add.at(g, at(index), widen(gy))
        return rounded(g, dtype, xp)

    return x[at(index)], (gx, None)


@op
def repeat(x: Array, *, times: tuple[int, ...]) -> Any:
    """x laid side by side ``times`` along each dimension (more of them than x has: new ones in front).

    Retains nothing.  Raises ValueError for fewer than x has.
    """
    if len(times) < x.ndim:
        raise ValueError(f"repeat of shape {x.shape} by {times}; expected a number for each dimension.")
    xp, shape, dtype = xp_of(x), x.shape, x.dtype
    full = (1,) * (len(times) - x.ndim) + shape
    split = [n for pair in zip(times, full, strict=True) for n in pair]

    def gx(gy: Array) -> Array:
        g = widen(gy).reshape(split).sum(axis=tuple(range(0, len(split), 2)))
        return rounded(g, dtype, xp).reshape(shape)

    return xp.tile(x, times), (gx,)


@op
def cumsum(x: Array, *, axis: int) -> Any:
    """Running sums along ``axis``; half types accumulate in float32, integers in int64.  Retains nothing."""
    xp, dtype = xp_of(x), x.dtype
    y = xp.cumsum(widen(x), axis=axis)

    def gx(gy: Array) -> Array:
        return rounded(xp.flip(xp.cumsum(xp.flip(widen(gy), axis), axis=axis), axis), dtype, xp)

    return rounded(y, dtype if is_float(dtype) else np.dtype(np.int64), xp), (gx,)
