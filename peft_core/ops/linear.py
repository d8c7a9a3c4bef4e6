"""Matrix products. Under autocast the inputs are rounded to the compute dtype; sums are kept in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import amp
from ..backend import Array, xp_of
from ..blas import product
from ..dtypes import accumulate_dtype, is_half, promote
from ..tape import op
from ..tensor import Tensor
from .common import into, rounded, unbroadcast, widen


def product_dtype(*arrays: Array) -> np.dtype:
    """What a product of these arrays is computed and returned in: autocast's compute dtype, else the promoted one."""
    return amp.compute_dtype() or promote(*(a.dtype for a in arrays))


def factor(x: Array, dtype: np.dtype) -> Array:
    """``x`` rounded to the compute dtype and widened to what its products are summed in."""
    if is_half(dtype) and x.dtype != dtype:
        x = x.astype(dtype)
    return x.astype(accumulate_dtype(dtype), copy=False)


def linear(x: Any, w: Any, bias: Any = None) -> Tensor:
    """y = x w^T + bias.   x (..., I), w (O, I), bias (O,) -> (..., O).

    Retains: w for gx; x for gw; nothing for the bias.  dtype of y: the compute dtype under autocast, else the promoted
    one (a frozen bfloat16 w with float32 x is widened).  Raises ValueError if the widths differ.
    """
    return _linear(x, w) if bias is None else _linear(x, w, bias)


@op
def _linear(x: Array, w: Array, *bias: Array) -> Any:
    _expect_widths("linear", x, w)
    xp, dtype = xp_of(x, w), product_dtype(x, w)
    (n_out, n_in), x_shape, x_dtype, w_dtype = w.shape, x.shape, x.dtype, w.dtype
    y = product(factor(x, dtype).reshape(-1, n_in), factor(w, dtype).T)  # (N, O)
    if bias:
        y += factor(bias[0], dtype)
        bias_dtype = bias[0].dtype

    def gx(gy: Array) -> Array:
        g = product(factor(gy, dtype).reshape(-1, n_out), factor(w, dtype))  # (N, I)
        return rounded(g, x_dtype, xp).reshape(x_shape)

    def gw(gy: Array) -> Array:
        return rounded(product(factor(gy, dtype).reshape(-1, n_out).T, factor(x, dtype).reshape(-1, n_in)), w_dtype, xp)

    def gb(gy: Array) -> Array:
        return rounded(widen(gy).reshape(-1, n_out).sum(0), bias_dtype, xp)

    return rounded(y, dtype, xp).reshape(*x_shape[:-1], n_out), (gx, gw, gb) if bias else (gx, gw)  # (..., O)


def _expect_widths(name: str, x: Array, w: Array) -> None:
    if w.ndim != 2 or not x.ndim or x.shape[-1] != w.shape[1]:
        raise ValueError(f"{name} of x {x.shape} and w {w.shape}; expected x (..., I) and w (O, I) with one I.")


@op
def low_rank(x: Array, a: Array, b: Array, *, scale: float = 1.0, needs: tuple[bool, ...]) -> Any:
    """y = scale (x a^T) b^T.   x (..., I), a (R, I), b (O, R) -> (..., O).

    Retains: s = x a^T (N, R) only if b trains; x only if a trains.  One product dS serves gx and ga.
    Source: Hu et al., "LoRA" (arXiv:2106.09685), section 4.1.  Raises ValueError if the widths differ.
    """
    _expect_widths("low_rank", x, a)
    if b.ndim != 2 or b.shape[1] != len(a):
        raise ValueError(f"low_rank of a {a.shape} and b {b.shape}; expected a (R, I) and b (O, R) with one R.")
    xp, dtype = xp_of(x, a, b), product_dtype(x, a, b)
    n_in, n_out, x_shape = a.shape[1], b.shape[0], x.shape
    dtypes = x.dtype, a.dtype, b.dtype
    scale = accumulate_dtype(dtype).type(scale)  # a float64 scale would widen everything behind it
    s = product(factor(x, dtype).reshape(-1, n_in), factor(a, dtype).T)  # (N, R)
    y = rounded(product(s * scale, factor(b, dtype).T), dtype, xp).reshape(*x_shape[:-1], n_out)  # (..., O)
    needs_x, needs_a, needs_b = needs
    kept_x = x if needs_a else None
    kept_s = s if needs_b else None
    kept_a = a if needs_x else None
    kept_b = b if needs_x or needs_a else None

    def vjp(gy: Array, acc: list) -> tuple:
        g = factor(gy, dtype).reshape(-1, n_out)
        gx = ga = gb = None
        if kept_b is not None:
            ds = product(g, factor(kept_b, dtype)) * scale  # (N, R)
        if kept_a is not None:
            gx = rounded(product(ds, factor(kept_a, dtype)), dtypes[0], xp).reshape(x_shape)
            gx = into(acc[0], gx)
        if kept_x is not None:
            ga = rounded(product(ds.T, factor(kept_x, dtype).reshape(-1, n_in)), dtypes[1], xp)
        if kept_s is not None:
            gb = rounded(product(g.T, kept_s * scale), dtypes[2], xp)
        return gx, ga, gb

    return y, vjp


@op
def matmul(a: Array, b: Array) -> Any:
    """a @ b with NumPy's rules: batch dimensions broadcast, vectors count as one row or one column.

    Retains: b for ga; a for gb.  dtype as in linear.  Raises ValueError if the inner sizes differ.
    """
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ValueError(f"matmul of {a.shape} and {b.shape}; expected (..., I, K) @ (..., K, O) with one K.")
    xp, dtype = xp_of(a, b), product_dtype(a, b)
    a_shape, b_shape, a_dtype, b_dtype = a.shape, b.shape, a.dtype, b.dtype
    left = a if a.ndim > 1 else a[None, :]  # (..., I, K)
    right = b if b.ndim > 1 else b[:, None]  # (..., K, O)
    left_shape, right_shape = left.shape, right.shape
    y = rounded(product(factor(left, dtype), factor(right, dtype)), dtype, xp)  # (..., I, O)
    full = y.shape
    shape = (*full[:-2], *full[-2:-1][: a.ndim > 1], *full[-1:][: b.ndim > 1])

    def ga(gy: Array) -> Array:
        g = product(factor(gy, dtype).reshape(full), factor(right, dtype).swapaxes(-1, -2))
        return rounded(unbroadcast(g, left_shape), a_dtype, xp).reshape(a_shape)

    def gb(gy: Array) -> Array:
        g = product(factor(left, dtype).swapaxes(-1, -2), factor(gy, dtype).reshape(full))
        return rounded(unbroadcast(g, right_shape), b_dtype, xp).reshape(b_shape)

    return y.reshape(shape), (ga, gb)
