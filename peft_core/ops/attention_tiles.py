"""Kernels of ``rotary.py``: causal grouped attention over a flat stream of bf16 tokens, RoPE included, on tiles.

Scores are held transposed, keys x 48 queries ("lanes"): every statistic of the softmax is then a vector, P^T is the
right operand of O^T = V^T P^T (two keys a word) and, row-major, the left operand of dV += P^T dO.

    S^T = K Q^T    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dV += P^T dO    dK += dS^T Q    dQ^T += K^T dS^T

Rows are padded to whole blocks of lanes inside the work buffers only; a padding query is 0 with gradient 0, a padding
key is hidden. Keys and values are laid out once per call; a block's queries are rotated where they are used.
The softmax is taken by chunks of keys (Milakov and Gimelshein, arXiv:1805.02867); backward forms P again from lse.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from ..tile_parts import FAST, INLINE, bf16_bits, exp2, widen
from ..tiles import pair16, round16, tile_6x64, tile_8x48

L = 48  # query lanes
CHUNK = 768  # keys of a forward chunk
KEYS = 384  # keys of a backward chunk: a multiple of 48 and, for the 6-row tile, of 6
_F4, _U32 = np.float32, np.uint32
_ZERO, _ONE, _HIDDEN, _LOG2E, _16 = _F4(0), _F4(1), _F4(-1e30), _F4(1 / math.log(2)), _U32(16)


# ------------------------------------------------------------------------------------------------ laying operands out


@njit(**INLINE)
def _take(x, n, column, width, cos, sin, turn, row):  # type: ignore[no-untyped-def]
    """row (width) = a head of token n, rotated if ``turn``; zeros for a padding token, n < 0."""
    half = width // 2
    if n < 0:
        for d in range(width):
            row[d] = np.uint16(0)
    elif turn:
        for d in range(half):
            a, b, c, s = widen(x[n, column + d]), widen(x[n, column + half + d]), cos[n, d], sin[n, d]
            row[d] = bf16_bits(a * c - b * s)
            row[half + d] = bf16_bits(b * c + a * s)
    else:
        for d in range(width):
            row[d] = x[n, column + d]


@njit(**INLINE)
def _unturn(row, n, width, cos, sin, out):  # type: ignore[no-untyped-def]
    """out (width) = the gradient of a head whose rotated gradient is ``row``."""
    half = width // 2
    for d in range(half):
        a, b, c, s = row[d], row[half + d], cos[n, d], sin[n, d]
        out[d] = a * c + b * s
        out[half + d] = b * c - a * s


@njit(**INLINE)
def _join(low, high, out):  # type: ignore[no-untyped-def]
    for d in range(len(out)):
        out[d] = _U32(low[d]) | (_U32(high[d]) << _16)


@njit(**INLINE)
def _columns(low, high, out, at):  # type: ignore[no-untyped-def]
    for d in range(len(low)):
        out[d, at] = _U32(low[d]) | (_U32(high[d]) << _16)


@njit(**FAST)
def lay_out_keys(t, T, x, token, cos, sin, heads, backward, k_rows, columns, v_rows):  # type: ignore[no-untyped-def]
    """Keys and values of x (N, (H + 2G) K) as the products read them, by padded token p.

    k_rows, v_rows (G, P, K) bf16; columns (G, K, P/2 + some) pairs of tokens.  Forward reads k_rows and the columns of
    v, backward all rows and the columns of k.
    """
    groups, padded, width = k_rows.shape
    rows = np.empty((2, width), np.uint16)
    for g in range(groups):
        k0, v0 = (heads + g) * width, (heads + groups + g) * width
        for p in range(padded // 2 * t // T * 2, padded // 2 * (t + 1) // T * 2, 2):
            for e in range(2):
                _take(x, token[p + e], k0, width, cos, sin, True, rows[e])
                k_rows[g, p + e] = rows[e]
            if backward:
                _columns(rows[0], rows[1], columns[g], p // 2)
            for e in range(2):
                _take(x, token[p + e], v0, width, cos, sin, False, rows[e])
                if backward:
                    v_rows[g, p + e] = rows[e]
            if not backward:
                _columns(rows[0], rows[1], columns[g], p // 2)


@njit(**INLINE)
def _lanes(x, token, p, column, cos, sin, turn, rows, out, o0, pairs, q0, with_pairs):  # type: ignore[no-untyped-def]
    """48 queries from padded token p: out (K/2, 48) from o0, two features a word; pairs (24, K) from q0, two tokens."""
    width = rows.shape[1]
    words = rows.view(np.uint32)
    for c in range(0, L, 2):
        for e in range(2):
            _take(x, token[p + c + e], column, width, cos, sin, turn, rows[e])
        for d in range(width // 2):
            out[o0 + d * L + c] = words[0, d]
            out[o0 + d * L + c + 1] = words[1, d]
        if with_pairs:
            _join(rows[0], rows[1], pairs[q0 + c // 2 * width : q0 + (c // 2 + 1) * width])


# ------------------------------------------------------------------------------------------------ softmax


@njit(**INLINE)
def _scores(rows, at, lanes, l0, depth, keys, s):  # type: ignore[no-untyped-def]
    for i in range(0, keys, 8):
        tile_8x48(rows, at + i * depth, depth, lanes, l0, L, depth, s, i * L, L, 0)


@njit(**INLINE)
def _hide(s, k0, k1, ahead, n):  # type: ignore[no-untyped-def]
    """Of the keys k0..k1: lane c sees key k if k <= ahead + c and k < n."""
    for k in range(k0, k1):
        for c in range(L if k >= n else min(L, k - ahead)):
            s[k * L + c] = _HIDDEN


@njit(**INLINE)
def _raise(top, s):  # type: ignore[no-untyped-def]
    """top (48) against 4 keys at once: a maximum that waits for the one before it is what costs here."""
    for c in range(L):
        a = s[c + L] if s[c + L] > s[c] else s[c]
        b = s[c + 3 * L] if s[c + 3 * L] > s[c + 2 * L] else s[c + 2 * L]
        a = b if b > a else a
        top[c] = a if a > top[c] else top[c]


@njit(**INLINE)
def _weigh_and_sum(s, shift, scale, total):  # type: ignore[no-untyped-def]
    """Two keys of s become P."""
    for c in range(L):
        a, b = exp2(s[c] * scale - shift[c]), exp2(s[c + L] * scale - shift[c])
        s[c], s[c + L] = a, b
        total[c] += a + b


@njit(**INLINE)
def _weigh(s, d, shift, scale2, delta, scale):  # type: ignore[no-untyped-def]
    """s becomes P, d becomes dS."""
    for c in range(L):
        e = exp2(s[c] * scale2 - shift[c])
        s[c] = e
        d[c] = e * (d[c] - delta[c]) * scale


@njit(**INLINE)
def _softmax_chunk(s, keys, first, scale2, top, shift, total, out, p):  # type: ignore[no-untyped-def]
    """p = exp(s - top) in pairs of keys, for the top so far; total and out are brought down to that top."""
    for c in range(L):
        shift[c] = top[c]
    for i in range(0, keys, 4):
        _raise(top, s[i * L : (i + 4) * L])
    for c in range(L):
        down = exp2((shift[c] - top[c]) * scale2)
        total[c] *= down
        shift[c] = down
    if not first:
        for d in range(0, len(out), L):
            for c in range(L):
                out[d + c] *= shift[c]
    for c in range(L):
        shift[c] = top[c] * scale2
    for i in range(0, keys * L, 2 * L):
        _weigh_and_sum(s[i : i + 2 * L], shift, scale2, total)
        for c in range(0, L, 16):
            pair16(s, i + c, i + L + c, p, i // 2 + c)


# ------------------------------------------------------------------------------------------------ forward


@njit(**INLINE)
def _finish_lanes(out, total, shift, n_lanes, n0, column, half, o, lse):  # type: ignore[no-untyped-def]
    width = len(out) // L
    for c in range(L):
        lse[c] = shift[c] + np.log2(total[c])
        total[c] = _ONE / total[c]
    for d in range(0, len(out), L):
        for c in range(L):
            out[d + c] *= total[c]
        for c in range(0, L, 16):
            round16(out, d + c, half, d + c)
    for c in range(n_lanes):
        for d in range(width):
            o[n0 + c, column + d] = half[d * L + c]


def forward_words(width: int) -> int:
    """Words of scratch that a thread of ``forward`` needs."""
    return CHUNK * L * 3 // 2 + width * L * 2 + 16


@njit(**FAST)
def forward(t, T, x, token, cu, pu, tasks, bounds, cos, sin, k_rows, v_columns, scale, o, lse, scratch):  # type: ignore[no-untyped-def]
    """o (N, H K) bf16 bits and lse (H, N), in powers of two of the scaled score."""
    heads, (groups, padded, width) = len(lse), k_rows.shape
    depth, ld, repeats, scale2 = width // 2, v_columns.shape[2], heads // groups, scale * _LOG2E
    k, v, work = k_rows.reshape(-1).view(np.uint32), v_columns.reshape(-1), scratch[t]
    s, p = work[: CHUNK * L].view(np.float32), work[CHUNK * L : CHUNK * L * 3 // 2]
    q, at = work[CHUNK * L * 3 // 2 :][: depth * L], CHUNK * L * 3 // 2 + depth * L
    out, half = work[at:][: width * L].view(np.float32), work[at + width * L :][: width * L].view(np.uint16)
    rows = np.empty((2, width), np.uint16)
    top, shift, total, below = np.empty(L, _F4), np.empty(L, _F4), np.empty(L, _F4), np.empty(L, _F4)
    for i in range(bounds[t], bounds[t + 1]):
        b, h, q0 = tasks[i, 0], tasks[i, 1], tasks[i, 2]
        g, n, start = h // repeats, cu[b + 1] - cu[b], pu[b]
        _lanes(x, token, start + q0, h * width, cos, sin, True, rows, q, 0, q, 0, False)
        top[:], total[:] = _HIDDEN, _ZERO
        seen = min(n, q0 + L)
        for k0 in range(0, seen, CHUNK):
            keys = (min(CHUNK, seen - k0) + 7) // 8 * 8
            _scores(k, (g * padded + start + k0) * depth, q, 0, depth, keys, s)
            _hide(s, max(0, q0 - k0), keys, q0 - k0, n - k0)
            _softmax_chunk(s, keys, k0 == 0, scale2, top, shift, total, out, p)
            for d in range(0, width, 8):
                at = (g * width + d) * ld + (start + k0) // 2
                tile_8x48(v, at, ld, p, 0, L, keys // 2, out, d * L, L, k0)
        live, n0 = min(L, n - q0), cu[b] + q0
        _finish_lanes(out, total, shift, live, n0, h * width, half, o, below)
        for c in range(live):
            lse[h, n0 + c] = below[c]


# ------------------------------------------------------------------------------------------------ backward


@njit(**INLINE)
def _deltas(o, do, lse, n0, live, h, width, below, delta):  # type: ignore[no-untyped-def]
    """delta = rowsum(dO O), lse beside it; 0 for the lanes of padding."""
    for c in range(2 * L):
        total = _ZERO
        if c < live:
            for d in range(h * width, (h + 1) * width):
                total += widen(o[n0 + c, d]) * widen(do[n0 + c, d])
        delta[c] = total
        below[c] = lse[h, n0 + c] if c < live else _ZERO


@njit(**INLINE)
def _slopes(s, d, keys, below, delta, scale2, scale, p, z, z_pairs, lane):  # type: ignore[no-untyped-def]
    """P and dS of 48 lanes: p and z (keys, 96) bf16 from ``lane``, z_pairs (keys/2, 48) pairs of keys."""
    for i in range(0, keys * L, 2 * L):
        j, y = i + L, 2 * i + lane
        _weigh(s[i:j], d[i:j], below, scale2, delta, scale)
        _weigh(s[j : j + L], d[j : j + L], below, scale2, delta, scale)
        for c in range(0, L, 16):
            round16(s, i + c, p, y + c)
            round16(s, j + c, p, y + 2 * L + c)
            round16(d, i + c, z, y + c)
            round16(d, j + c, z, y + 2 * L + c)
            pair16(d, i + c, j + c, z_pairs, i // 2 + c)


@njit(**INLINE)
def _clear(p, z, k0, k1, lane):  # type: ignore[no-untyped-def]
    for k in range(k0, k1):
        for c in range(k * 2 * L + lane, k * 2 * L + lane + L):
            p[c] = z[c] = np.uint16(0)


@njit(**INLINE)
def _add_keys(left, right, n_pairs, width, keys, out, at):  # type: ignore[no-untyped-def]
    """out (keys, K) from at += left (keys, 2 n_pairs) right.  May run into the row's padding, never past it."""
    for i in range(0, keys, 6):
        for d in range(0, width, 64):
            tile_6x64(left, i * L, L, right, d, width, n_pairs, out, at + i * width + d, width, 1)


