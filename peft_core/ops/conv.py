"""Convolution and pooling over images (N, C, Y, X).  Windows are views of the padded image; products are matmuls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..tape import op
from ..tensor import Tensor
from .common import rounded, widen
from .linear import factor, product_dtype

Pair = tuple[int, int]


def pair(value: Any, what: str = "a size") -> Pair:
    """One number for both directions, or two numbers, as a pair of ints.  Raises ValueError for something else."""
    both = (value, value) if isinstance(value, int) else tuple(value)
    if len(both) != 2 or not all(isinstance(n, int | np.integer) for n in both):
        raise ValueError(f"{what} is {value!r}; expected an integer or a pair of integers.")
    return int(both[0]), int(both[1])


def _out_size(n: int, kernel: int, stride: int, dilation: int) -> int:
    return (n - dilation * (kernel - 1) - 1) // stride + 1


def _expect_fits(name: str, shape: tuple, kernel: Pair, stride: Pair, dilation: Pair) -> Pair:
    size = tuple(map(_out_size, shape[-2:], kernel, stride, dilation))
    if min(size) < 1 or min(stride) < 1 or min(dilation) < 1:
        raise ValueError(
            f"{name} of a padded image {shape[-2:]} with kernel {kernel}, stride {stride}, dilation {dilation} has "
            f"output {size}; expected at least 1 x 1, and strides and dilations of at least 1."
        )
    return size[0], size[1]


def _windows(x: Array, kernel: Pair, stride: Pair, dilation: Pair, size: Pair) -> Array:
    """A view (N, C, y, x, i, j) of all windows of x (N, C, Y, X)."""
    n, c, down, right = x.strides
    strides = (n, c, down * stride[0], right * stride[1], down * dilation[0], right * dilation[1])
    return xp_of(x).lib.stride_tricks.as_strided(x, shape=(*x.shape[:2], *size, *kernel), strides=strides)


def _taps(kernel: Pair, stride: Pair, dilation: Pair, size: Pair) -> Iterator[tuple[int, int, tuple]]:
    """(i, j, index of the pixels that tap (i, j) of the kernel reads)."""
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            y, x = i * dilation[0], j * dilation[1]
            rows = slice(y, y + (size[0] - 1) * stride[0] + 1, stride[0])
            yield i, j, (..., rows, slice(x, x + (size[1] - 1) * stride[1] + 1, stride[1]))


def _padded(x: Array, padding: tuple[Pair, Pair], value: float = 0.0) -> Array:
    if padding == ((0, 0), (0, 0)):
        return x
    return xp_of(x).pad(x, ((0, 0), (0, 0), *padding), constant_values=x.dtype.type(value))


def _inside(padding: tuple[Pair, Pair], shape: tuple) -> tuple:
    (top, _), (left, _) = padding
    return (..., slice(top, top + shape[-2]), slice(left, left + shape[-1]))


def conv2d(
    x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Cross-correlation: y[n, o, p, q] = bias[o] + sum_cij w[o, c, i, j] x[n, c, p stride + i dilation, q ...].

    x (N, C, Y, X), w (O, C / groups, i, j), bias (O,) -> (N, O, P, Q); ``padding`` zeros on each side, or "valid" (0)
    or "same" (as many as keep the size, for stride 1).  dtype as in linear.  Retains w for gx; x for gw.
    Raises ValueError for shapes or settings that do not fit.
    """
    stride, dilation = pair(stride, "conv2d stride"), pair(dilation, "conv2d dilation")
    _expect_channels(x.shape, w.shape, groups)
    kernel = (w.shape[2], w.shape[3])
    sides = _sides(padding, kernel, stride, dilation)
    params = {"stride": stride, "padding": sides, "dilation": dilation, "groups": groups}
    return _conv2d(x, w, **params) if bias is None else _conv2d(x, w, bias, **params)


