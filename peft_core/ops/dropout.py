"""Dropout whose mask is a function of a key and the position, so that backward rebuilds it and nothing is stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..kernels import formula
from ..tape import op
from .common import rounded, widen


@formula
def _drop(x: Array, key: Any, threshold: Any, scale: float) -> tuple[Array]:
    # x (n,); element i stays if the upper half of splitmix64(key + i) is at least the threshold
    xp = xp_of(x)
    z = xp.arange(x.size, dtype=xp.uint64) + (key + np.uint64(0x9E3779B97F4A7C15))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    kept = ((z ^ (z >> np.uint64(31))) >> np.uint64(32)) >= threshold
    return (xp.where(kept, x * x.dtype.type(scale), x.dtype.type(0)),)


@_drop.cpu(out=lambda x, key, threshold, scale: (np.empty_like(x),))
def _(t, T, x, key, threshold, scale, y):  # type: ignore[no-untyped-def]
    n = len(x)
    factor = np.float32(scale)
    for i in range(n * t // T, n * (t + 1) // T):
        z = np.uint64(i) + key + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        kept = ((z ^ (z >> np.uint64(31))) >> np.uint64(32)) >= threshold
        y[i] = x[i] * factor if kept else np.float32(0)


@op
def dropout(x: Array, *, p: float, key: int) -> Any:
    """y = x / (1 - p) where the mask of ``key`` keeps an element, else 0; each is dropped with probability p.

    The mask hashes key + position (splitmix64: Steele et al., OOPSLA 2014), the same on every backend, thread count
    and memory layout.  Retains nothing.  Raises ValueError for p outside [0, 1].
    Source: Srivastava et al., "Dropout" (JMLR 15, 2014), in its inverted form.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout with p = {p}; expected 0 <= p <= 1.")
    xp, dtype, shape = xp_of(x), x.dtype, x.shape
    if not p:
        return x, (lambda gy: gy,)
    key64, threshold = np.uint64(key & 0xFFFFFFFFFFFFFFFF), np.uint64(round(p * 2**32))
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0

    def masked(z: Array) -> Array:
        with np.errstate(over="ignore"):  # the hash is arithmetic modulo 2^64
            return rounded(_drop(widen(z).reshape(-1), key64, threshold, scale)[0], dtype, xp).reshape(shape)

    return masked(x), (masked,)
