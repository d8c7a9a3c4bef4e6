"""Attention of one new query a row over the keys that its row has seen: what generation does with a cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..dtypes import bfloat16
from ..kernels import formula, get_num_threads, run_team, team_supported, tiles_supported
from ..packing import elements
from ..workspace import workspace

_NO_ANGLES = np.zeros((0, 0), np.float32)


def attend_next(
    qkv: Array, keys: Array, values: Array, *, cos: Any, sin: Any, slots: Array, seen: Array, n_heads: int,
    scale: float | None = None, window: int | None = None,
) -> Array | None:  # fmt: skip
    """rotary_attention of one new token a row, which is put into the cache: o (N, H K) of qkv (N, (H + 2G) K).

    keys and values (S, G, K) are written to: token n's go to slots[n], and it sees the seen[n] last up to there, its
    own included; with a window no more than so many.  cos and sin (N, K/2) float32, or None for no rotation.
    None, and nothing written, where the kernel does not run: no tiles, or a cache of another dtype.
    """
    width, dtype = keys.shape[2], qkv.dtype
    fit = type(qkv) is np.ndarray and keys.dtype == dtype and width % 2 == 0 and len(qkv) > 0
    if not (fit and tiles_supported(dtype) and team_supported()):
        return None
    from . import decode_tiles as kernels

    seen = seen if window is None else np.minimum(seen, window)
    factor = np.float32(1 / math.sqrt(width) if scale is None else scale)
    o = np.empty((len(qkv), n_heads * width), dtype)
    with workspace:
        size = int(seen.max()) + 2 * width + 16
        scratch = workspace.get("scratch", get_num_threads(), size, dtype=np.float32)
        run_team(kernels.attend_next, elements(qkv, dtype), _NO_ANGLES if cos is None else cos,
                 _NO_ANGLES if sin is None else sin, elements(keys, dtype), elements(values, dtype), slots, seen,
                 n_heads, factor, elements(o, dtype), scratch)  # fmt: skip
    return o


def attend_one(q: Array, k: Array, v: Array, first: Array, lengths: Array, scale: float) -> Array:
    """o (B, H, K) float32 of q (B, H, K): row b sees the lengths[b] keys of k, v (S, G, K) from first[b] on."""
    if k.dtype == bfloat16:
        k, v = k.view(np.uint16), v.view(np.uint16)  # the bits, for numba knows no bfloat16
    xp = xp_of(q)
    return attend_rows(q.astype(np.float32, copy=False), k, v, xp.asarray(first), xp.asarray(lengths), scale)[0]


def _wide(x: Array) -> Array:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32) if x.dtype == np.uint16 else x


@formula
def attend_rows(q: Array, k: Array, v: Array, first: Array, lengths: Array, scale: float) -> tuple[Array]:
    """See ``attend_one``; uint16 keys and values are the bits of bfloat16."""
    xp, groups = xp_of(q), k.shape[1]
    o = xp.empty_like(q)
    for b in range(len(q)):
        seen = slice(int(first[b]), int(first[b]) + int(lengths[b]))
        keys, values = (_wide(x[seen]).swapaxes(0, 1) for x in (k, v))  # (G, n, K)
        s = q[b].reshape(groups, -1, q.shape[2]) @ keys.swapaxes(1, 2) * np.float32(scale)  # (G, H/G, n)
        p = xp.exp(s - s.max(-1, keepdims=True))
        o[b] = (p @ values / p.sum(-1, keepdims=True)).reshape(o[b].shape)
    return (o,)


@attend_rows.cpu(out=lambda q, *rest: (np.empty_like(q),))
def _attend_rows(t, T, q, k, v, first, lengths, scale, o):
    heads, groups, width = q.shape[1], k.shape[1], q.shape[2]
    repeats, zero, factor = heads // groups, np.float32(0), np.float32(scale)
    longest = 0
    for b in range(len(q)):
        longest = max(longest, lengths[b])
    s, row = np.empty((repeats, longest), np.float32), np.empty(width, np.float32)
    tasks = len(q) * groups
    for task in range(tasks * t // T, tasks * (t + 1) // T):
        b, g = task // groups, task % groups
        n, at = lengths[b], first[b]
        for j in range(n):
            if k.itemsize == 2:
                for d in range(width):
                    row[d] = np.uint32(np.uint32(k[at + j, g, d]) << np.uint32(16)).view(np.float32)
            else:
                for d in range(width):
                    row[d] = k[at + j, g, d]
            for r in range(repeats):
                query, total = q[b, g * repeats + r], zero
                for d in range(width):
                    total += query[d] * row[d]
                s[r, j] = total * factor
        for r in range(repeats):
            top, total = s[r, 0], zero
            for j in range(n):
                top = s[r, j] if s[r, j] > top else top
            for j in range(n):
                s[r, j] = math.exp(s[r, j] - top)
                total += s[r, j]
            for j in range(n):
                s[r, j] /= total
            o[b, g * repeats + r] = zero
        for j in range(n):
            if v.itemsize == 2:
                for d in range(width):
                    row[d] = np.uint32(np.uint32(v[at + j, g, d]) << np.uint32(16)).view(np.float32)
            else:
                for d in range(width):
                    row[d] = v[at + j, g, d]
            for r in range(repeats):
                out, p = o[b, g * repeats + r], s[r, j]
                for d in range(width):
                    out[d] += p * row[d]
