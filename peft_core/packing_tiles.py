"""Kernels of ``packing.py``: a weight as the right operand of the register tile, by panels of 48 columns.

Imported inside functions only (see tiles.py).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from .tile_parts import FAST, per
from .tiles import COLUMNS

_U16 = np.uint32(16)


def _word(w, o, i, down):
    """The word of element (o, i) of w and of its neighbour in the next row (``down``) or column, 0 outside of w."""
    raise NotImplementedError("for kernels")


@overload(_word)
def _word_of(w, o, i, down):
    def halves(w, o, i, down):
        word = np.uint32(0)
        if o < w.shape[0] and i < w.shape[1]:
            word = np.uint32(w[o, i])
            o2, i2 = (o + 1, i) if down else (o, i + 1)
            if o2 < w.shape[0] and i2 < w.shape[1]:
                word |= np.uint32(w[o2, i2]) << _U16
        return word

    def whole(w, o, i, down):
        return w[o, i] if o < w.shape[0] and i < w.shape[1] else np.float32(0)

    return halves if w.dtype == types.uint16 else whole


@njit(**FAST)
def pack_rows(t, T, w, out):
    """w (O, I), bf16 bits or float32 -> out [O/48][I in words][48] words, zero padded: the right operand of x w^T."""
    n_out, n_in = w.shape
    step = per(out)
    words = (n_in + step - 1) // step
    panels = (n_out + COLUMNS - 1) // COLUMNS
    for p in range(panels * t // T, panels * (t + 1) // T):
        for k in range(words):
            at = (p * words + k) * COLUMNS
            for j in range(COLUMNS):
                out[at + j] = _word(w, p * COLUMNS + j, step * k, False)


@njit(**FAST)
def pack_columns(t, T, w, out):
    """w (O, I), bf16 bits or float32 -> out [I/48][O in words][48] words, zero padded: the right operand of g w."""
    n_out, n_in = w.shape
    step = per(out)
    words = (n_out + step - 1) // step
    panels = (n_in + COLUMNS - 1) // COLUMNS
    for k in range(words * t // T, words * (t + 1) // T):
        for p in range(panels):
            at = (p * words + k) * COLUMNS
            for j in range(COLUMNS):
                out[at + j] = _word(w, step * k, p * COLUMNS + j, True)
