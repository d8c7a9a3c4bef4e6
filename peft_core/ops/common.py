"""What the ops share: dtype rules of operands and results, and undoing a broadcast in a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..dtypes import accumulate_dtype, float32, is_float, promote


def is_scalar(x: Any) -> bool:
    """True for Python and NumPy scalars, which take the dtype of the array they meet (a 0-d array keeps its own)."""
    return isinstance(x, int | float | bool | np.generic)


def operands(*values: Any, floating: bool = False) -> tuple[Any, np.dtype, list[Array]]:
    """(xp, dtype of the result, values as arrays).  Scalars take the arrays' dtype: NumPy would let a float64 scalar
    turn float32 arrays into float64.  ``floating`` (or a float scalar) makes integers float32."""
    xp = xp_of(*values)
    dtypes = [v.dtype for v in values if not is_scalar(v)]
    if dtypes:
        dtype = promote(*dtypes)
        if any(isinstance(v, float | np.floating) for v in values if is_scalar(v)) and not is_float(dtype):
            dtype = float32
    else:
        dtype = float32 if any(isinstance(v, float | np.floating) for v in values) else np.dtype(np.int64)
    if floating and not is_float(dtype):
        dtype = float32
    return xp, dtype, [xp.asarray(v, dtype=dtype) if is_scalar(v) else v for v in values]


def widen(x: Array, dtype: Any = None) -> Array:
    """``x`` in the type that a result of ``dtype`` (by default x's own) is computed in: half types in float32."""
    return x.astype(accumulate_dtype(x.dtype if dtype is None else dtype), copy=False)


def rounded(y: Any, dtype: Any, xp: Any = np) -> Array:
    """``y`` as an array (never a NumPy scalar) of ``dtype``."""
    return xp.asarray(y).astype(dtype, copy=False)


def unbroadcast(g: Array, shape: tuple[int, ...]) -> Array:
    """Sum ``g`` over the axes along which an array of ``shape`` was broadcast."""
    if g.shape == shape:
        return g
    lead = g.ndim - len(shape)
    axes = (*range(lead), *(lead + i for i, n in enumerate(shape) if n == 1 and g.shape[lead + i] != 1))
    return g.sum(axis=axes, keepdims=True).reshape(shape)


def fit_like(x: Array) -> Callable[[Array], Array]:
    """A function that gives a gradient x's shape and dtype; it keeps those two, not x."""
    shape, dtype, xp = x.shape, x.dtype, xp_of(x)
    return lambda g: rounded(unbroadcast(xp.asarray(g), shape), dtype, xp)


def normalized_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """``axis`` (None, an int or several, negative ones too) as a sorted tuple of non-negative ints.

    Raises IndexError for an axis that is out of range.
    """
    axes = range(ndim) if axis is None else (axis if isinstance(axis, tuple | list) else (axis,))
    for a in axes:
        if not -ndim <= a < ndim:
            raise IndexError(f"axis {a} of an array with {ndim} dimensions; expected {-ndim} <= axis < {ndim}.")
    return tuple(sorted({int(a) % ndim for a in axes}))


def into(acc: Array | None, g: Array) -> Array:
    """``g`` added into the gradient that has already arrived, where there is one."""
    if acc is None:
        return g
    acc += g
    return acc
