"""Shapes: views where the memory allows, so that they cost nothing; joining, splitting and indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..dtypes import accumulate_dtype, promote
from ..tape import op
from ..tensor import Tensor
from .common import fit_like, normalized_axes, rounded, widen


@op
def reshape(x: Array, *, shape: Any) -> Any:
    """The same elements, in C order, in another shape (one size may be -1).  Retains nothing."""
    before = x.shape
    return x.reshape(shape), (lambda gy: gy.reshape(before),)


@op
def permute(x: Array, *, axes: Sequence[int]) -> Any:
    """The dimensions in the order of ``axes``; a view.  Retains nothing."""
    axes = tuple(a % x.ndim for a in axes)
    back = tuple(int(a) for a in np.argsort(axes))
    return x.transpose(axes), (lambda gy: gy.transpose(back),)


def transpose(x: Any, dim0: int = -2, dim1: int = -1) -> Tensor:
    """Two dimensions swapped (the last two by default); a view."""
    axes = list(range(x.ndim))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return permute(x, axes=axes)


@op
def expand(x: Array, *, shape: Sequence[int]) -> Any:
    """x broadcast to ``shape`` (-1 keeps a size); a read-only view.  Retains nothing."""
    to_x, lead = fit_like(x), len(shape) - x.ndim
    sizes = tuple(x.shape[i - lead] if n == -1 else n for i, n in enumerate(shape))
    return xp_of(x).broadcast_to(x, sizes), (lambda gy: to_x(widen(gy)),)


def flatten(x: Any, start: int = 0, end: int = -1) -> Tensor:
    """Dimensions ``start`` to ``end`` (inclusive) joined into one."""
    if not x.ndim:
        return reshape(x, shape=(1,))
    start, end = start % x.ndim, end % x.ndim
    return reshape(x, shape=(*x.shape[:start], int(np.prod(x.shape[start : end + 1])), *x.shape[end + 1 :]))


def squeeze(x: Any, axis: Any = None) -> Tensor:
    """Without the dimensions of size 1 (all of them, or those in ``axis``)."""
    axes = normalized_axes(axis, x.ndim)
    return reshape(x, shape=tuple(n for i, n in enumerate(x.shape) if n != 1 or i not in axes))


def unsqueeze(x: Any, axis: int) -> Tensor:
    """With a dimension of size 1 inserted before position ``axis``."""
    at = axis % (x.ndim + 1)
    return reshape(x, shape=(*x.shape[:at], 1, *x.shape[at:]))


@op
def contiguous(x: Array) -> Any:
    """x in C order: itself if it is already.  Retains nothing."""
    return xp_of(x).ascontiguousarray(x).reshape(x.shape), (lambda gy: gy,)


@op
def getitem(x: Array, *, index: Any) -> Any:
    """x[index], basic or advanced; a view for basic ones.

    Gradients of elements that were taken several times add up.  Retains the index arrays.
    """
    xp, shape, dtype = xp_of(x), x.shape, x.dtype
    index = tuple(_array_index(i, xp) for i in (index if isinstance(index, tuple) else (index,)))
    basic = not any(hasattr(i, "dtype") and not isinstance(i, np.generic) for i in index)

    def gx(gy: Array) -> Array:
        if basic:
            g = xp.zeros(shape, dtype)
            g[index] = gy
            return g
        g = xp.zeros(shape, accumulate_dtype(dtype))
        xp.add.at(g, index, widen(gy))
        return rounded(g, dtype, xp)

    return xp.asarray(x[index]), (gx,)


def _array_index(i: Any, xp: Any) -> Any:
    return xp.asarray(i) if isinstance(i, list) else i


@op
def _concatenate(*arrays: Array, axis: int) -> Any:
    xp, dtype = xp_of(*arrays), promote(*(a.dtype for a in arrays))
    axis = axis % arrays[0].ndim
    y = xp.concatenate([a.astype(dtype, copy=False) for a in arrays], axis=axis)
    ends = np.cumsum([a.shape[axis] for a in arrays]).tolist()
    starts = [0, *ends[:-1]]
    lead = (slice(None),) * axis

    def part(start: int, end: int, dtype: Any) -> Any:
        return lambda gy: gy[(*lead, slice(start, end))].astype(dtype, copy=False)

    return y, tuple(part(s, e, a.dtype) for s, e, a in zip(starts, ends, arrays, strict=True))


def concatenate(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Tensors joined along an existing axis.  Retains nothing."""
    return _concatenate(*tensors, axis=axis)


def stack(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis.  Retains nothing."""
    return _concatenate(*(unsqueeze(t, axis) for t in tensors), axis=axis)


def split(x: Any, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """x cut along ``axis`` into views: pieces of ``sizes`` (an int: of that size, the last may be smaller).

    Raises ValueError if the sizes do not add up.
    """
    axis, total = axis % x.ndim, x.shape[axis % x.ndim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    if sum(sizes) != total:
        raise ValueError(f"split sizes {list(sizes)} sum to {sum(sizes)}; expected {total}, the size of axis {axis}.")
    ends = np.cumsum(sizes).tolist()
    lead = (slice(None),) * axis
    return tuple(getitem(x, index=(*lead, slice(e - n, e))) for n, e in zip(sizes, ends, strict=True))
