"""Sums, extremes, order and choice under torch's names, as functions and as methods of Tensor; see functions.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import ops
from .dtypes import as_dtype
from .functions import _spelled, both
from .methods import matched
from .tensor import Tensor
from .unsupported import unsupported

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "cumsum", "gather", "index_select", "log_softmax",
    "logsumexp", "masked_fill", "max", "mean", "min", "nonzero", "norm", "softmax", "sort", "std", "sum", "topk",
    "tril", "triu", "var", "where",
]  # fmt: skip


class Found(NamedTuple):
    """What ``max``, ``min``, ``sort`` and ``topk`` over one dimension return."""

    values: Tensor
    indices: Tensor


def _cast(x: Any, dtype: Any) -> Any:
    return x if dtype is None else ops.astype(x, dtype=as_dtype(dtype))


@both
def sum(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum over ``dim`` (all by default); half types accumulate in float32."""
    return ops.sum(_cast(x, dtype), axis=dim, keepdims=keepdim)


@both
def mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The mean over ``dim`` (all by default); half types accumulate in float32."""
    return ops.mean(_cast(x, dtype), axis=dim, keepdims=keepdim)


@both
def var(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: int | None = None) -> Tensor:
    """The variance over ``dim``: sum((x - mean)^2) / (n - correction); ``unbiased``: correction 1, else 0."""
    n = int(unbiased) if correction is None else correction
    return ops.var(x, axis=dim, keepdims=keepdim, correction=n)


@both
def std(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: int | None = None) -> Tensor:
    """The square root of ``var``."""
    return ops.sqrt(var(x, dim, unbiased, keepdim, correction))


@both
def norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    """sqrt(sum(x^2)) over ``dim``, or sum(|x|) for p = 1.  Raises UnsupportedError for another p."""
    if p == 1:
        return ops.sum(ops.abs(x), axis=dim, keepdims=keepdim)
    if p not in (2, "fro"):
        unsupported(f"norm with p={p!r}", "expected 1 or 2")
    return ops.sqrt(ops.sum(ops.mul(x, x), axis=dim, keepdims=keepdim))


def _extreme(name: str, x: Any, dim: Any, keepdim: bool) -> Any:
    if isinstance(dim, Tensor):
        return getattr(ops, f"{name}imum")(x, dim)
    if dim is None:
        return getattr(ops, name)(x)
    indices = getattr(ops, f"arg{name}")(x, axis=dim, keepdims=True)
    values = ops.gather(x, indices, axis=dim)
    return Found(*(t if keepdim else ops.squeeze(t, dim) for t in (values, indices)))


@both
def max(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest element; with ``dim`` (values, indices), the first of equals; with a Tensor instead, maximum."""
    return _extreme("max", x, dim, keepdim)


@both
def min(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The smallest element; with ``dim`` (values, indices), the first of equals; with a Tensor instead, minimum."""
    return _extreme("min", x, dim, keepdim)


@both
def amax(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The largest element over ``dim``; equal ones share the gradient."""
    return ops.max(x, axis=dim, keepdims=keepdim)


@both
def amin(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The smallest element over ``dim``; equal ones share the gradient."""
    return ops.min(x, axis=dim, keepdims=keepdim)


@both
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the largest element over ``dim`` stands."""
    return ops.argmax(x, axis=dim, keepdims=keepdim)


@both
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the smallest element over ``dim`` stands."""
    return ops.argmin(x, axis=dim, keepdims=keepdim)


@both
def argsort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Where the elements of ``dim`` stand in order, equal ones in their own order whatever ``stable`` says."""
    return ops.argsort(x, axis=dim, descending=descending)


@both
def sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Found:
    """The elements in order along ``dim``, and where they stood; equal ones in their own order."""
    indices = ops.argsort(x, axis=dim, descending=descending)
    return Found(ops.gather(x, indices, axis=dim), indices)


@both
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Found:
    """The ``k`` largest or smallest elements along ``dim``, in order, and where they stood.

    Raises ValueError for more of them than there are.
    """
    if not 0 <= k <= x.shape[dim]:
        raise ValueError(f"topk of {k} along dimension {dim} of shape {x.shape}; expected at most {x.shape[dim]}.")
    indices = ops.argsort(x, axis=dim, descending=largest)[(slice(None),) * (dim % x.ndim) + (slice(k),)]
    return Found(ops.gather(x, indices, axis=dim), indices)


@both
def any(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """True where some element over ``dim`` is not zero."""
    return ops.any(x, axis=dim, keepdims=keepdim)


@both
def all(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """True where every element over ``dim`` is not zero."""
    return ops.all(x, axis=dim, keepdims=keepdim)


@both
def cumsum(x: Any, dim: int) -> Tensor:
    """Running sums along ``dim``."""
    return ops.cumsum(x, axis=dim)


@both
def softmax(x: Any, dim: int, dtype: Any = None) -> Tensor:
    """exp(x) / sum(exp(x)) over ``dim``, of x in ``dtype`` where one is given."""
    return ops.softmax(_cast(x, dtype), axis=dim)


@both
def log_softmax(x: Any, dim: int, dtype: Any = None) -> Tensor:
    """log(softmax(x)) over ``dim``, of x in ``dtype`` where one is given."""
    return ops.log_softmax(_cast(x, dtype), axis=dim)


@both
def logsumexp(x: Any, dim: int, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))) over ``dim``."""
    return ops.logsumexp(x, axis=dim, keepdims=keepdim)


# ------------------------------------------------------------------ choosing


@both
def masked_fill(x: Any, mask: Any, value: Any) -> Tensor:
    """x with the number ``value`` where ``mask`` (bool, or TypeError) holds; the two broadcast."""
    if mask.dtype.kind != "b":
        raise TypeError(f"masked_fill got a mask of dtype {mask.dtype}; expected bool. Compare first, as in mask == 0.")
    shape = np.broadcast_shapes(x.shape, mask.shape)
    x = x if x.shape == shape else ops.expand(x, shape=shape)
    return ops.masked_fill(x, mask, value=value.item() if isinstance(value, Tensor) else value)


@_spelled
def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    """x where ``condition`` holds, else y; without the two, ``nonzero(condition, as_tuple=True)``."""
    if x is None and y is None:
        return nonzero(condition, as_tuple=True)
    return ops.where(condition, *matched(x, y))


def _where(x: Tensor, condition: Any, y: Any) -> Tensor:
    """x where ``condition`` holds, else y."""
    return ops.where(condition, *matched(x, y))


Tensor.where = _where  # type: ignore[attr-defined]  # the method takes x first, the function the condition


@both
def nonzero(x: Any, as_tuple: bool = False) -> Any:
    """The places of the elements that are not zero: (number, dimensions), or a vector for each dimension."""
    places = ops.nonzero(x)
    return tuple(places[:, i] for i in range(x.ndim)) if as_tuple else places


@both
def tril(x: Any, diagonal: int = 0) -> Tensor:
    """Zeros above the diagonal."""
    return ops.tril(x, diagonal=diagonal)


@both
def triu(x: Any, diagonal: int = 0) -> Tensor:
    """Zeros below the diagonal."""
    return ops.triu(x, diagonal=diagonal)


@both
def gather(x: Any, dim: int, index: Any) -> Tensor:
    """Elements of x along ``dim`` by ``index``, which has as many dimensions."""
    return ops.gather(x, index, axis=dim)


@both
def index_select(x: Any, dim: int, index: Any) -> Tensor:
    """The slices of x along ``dim`` at the positions of the vector ``index``."""
    return x[(slice(None),) * (dim % x.ndim) + (index,)]
