"""RoPE and causal attention in one op over the joint projection of queries, keys and values.

One op keeps qkv, o and a number per query and head: rotated copies, probabilities and masks are formed again. bf16 runs
on the kernels of ``attention_tiles.py`` where the CPU has them; everything else on the functions of ``rope`` and
``attention``, which are the definition.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..amp import compute_dtype
from ..backend import Array, xp_of
from ..dtypes import accumulate_dtype, bfloat16
from ..kernels import get_num_threads, run_kernel, tiles_supported
from ..tape import op
from ..tensor import Tensor
from ..workspace import workspace
from .attention import Row, attend, attend_back, check_window, rows_of
from .rope import turned

LANES = 48  # queries that a tile holds


class Shape(NamedTuple):
    """Query heads, key heads, width of a head."""

    heads: int
    groups: int
    width: int


@op
def rotary_attention(
    qkv: Array, *, cos: Any, sin: Any, cu_seqlens: Any, n_heads: int, n_kv_heads: int, head_dim: int,
    scale: float | None = None, window: int | None = None, needs: tuple[bool],
) -> tuple:  # fmt: skip
    """o = attention(rope(q), rope(k), v), causal, row by row, for qkv = [q | k | v] with heads side by side.

    qkv (N, (H + 2G) K), cos and sin (N, K/2), cu_seqlens the rows' offsets -> (N, H K) in the compute dtype, or qkv's.
    scale and window as in ``attention``, half-split pairs as in ``rope``.  Retains qkv, lse (H, N), and o on tiles.
    Raises ValueError for shapes, offsets or a window that do not fit.
    Source: Su et al., arXiv:2104.09864; Dao et al., arXiv:2205.14135.
    """
    shape = Shape(n_heads, n_kv_heads, head_dim)
    cos, sin = (a.data if isinstance(a, Tensor) else a for a in (cos, sin))
    _check_shapes(qkv, cos, sin, shape)
    check_window("rotary_attention", window, True)
    rows = rows_of("rotary_attention", cu_seqlens, None, None, len(qkv), len(qkv))
    dtype = compute_dtype() or qkv.dtype
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    longest = max((row.n_q for row in rows), default=0)
    seen_whole = longest > 0 and (window is None or window >= longest)
    if seen_whole and scale > 0 and dtype == qkv.dtype and _fits_tiles(qkv, head_dim):
        cos, sin = (_kernel_array(a.astype(np.float32, copy=False)) for a in (cos, sin))
        call = Call((0, *(row.q0 + row.n_q for row in rows)), cos, sin, shape, np.float32(scale))
        o, lse = _attend_on_tiles(qkv, call)
        return o, (lambda gy: _back_on_tiles(qkv, o, lse, gy, call),)
    factor = accumulate_dtype(dtype).type(scale)
    y, lse = attend(*_rotated(qkv, cos, sin, shape, dtype), rows, factor, True, window)
    return y.reshape(len(qkv), n_heads * head_dim), (
        lambda gy: _back(qkv, lse, gy, cos, sin, rows, shape, dtype, factor, window),
    )


def _fits_tiles(qkv: Array, width: int) -> bool:
    return isinstance(qkv, np.ndarray) and qkv.dtype == bfloat16 and width % 64 == 0 and tiles_supported()


def _check_shapes(qkv: Array, cos: Array, sin: Array, shape: Shape) -> None:
    heads, groups, width = shape
    half = len(qkv), width // 2
    columns = (heads + 2 * groups) * width
    if (
        width % 2
        or groups < 1
        or heads % groups
        or qkv.shape != (len(qkv), columns)
        or not cos.shape == sin.shape == half
    ):
        raise ValueError(
            f"rotary_attention got qkv {qkv.shape}, cos {cos.shape}, sin {sin.shape} for {heads} heads, {groups} key "
            f"heads of width {width}; expected qkv (N, {columns}), cos and sin (N, {width // 2}), an even width and "
            "heads a multiple of key heads."
        )


# ------------------------------------------------------------------------------------------------ the formula


def _rotated(qkv: Array, cos: Array, sin: Array, shape: Shape, dtype: np.dtype) -> tuple[Array, Array, Array]:
    heads, groups, width = shape
    x = qkv.reshape(len(qkv), heads + 2 * groups, width)  # (N, H + 2G, K)
    qk = turned(x[:, : heads + groups], cos, sin, 1.0)
    return tuple(a.astype(dtype, copy=False) for a in (qk[:, :heads], qk[:, heads:], x[:, heads + groups :]))  # type: ignore[return-value]


def _back(
    qkv: Array, lse: Array, gy: Array, cos: Array, sin: Array,
    rows: list[Row], shape: Shape, dtype: np.dtype, scale: Any, window: int | None,
) -> Array:  # fmt: skip
    heads, groups, width = shape
    up = gy.reshape(len(qkv), heads, width)  # (N, H, K)
    q, k, v = _rotated(qkv, cos, sin, shape, dtype)
    dq, dk, dv = attend_back(q, k, v, lse, up, rows, scale, True, window, (True, True, True))
    dx = xp_of(qkv).empty((len(qkv), heads + 2 * groups, width), qkv.dtype)  # (N, H + 2G, K)
    dx[:, :heads] = turned(dq, cos, sin, -1.0)
    dx[:, heads : heads + groups] = turned(dk, cos, sin, -1.0)
    dx[:, heads + groups :] = dv
    return dx.reshape(qkv.shape)


# ------------------------------------------------------------------------------------------------ on register tiles


class Plan(NamedTuple):
    """Where tokens stand in the padded stream, and who does what: tasks (row, head, query), T + 1 bounds of shares."""

    cu: np.ndarray
    pu: np.ndarray
    token: np.ndarray  # (P,) the token, -1 for padding
    place: np.ndarray  # (N,) the padded token
    row_of: np.ndarray  # (N,)
    longest: int  # padded
    forward: tuple[np.ndarray, np.ndarray]
    backward: tuple[np.ndarray, np.ndarray]
    spills: np.ndarray  # (T,) row * G + group in whose middle the thread begins, or -1


@functools.lru_cache(maxsize=16)
def _plan(cu: tuple[int, ...], heads: int, groups: int, threads: int) -> Plan:
    """The plan of one stream of rows: equal shares by the number of keys that each block of queries sees."""
    starts = np.array(cu, np.int64)
    lengths = np.diff(starts)
    padded = -(-lengths // LANES) * LANES
    pu = np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(starts[-1]) - starts[row_of] + pu[row_of]
    token = np.full(pu[-1], -1, np.int64)
    token[place] = np.arange(starts[-1])
    queries = _tasks(lengths, heads, LANES, threads), _tasks(lengths, heads, 2 * LANES, threads)
    tasks, bounds = queries[1]
    repeats, spills = heads // groups, np.full(threads, -1, np.int64)
    for t in range(threads):
        if bounds[t] < bounds[t + 1]:
            b, h, q0 = tasks[bounds[t]]
            if q0 or h % repeats:
                spills[t] = b * groups + h // repeats
    return Plan(starts, pu, token, place, row_of, int(padded.max(initial=0)), *queries, spills)


def _tasks(lengths: np.ndarray, heads: int, step: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    tasks = [(b, h, q0) for b, n in enumerate(lengths) for h in range(heads) for q0 in range(0, n, step)]
    table = np.array(tasks, np.int64).reshape(-1, 3)
    cost = np.minimum(table[:, 2] + step, lengths[table[:, 0]]) + step
    done = np.cumsum(cost) - cost / 2
    shares = np.arange(threads + 1) * (cost.sum() / threads)
    return table, np.searchsorted(done, shares).astype(np.int64)


class Call(NamedTuple):
    """What both passes over the tiles need to know besides their arrays."""

    cu: tuple[int, ...]
    cos: np.ndarray
    sin: np.ndarray
    shape: Shape
    scale: np.float32

    def plan(self) -> Plan:
        """The plan for the threads of this moment."""
        return _plan(self.cu, self.shape.heads, self.shape.groups, get_num_threads())


def _kernel_array(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return x if x.flags.writeable else x.copy()  # a read-only array is another type to numba, compiled anew


def _bits(x: np.ndarray) -> np.ndarray:
    return _kernel_array(x).view(np.uint16)


def _keys(x: np.ndarray, p: Plan, call: Call, back: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """k by rows, k or v by columns, v by rows where ``back``, in the workspace."""
    from . import attention_tiles as kernels

    heads, groups, width = call.shape
    padded = len(p.token)
    ld = (padded // 2 + 15) // 16 * 16 | 16  # an odd number of cache lines
    k_rows = workspace.get("k_rows", groups, padded, width, dtype=np.uint16)
    columns = workspace.get("columns", groups, width, ld)
    v_rows = workspace.get("v_rows", groups, padded if back else 0, width, dtype=np.uint16)
    run_kernel(kernels.lay_out_keys, x, p.token, call.cos, call.sin, heads, back, k_rows, columns, v_rows)
    return k_rows, columns, v_rows


def _attend_on_tiles(qkv: np.ndarray, call: Call) -> tuple[np.ndarray, np.ndarray]:
    """o (N, H K) bfloat16 and lse (H, N), in powers of two, of qkv (N, (H + 2G) K) bfloat16."""
    from . import attention_tiles as kernels

    heads, _, width = call.shape
    p, x = call.plan(), _bits(qkv)
    o = np.empty((len(qkv), heads * width), qkv.dtype)
    lse = np.empty((heads, len(qkv)), np.float32)
    with workspace:
        k_rows, v_columns, _ = _keys(x, p, call, False)
        scratch = workspace.get("scratch", len(p.spills), kernels.forward_words(width))
        run_kernel(kernels.forward, x, p.token, p.cu, p.pu, *p.forward, call.cos, call.sin, k_rows, v_columns,
                   call.scale, o.view(np.uint16), lse, scratch)  # fmt: skip
    return o, lse


def _back_on_tiles(qkv: np.ndarray, o: np.ndarray, lse: np.ndarray, gy: np.ndarray, call: Call) -> np.ndarray:
    """The gradient of qkv, bfloat16, for gy (N, H K) bfloat16."""
    from . import attention_tiles as kernels

    _, groups, width = call.shape
    p, x, cos, sin = call.plan(), _bits(qkv), call.cos, call.sin
    padded, threads = len(p.token), len(p.spills)
    dx = np.empty(qkv.shape, qkv.dtype)
    bits = dx.view(np.uint16)
    with workspace:
        k_rows, k_columns, v_rows = _keys(x, p, call, True)
        sums = groups * padded + threads * p.longest
        dk, dv = (workspace.get(name, sums, width, dtype=np.float32) for name in ("dk", "dv"))
        scratch = workspace.get("scratch", threads, kernels.backward_words(width))
        run_kernel(kernels.backward, x, _bits(o), _bits(gy), lse, p.token, p.cu, p.pu, *p.backward, p.spills, cos, sin,
                   k_rows, k_columns, v_rows, call.scale, bits, dk, dv, p.longest, scratch)  # fmt: skip
        run_kernel(kernels.finish_keys, dk, dv, p.place, p.row_of, p.pu, p.spills, padded, p.longest, groups, cos, sin,
                   bits)  # fmt: skip
    return dx
