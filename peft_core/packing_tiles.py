"""Kernels of ``packing.py``: a weight as the right operand of the register tile, by panels of 48 columns.

Imported inside functions only (see tiles.py).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .tile_parts import kernel, per
from .tiles import COLUMNS

_U16 = np.uint32(16)
_intrinsic: Any = intrinsic  # its annotation counts the typing context among a caller's arguments
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ROW = ir.VectorType(_I32, 16)


def _turned(b: ir.IRBuilder, rows: list) -> list:
    """Sixteen vectors of sixteen words, transposed: squares of 8, 4, 2 and 1 words change places."""
    for d in (8, 4, 2, 1):
        above = [c if not c & d else 16 + (c ^ d) for c in range(16)]
        below = [c | d if not c & d else 16 + c for c in range(16)]
        for i in (i for i in range(16) if not i & d):
            pair = rows[i], rows[i | d]
            rows[i], rows[i | d] = (
                b.shuffle_vector(*pair, ir.Constant(ir.VectorType(_I32, 16), mask)) for mask in (above, below)
            )
    return rows


@_intrinsic
def _turn16(typing, w, at, ld, out, to, ldo):
    """out[to + k ldo + j] = word k from element at + j ld of w, for 16 rows j and 16 words k; flat arrays."""

    def write(context, b, signature, args):
        def place(i: int, element: Any, aligned: int) -> Any:
            data = context.make_array(signature.args[i])(context, b, args[i]).data
            return b.bitcast(b.gep(data, [element]), _ROW.as_pointer()), aligned

        def offset(j: int, first: Any, stride: Any) -> Any:
            return b.add(first, b.mul(stride, ir.Constant(_I64, j)))

        rows = []
        for j in range(16):
            pointer, aligned = place(0, offset(j, args[1], args[2]), 2)
            rows.append(b.load(pointer))
            rows[-1].align = aligned
        for k, row in enumerate(_turned(b, rows)):
            pointer, aligned = place(3, offset(k, args[4], args[5]), 4)
            b.store(row, pointer).align = aligned
        return context.get_dummy_value()

    n = types.intp
    return types.void(w, n, n, out, n, n), write


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


@kernel
def pack_rows(t, T, w, out):
    """w (O, I), bf16 bits or float32 -> out [O/48][I in words][48] words, zero padded: the right operand of x w^T."""
    n_out, n_in = w.shape
    step = per(out)
    words = (n_in + step - 1) // step
    panels, flat = (n_out + COLUMNS - 1) // COLUMNS, w.reshape(-1)
    for p in range(panels * t // T, panels * (t + 1) // T):
        whole = n_in // step // 16 * 16 if (p + 1) * COLUMNS <= n_out else 0
        for k in range(0, whole, 16):
            for j in range(0, COLUMNS, 16):
                _turn16(flat, (p * COLUMNS + j) * n_in + step * k, n_in, out, (p * words + k) * COLUMNS + j, COLUMNS)
        for k in range(whole, words):
            at = (p * words + k) * COLUMNS
            for j in range(COLUMNS):
                out[at + j] = _word(w, p * COLUMNS + j, step * k, False)


@kernel
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
