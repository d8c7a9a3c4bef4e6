"""The kernel of ``decode.attend_next``: RoPE, the new keys and values into the cache, attention of one query a row.

A part is a run of query heads, row after row. Where two parts share a group of heads both write its new key and value,
the same bits: neither has to wait for the other. Imported inside functions only (see tiles.py).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numba import njit

from ..tile_parts import INLINE, exp, get, kernel, put
from ..tile_team import share

_ZERO = np.float32(0)


@njit(**INLINE)
def _turned(x, at, cos, sin, n, width, out, to):
    """A head of x, rotated and rounded; as it is where there are no angles."""
    half = width // 2
    if len(cos) == 0:
        for k in range(width):
            out[to + k] = x[at + k]
        return
    for k in range(half):
        first, second = get(x, at + k), get(x, at + half + k)
        put(out, to + k, first * cos[n, k] - second * sin[n, k])
        put(out, to + half + k, second * cos[n, k] + first * sin[n, k])


@njit(**INLINE)
def _scores(query, k, at, step, n, scale, s):
    for j in range(n):
        total = _ZERO
        for d in range(len(query)):
            total += query[d] * get(k, at + j * step + d)
        s[j] = total * scale


@njit(**INLINE)
def _softmax(s):
    top = s[0]
    for j in range(len(s)):
        top = s[j] if s[j] > top else top
    total = _ZERO
    for j in range(len(s)):
        s[j] = exp(s[j] - top)
        total += s[j]
    for j in range(len(s)):
        s[j] /= total


@njit(**INLINE)
def _mixed(s, v, at, step, out):
    out[:] = _ZERO
    for j in range(len(s)):
        p = s[j]
        for d in range(len(out)):
            out[d] += p * get(v, at + j * step + d)


@kernel
def _heads(t, T, x, cos, sin, k, v, slots, seen, heads, scale, o, scratch):
    groups, width = k.shape[1], k.shape[2]
    x1, k1, v1, o1, wide, step = x.reshape(-1), k.reshape(-1), v.reshape(-1), o.reshape(-1), x.shape[1], groups * width
    query, out, rest = scratch[t, :width], scratch[t, width : 2 * width], scratch[t, 2 * width :]
    repeats, tasks = heads // groups, len(slots) * heads
    first_task = tasks * t // T
    for task in range(first_task, tasks * (t + 1) // T):
        n, h = task // heads, task % heads
        g, slot = h // repeats, slots[n]
        if h % repeats == 0 or task == first_task:
            _turned(x1, n * wide + (heads + g) * width, cos, sin, n, width, k1, slot * step + g * width)
            for d in range(width):
                v1[slot * step + g * width + d] = x1[n * wide + (heads + groups + g) * width + d]
        to, at = (n * heads + h) * width, (slot + 1 - seen[n]) * step + g * width
        _turned(x1, n * wide + h * width, cos, sin, n, width, o1, to)  # rounded there, before it makes way for the sum
        for d in range(width):
            query[d] = get(o1, to + d)
        s = rest[: seen[n]]
        _scores(query, k1, at, step, seen[n], scale, s)
        _softmax(s)
        _mixed(s, v1, at, step, out)
        for d in range(width):
            put(o1, to + d, out[d])


@kernel
def attend_next(team, parts, x, cos, sin, k, v, slots, seen, heads, scale, o, scratch):
    """o (N, H K) of x (N, (H + 2G) K); k and v (S, G, K) get a new row each at slots (N,).  Elements throughout."""
    share(team, parts, _heads, (x, cos, sin, k, v, slots, seen, heads, scale, o, scratch))
