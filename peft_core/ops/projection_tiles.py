"""project on bf16 register tiles: one parallel region from norm or gate through the products to the residual sum.

Each thread takes blocks of rows. A block is rounded to bf16 once and meets every panel of the packed weights while it
stays in the second-level cache. Imported inside functions only (see tiles.py).

``panels`` (P, 6), one row per 48 columns of y: first column, columns, first word of its B, words in a row of that B,
first rank / 2, ranks / 2.  ``mods`` (M, 6), one row per linear: first column, columns, first rank, ranks (padded to
16), first word of its B in pairs of rows, first element of its dB.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numba import njit

from ..tiles import FAST, INLINE, bf16_bits, exp, round16, tile_8x16, tile_8x48, widen

PLAIN, NORM, GATED = 0, 1, 2
_ROWS, _COLUMNS = 8, 48  # of the tile
_U16, _ONE = np.uint32(16), np.float32(1)

# ------------------------------------------------------------------------------------------------ rows in


@njit(**INLINE)
def _inverse_rms(row, eps):
    total = np.float32(0)
    for k in range(len(row)):
        total += row[k] * row[k]
    return np.float32(1.0 / np.sqrt(np.float64(total) / len(row) + eps))  # float64: fast-math makes NaN of 1/sqrt(inf)


@njit(**INLINE)
def _norm_row(row, w, r, out):
    for k in range(len(row)):
        out[k] = bf16_bits(row[k] * r * w[k])


@njit(**INLINE)
def _gate_row(gate, up, out):
    for k in range(len(gate)):
        g = widen(gate[k])
        out[k] = bf16_bits(g / (_ONE + exp(-g)) * widen(up[k]))


@njit(**INLINE)
def _round_row(row, out):
    for k in range(len(row)):
        out[k] = bf16_bits(row[k])


@njit(**INLINE)
def _copy_row(row, out):
    for k in range(len(row)):
        out[k] = row[k]


@njit(**INLINE)
def _pair_rows(a16, ld, pairs, width, out, ldo):
    """Rows of bf16, two at a time, become the right operand of a product that sums over rows."""
    for q in range(pairs):
        low, high = a16[2 * q * ld : 2 * q * ld + width], a16[(2 * q + 1) * ld : (2 * q + 1) * ld + width]
        to = out[q * ldo : q * ldo + width]
        for k in range(width):
            to[k] = np.uint32(low[k]) | (np.uint32(high[k]) << _U16)


@njit(**INLINE)
def _sum_over_rows(left, ldl, at, n_rows, right, ldr, first, columns, pairs, out, o0, ldo):
    """out[n_rows, columns] += left[n_rows, rows] right[rows, columns]."""
    for i in range(0, n_rows, 8):
        for c in range(0, columns, 48):
            tile_8x48(left, (at + i) * ldl, ldl, right, first + c, ldr, pairs, out, o0 + i * ldo + c, ldo, 1)


@njit(**INLINE)
def _round48(src, s0, dst, d0):
    round16(src, s0, dst, d0)
    round16(src, s0 + 16, dst, d0 + 16)
    round16(src, s0 + 32, dst, d0 + 32)


@njit(**INLINE)
def _gate_backward(gate, up, d, out):
    """From d = dL/dh: h once more for dA, and both gradients.  One array out: LLVM gives up on more to tell apart."""
    for c in range(len(gate)):
        g, u = widen(gate[c]), widen(up[c])
        s = _ONE / (_ONE + exp(-g))
        silu = g * s
        out[c] = silu * u
        out[48 + c] = d[c] * u * s * (_ONE + g * (_ONE - s))
        out[96 + c] = d[c] * silu


@njit(**INLINE)
def _gate_out(part, n_columns, h16, at, gx, gx1, n, j, width):
    if n_columns == 48:
        _round48(part, 0, h16, at)
        _round48(part, 48, gx1, n * 2 * width + j)
        _round48(part, 96, gx1, n * 2 * width + width + j)
    else:
        _round_row(part[:n_columns], h16[at : at + n_columns])
        _round_row(part[48 : 48 + n_columns], gx[n, j : j + n_columns])
        _round_row(part[96 : 96 + n_columns], gx[n, width + j : width + j + n_columns])


@njit(**INLINE)
def _add48(y, residual, sums):
    for c in range(len(sums)):
        y[c] = residual[c] + sums[c]


# ------------------------------------------------------------------------------------------------ forward


@njit(**INLINE)
def _rows_in(before, x, norm, eps, r, r0, rows, pad, a16, ld):
    """A block of h as bf16.  Branches for another dtype of x are compiled too, and never taken."""
    half = x.shape[1] // 2
    for i in range(rows):
        row, out = x[r0 + i], a16[i * ld : i * ld + ld]
        if before == NORM:
            r[r0 + i] = _inverse_rms(row, eps)
            _norm_row(row, norm, r[r0 + i], out)
        elif before == GATED:
            _gate_row(row[:half], row[half:], out)
        else:
            _copy_row(row, out)
    for i in range(rows, pad):
        a16[i * ld : i * ld + ld] = 0


@njit(**INLINE)
def _low_rank_rows(a, ld, ap, n_pairs, scale, pad, s16, lds, sums):
    """s = scale h A^T for a block of rows, rounded to bf16."""
    n_rank = len(scale)
    for p in range(0, pad, 8):
        for c in range(0, n_rank, 16):
            tile_8x16(a, p * ld, ld, ap, c, n_rank, n_pairs, sums, 0, 16, 0)
            for i in range(8):
                for q in range(16):
                    s16[(p + i) * lds + c + q] = bf16_bits(sums[i * 16 + q] * scale[c + q])


@njit(**INLINE)
def _rows_out(sums, rows, first, n_columns, residual, has_residual, y, y1, n):
    """Eight rows and 48 columns of sums into y: on top of the residual, or rounded to bf16."""
    width = y.shape[1]
    for i in range(rows):
        if has_residual:
            _add48(y[n + i, first : first + n_columns], residual[n + i, first : first + n_columns],
                   sums[i * 48 : i * 48 + n_columns])  # fmt: skip
        elif n_columns == 48:
            _round48(sums, i * 48, y1, (n + i) * width + first)
        else:
            _round_row(sums[i * 48 : i * 48 + n_columns], y[n + i, first : first + n_columns])


@njit(**FAST)
def forward(t, T, before, x, norm, eps, r, wp, panels, ap, bp, scale, bias, residual, y, s_out, scratch, block):
    """y (N, O) = [residual +] h w^T + s b^T + bias, and s (N, R); r (N,) for a norm.  bias is empty or (O,)."""
    n_rows, n_pairs, n_rank, y1 = len(x), len(norm) // 2, len(scale), y.reshape(-1)
    ld, lds = n_pairs + 16, n_rank // 2 + 16  # never a power of two: rows would share cache sets
    a, s = scratch[t, : block * ld], scratch[t, block * ld : block * (ld + lds)]
    sums = scratch[t, block * (ld + lds) : block * (ld + lds) + 8 * 48].view(np.float32)
    a16, s16, has_residual = a.view(np.uint16), s.view(np.uint16), len(residual) > 0
    tiles = (n_rows + 7) // 8
    end = min(n_rows, tiles * (t + 1) // T * 8)
    for r0 in range(tiles * t // T * 8, end, block):
        rows = min(block, end - r0)
        pad = (rows + 7) // 8 * 8
        _rows_in(before, x, norm, eps, r, r0, rows, pad, a16, 2 * ld)
        _low_rank_rows(a, ld, ap, n_pairs, scale, pad, s16, 2 * lds, sums)
        for i in range(rows):
            _copy_row(s16[i * 2 * lds : i * 2 * lds + n_rank], s_out[r0 + i])
        for j in range(len(panels)):
            first, n_columns, b0, ldb, rank0, n_ranks = panels[j]
            for p in range(0, pad, 8):
                tile_8x48(a, p * ld, ld, wp, j * n_pairs * 48, 48, n_pairs, sums, 0, 48, 0)
                if n_ranks > 0:
                    tile_8x48(s, p * lds + rank0, lds, bp, b0, ldb, n_ranks, sums, 0, 48, 1)
                if len(bias) > 0:
                    for i in range(8):
                        for c in range(n_columns):
                            sums[i * 48 + c] += bias[first + c]
                _rows_out(sums, min(8, rows - p), first, n_columns, residual, has_residual, y, y1, r0 + p)


# ------------------------------------------------------------------------------------------------ backward


@njit(**INLINE)
def _gradient_rows(gy, r0, rows, pad, g16, ld):
    """A block of gy as bf16."""
    for i in range(rows):
        if gy.itemsize == 4:
            _round_row(gy[r0 + i], g16[i * ld : i * ld + ld])
        else:
            _copy_row(gy[r0 + i], g16[i * ld : i * ld + ld])
    for i in range(rows, pad):
        g16[i * ld : i * ld + ld] = 0


@njit(**INLINE)
def _gradient_low_rank(g, ldg, mods, btp, scale, pad, s16, lds, sums):
    """dS = scale gy B, linear by linear, rounded to bf16."""
    for m in range(len(mods)):
        first, n_out, rank0, n_rank, b0, _ = mods[m]
        for p in range(0, pad, 8):
            for c in range(0, n_rank, 16):
                tile_8x16(g, p * ldg + first // 2, ldg, btp, b0 + c, n_rank, n_out // 2, sums, 0, 16, 0)
                for i in range(8):
                    for q in range(16):
                        s16[(p + i) * lds + rank0 + c + q] = bf16_bits(sums[i * 16 + q] * scale[rank0 + c + q])


@njit(**INLINE)
def _turn(src, ld, rows, pad, n_rank, out, ldo):
    """Rows of ranks become one row a rank."""
    for c in range(n_rank):
        for i in range(rows):
            out[c * ldo + i] = src[i * ld + c]
        for i in range(rows, pad):
            out[c * ldo + i] = 0


@njit(**INLINE)
def _gradient_b(f, ldf, mods, inter, ldi, pairs, d_b):
    """dB^T (R, O) += s^T gy, each linear's in its own place, rows padded to whole panels."""
    for m in range(len(mods)):
        first, n_out, rank0, n_rank, _, at = mods[m]
        _sum_over_rows(f, ldf, rank0, n_rank, inter, ldi, first, n_out, pairs, d_b, at, (n_out + 47) // 48 * 48)


@njit(**INLINE)
def _norm_backward(dh, lddh, x, norm, r, r0, rows, gx):
    width = x.shape[1]
    for i in range(rows):
        d, row, scale, to = dh[i * lddh : i * lddh + width], x[r0 + i], r[r0 + i], gx[r0 + i]
        inner = np.float32(0)
        for k in range(width):
            inner += d[k] * norm[k] * row[k]
        inner *= scale * scale * scale / np.float32(width)
        for k in range(width):
            to[k] += d[k] * norm[k] * scale - row[k] * inner


@njit(**INLINE)
def _input_rows(before, x, norm, r, r0, rows, pad, h16, ld, wants_x):
    """h once more, for dA; behind a gate it comes with the gate's gradient, where that is wanted."""
    half = x.shape[1] // 2
    for i in range(rows):
        out = h16[i * ld : i * ld + ld]
        if before == NORM:
            _norm_row(x[r0 + i], norm, r[r0 + i], out)
        elif before == PLAIN:
            _copy_row(x[r0 + i], out)
        elif not wants_x:
            _gate_row(x[r0 + i, :half], x[r0 + i, half:], out)
    for i in range(rows, pad):
        h16[i * ld : i * ld + ld] = 0


@njit(**INLINE)
def _gradient_x(
    before, g, ldg, s, lds, wbp, atp, pad, rows, n_pairs, n_ranks, width, x, r0, dh, h16, ldh, gx, gx1, sums, gated
):
    """dh = gy w + dS A, panel by panel; stored for a norm, rounded for a plain input, through the gate behind one."""
    wide = (width + 47) // 48 * 48
    for j in range(0, width, 48):
        n_columns = min(48, width - j)
        for p in range(0, pad, 8):
            tile_8x48(g, p * ldg, ldg, wbp, j * n_pairs, 48, n_pairs, sums, 0, 48, 0)
            if n_ranks > 0:
                tile_8x48(s, p * lds, lds, atp, j, wide, n_ranks, sums, 0, 48, 1)
            for i in range(min(8, rows - p)):
                part, n = sums[i * 48 : i * 48 + n_columns], r0 + p + i
                if before == NORM:
                    to = dh[(p + i) * wide + j : (p + i) * wide + j + n_columns]
                    for c in range(n_columns):
                        to[c] = part[c]
                elif before == GATED:
                    _gate_backward(x[n, j : j + n_columns], x[n, width + j : width + j + n_columns], part, gated)
                    _gate_out(gated, n_columns, h16, (p + i) * ldh + j, gx, gx1, n, j, width)
                elif n_columns == 48:
                    _round48(sums, i * 48, gx1, n * width + j)
                else:
                    _round_row(part, gx[n, j : j + n_columns])


@njit(**FAST)
def backward(t, T, before, gy, x, norm, r, wbp, mods, atp, btp, scale, s_in, gx, d_a, d_b, scratch, block, wants_b):
    """gx as x (added to for a norm; empty if nobody wants it), and this thread's dA (R, I) and dB^T, zeroed here."""
    n_rows, width, n_rank, n_out = len(gy), len(norm), len(scale), gy.shape[1]
    ldg, ldh, lds, ldt = n_out // 2 + 16, width // 2 + 16, n_rank // 2 + 16, block // 2 + 16
    wide, o = (width + 47) // 48 * 48, block * ldg
    g, s = scratch[t, :o], scratch[t, o : o + block * lds]
    o += block * lds
    turned, o = scratch[t, o : o + n_rank * ldt], o + n_rank * ldt
    h, o = scratch[t, o : o + block * ldh], o + block * ldh
    ldi = max(n_out, width) + 64
    inter, o = scratch[t, o : o + block // 2 * ldi], o + block // 2 * ldi
    sums, o = scratch[t, o : o + 8 * 48].view(np.float32), o + 8 * 48
    gated, o = scratch[t, o : o + 3 * 48].view(np.float32), o + 3 * 48
    dh, gx1 = scratch[t, o : o + block * wide].view(np.float32), gx.reshape(-1)
    g16, s16, t16, h16 = g.view(np.uint16), s.view(np.uint16), turned.view(np.uint16), h.view(np.uint16)
    d_a[t] = 0
    d_b[t] = 0
    tiles = (n_rows + 7) // 8
    end = min(n_rows, tiles * (t + 1) // T * 8)
    for r0 in range(tiles * t // T * 8, end, block):
        rows = min(block, end - r0)
        pad = (rows + 7) // 8 * 8
        _gradient_rows(gy, r0, rows, pad, g16, 2 * ldg)
        _gradient_low_rank(g, ldg, mods, btp, scale, pad, s16, 2 * lds, sums)
        if wants_b:
            _pair_rows(g16, 2 * ldg, pad // 2, n_out, inter, ldi)
            _turn(s_in[r0 : r0 + rows].reshape(-1), n_rank, rows, pad, n_rank, t16, 2 * ldt)
            _gradient_b(turned, ldt, mods, inter, ldi, pad // 2, d_b[t])
        _input_rows(before, x, norm, r, r0, rows, pad, h16, 2 * ldh, len(gx) > 0)
        if len(gx) > 0:
            _gradient_x(before, g, ldg, s, lds, wbp, atp, pad, rows, n_out // 2, n_rank // 2, width, x, r0, dh,
                        h16, 2 * ldh, gx, gx1, sums, gated)  # fmt: skip
        if d_a.shape[1] > 0:
            _pair_rows(h16, 2 * ldh, pad // 2, width, inter, ldi)
            _turn(s16, 2 * lds, rows, pad, n_rank, t16, 2 * ldt)
            _sum_over_rows(turned, ldt, 0, n_rank, inter, ldi, 0, width, pad // 2, d_a[t], 0, wide)
        if before == NORM and len(gx) > 0:
            _norm_backward(dh, wide, x, norm, r, r0, rows, gx)
