"""Rows of a table by id."""

from __future__ import annotations

from typing import Any

from ..backend import Array, xp_of
from ..dtypes import accumulate_dtype, dtype_name
from ..errors import DataError, expect
from ..tape import op
from .common import rounded, widen


@op
def embedding(ids: Array, w: Array, *, padding: int | None = None) -> Any:
    """y = w[ids].   ids (...) integers, w (V, D) -> (..., D).  Row ``padding`` gets no gradient.

    Retains ids.  Gradients of a row that was looked up several times add up, in float32 for half types.
    Raises DataError for ids outside [0, V) or of a dtype that is not integer.
    """
    xp, (n_rows, width), dtype = xp_of(ids, w), w.shape, w.dtype
    expect(ids.dtype.kind in "iu", DataError, f"embedding ids have dtype {dtype_name(ids.dtype)}", expected="integers")
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        expect(low >= 0 and high < n_rows, DataError, f"embedding ids range from {low} to {high}",
               expected=f"0 <= id < {n_rows}, the number of rows of the table",
               fix="Check that tokenizer and model belong together.")  # fmt: skip

    def gw(gy: Array) -> Array:
        g = xp.zeros((n_rows, width), accumulate_dtype(dtype))
        xp.add.at(g, ids.reshape(-1), widen(gy).reshape(-1, width))
        if padding is not None:
            g[padding] = 0
        return rounded(g, dtype, xp)

    return w[ids], (None, gw)  # (..., D)
