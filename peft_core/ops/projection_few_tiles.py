"""project for the few rows of generation, where reading the weights is all of the cost.

The columns are shared among threads and every row meets a panel at once; the tile has as many rows as there are, not
eight. Its sums run in the order of the large tile: a row's numbers do not depend on how many come with it.
Imported inside functions only (see tiles.py).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numba import njit

from ..tile_parts import INLINE, elements, kernel, per, put
from ..tile_team import share
from ..tiles import make_tile, tile_8x16, tile_8x48
from .projection_rows_tiles import rows_in
from .projection_tiles import rows_out

tile_1x48, tile_2x48, tile_4x48 = make_tile(1, 48), make_tile(2, 48), make_tile(4, 48)
tile_1x16, tile_2x16, tile_4x16 = make_tile(1, 16), make_tile(2, 16), make_tile(4, 16)


@njit(**INLINE)
def _tile48(high, a, a0, lda, w, w0, ldw, k, c, add):
    if high == 1:
        tile_1x48(a, a0, lda, w, w0, ldw, k, c, 0, 48, add)
    elif high == 2:
        tile_2x48(a, a0, lda, w, w0, ldw, k, c, 0, 48, add)
    elif high == 4:
        tile_4x48(a, a0, lda, w, w0, ldw, k, c, 0, 48, add)
    else:
        tile_8x48(a, a0, lda, w, w0, ldw, k, c, 0, 48, add)


@njit(**INLINE)
def _tile16(high, a, a0, lda, w, w0, ldw, k, c):
    if high == 1:
        tile_1x16(a, a0, lda, w, w0, ldw, k, c, 0, 48, 0)
    elif high == 2:
        tile_2x16(a, a0, lda, w, w0, ldw, k, c, 0, 48, 0)
    elif high == 4:
        tile_4x16(a, a0, lda, w, w0, ldw, k, c, 0, 48, 0)
    else:
        tile_8x16(a, a0, lda, w, w0, ldw, k, c, 0, 48, 0)


@njit(**INLINE)
def _low_rank_rows(high, a, ld, ap, depth, scale, pad, s16, lds, sums):
    """s = scale h A^T, 48 ranks at a time where there are so many."""
    n_rank = len(scale)
    for p in range(0, pad, high):
        c = 0
        while c < n_rank:
            wide = 48 if n_rank - c >= 48 else 16
            if wide == 48:
                _tile48(high, a, p * ld, ld, ap, c, n_rank, depth, sums, 0)
            else:
                _tile16(high, a, p * ld, ld, ap, c, n_rank, depth, sums)
            for i in range(high):
                for q in range(wide):
                    put(s16, (p + i) * lds + c + q, sums[i * 48 + q] * scale[c + q])
            c += wide


@kernel
def _columns(t, T, before, x, norm, shift, eps, wp, panels, ap, bp, scale, bias, residual, y, scratch):
    n_rows, step, n_rank, y1 = len(x), per(wp), len(scale), y.reshape(-1)
    high = 1 if n_rows == 1 else 2 if n_rows == 2 else 4 if n_rows <= 4 else 8
    pad, depth = (n_rows + high - 1) // high * high, len(norm) // step
    ld, lds = depth + 16, n_rank // step + 16  # never a power of two: rows would share cache sets
    a, s = scratch[t, : pad * ld], scratch[t, pad * ld : pad * (ld + lds)]
    rest = scratch[t, pad * (ld + lds) : pad * (ld + lds) + 8 * 48 + 2 * n_rows].view(np.float32)
    sums, r, mean = rest[: 8 * 48], rest[8 * 48 : 8 * 48 + n_rows], rest[8 * 48 + n_rows :]
    a16, s16 = elements(a), elements(s)
    rows_in(before, wp, x, norm, shift, r, mean, eps, 0, n_rows, pad, a16, step * ld)
    _low_rank_rows(high, a, ld, ap, depth, scale, pad, s16, step * lds, sums)
    for j in range(len(panels) * t // T, len(panels) * (t + 1) // T):
        first, n_columns, b0, ldb, rank0, n_ranks = panels[j]
        for p in range(0, pad, high):
            _tile48(high, a, p * ld, ld, wp, j * depth * 48, 48, depth, sums, 0)
            if n_ranks > 0:
                _tile48(high, s, p * lds + rank0, lds, bp, b0, ldb, n_ranks, sums, 1)
            if len(bias) > 0:
                for i in range(high):
                    for c in range(n_columns):
                        sums[i * 48 + c] += bias[first + c]
            rows_out(sums, min(high, n_rows - p), first, n_columns, residual, len(residual) > 0, y, y1, p)


def scratch_words(n_rows, width, n_rank):
    """Words of scratch that a part needs; ``width`` counts elements."""
    return (n_rows + 8) * (width + n_rank + 32) + 8 * 48 + 2 * n_rows


@kernel
def forward(team, parts, before, x, norm, shift, eps, wp, panels, ap, bp, scale, bias, residual, y, scratch):
    """y (N, O) = [residual +] h w^T + s b^T + bias for few rows, arguments as in projection_tiles.forward."""
    share(team, parts, _columns, (before, x, norm, shift, eps, wp, panels, ap, bp, scale, bias, residual, y, scratch))
