"""Kernels of ``rotary.py``: causal grouped attention over a flat stream of tokens, RoPE included, on tiles.

Scores are held transposed, keys x 48 queries ("lanes"): every statistic of the softmax is then a vector, P^T is the
right operand of O^T = V^T P^T and, row-major, the left operand of dV += P^T dO.

    S^T = K Q^T    dP^T = V dO^T    dS^T = P^T (dP^T - delta)    dV += P^T dO    dK += dS^T Q    dQ^T += K^T dS^T

Operands are words (see tiles.py). In bf16 P and dS are rounded into buffers of words, in float32 they are words where
they are. Rows are padded to whole blocks of lanes inside the work buffers only; a padding query is 0 with gradient 0, a
padding key is hidden. Keys and values are laid out once per call; a block's queries are rotated where they are used.
The softmax is taken by chunks of keys (Milakov and Gimelshein, arXiv:1805.02867); backward, in
``attention_tiles_back.py``, forms P again from lse.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math

import numpy as np
from numba import njit

from ..tile_parts import INLINE, elements, exp2, get, kernel, operand, pair_rows, per, put
from ..tiles import pair16, round16, tile_8x48

L = 48  # query lanes
CHUNK = 768  # keys of a forward chunk
_F4 = np.float32
_ZERO, _ONE, _HIDDEN, _LOG2E, _NAN = _F4(0), _F4(1), _F4(-1e30), _F4(1 / math.log(2)), _F4(np.nan)


# ------------------------------------------------------------------------------------------------ laying operands out


@njit(**INLINE)
def take(x, n, column, width, cos, sin, turn, out):
    """out (width) = a head of token n, rotated if ``turn``; zeros for a padding token, n < 0."""
    half = width // 2
    if n < 0:
        for d in range(width):
            out[d] = 0
    elif turn:
        row, c, s = x[n, column : column + width], cos[n], sin[n]
        for d in range(half):
            a, b = get(row, d), get(row, half + d)
            put(out, d, a * c[d] - b * s[d])
            put(out, half + d, b * c[d] + a * s[d])
    else:
        for d in range(width):
            out[d] = x[n, column + d]


@njit(**INLINE)
def _columns(rows, width, words, columns, at):
    """The tokens of one word, rows (their number, width), become a column of words."""
    pair_rows(rows, width, per(words), width, words, width)
    for d in range(width):
        columns[d, at] = words[d]


@kernel
def lay_out_keys(t, T, x, token, cos, sin, heads, backward, k_rows, columns, v_rows):
    """Keys and values of x (N, (H + 2G) K) as the products read them, by padded token p.

    k_rows, v_rows (G P K) elements in flat words; columns (G, K, P in words + some).  Forward reads k_rows and the
    columns of v, backward all rows and the columns of k.  Without angles, cos (0, 0), keys are not rotated.
    """
    groups, width, _ = columns.shape
    padded, step, turn = len(token), per(columns), len(cos) > 0
    keys, values = elements(k_rows), elements(v_rows)
    rows, words = np.empty(step * width, x.dtype), np.empty(width, columns.dtype)
    for g in range(groups):
        k0, v0 = (heads + g) * width, (heads + groups + g) * width
        for p in range(padded // step * t // T * step, padded // step * (t + 1) // T * step, step):
            at = (g * padded + p) * width
            for e in range(step):
                take(x, token[p + e], k0, width, cos, sin, turn, keys[at + e * width : at + (e + 1) * width])
                take(x, token[p + e], v0, width, cos, sin, False, rows[e * width : (e + 1) * width])
            if backward:
                _columns(keys[at : at + step * width], width, words, columns[g], p // step)
                for d in range(step * width):
                    values[at + d] = rows[d]
            else:
                _columns(rows, width, words, columns[g], p // step)


@njit(**INLINE)
def lanes(x, token, p, column, cos, sin, turn, words, out, o0, width, rows_out, r0, with_rows):
    """48 queries from padded token p: out (K in words, 48) from o0; rows_out (48 in words, K) from r0.

    ``words``: K of them, work space.
    """
    step, rows = per(words), elements(words)
    depth = width // step
    for c in range(0, L, step):
        for e in range(step):
            take(x, token[p + c + e], column, width, cos, sin, turn, rows[e * width : (e + 1) * width])
            for d in range(depth):
                out[o0 + d * L + c + e] = words[e * depth + d]
        if with_rows:
            at = r0 + c // step * width
            pair_rows(rows, width, step, width, rows_out[at : at + width], width)


# ------------------------------------------------------------------------------------------------ scores


@njit(**INLINE)
def scores(rows, at, queries, q0, depth, keys, s):
    """s (keys, 48) = rows from ``at`` times 48 queries from q0; a multiple of 8 keys."""
    for i in range(0, keys, 8):
        tile_8x48(rows, at + i * depth, depth, queries, q0, L, depth, s, i * L, L, 0)


@njit(**INLINE)
def hide(s, keys, ahead, window, n):
    """Of the keys 0..keys lane c sees key k if ahead + c - window < k <= ahead + c and k < n."""
    for k in range(min(keys, ahead - window + L)):
        for c in range(max(0, k - ahead + window), L):
            s[k * L + c] = _HIDDEN
    for k in range(max(0, ahead), keys):
        for c in range(L if k >= n else min(L, k - ahead)):
            s[k * L + c] = _HIDDEN


@njit(**INLINE)
def first_key(q0, window):
    """The key from which queries from q0 on are served: none before it is seen; a multiple of 48."""
    return max(0, q0 - window + 1) // L * L


# ------------------------------------------------------------------------------------------------ softmax


@njit(**INLINE)
def _raise(top, s):
    """top (48) against 4 keys at once: a maximum that waits for the one before it is what costs here."""
    for c in range(L):
        a = s[c + L] if s[c + L] > s[c] else s[c]
        b = s[c + 3 * L] if s[c + 3 * L] > s[c + 2 * L] else s[c + 2 * L]
        a = b if b > a else a
        top[c] = a if a > top[c] else top[c]


@njit(**INLINE)
def _weigh_and_sum(s, shift, scale, total, exact):
    """Two keys of s become P."""
    for c in range(L):
        a, b = exp2(s[c] * scale - shift[c], exact), exp2(s[c + L] * scale - shift[c], exact)
        s[c], s[c + L] = a, b
        total[c] += a + b


@njit(**INLINE)
def _softmax_chunk(s, keys, first, scale2, top, shift, total, out, p):
    """p = exp(s - top) in words of keys, for the top so far; total and out are brought down to that top."""
    exact = per(p) == 1
    for c in range(L):
        shift[c] = top[c]
    for i in range(0, keys, 4):
        _raise(top, s[i * L : (i + 4) * L])
    for c in range(L):
        down = exp2((shift[c] - top[c]) * scale2, exact)
        total[c] *= down
        shift[c] = down
    if not first:
        for d in range(0, len(out), L):
            for c in range(L):
                out[d + c] *= shift[c]
    for c in range(L):
        shift[c] = top[c] * scale2
    for i in range(0, keys * L, 2 * L):
        _weigh_and_sum(s[i : i + 2 * L], shift, scale2, total, exact)
        if per(p) == 2:
            for c in range(0, L, 16):
                pair16(s, i + c, i + L + c, p, i // 2 + c)


# ------------------------------------------------------------------------------------------------ forward


@njit(**INLINE)
def _finish_lanes(out, top, total, shift, n_lanes, n0, column, half, o, lse):
    """o and lse of a block; NaN where nothing but -inf was seen, as in the formula."""
    width = len(out) // L
    for c in range(L):
        total[c] = total[c] if top[c] > _HIDDEN else _NAN
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
    return CHUNK * L * 3 // 2 + width * (L * 3 + 1) + 16


@kernel
def forward(t, T, x, token, cu, pu, tasks, bounds, cos, sin, k, v_columns, scale, window, o, lse, scratch):
    """o (N, H K) elements and lse (H, N), in powers of two of the scaled score.  k, v_columns: see lay_out_keys."""
    heads, (groups, width, ld), padded, step = len(lse), v_columns.shape, len(token), per(k)
    depth, repeats, scale2, turn = width // step, heads // groups, scale * _LOG2E, len(cos) > 0
    v, w, m, size = v_columns.reshape(-1), scratch[t], CHUNK * L, width * L
    s, q, out, words = w[:m].view(_F4), w[m:][: depth * L], w[m + size :][:size].view(_F4), w[m + 2 * size :][:width]
    w = w[m + 2 * size + width :]
    half, p = elements(w[:size]), operand(s, w[size // step :])
    top, shift, total, below = np.empty(L, _F4), np.empty(L, _F4), np.empty(L, _F4), np.empty(L, _F4)
    for i in range(bounds[t], bounds[t + 1]):
        b, h, q0 = tasks[i, 0], tasks[i, 1], tasks[i, 2]
        g, n, start = h // repeats, cu[b + 1] - cu[b], pu[b]
        lanes(x, token, start + q0, h * width, cos, sin, turn, words, q, 0, width, q, 0, False)
        top[:], total[:] = _HIDDEN, _ZERO
        begin, seen = first_key(q0, window), min(n, q0 + L)
        for k0 in range(begin, seen, CHUNK):
            keys = (min(CHUNK, seen - k0) + 7) // 8 * 8
            scores(k, (g * padded + start + k0) * depth, q, 0, depth, keys, s)
            hide(s, keys, q0 - k0, window, n - k0)
            _softmax_chunk(s, keys, k0 == begin, scale2, top, shift, total, out, p)
            for d in range(0, width, 8):
                at = (g * width + d) * ld + (start + k0) // step
                tile_8x48(v, at, ld, p, 0, L, keys // step, out, d * L, L, k0 - begin)
        live, n0 = min(L, n - q0), cu[b] + q0
        _finish_lanes(out, top, total, shift, live, n0, h * width, half, o, below)
        for c in range(live):
            lse[h, n0 + c] = below[c]
