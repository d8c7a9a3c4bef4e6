"""Backward of ``attention_tiles.py``: the probabilities once more, and the three gradients.

A block of queries is 48 words long: 96 of them in bf16, in two parts of 48 lanes, and 48 in float32, whose P and dS are
left operand and right operand where they are.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math

import numpy as np
from numba import njit

from ..tile_parts import INLINE, elements, exp2, get, kernel, operand, per
from ..tiles import pair16, round16, tile_6x64, tile_8x16, tile_8x48, tile_12x32
from .attention_tiles import L, first_key, hide, lanes, scores

KEYS = 384  # keys of a chunk: a multiple of 48 and of the rows of every tile
_F4 = np.float32
_ZERO, _LOG2E = _F4(0), _F4(1 / math.log(2))


@njit(**INLINE)
def _unturn(row, n, width, cos, sin, out):
    """out (width) = the gradient of a head whose rotated gradient is ``row``."""
    half = width // 2
    for d in range(half):
        a, b, c, s = row[d], row[half + d], cos[n, d], sin[n, d]
        out[d] = a * c + b * s
        out[half + d] = b * c - a * s


@njit(**INLINE)
def _weigh(s, d, shift, scale2, delta, scale, exact):
    """s becomes P, d becomes dS."""
    for c in range(L):
        e = exp2(s[c] * scale2 - shift[c], exact)
        s[c] = e
        d[c] = e * (d[c] - delta[c]) * scale


@njit(**INLINE)
def _deltas(o, do, lse, n0, live, h, width, below, delta):
    """delta = rowsum(dO O), lse beside it; 0 for the lanes of padding."""
    for c in range(len(delta)):
        total = _ZERO
        if c < live:
            left, right = o[n0 + c, h * width : (h + 1) * width], do[n0 + c, h * width : (h + 1) * width]
            for d in range(width):
                total += get(left, d) * get(right, d)
        delta[c] = total
        below[c] = lse[h, n0 + c] if c < live else _ZERO


@njit(**INLINE)
def _slopes(s, d, keys, below, delta, scale2, scale, p, z, z_rows, lane):
    """P and dS of 48 lanes; bf16: p and z (keys, 96) from ``lane``, z_rows (keys/2, 48) pairs of keys."""
    p16, z16, exact = elements(p), elements(z), per(p) == 1
    for i in range(0, keys * L, 2 * L):
        j, y = i + L, 2 * i + lane
        _weigh(s[i:j], d[i:j], below, scale2, delta, scale, exact)
        _weigh(s[j : j + L], d[j : j + L], below, scale2, delta, scale, exact)
        if per(p) == 2:
            for c in range(0, L, 16):
                round16(s, i + c, p16, y + c)
                round16(s, j + c, p16, y + 2 * L + c)
                round16(d, i + c, z16, y + c)
                round16(d, j + c, z16, y + 2 * L + c)
                pair16(d, i + c, j + c, z_rows, i // 2 + c)


@njit(**INLINE)
def _clear(p, z, k0, k1, lane):
    p16, z16, wide = elements(p), elements(z), per(p) * L
    for k in range(k0, k1):
        for c in range(k * wide + lane, k * wide + lane + L):
            p16[c] = 0
            z16[c] = 0


@njit(**INLINE)
def _add_keys(left, right, depth, width, keys, out, at):
    """out (keys, K) from at += left (keys, depth) right.  May run into the row's padding, never past it."""
    whole = width // 64 * 64
    rest = width - whole
    for i in range(0, keys, 6):
        for d in range(0, whole, 64):
            tile_6x64(left, i * L, L, right, d, width, depth, out, at + i * width + d, width, 1)
    if rest == 48:
        for i in range(0, keys, 8):
            tile_8x48(left, i * L, L, right, whole, width, depth, out, at + i * width + whole, width, 1)
    elif rest == 32:
        for i in range(0, keys, 12):
            tile_12x32(left, i * L, L, right, whole, width, depth, out, at + i * width + whole, width, 1)
    elif rest == 16:
        for i in range(0, keys, 8):
            tile_8x16(left, i * L, L, right, whole, width, depth, out, at + i * width + whole, width, 1)


@njit(**INLINE)
def _finish_queries(dq, live, n0, width, cos, sin, row, turned, out, column):
    for c in range(live):
        u, lane = c // L * width * L, c % L
        for d in range(width):
            row[d] = dq[u + d * L + lane]
        if len(cos) > 0:
            _unturn(row, n0 + c, width, cos, sin, turned)
        else:
            turned[:] = row
        for d in range(0, width, 16):
            round16(turned, d, out[n0 + c], column + d)


