"""Attention over a flat stream of tokens, by blocks of queries: no T x T array, nothing computed for padding.

Every block of queries meets only the keys that its causal and window bounds let it see, so the memory held at a time
is a block of scores, linear in the row's length. Backward keeps the logarithm of each softmax's denominator and forms
the probabilities again, as in Dao et al., "FlashAttention" (arXiv:2205.14135), section 3.1 and appendix B.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..amp import compute_dtype
from ..backend import Array, to_numpy, xp_of
from ..blas import product
from ..dtypes import accumulate_dtype, promote
from ..kernels import formula
from ..tape import op
from ..tensor import Tensor

BLOCK = 128  # queries a block

# exp(x) = 2^k 2^f, |f| <= 1/2: Taylor's series of 2^f to degree 7, 5e-9 relative. A call of the system's expf would
# keep LLVM from vectorising the loops below. float32 scalars, or numba would compute in float64.
_LOG2E = np.float32(1 / math.log(2))
_C = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(8))
_HALF, _LOWEST, _ZERO, _ONE = np.float32(0.5), np.float32(-126), np.float32(0), np.float32(1)  # 2^-126: the last normal
_LANES = 16


class Row(NamedTuple):
    """One sequence: ``n_q`` queries from ``q0`` of the query stream, ``n_k`` keys from ``k0`` of the key stream."""

    q0: int
    n_q: int
    k0: int
    n_k: int


class Block(NamedTuple):
    """Queries a..b of a row against its keys c..d.  Query a + i sees the keys c + j with first <= j - i < last."""

    a: int
    b: int
    c: int
    d: int
    first: int
    last: int


# ------------------------------------------------------------------------------------------------ softmax of a block


def _seen(xp: Any, s: Array, first: int, last: int) -> Array:
    ahead = xp.arange(s.shape[2])[None, :] - xp.arange(s.shape[1])[:, None]  # (n, keys)
    return (ahead >= first) & (ahead < last)


@formula
def softmax_block(s: Array, lse: Array, scale: Any, first: int, last: int) -> None:
    """In place: s (H, n, keys) becomes softmax(scale * s) over the keys seen, 0 elsewhere; lse (H, n) its log-sum-exp.

    Every query sees at least one key.
    """
    xp = xp_of(s)
    seen = _seen(xp, s, first, last)
    with np.errstate(invalid="ignore"):  # inf - inf is the NaN that a diverged run has to show
        s *= scale
        s[...] = xp.where(seen, s, -xp.inf)
        top = s.max(-1, keepdims=True)  # (H, n, 1)
        s -= top
        xp.exp(s, out=s)
        total = s.sum(-1, keepdims=True)
        s /= total
        lse[...] = (top + xp.log(total))[..., 0]


@softmax_block.cpu()
def _softmax_block(t, T, s, lse, scale, first, last):
    heads, n, keys = s.shape
    lanes = np.empty(_LANES, np.float32)  # a maximum per lane: LLVM does not vectorise one that has to respect NaN
    for r in range(t, heads * n, T):
        h, i = r // n, r % n
        lo, hi = max(0, i + first), min(keys, i + last)
        s[h, i, :lo] = _ZERO
        s[h, i, hi:] = _ZERO
        row = s[h, i, lo:hi]  # counted from 0: an index that may be negative is not vectorised
        lanes[:] = row[0] * scale
        full = len(row) // _LANES * _LANES
        for j in range(0, full, _LANES):
            for c in range(_LANES):
                x = row[j + c] * scale
                lanes[c] = x if x > lanes[c] else lanes[c]
        top = lanes[0]
        for c in range(1, _LANES):
            top = lanes[c] if lanes[c] > top else top
        for j in range(full, len(row)):
            x = row[j] * scale
            top = x if x > top else top
        total = _ZERO
        for j in range(len(row)):
            y = (row[j] * scale - top) * _LOG2E
            y = _LOWEST if y < _LOWEST else y  # this way round a NaN stays
            k = np.floor(y + _HALF)
            f = y - k
            e = ((((((_C[7] * f + _C[6]) * f + _C[5]) * f + _C[4]) * f + _C[3]) * f + _C[2]) * f + _C[1]) * f + _C[0]
            e *= np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
            row[j] = e
            total += e
        lse[h, i] = top + np.log(total)
        share = _ONE / total
        for j in range(len(row)):
            row[j] *= share


@formula
def slope_block(s: Array, dp: Array, lse: Array, scale: Any, first: int, last: int) -> None:
    """In place: s (H, n, keys) becomes P = exp(scale * s - lse), dp becomes dS = scale * P * (dp - sum(P * dp)).

    lse (H, n).  Unseen keys get 0 in both.  The sum could be had as do . o; that o is rounded in half precision.
    """
    xp = xp_of(s)
    seen = _seen(xp, s, first, last)
    with np.errstate(invalid="ignore"):
        s *= scale
        s[...] = xp.where(seen, s, -xp.inf)  # before exp: an unseen score may be far above lse
        s -= lse[..., None]
        xp.exp(s, out=s)
        dp[...] = xp.where(seen, dp, 0)
        dp -= xp.einsum("hik,hik->hi", s, dp)[..., None]
        dp *= s
        dp *= scale


@slope_block.cpu()
def _slope_block(t, T, s, dp, lse, scale, first, last):
    heads, n, keys = s.shape
    for r in range(t, heads * n, T):
        h, i = r // n, r % n
        lo, hi = max(0, i + first), min(keys, i + last)
        s[h, i, :lo] = dp[h, i, :lo] = _ZERO
        s[h, i, hi:] = dp[h, i, hi:] = _ZERO
        row, slope = s[h, i, lo:hi], dp[h, i, lo:hi]
        below, mean = lse[h, i], _ZERO
        for j in range(len(row)):
            y = (row[j] * scale - below) * _LOG2E
            y = _LOWEST if y < _LOWEST else y
            k = np.floor(y + _HALF)
            f = y - k
            e = ((((((_C[7] * f + _C[6]) * f + _C[5]) * f + _C[4]) * f + _C[3]) * f + _C[2]) * f + _C[1]) * f + _C[0]
            e *= np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
            row[j] = e
            mean += e * slope[j]
        for j in range(len(row)):
            slope[j] = row[j] * (slope[j] - mean) * scale


# ------------------------------------------------------------------------------------------------ the op


@op
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_q: Any,
    cu_k: Any = None,
    k_lengths: Any = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    needs: tuple[bool, bool, bool],
) -> tuple:
    """o = softmax(scale * q k^T) v, row by row of a flat stream; query head h reads key head h // (H / G).

    q (N, H, K), k and v (S, G, K) -> (N, H, K) in the compute dtype, or the promoted one; scores and sums in float32.
    Row b's queries are q[cu_q[b]:cu_q[b+1]], its keys the first k_lengths[b] from cu_k[b] (default: up to cu_k[b+1]);
    cu_k defaults to cu_q, scale to 1 / sqrt(K). Causal: query i of n_q sees key j of n_k if j <= i + n_k - n_q; window:
    only the last ``window`` of those. A query that sees no key gives 0, and gradient 0.
    Retains q, k, v (as rounded to the compute dtype) and lse (H, N).
    Raises ValueError for shapes, offsets or a window that do not fit.
    Source: Vaswani et al., arXiv:1706.03762, section 3.2; grouped heads: Ainslie et al., arXiv:2305.13245, section 2.2.
    """
    _check_shapes(q.shape, k.shape, v.shape)
    check_window("attention", window, causal)
    rows = rows_of("attention", cu_q, cu_k, k_lengths, q.shape[0], k.shape[0])
    kinds = q.dtype, k.dtype, v.dtype
    dtype = compute_dtype() or promote(*kinds)
    work = accumulate_dtype(dtype)
    factor = work.type(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    q, k, v = (a.astype(dtype, copy=False) for a in (q, k, v))
    o, lse = attend(q, k, v, rows, factor, causal, window)
    if not any(needs):
        return o, None

    def joint(gy: Array, acc: list) -> tuple:
        grads = attend_back(q, k, v, lse, gy, rows, factor, causal, window, needs)
        return tuple(None if g is None else g.astype(kind, copy=False) for g, kind in zip(grads, kinds, strict=True))

    return o, joint


def attend(
    q: Array, k: Array, v: Array, rows: list[Row], scale: Any, causal: bool, window: int | None
) -> tuple[Array, Array]:
    """o like q, and lse (H, N), of q, k, v in the dtype that products take; ``scale`` has the type of their sums."""
    xp, groups, work = xp_of(q), k.shape[1], np.dtype(type(scale))
    o = xp.zeros_like(q, order="C")  # (N, H, K)
    lse = xp.zeros((q.shape[1], q.shape[0]), work)  # (H, N)
    for row in rows:
        keys, values = (_key_heads(a, row, work) for a in (k, v))  # (G, n_k, K)
        for block in _blocks(row, causal, window):
            at = slice(row.q0 + block.a, row.q0 + block.b)
            seen = slice(block.c, block.d)
            part = xp.empty((q.shape[1], block.b - block.a), work)  # (H, n)
            s = product(_query_heads(q[at], groups, work), keys[:, seen].swapaxes(1, 2))  # (G, H/G * n, keys)
            s = s.reshape(*part.shape, -1)  # (H, n, keys)
            softmax_block(s, part, scale, block.first, block.last)
            lse[:, at] = part
            _put_query_heads(o, at, product(s.reshape(groups, -1, s.shape[-1]), values[:, seen]))
    return o, lse


def attend_back(
    q: Array, k: Array, v: Array, lse: Array, gy: Array,
    rows: list[Row], scale: Any, causal: bool, window: int | None, needs: tuple[bool, bool, bool],
) -> tuple:  # fmt: skip
    """dq, dk, dv, or None where not needed:  dv = P^T do,  dS = P (dP - rowsum(P dP)),  dq = dS k,  dk = dS^T q."""
    xp, groups, work = xp_of(q), k.shape[1], np.dtype(type(scale))
    dq, dk, dv = (xp.zeros_like(a, order="C") if need else None for a, need in zip((q, k, v), needs, strict=True))
    for row in rows:
        keys, values = (_key_heads(a, row, work) for a in (k, v))  # (G, n_k, K)
        row_dk, row_dv = (None if d is None else xp.zeros(keys.shape, work) for d in (dk, dv))
        for block in _blocks(row, causal, window):
            at = slice(row.q0 + block.a, row.q0 + block.b)
            seen = slice(block.c, block.d)
            queries, up = _query_heads(q[at], groups, work), _query_heads(gy[at], groups, work)  # (G, H/G * n, K)
            below = xp.ascontiguousarray(lse[:, at])  # (H, n)
            s = product(queries, keys[:, seen].swapaxes(1, 2)).reshape(*below.shape, -1)  # (H, n, keys)
            ds = product(up, values[:, seen].swapaxes(1, 2)).reshape(s.shape)
            slope_block(s, ds, below, scale, block.first, block.last)
            s, ds = (x.reshape(groups, -1, s.shape[-1]) for x in (s, ds))  # (G, H/G * n, keys)
            if dq is not None:
                _put_query_heads(dq, at, product(ds, keys[:, seen]))
            if row_dk is not None:
                row_dk[:, seen] += product(ds.swapaxes(1, 2), queries)
            if row_dv is not None:
                row_dv[:, seen] += product(s.swapaxes(1, 2), up)
        for total, d in ((row_dk, dk), (row_dv, dv)):
            if total is not None and d is not None:
                d[row.k0 : row.k0 + row.n_k] = total.swapaxes(0, 1)
    return dq, dk, dv


# ------------------------------------------------------------------------------------------------ layout


def _query_heads(x: Array, groups: int, dtype: np.dtype) -> Array:
    n, heads, width = x.shape
    x = x.astype(dtype, copy=False).reshape(n, groups, heads // groups, width).transpose(1, 2, 0, 3)  # (G, H/G, n, K)
    return xp_of(x).ascontiguousarray(x).reshape(groups, -1, width)  # (G, H/G * n, K)


def _put_query_heads(out: Array, at: slice, x: Array) -> None:
    heads, width = out.shape[1:]
    out[at] = x.reshape(heads, -1, width).swapaxes(0, 1)  # (n, H, K)


def _key_heads(x: Array, row: Row, dtype: np.dtype) -> Array:
    return x[row.k0 : row.k0 + row.n_k].astype(dtype, copy=False).swapaxes(0, 1)  # (G, n_k, K), a view in float32


def _blocks(row: Row, causal: bool, window: int | None) -> Iterator[Block]:
    """The queries of a row that see a key at all, in blocks."""
    if row.n_k == 0:
        return
    ahead = row.n_k - row.n_q  # query i stands at key i + ahead
    for a in range(max(0, -ahead) if causal else 0, row.n_q, BLOCK):
        b = min(row.n_q, a + BLOCK)
        d = b + ahead if causal else row.n_k
        c = 0 if window is None else max(0, a + ahead - window + 1)
        here = a + ahead - c  # the key at which query a stands, counted from c
        yield Block(a, b, c, d, -BLOCK if window is None else here - window + 1, here + 1 if causal else row.n_k)


def rows_of(name: str, cu_q: Any, cu_k: Any, k_lengths: Any, n: int, s: int) -> list[Row]:
    """The rows of a call of the op ``name``.  Raises ValueError for offsets or lengths that do not fit."""
    queries = _integers(cu_q)
    keys = queries if cu_k is None else _integers(cu_k)
    for which, cu, size, of in (("cu_q", queries, n, "queries"), ("cu_k", keys, s, "keys")):
        if len(cu) == 0 or cu[0] != 0 or cu[-1] != size or any(x > y for x, y in pairwise(cu)):
            raise ValueError(
                f"{name} got {which}={_short(cu)} for {size} {of}; expected offsets that rise from 0 to {size}."
            )
    room = [y - x for x, y in pairwise(keys)]
    lengths = room if k_lengths is None else _integers(k_lengths)
    if not len(queries) - 1 == len(room) == len(lengths):
        raise ValueError(
            f"{name} got {len(queries) - 1} rows of queries, {len(room)} of keys and {len(lengths)} key lengths; "
            "expected as many of each."
        )
    if any(not 0 <= used <= r for used, r in zip(lengths, room, strict=True)):
        raise ValueError(
            f"{name} got k_lengths={_short(lengths)} for rows of {_short(room)} keys; expected 0 to the row's keys."
        )
    return [Row(a, b - a, c, used) for a, b, c, used in zip(queries, queries[1:], keys, lengths, strict=False)]


def _integers(x: Any) -> list[int]:
    x = x.data if isinstance(x, Tensor) else x
    return [int(i) for i in (to_numpy(x) if hasattr(x, "dtype") else x)]


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ... {len(values)} in all]"


def _check_shapes(q: tuple, k: tuple, v: tuple) -> None:
    if len(q) != 3 or len(k) != 3 or k != v or q[2] != k[2] or q[1] % max(k[1], 1) or k[1] == 0:
        raise ValueError(
            f"attention got q {q}, k {k}, v {v}; expected q (N, H, K), k and v (S, G, K) with H a multiple of G."
        )


def check_window(name: str, window: int | None, causal: bool) -> None:
    """Raises ValueError for a window that the op ``name`` cannot have."""
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"{name} got window={window} with causal={causal}; expected a window of at least 1 key, and causal=True."
        )
