"""Rows on their way into and out of the kernels of ``projection_tiles.py``: norm, gate and gelu, and their gradients.

Imported inside functions only (see tiles.py).  What stands before the products has a number, see projection_fused.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from ..tile_parts import INLINE, exp, get, put
from ..tiles import round16
from .projection_fused import GATED, GELU, LAYER, NORM, PLAIN

_ONE, _ZERO = np.float32(1), np.float32(0)
# gelu by tanh is x / (1 + e^-p), p = x (C1 + C3 x^2): (1 + tanh u) / 2 is the logistic function of 2 u
_C1, _C3, _D3 = (np.float32(2 * math.sqrt(2 / math.pi) * c) for c in (1, 0.044715, 3 * 0.044715))


def normed(before: int, x: Any, words: Any) -> bool:
    """True where a norm stands before the products.

    Where the types say it, x being float32 or elements of bf16, the other half of a kernel is not compiled for long.
    """
    raise NotImplementedError("for kernels")


@overload(normed)
def _normed(before, x, words):
    if words.dtype == types.float32:
        return lambda before, x, words: before in (NORM, LAYER)
    if x.dtype == types.float32:
        return lambda before, x, words: True
    return lambda before, x, words: False


@njit(**INLINE)
def round_row(row, out):
    """out = row, rounded."""
    for k in range(len(row)):
        put(out, k, row[k])


@njit(**INLINE)
def copy_row(row, out):
    """out = row, elements both."""
    for k in range(len(row)):
        out[k] = row[k]


@njit(**INLINE)
def round48(src, s0, dst, d0):
    """dst[d0:d0+48] = src[s0:s0+48], rounded."""
    round16(src, s0, dst, d0)
    round16(src, s0 + 16, dst, d0 + 16)
    round16(src, s0 + 32, dst, d0 + 32)


# ------------------------------------------------------------------------------------------------ norms


@njit(**INLINE)
def _mean(row):
    total = _ZERO
    for k in range(len(row)):
        total += row[k]
    return total / np.float32(len(row))


@njit(**INLINE)
def _inverse_root(row, mean, eps):
    total = _ZERO
    for k in range(len(row)):
        total += (row[k] - mean) * (row[k] - mean)
    return np.float32(1.0 / np.sqrt(np.float64(total) / len(row) + eps))  # float64: fast-math makes NaN of 1/sqrt(inf)


@njit(**INLINE)
def _norm_row(row, w, r, out):
    for k in range(len(row)):
        put(out, k, row[k] * r * w[k])


@njit(**INLINE)
def _layer_row(row, w, shift, mean, r, out):
    for k in range(len(row)):
        put(out, k, (row[k] - mean) * r * w[k] + shift[k])


@njit(**INLINE)
def _rms_back(d, x, w, r, to):
    width, inner = len(x), _ZERO
    for k in range(width):
        inner += d[k] * w[k] * x[k]
    inner *= r * r * r / np.float32(width)
    for k in range(width):
        d[k] = d[k] * w[k] * r - x[k] * inner
    for k in range(width):  # a loop of its own: fused, the sum would be rounded otherwise than one made elsewhere
        to[k] += d[k]


@njit(**INLINE)
def _layer_back(d, x, w, mean, r, to):
    width, total, inner = len(x), _ZERO, _ZERO
    for k in range(width):
        total += d[k] * w[k]
        inner += d[k] * w[k] * (x[k] - mean)
    total *= r / np.float32(width)
    inner *= r * r * r / np.float32(width)
    for k in range(width):
        d[k] = d[k] * w[k] * r - total - (x[k] - mean) * inner
    for k in range(width):  # as above
        to[k] += d[k]


@njit(**INLINE)
def norm_back(before, dh, ld, x, norm, r, mean, r0, rows, gx):
    """gx += the norm's gradient for dh, a block of rows ``ld`` apart, which is used up."""
    width = x.shape[1]
    for i in range(rows):
        d, n = dh[i * ld : i * ld + width], r0 + i
        if before == LAYER:
            _layer_back(d, x[n], norm, mean[n], r[n], gx[n])
        else:
            _rms_back(d, x[n], norm, r[n], gx[n])


# ------------------------------------------------------------------------------------------------ activations


