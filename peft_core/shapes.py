"""Shapes and conversions under torch's names, as functions and as methods of Tensor; see functions.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import ops
from .backend import address
from .dtypes import is_float
from .functions import _spelled, both
from .tensor import Tensor, _flat
from .unsupported import unsupported

__all__ = [
    "broadcast_to", "cat", "chunk", "concat", "concatenate", "expand", "expand_as", "flatten", "flip",
    "is_floating_point", "is_tensor", "movedim", "numel", "permute", "repeat", "repeat_interleave", "reshape", "split",
    "squeeze", "stack", "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
]  # fmt: skip


@both
def reshape(x: Any, *shape: Any) -> Tensor:
    """The same elements in another shape (one size may be -1); shares memory where it can."""
    return ops.reshape(x, shape=_flat(shape))


@both
def view(x: Tensor, *shape: Any) -> Tensor:
    """The same memory in another shape (one size may be -1).

    Raises RuntimeError where that would take a copy, UnsupportedError for a dtype in place of a shape.
    """
    if len(shape) == 1 and not isinstance(shape[0], int | tuple | list | np.integer | Tensor):
        unsupported(f"view({shape[0]!r})", "memory keeps its dtype; expected a shape, or .to(dtype)")
    y = ops.reshape(x, shape=_flat(shape))
    if x.data.size and address(y.data) != address(x.data):
        raise RuntimeError(
            f"view of shape {x.shape} and strides {x.stride()} as {y.shape} needs a copy; expected dimensions to join "
            "that lie one after the other in memory. Use .reshape(...), or .contiguous() before."
        )
    return y


@both
def permute(x: Any, *dims: Any) -> Tensor:
    """The dimensions in another order; shares memory."""
    return ops.permute(x, axes=_flat(dims))


@both
def transpose(x: Any, dim0: int, dim1: int) -> Tensor:
    """Two dimensions swapped; shares memory."""
    return ops.transpose(x, dim0, dim1)


@both
def swapaxes(x: Any, dim0: int, dim1: int) -> Tensor:
    """Two dimensions swapped; shares memory."""
    return ops.transpose(x, dim0, dim1)


@both
def t(x: Any) -> Tensor:
    """A matrix transposed, a vector as it is.  Raises ValueError for more dimensions."""
    if x.ndim > 2:
        raise ValueError(f"t() of shape {x.shape}; expected at most two dimensions. Use .transpose(-2, -1) or .mT.")
    return ops.transpose(x, 0, 1) if x.ndim == 2 else x


@both
def movedim(x: Any, source: int, destination: int) -> Tensor:
    """One dimension at another place, the others in their order; shares memory."""
    order = [i for i in range(x.ndim) if i != source % x.ndim]
    order.insert(destination % x.ndim, source % x.ndim)
    return ops.permute(x, axes=order)


@both
def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Dimensions ``start_dim`` to ``end_dim`` (inclusive) joined into one."""
    return ops.flatten(x, start_dim, end_dim)


@both
def unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Tensor:
    """One dimension split into ``sizes``, of which one may be -1."""
    dim = dim % x.ndim
    return ops.reshape(x, shape=(*x.shape[:dim], *_resolved(x.shape[dim], sizes), *x.shape[dim + 1 :]))


def _resolved(total: int, sizes: Sequence[int]) -> tuple[int, ...]:
    known = math.prod(n for n in sizes if n != -1)
    return tuple(total // known if n == -1 else n for n in sizes)


@both
def flip(x: Any, *dims: Any) -> Tensor:
    """The elements of the dimensions ``dims`` in reverse order."""
    reverse = {d % x.ndim for d in _flat(dims)}
    turned = x[tuple(slice(None, None, -1 if d in reverse else None) for d in range(x.ndim))]
    return ops.contiguous(turned)


@both
def squeeze(x: Any, dim: Any = None) -> Tensor:
    """Without the dimensions of size 1 (all of them, or those in ``dim``)."""
    return ops.squeeze(x, dim)


@both
def unsqueeze(x: Any, dim: int) -> Tensor:
    """With a dimension of size 1 inserted before position ``dim``."""
    return ops.unsqueeze(x, dim)


@both
def expand(x: Tensor, *sizes: Any) -> Tensor:
    """Broadcast to ``sizes`` (-1 keeps one); a read-only view."""
    return ops.expand(x, shape=_flat(sizes))


@both
def broadcast_to(x: Any, size: Sequence[int]) -> Tensor:
    """Broadcast to ``size``; a read-only view."""
    return ops.expand(x, shape=tuple(size))


@both
def expand_as(x: Tensor, y: Tensor) -> Tensor:
    """Broadcast to y's shape; a read-only view."""
    return ops.expand(x, shape=y.shape)


@both
def view_as(x: Tensor, y: Tensor) -> Tensor:
    """The same memory in y's shape.  Raises RuntimeError where that would take a copy."""
    return view(x, y.shape)


@both
def repeat(x: Tensor, *times: Any) -> Tensor:
    """x laid side by side ``times`` along each dimension."""
    return ops.repeat(x, times=_flat(times))


@both
def repeat_interleave(x: Any, repeats: int, dim: int | None = None) -> Tensor:
    """Each slice along ``dim`` (each element without) ``repeats`` times in a row."""
    if not isinstance(repeats, int):
        unsupported("repeat_interleave with a number per element", "expected one integer")
    x, dim = (ops.flatten(x), 0) if dim is None else (x, dim % x.ndim)
    shape = x.shape
    x = ops.expand(ops.unsqueeze(x, dim + 1), shape=(*shape[: dim + 1], repeats, *shape[dim + 1 :]))
    return ops.flatten(x, dim, dim + 1)


@both
def split(x: Any, sizes: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """x cut along ``dim`` into views: pieces of the ``sizes``, or (an int) of that size."""
    return ops.split(x, sizes, dim)


@both
def chunk(x: Any, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """x cut along ``dim`` into at most ``chunks`` views of one size, the last may be smaller."""
    return ops.split(x, max(1, -(-x.shape[dim] // chunks)), dim)


@both
def unbind(x: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """The slices along ``dim``, without that dimension."""
    return tuple(ops.squeeze(piece, dim % x.ndim) for piece in ops.split(x, 1, dim))


@_spelled
def cat(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Tensors joined along an existing dimension."""
    return ops.concatenate(tensors, dim)


concat = concatenate = cat


@_spelled
def stack(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Tensors of one shape joined along a new dimension."""
    return ops.stack(tensors, dim)


@both
def numel(x: Tensor) -> int:
    """The number of elements."""
    return x.data.size


@both
def is_floating_point(x: Tensor) -> bool:
    """True for float64, float32, float16 and bfloat16."""
    return is_float(x.dtype)


def is_tensor(x: Any) -> bool:
    """True for a Tensor."""
    return isinstance(x, Tensor)
