"""Normalisation over the last axis. Statistics are float32 (float64 for float64) whatever the inputs are."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..kernels import formula
from ..tape import op
from ..tensor import Tensor
from .common import into, rounded, widen

# ---------------------------------------------------------------------------------------------- RMS norm


@formula
def _rms_forward(x: Array, w: Array, eps: float) -> tuple[Array, Array]:
    # x (N, D), w (D,) -> y (N, D), r (N,)
    xp = xp_of(x)
    r = 1 / xp.sqrt((x * x).mean(axis=-1) + x.dtype.type(eps))
    return x * r[:, None] * w, r


@_rms_forward.cpu(out=lambda x, w, eps: (np.empty_like(x), np.empty(len(x), x.dtype)))
def _(t, T, x, w, eps, y, r):  # type: ignore[no-untyped-def]
    n, d = x.shape
    for i in range(n * t // T, n * (t + 1) // T):
        total = np.float32(0)
        for k in range(d):
            total += x[i, k] * x[i, k]
        # in float64: for float32, fast-math takes an estimate and a Newton step, which make NaN of 1 / sqrt(inf)
        scale = np.float32(1.0 / np.sqrt(np.float64(total) / d + eps))
        r[i] = scale
        for k in range(d):
            y[i, k] = x[i, k] * scale * w[k]


@formula
def _rms_backward(gy: Array, x: Array, w: Array, r: Array) -> tuple[Array]:
    # gx = r (gy w - x r^2 mean(gy w x))      (N, D)
    g = gy * w
    inner = (g * x).mean(axis=-1) * r * r  # (N,)
    return ((g - x * inner[:, None]) * r[:, None],)


@_rms_backward.cpu(out=lambda gy, x, w, r: (np.empty_like(x),))
def _(t, T, gy, x, w, r, gx):  # type: ignore[no-untyped-def]
    n, d = x.shape
    for i in range(n * t // T, n * (t + 1) // T):
        total = np.float32(0)
        for k in range(d):
            total += gy[i, k] * w[k] * x[i, k]
        scale = r[i]
        inner = total / np.float32(d) * scale * scale
        for k in range(d):
            gx[i, k] = (gy[i, k] * w[k] - x[i, k] * inner) * scale


@op
def rms_norm(x: Array, w: Array, *, eps: float = 1e-5, needs: tuple[bool, ...]) -> Any:
    """y = x / sqrt(mean(x^2) + eps) * w, over the last axis.   x (..., D), w (D,) -> (..., D) in x's dtype.

    Retains x, one float a row, and w for gx.
    Source: Zhang and Sennrich, "Root mean square layer normalization" (arXiv:1910.07467), equation 4.
    """
    xp, shape, dtype, width, w_dtype = xp_of(x), x.shape, x.dtype, x.shape[-1], w.dtype
    y, r = _rms_forward(widen(x).reshape(-1, width), widen(w, dtype), eps)
    kept_w = w if needs[0] else None
    needs_w = needs[1]

    def vjp(gy: Array, acc: list) -> tuple:
        g, wide = widen(gy).reshape(-1, width), widen(x).reshape(-1, width)
        gx = gw = None
        if kept_w is not None:
            (gx,) = _rms_backward(g, wide, widen(kept_w, dtype), r)
            gx = into(acc[0], rounded(gx, dtype, xp).reshape(shape))
        if needs_w:
            gw = rounded((g * wide * r[:, None]).sum(axis=0), w_dtype, xp)  # (D,)
        return gx, gw

    return rounded(y, dtype, xp).reshape(shape), vjp


# ---------------------------------------------------------------------------------------------- layer norm


def layer_norm(x: Any, w: Any, bias: Any = None, *, eps: float = 1e-5) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * w + bias, over the last axis, with the biased variance.

    x (..., D), w and bias (D,) -> (..., D) in x's dtype.  Retains x, two floats a row, and w for gx.
    Source: Ba et al., "Layer normalization" (arXiv:1607.06450), section 3.
    """
    return _layer_norm(x, w, eps=eps) if bias is None else _layer_norm(x, w, bias, eps=eps)


def _layer_forward(x: Array, w: Array, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    # x (N, D), w and bias (D,) -> y (N, D), mean (N, 1), r (N, 1)
    mean = x.mean(axis=-1, keepdims=True)
    centred = x - mean
    r = 1 / xp_of(x).sqrt((centred * centred).mean(axis=-1, keepdims=True) + x.dtype.type(eps))
    y = centred * r * w
    return (y if bias is None else y + bias), mean, r


def _layer_backward(g: Array, normal: Array, w: Array, r: Array) -> Array:
    # gx = r (g w - mean(g w) - normal mean(g w normal)), normal = (x - mean) r      (N, D)
    gn = g * w
    gx = gn - gn.mean(axis=-1, keepdims=True) - normal * (gn * normal).mean(axis=-1, keepdims=True)
    return gx * r


@op
def _layer_norm(x: Array, w: Array, *bias: Array, eps: float, needs: tuple[bool, ...]) -> Any:
    xp, shape, dtype, width = xp_of(x), x.shape, x.dtype, x.shape[-1]
    w_dtype, bias_dtypes = w.dtype, [b.dtype for b in bias]
    wide = widen(x).reshape(-1, width)  # (N, D)
    y, mean, r = _layer_forward(wide, widen(w, dtype), widen(bias[0], dtype) if bias else None, eps)
    kept = x, mean, r
    if not any(needs[:2]):
        kept = None  # type: ignore[assignment]
    kept_w = w if needs[0] else None

    def vjp(gy: Array, acc: list) -> tuple:
        g = widen(gy).reshape(-1, width)
        gx, gw = None, None
        if kept is not None:
            kept_x, mean, r = kept
            normal = (widen(kept_x).reshape(-1, width) - mean) * r  # (N, D)
        if kept_w is not None:
            gx = _layer_backward(g, normal, widen(kept_w, dtype), r)
            gx = into(acc[0], rounded(gx, dtype, xp).reshape(shape))
        if needs[1]:
            gw = rounded((g * normal).sum(axis=0), w_dtype, xp)  # (D,)
        return gx, gw, *(rounded(g.sum(axis=0), b, xp) for b in bias_dtypes)

    return rounded(y, dtype, xp).reshape(shape), vjp