@njit(**INLINE)
def _gate_row(gate, up, out):
    for k in range(len(gate)):
        g = get(gate, k)
        put(out, k, g / (_ONE + exp(-g)) * get(up, k))


@njit(**INLINE)
def _gelu_row(row, out):
    for k in range(len(row)):
        x = get(row, k)
        put(out, k, x / (_ONE + exp(-(x * (_C1 + _C3 * x * x)))))


@njit(**INLINE)
def gate_back(gate, up, d, out):
    """From d = dL/dh: h once more for dA, and both gradients.  One array out: LLVM gives up on more to tell apart."""
    for c in range(len(gate)):
        g, u = get(gate, c), get(up, c)
        s = _ONE / (_ONE + exp(-g))
        silu = g * s
        out[c] = silu * u
        out[48 + c] = d[c] * u * s * (_ONE + g * (_ONE - s))
        out[96 + c] = d[c] * silu


@njit(**INLINE)
def gate_out(part, n_columns, h16, at, gx, gx1, n, j, width):
    """Where ``gate_back``'s three rows belong."""
    if n_columns == 48:
        round48(part, 0, h16, at)
        round48(part, 48, gx1, n * 2 * width + j)
        round48(part, 96, gx1, n * 2 * width + width + j)
    else:
        round_row(part[:n_columns], h16[at : at + n_columns])
        round_row(part[48 : 48 + n_columns], gx[n, j : j + n_columns])
        round_row(part[96 : 96 + n_columns], gx[n, width + j : width + j + n_columns])


@njit(**INLINE)
def gelu_back(row, d, out):
    """From d = dL/dh: h once more for dA, and the gradient."""
    for c in range(len(row)):
        x = get(row, c)
        s = _ONE / (_ONE + exp(-(x * (_C1 + _C3 * x * x))))
        out[c] = x * s
        out[48 + c] = d[c] * s * (_ONE + x * (_ONE - s) * (_C1 + _D3 * x * x))


@njit(**INLINE)
def gelu_out(part, n_columns, h16, at, gx, gx1, n, j, width):
    """Where ``gelu_back``'s two rows belong."""
    if n_columns == 48:
        round48(part, 0, h16, at)
        round48(part, 48, gx1, n * width + j)
    else:
        round_row(part[:n_columns], h16[at : at + n_columns])
        round_row(part[48 : 48 + n_columns], gx[n, j : j + n_columns])


# ------------------------------------------------------------------------------------------------ a block of h


@njit(**INLINE)
def _normed_row(before, row, norm, shift, r, mean, n, to):
    if before == LAYER:
        _layer_row(row, norm, shift, mean[n], r[n], to)
    else:
        _norm_row(row, norm, r[n], to)


@njit(**INLINE)
def rows_in(before, words, x, norm, shift, r, mean, eps, r0, rows, pad, out, ld):
    """A block of h as elements.  words: an array of the operands' type."""
    half = x.shape[1] // 2
    for i in range(rows):
        row, n, to = x[r0 + i], r0 + i, out[i * ld : i * ld + ld]
        if normed(before, x, words):
            centre = _ZERO
            if before == LAYER:
                centre = mean[n] = _mean(row)
            r[n] = _inverse_root(row, centre, eps)
            _normed_row(before, row, norm, shift, r, mean, n, to)
        elif before == GATED:
            _gate_row(row[:half], row[half:], to)
        elif before == GELU:
            _gelu_row(row, to)
        else:
            copy_row(row, to)
    for i in range(rows, pad):
        out[i * ld : i * ld + ld] = 0


@njit(**INLINE)
def rows_again(before, words, x, norm, shift, r, mean, r0, rows, pad, out, ld, wants_x):
    """h once more, for dA; behind an activation it comes with the activation's gradient, where that is wanted."""
    half = x.shape[1] // 2
    for i in range(rows):
        n, to = r0 + i, out[i * ld : i * ld + ld]
        if normed(before, x, words):
            _normed_row(before, x[n], norm, shift, r, mean, n, to)
        elif before == PLAIN:
            copy_row(x[n], to)
        elif not wants_x and before == GATED:
            _gate_row(x[n, :half], x[n, half:], to)
        elif not wants_x:
            _gelu_row(x[n], to)
    for i in range(rows, pad):
        out[i * ld : i * ld + ld] = 0
