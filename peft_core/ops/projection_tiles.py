"""project on register tiles: one parallel region from norm or gate through the products to the residual sum.

Each thread takes blocks of rows. A block becomes words (see tiles.py) once and meets every panel of the packed weights
while it stays in the second-level cache. Imported inside functions only.

``panels`` (P, 6), one row per 48 columns of y: first column, columns, first word of its B, words in a row of that B,
first rank and ranks, both in words.  ``mods`` (M, 6), one row per linear: first column, columns, first rank, ranks
(padded to 16), first word of its B for gradients, first element of its dB.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numba import njit

from ..tile_parts import INLINE, elements, kernel, pair_rows, per, put, will_read, will_write
from ..tiles import tile_8x16, tile_8x48
from .projection_fused import GATED, GELU, PLAIN
from .projection_rows_tiles import (
    copy_row,
    gate_back,
    gate_out,
    gelu_back,
    gelu_out,
    norm_back,
    normed,
    round48,
    round_row,
    rows_again,
    rows_in,
)  # fmt: skip


@njit(**INLINE)
def _sum_over_rows(left, ldl, at, n_rows, right, ldr, first, columns, depth, out, o0, ldo):
    """out[n_rows, columns] += left[n_rows, rows] right[rows, columns]."""
    for i in range(0, n_rows, 8):
        for c in range(0, columns, 48):
            tile_8x48(left, (at + i) * ldl, ldl, right, first + c, ldr, depth, out, o0 + i * ldo + c, ldo, 1)


@njit(**INLINE)
def _add48(y, residual, sums):
    for c in range(len(sums)):
        y[c] = residual[c] + sums[c]


# ------------------------------------------------------------------------------------------------ forward


@njit(**INLINE)
def _low_rank_rows(a, ld, ap, depth, scale, pad, s16, lds, sums):
    """s = scale h A^T for a block of rows."""
    n_rank = len(scale)
    for p in range(0, pad, 8):
        for c in range(0, n_rank, 16):
            tile_8x16(a, p * ld, ld, ap, c, n_rank, depth, sums, 0, 16, 0)
            for i in range(8):
                for q in range(16):
                    put(s16, (p + i) * lds + c + q, sums[i * 16 + q] * scale[c + q])


@njit(**INLINE)
def rows_out(sums, rows, first, n_columns, residual, has_residual, y, y1, n):
    """Eight rows and 48 columns of sums into y: on top of the residual, or rounded to bf16."""
    width = y.shape[1]
    for i in range(rows):
        if has_residual:
            _add48(y[n + i, first : first + n_columns], residual[n + i, first : first + n_columns],
                   sums[i * 48 : i * 48 + n_columns])  # fmt: skip
        elif n_columns == 48:
            round48(sums, i * 48, y1, (n + i) * width + first)
        else:
            round_row(sums[i * 48 : i * 48 + n_columns], y[n + i, first : first + n_columns])


@kernel
def forward(
    t, T, before, x, norm, shift, r, mean, eps, wp, panels, ap, bp, scale, bias, residual, y, s_out, scratch, block
):
    """y (N, O) = [residual +] h w^T + s b^T + bias, and s (N, R).  bias is empty or (O,).

    norm, shift, r, mean: see projection_fused.NormArrays.
    """
    n_rows, step, n_rank, y1, width = len(x), per(wp), len(scale), y.reshape(-1), y.shape[1]
    depth = len(norm) // step
    ld, lds = depth + 16, n_rank // step + 16  # never a power of two: rows would share cache sets
    a, s = scratch[t, : block * ld], scratch[t, block * ld : block * (ld + lds)]
    sums = scratch[t, block * (ld + lds) : block * (ld + lds) + 8 * 48].view(np.float32)
    a16, s16, has_residual = elements(a), elements(s), len(residual) > 0
    tiles, j0, j1 = (n_rows + 7) // 8, 0, len(panels)
    start, end = tiles * t // T * 8, min(n_rows, tiles * (t + 1) // T * 8)
    if tiles < T:  # too few rows to share: each thread takes all of them to its part of the columns
        start, end, j0, j1 = 0, n_rows, len(panels) * t // T, len(panels) * (t + 1) // T
    for r0 in range(start, end, block):
        rows = min(block, end - r0)
        pad = (rows + 7) // 8 * 8
        rows_in(before, wp, x, norm, shift, r, mean, eps, r0, rows, pad, a16, step * ld)
        _low_rank_rows(a, ld, ap, depth, scale, pad, s16, step * lds, sums)
        for i in range(rows):
            copy_row(s16[i * step * lds : i * step * lds + n_rank], s_out[r0 + i])
        for j in range(j0, j1):
            first, n_columns, b0, ldb, rank0, n_ranks = panels[j]
            for p in range(0, pad, 8):
                will_write(y1, (r0 + p) * width + first, width, min(8, rows - p), n_columns)
                tile_8x48(a, p * ld, ld, wp, j * depth * 48, 48, depth, sums, 0, 48, 0)
                if n_ranks > 0:
                    tile_8x48(s, p * lds + rank0, lds, bp, b0, ldb, n_ranks, sums, 0, 48, 1)
                if len(bias) > 0:
                    for i in range(8):
                        for c in range(n_columns):
                            sums[i * 48 + c] += bias[first + c]
                rows_out(sums, min(8, rows - p), first, n_columns, residual, has_residual, y, y1, r0 + p)


# ------------------------------------------------------------------------------------------------ backward


@njit(**INLINE)
def _gradient_rows(gy, r0, rows, pad, g16, ld):
    """A block of gy as elements."""
    for i in range(rows):
        if gy.itemsize == 4:
            round_row(gy[r0 + i], g16[i * ld : i * ld + ld])
        else:
            copy_row(gy[r0 + i], g16[i * ld : i * ld + ld])
    for i in range(rows, pad):
        g16[i * ld : i * ld + ld] = 0


@njit(**INLINE)
def _gradient_low_rank(g, ldg, mods, btp, scale, pad, s16, lds, sums):
    """dS = scale gy B, linear by linear."""
    step = per(g)
    for m in range(len(mods)):
        first, n_out, rank0, n_rank, b0, _ = mods[m]
        for p in range(0, pad, 8):
            for c in range(0, n_rank, 16):
                tile_8x16(g, p * ldg + first // step, ldg, btp, b0 + c, n_rank, n_out // step, sums, 0, 16, 0)
                for i in range(8):
                    for q in range(16):
                        put(s16, (p + i) * lds + rank0 + c + q, sums[i * 16 + q] * scale[rank0 + c + q])


@njit(**INLINE)
def _turn(src, ld, rows, pad, n_rank, out, ldo):
    """Rows of ranks become one row a rank."""
    for c in range(n_rank):
        for i in range(rows):
            out[c * ldo + i] = src[i * ld + c]
        for i in range(rows, pad):
            out[c * ldo + i] = 0


@njit(**INLINE)
def _gradient_b(f, ldf, mods, inter, ldi, depth, d_b):
    """dB^T (R, O) += s^T gy, each linear's in its own place, rows padded to whole panels."""
    for m in range(len(mods)):
        first, n_out, rank0, n_rank, _, at = mods[m]
        _sum_over_rows(f, ldf, rank0, n_rank, inter, ldi, first, n_out, depth, d_b, at, (n_out + 47) // 48 * 48)


@njit(**INLINE)
def _gradient_x(
    before, g, ldg, s, lds, wbp, atp, pad, rows, depth, n_ranks, width, x, r0, dh, h16, ldh, gx, gx1, sums, gated
):
    """dh = gy w + dS A, panel by panel: stored for a norm, rounded for a plain input, else through the activation."""
    wide, x1 = (width + 47) // 48 * 48, x.reshape(-1)
    for j in range(0, width, 48):
        n_columns = min(48, width - j)
        for p in range(0, pad, 8):
            if normed(before, x, g):
                pass  # dh is the block's own
            elif before == GATED:
                for side in range(2):
                    at = (r0 + p) * 2 * width + side * width + j
                    will_read(x1, at, 2 * width, min(8, rows - p), n_columns)
                    will_write(gx1, at, 2 * width, min(8, rows - p), n_columns)
            elif before in (PLAIN, GELU):
                will_write(gx1, (r0 + p) * width + j, width, min(8, rows - p), n_columns)
                if before == GELU:
                    will_read(x1, (r0 + p) * width + j, width, min(8, rows - p), n_columns)
            tile_8x48(g, p * ldg, ldg, wbp, j * depth, 48, depth, sums, 0, 48, 0)
            if n_ranks > 0:
                tile_8x48(s, p * lds, lds, atp, j, wide, n_ranks, sums, 0, 48, 1)
            for i in range(min(8, rows - p)):
                part, n = sums[i * 48 : i * 48 + n_columns], r0 + p + i
                if normed(before, x, g):
                    to = dh[(p + i) * wide + j : (p + i) * wide + j + n_columns]
                    for c in range(n_columns):
                        to[c] = part[c]
                elif before == GATED:
                    gate_back(x[n, j : j + n_columns], x[n, width + j : width + j + n_columns], part, gated)
                    gate_out(gated, n_columns, h16, (p + i) * ldh + j, gx, gx1, n, j, width)
                elif before == GELU:
                    gelu_back(x[n, j : j + n_columns], part, gated)
                    gelu_out(gated, n_columns, h16, (p + i) * ldh + j, gx, gx1, n, j, width)
                elif n_columns == 48:
                    round48(sums, i * 48, gx1, n * width + j)
                else:
                    round_row(part, gx[n, j : j + n_columns])


@kernel
def backward(
    t, T, before, gy, x, norm, shift, r, mean, wbp, mods, atp, btp, scale, s_in, gx, d_a, d_b, scratch, block, wants_b
):
    """gx as x (added to for a norm; empty if nobody wants it), and this thread's dA (R, I) and dB^T, zeroed here."""
    n_rows, width, n_rank, n_out = len(gy), len(norm), len(scale), gy.shape[1]
    step = per(wbp)
    ldg, ldh, lds, ldt = n_out // step + 16, width // step + 16, n_rank // step + 16, block // step + 16
    wide, o = (width + 47) // 48 * 48, block * ldg
    g, s = scratch[t, :o], scratch[t, o : o + block * lds]
    o += block * lds
    turned, o = scratch[t, o : o + n_rank * ldt], o + n_rank * ldt
    h, o = scratch[t, o : o + block * ldh], o + block * ldh
    ldi = max(n_out, width) + 64
    inter, o = scratch[t, o : o + block // step * ldi], o + block // step * ldi
    sums, o = scratch[t, o : o + 8 * 48].view(np.float32), o + 8 * 48
    gated, o = scratch[t, o : o + 3 * 48].view(np.float32), o + 3 * 48
    dh, gx1 = scratch[t, o : o + block * wide].view(np.float32), gx.reshape(-1)
    g16, s16, t16, h16 = elements(g), elements(s), elements(turned), elements(h)
    d_a[t] = 0
    d_b[t] = 0
    tiles = (n_rows + 7) // 8
    end = min(n_rows, tiles * (t + 1) // T * 8)
    for r0 in range(tiles * t // T * 8, end, block):
        rows = min(block, end - r0)
        pad = (rows + 7) // 8 * 8
        _gradient_rows(gy, r0, rows, pad, g16, step * ldg)
        _gradient_low_rank(g, ldg, mods, btp, scale, pad, s16, step * lds, sums)
        if wants_b:
            pair_rows(g16, step * ldg, pad, n_out, inter, ldi)
            _turn(s_in[r0 : r0 + rows].reshape(-1), n_rank, rows, pad, n_rank, t16, step * ldt)
            _gradient_b(turned, ldt, mods, inter, ldi, pad // step, d_b[t])
        rows_again(before, wbp, x, norm, shift, r, mean, r0, rows, pad, h16, step * ldh, len(gx) > 0)
        if len(gx) > 0:
            _gradient_x(before, g, ldg, s, lds, wbp, atp, pad, rows, n_out // step, n_rank // step, width, x, r0,
                        dh, h16, step * ldh, gx, gx1, sums, gated)  # fmt: skip
        if d_a.shape[1] > 0:
            pair_rows(h16, step * ldh, pad, width, inter, ldi)
            _turn(s16, step * lds, rows, pad, n_rank, t16, step * ldt)
            _sum_over_rows(turned, ldt, 0, n_rank, inter, ldi, 0, width, pad // step, d_a[t], 0, wide)
        if normed(before, x, g) and len(gx) > 0:
            norm_back(before, dh, wide, x, norm, r, mean, r0, rows, gx)