@njit(**INLINE)
def _finish_queries(dq, live, n0, width, cos, sin, row, turned, out, column):  # type: ignore[no-untyped-def]
    for c in range(live):
        u, lane = c // L * width * L, c % L
        for d in range(width):
            row[d] = dq[u + d * L + lane]
        _unturn(row, n0 + c, width, cos, sin, turned)
        for d in range(0, width, 16):
            round16(turned, d, out[n0 + c], column + d)


@njit(**INLINE)
def _chunk(operands, work, sizes, k_at, t_at, keys, q0, k0, n, parts, below, delta, scale):  # type: ignore[no-untyped-def]
    """P and dS of a chunk of keys against up to 96 queries, and its part of dQ^T."""
    k, v, kt, ld = operands
    s, d, p, z, z_pairs, q, do, dq = work
    width, depth = sizes
    p16, z16 = p.view(np.uint16), z.view(np.uint16)
    for u in range(parts):
        ahead = q0 + u * L - k0  # lane 0 stands at this key of the chunk
        live = max(0, min(keys, (ahead + L + 7) // 8 * 8))
        _scores(k, k_at, q, u * L * depth, depth, live, s)
        _scores(v, k_at, do, u * L * depth, depth, live, d)
        _hide(s, max(0, ahead), live, ahead, n - k0)
        lanes = slice(u * L, u * L + L)
        _slopes(s, d, live, below[lanes], delta[lanes], scale * _LOG2E, scale, p16, z16, z_pairs, u * L)
        _clear(p16, z16, live, keys, u * L)
        if live:
            for i in range(0, width, 8):
                tile_8x48(kt, t_at + i * ld, ld, z_pairs, 0, L, live // 2, dq, (u * width + i) * L, L, 1)


def backward_words(width: int) -> int:
    """Words of scratch that a thread of ``backward`` needs."""
    return KEYS * L * 9 // 2 + width * L * 6 + 16


@njit(**FAST)
def backward(  # type: ignore[no-untyped-def]
    t, T, x, o, do, lse, token, cu, pu, tasks, bounds, spills, cos, sin, k_rows, k_columns, v_rows, scale,
    dx, dk, dv, longest, scratch,
):  # fmt: skip
    """The queries' part of dx (N, (H + 2G) K); dk and dv, still rotated, for each group: (G P + T longest, K) float32.

    A thread that begins in the middle of a group's work adds into a place of its own, behind the others (``spills``).
    """
    heads, (groups, padded, width) = len(lse), k_rows.shape
    depth, ld, repeats, m = width // 2, k_columns.shape[2], heads // groups, KEYS * L
    k, v, kt = k_rows.reshape(-1).view(np.uint32), v_rows.reshape(-1).view(np.uint32), k_columns.reshape(-1)
    w, dk1, dv1 = scratch[t], dk.reshape(-1), dv.reshape(-1)
    s, d, p, z, z_pairs = w[:m].view(_F4), w[m:][:m].view(_F4), w[2 * m :][:m], w[3 * m :][:m], w[4 * m :][: m // 2]
    w, at, size = w[9 * m // 2 :], 0, width * L  # size: words of 96 queries in bf16
    q, do_lanes, q_pairs, do_pairs = w[:size], w[size:][:size], w[2 * size :][:size], w[3 * size :][:size]
    dq = w[4 * size :][: 2 * size].view(_F4)
    rows, row, turned = np.empty((2, width), np.uint16), np.empty(width, _F4), np.empty(width, _F4)
    below, delta, before = np.empty(2 * L, _F4), np.empty(2 * L, _F4), -1
    work, operands = (s, d, p, z, z_pairs, q, do_lanes, dq), (k, v, kt, ld)
    for i in range(bounds[t], bounds[t + 1]):
        b, h, q0 = tasks[i, 0], tasks[i, 1], tasks[i, 2]
        g, n, start, n0 = h // repeats, cu[b + 1] - cu[b], pu[b], cu[b] + q0
        group, end = b * groups + g, pu[b + 1] - pu[b]
        if group != before:
            before, at = group, (groups * padded + t * longest if spills[t] == group else g * padded + start) * width
            dk1[at : at + end * width] = _ZERO
            dv1[at : at + end * width] = _ZERO
        parts = min(2, (end - q0) // L)
        for u in range(parts):
            first, to = start + q0 + u * L, u * depth * L
            _lanes(x, token, first, h * width, cos, sin, True, rows, q, to, q_pairs, to, True)
            _lanes(do, token, first, h * width, cos, sin, False, rows, do_lanes, to, do_pairs, to, True)
        live = min(parts * L, n - q0)
        _deltas(o, do, lse, n0, live, h, width, below, delta)
        dq[:] = _ZERO
        seen = min(n, q0 + parts * L)
        for k0 in range(0, seen, KEYS):
            keys, first = (min(KEYS, seen - k0) + 7) // 8 * 8, start + k0
            k_at, t_at = (g * padded + first) * depth, g * width * ld + first // 2
            _chunk(operands, work, (width, depth), k_at, t_at, keys, q0, k0, n, parts, below, delta, scale)
            _add_keys(p, do_pairs, parts * L // 2, width, keys, dv1, at + k0 * width)
            _add_keys(z, q_pairs, parts * L // 2, width, keys, dk1, at + k0 * width)
        _finish_queries(dq, live, n0, width, cos, sin, row, turned, dx, h * width)


@njit(**FAST)
def finish_keys(t, T, dk, dv, place, row_of, pu, spills, padded, longest, groups, cos, sin, dx):  # type: ignore[no-untyped-def]
    """The keys' and values' part of dx, the spilled sums added in the order of the threads."""
    n, width = len(place), dk.shape[1]
    heads = dx.shape[1] // width - 2 * groups
    a, b, turned = np.empty(width, _F4), np.empty(width, _F4), np.empty(width, _F4)
    for i in range(n * t // T, n * (t + 1) // T):
        for g in range(groups):
            r = row_of[i]
            a[:], b[:] = dk[g * padded + place[i]], dv[g * padded + place[i]]
            for other in range(T):
                if spills[other] == r * groups + g:
                    at = groups * padded + other * longest + place[i] - pu[r]
                    for d in range(width):
                        a[d] += dk[at, d]
                        b[d] += dv[at, d]
            _unturn(a, i, width, cos, sin, turned)
            for d in range(0, width, 16):
                round16(turned, d, dx[i], (heads + g) * width + d)
                round16(b, d, dx[i], (heads + groups + g) * width + d)
