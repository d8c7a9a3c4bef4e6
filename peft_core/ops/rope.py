"""Rotary position embedding, half-split: element k of a head is paired with element k + K/2."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..kernels import formula
from ..tape import op
from .common import rounded, widen


@formula
def _rotate(x: Array, cos: Array, sin: Array, sign: float) -> tuple[Array]:
    # x (N, H, K), cos and sin (N, K/2)
    xp, half = xp_of(x), x.shape[-1] // 2
    c, s = cos[:, None, :], sin[:, None, :] * x.dtype.type(sign)
    first, second = x[..., :half], x[..., half:]
    return (xp.concatenate([first * c - second * s, second * c + first * s], axis=-1),)


@_rotate.cpu(out=lambda x, cos, sin, sign: (np.empty_like(x),))
def _(t, T, x, cos, sin, sign, y):  # type: ignore[no-untyped-def]
    n, heads, width = x.shape
    half = width // 2
    direction = np.float32(sign)
    for i in range(n * t // T, n * (t + 1) // T):
        for h in range(heads):
            for k in range(half):
                c, s = cos[i, k], sin[i, k] * direction
                first, second = x[i, h, k], x[i, h, k + half]
                y[i, h, k] = first * c - second * s
                y[i, h, k + half] = second * c + first * s


def turned(x: Array, cos: Array, sin: Array, sign: float) -> Array:
    """x (N, H, K) rotated by its angles (sign 1) or back (-1), in x's dtype."""
    return rounded(_rotate(widen(x), widen(cos, x.dtype), widen(sin, x.dtype), sign)[0], x.dtype, xp_of(x))


@op
def rope(x: Array, cos: Array, sin: Array) -> Any:
    """y = x rotated, pair (k, k + K/2) of row n by the angle whose cosine is cos[n, k].

    x (N, H, K), cos and sin (N, K/2) float32 -> (N, H, K) in x's dtype.  Retains cos and sin; they have no gradient.
    Raises ValueError if the shapes do not fit.
    Source: Su et al., "RoFormer" (arXiv:2104.09864), section 3.2.2.
    """
    if x.ndim != 3 or x.shape[-1] % 2 or cos.shape != (len(x), x.shape[-1] // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"rope of x {x.shape} with cos {cos.shape} and sin {sin.shape}; expected x (N, H, K) with an even K and "
            "cos, sin (N, K/2)."
        )
    return turned(x, cos, sin, 1.0), (lambda gy: turned(gy, cos, sin, -1.0), None, None)