def _sides(padding: Any, kernel: Pair, stride: Pair, dilation: Pair) -> tuple[Pair, Pair]:
    if padding == "valid":
        return (0, 0), (0, 0)
    if padding == "same":
        if stride != (1, 1):
            raise ValueError(f"conv2d with padding='same' and stride {stride}; expected stride 1.")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return (total[0] // 2, total[0] - total[0] // 2), (total[1] // 2, total[1] - total[1] // 2)
    if isinstance(padding, str):
        raise ValueError(f"conv2d with padding={padding!r}; expected numbers, 'valid' or 'same'.")
    down, right = pair(padding, "conv2d padding")
    return (down, down), (right, right)


def _expect_channels(x: tuple, w: tuple, groups: int) -> None:
    if len(x) != 4 or len(w) != 4 or x[1] != w[1] * groups or w[0] % groups:
        raise ValueError(
            f"conv2d of x {tuple(x)} and w {tuple(w)} with groups={groups}; expected x (N, C, Y, X) and "
            "w (O, C / groups, i, j) with one C, and O divisible by groups."
        )


@op
def _conv2d(
    x: Array, w: Array, *bias: Array, stride: Pair, padding: tuple[Pair, Pair], dilation: Pair, groups: int
) -> Any:
    xp, dtype = xp_of(x, w), product_dtype(x, w)
    x_shape, x_dtype, w_shape, w_dtype = x.shape, x.dtype, w.shape, w.dtype
    n, n_out, kernel = x_shape[0], w_shape[0], (w_shape[2], w_shape[3])
    padded = (*x_shape[:2], *(k + sum(p) for k, p in zip(x_shape[2:], padding, strict=True)))
    size = _expect_fits("conv2d", padded, kernel, stride, dilation)
    width = w_shape[1] * kernel[0] * kernel[1]  # elements of a window of one group

    def columns(x: Array) -> Array:
        views = _windows(_padded(factor(x, dtype), padding), kernel, stride, dilation, size)
        views = views.reshape(n, groups, w_shape[1], *size, *kernel).transpose(1, 0, 3, 4, 2, 5, 6)
        return views.reshape(groups, n * size[0] * size[1], width)

    def by_group(g: Array) -> Array:
        g = factor(g, dtype).reshape(n, groups, n_out // groups, size[0] * size[1])
        return g.transpose(1, 2, 0, 3).reshape(groups, n_out // groups, -1)  # (G, O / G, N P Q)

    def gx(gy: Array) -> Array:
        taps = by_group(gy).swapaxes(1, 2) @ factor(w, dtype).reshape(groups, -1, width)  # (G, N P Q, width)
        taps = taps.reshape(groups, n, *size, w_shape[1], *kernel).transpose(1, 0, 4, 5, 6, 2, 3)
        taps = taps.reshape(n, x_shape[1], *kernel, *size)
        g = xp.zeros(padded, taps.dtype)
        for i, j, at in _taps(kernel, stride, dilation, size):
            g[at] += taps[:, :, i, j]
        return rounded(xp.ascontiguousarray(g[_inside(padding, x_shape)]), x_dtype, xp)

    def gw(gy: Array) -> Array:
        return rounded((by_group(gy) @ columns(x)).reshape(w_shape), w_dtype, xp)

    y = columns(x) @ factor(w, dtype).reshape(groups, -1, width).swapaxes(1, 2)  # (G, N P Q, O / G)
    y = y.reshape(groups, n, *size, n_out // groups).transpose(1, 0, 4, 2, 3).reshape(n, n_out, *size)
    y = xp.ascontiguousarray(y)  # (N, O, P, Q): its user may call .view
    if not bias:
        return rounded(y, dtype, xp), (gx, gw)
    bias_dtype = bias[0].dtype
    y = y + factor(bias[0], dtype)[:, None, None]
    return rounded(y, dtype, xp), (gx, gw, lambda gy: rounded(widen(gy).sum((0, 2, 3)), bias_dtype, xp))


@op
def max_pool2d(x: Array, *, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1) -> Any:
    """The largest element of each window, NaN if there is one; x (N, C, Y, X) -> (N, C, P, Q).

    ``stride`` is the kernel's size by default; padding counts as -inf.  The gradient goes to the first of equal
    maxima.  Retains the place of the maximum in each window, a byte each.  Raises ValueError for sizes that do not fit.
    """
    kernel = pair(kernel, "max_pool2d kernel")
    stride = kernel if stride is None else pair(stride, "max_pool2d stride")
    down, right = pair(padding, "max_pool2d padding")
    dilation, sides = pair(dilation, "max_pool2d dilation"), ((down, down), (right, right))
    if x.ndim != 4 or 2 * down > kernel[0] or 2 * right > kernel[1]:
        raise ValueError(
            f"max_pool2d of x {x.shape} with kernel {kernel} and padding {(down, right)}; expected x (N, C, Y, X) "
            "and a padding of at most half the kernel."
        )
    xp, shape, dtype = xp_of(x), x.shape, x.dtype
    full = _padded(x, sides, -np.inf)
    padded, size = full.shape, _expect_fits("max_pool2d", full.shape, kernel, stride, dilation)
    flat = _windows(full, kernel, stride, dilation, size).reshape(*shape[:2], *size, -1)
    place = xp.argmax(widen(flat), axis=-1)  # (N, C, P, Q)
    y = xp.take_along_axis(flat, place[..., None], axis=-1)[..., 0]
    place = place.astype(np.min_scalar_type(kernel[0] * kernel[1]))
    del full, flat

    def gx(gy: Array) -> Array:
        g, wide = xp.zeros(padded, widen(gy[:0]).dtype), widen(gy)
        for i, j, at in _taps(kernel, stride, dilation, size):
            g[at] += xp.where(place == i * kernel[1] + j, wide, 0)
        return rounded(xp.ascontiguousarray(g[_inside(sides, shape)]), dtype, xp)

    return xp.ascontiguousarray(y), (gx,)