@njit(**INLINE)
def _chunk(operands, work, width, k_at, t_at, keys, q0, k0, n, window, parts, below, delta, scale):
    """P and dS of a chunk of keys against a block of queries, and its part of dQ^T."""
    k, v, kt, ld = operands
    s, d, p, z, z_rows, q, do, dq = work
    step = per(k)
    depth = width // step
    for u in range(parts):
        ahead = q0 + u * L - k0  # lane 0 stands at this key of the chunk
        live = max(0, min(keys, (ahead + L + 7) // 8 * 8))
        scores(k, k_at, q, u * L * depth, depth, live, s)
        scores(v, k_at, do, u * L * depth, depth, live, d)
        hide(s, live, ahead, window, n - k0)
        part = slice(u * L, u * L + L)
        _slopes(s, d, live, below[part], delta[part], scale * _LOG2E, scale, p, z, z_rows, u * L)
        _clear(p, z, live, keys, u * L)
        if live:
            for i in range(0, width, 8):
                tile_8x48(kt, t_at + i * ld, ld, z_rows, 0, L, live // step, dq, (u * width + i) * L, L, 1)


def backward_words(width: int) -> int:
    """Words of scratch that a thread of ``backward`` needs."""
    return KEYS * L * 9 // 2 + width * (L * 6 + 1) + 16


@kernel
def backward(
    t, T, x, o, do, lse, token, cu, pu, tasks, bounds, spills, cos, sin, k, k_columns, v, scale, window,
    dx, dk, dv, longest, scratch,
):  # fmt: skip
    """The queries' part of dx (N, (H + 2G) K); dk and dv, still rotated, for each group: (G P + T longest, K) float32.

    A thread that begins in the middle of a group's work adds into a place of its own, behind the others (``spills``).
    k, k_columns, v: see lay_out_keys.
    """
    heads, (groups, width, ld), padded, step = len(lse), k_columns.shape, len(token), per(k)
    depth, repeats, m, turn = width // step, heads // groups, KEYS * L, len(cos) > 0
    w, dk1, dv1, at, size = scratch[t], dk.reshape(-1), dv.reshape(-1), 0, width * L  # size: words of a block
    q, do_lanes, q_rows, do_rows = w[:size], w[size:][:size], w[2 * size :][:size], w[3 * size :][:size]
    w = w[4 * size :]
    dq, words, w = w[: step * size].view(_F4), w[step * size :][:width], w[step * size + width :]
    s, d, p, z, z_rows = w[:m].view(_F4), w[m:][:m].view(_F4), w[2 * m :][:m], w[3 * m :][:m], w[4 * m :]
    work = (s, d, operand(s, p), operand(d, z), operand(d, z_rows), q, do_lanes, dq)
    left_p, left_z, operands = operand(s, p), operand(d, z), (k, v, k_columns.reshape(-1), ld)
    row, turned = np.empty(width, _F4), np.empty(width, _F4)
    below, delta, before = np.empty(step * L, _F4), np.empty(step * L, _F4), -1
    for i in range(bounds[t], bounds[t + 1]):
        b, h, q0 = tasks[i, 0], tasks[i, 1], tasks[i, 2]
        g, n, start, n0 = h // repeats, cu[b + 1] - cu[b], pu[b], cu[b] + q0
        group, end = b * groups + g, pu[b + 1] - pu[b]
        if group != before:
            before, at = group, (groups * padded + t * longest if spills[t] == group else g * padded + start) * width
            dk1[at : at + end * width] = _ZERO
            dv1[at : at + end * width] = _ZERO
        parts = min(step, (end - q0) // L)
        for u in range(parts):
            first, to = start + q0 + u * L, u * depth * L
            lanes(x, token, first, h * width, cos, sin, turn, words, q, to, width, q_rows, to, True)
            lanes(do, token, first, h * width, cos, sin, False, words, do_lanes, to, width, do_rows, to, True)
        live = min(parts * L, n - q0)
        _deltas(o, do, lse, n0, live, h, width, below, delta)
        dq[:] = _ZERO
        seen = min(n, q0 + parts * L)
        for k0 in range(first_key(q0, window), seen, KEYS):
            keys, first = (min(KEYS, seen - k0) + 7) // 8 * 8, start + k0
            k_at, t_at = (g * padded + first) * depth, g * width * ld + first // step
            _chunk(operands, work, width, k_at, t_at, keys, q0, k0, n, window, parts, below, delta, scale)
            _add_keys(left_p, do_rows, parts * L // step, width, keys, dv1, at + k0 * width)
            _add_keys(left_z, q_rows, parts * L // step, width, keys, dk1, at + k0 * width)
        _finish_queries(dq, live, n0, width, cos, sin, row, turned, dx, h * width)


@kernel
def finish_keys(t, T, dk, dv, place, row_of, pu, spills, padded, longest, groups, cos, sin, dx):
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
            if len(cos) > 0:
                _unturn(a, i, width, cos, sin, turned)
            else:
                turned[:] = a
            for d in range(0, width, 16):
                round16(turned, d, dx[i], (heads + g) * width + d)
                round16(b, d, dx[i], (heads + groups + g) * width + d)
