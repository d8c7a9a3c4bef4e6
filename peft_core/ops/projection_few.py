"""project for few rows without gradients: what it takes is made ready once and found again at the next token."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..backend import Array
from ..dtypes import float32
from ..kernels import get_num_threads, run_team, tiles_supported
from ..packing import elements, packed_forward, words
from ..workspace import workspace
from . import projection_fused
from .linear import product_dtype

if TYPE_CHECKING:
    from .projection import Layout

ROWS = 16  # above, a thread does better with rows of its own


class Ready(NamedTuple):
    """A group of linears with its low-rank terms, as projection_few_tiles.py reads them."""

    before: int
    norm: Array  # (I,) float32
    operands: tuple[Array, ...]  # packed weights, panels, A, B, scale
    bias: Array
    width: int
    n_out: int
    n_rank: int


_kept: dict[tuple, Ready | None] = {}


def attempt(
    x: Array, residual: Array | None, norm: Array | None, tensors: tuple[Array, ...], layout: Layout, eps: float,
    gated: bool,
) -> Array | None:  # fmt: skip
    """y of ops.project, or None where these kernels do not compute this call."""
    if x.ndim != 2 or not 0 < len(x) <= ROWS or type(x) is not np.ndarray:
        return None
    dtype = product_dtype(x, tensors[0])
    if not tiles_supported(dtype):
        return None
    key = dtype.char, x.dtype.char, gated, layout, id(norm), *map(id, tensors)
    ready = _kept.get(key)
    if ready is None:
        ready = _made_ready(x, norm, tensors, layout, eps, gated, dtype)
        if ready is None:
            return None
        arrays = [a for a in (norm, *tensors) if a is not None]
        if not any(a.flags.writeable for a in arrays):  # arrays that cannot change, as in packing.py
            _kept[key] = ready
            for a in arrays:
                weakref.finalize(a, _kept.pop, key, None)
    return _run(ready, x, residual, eps, dtype)


def _made_ready(
    x: Array, norm: Array | None, tensors: tuple[Array, ...], layout: Layout, eps: float, gated: bool, dtype: Any
) -> Ready | None:
    from . import projection_tiles as kernels
    from .projection import members

    group = list(members(tensors, layout, 3))
    if not projection_fused.fits(x, norm, gated, group, dtype, (False,) * (3 + len(tensors))):
        return None
    width = group[0].w.shape[1]
    ranks = projection_fused._ranks(group, width, dtype)
    packed = packed_forward(*(m.w for m in group), dtype=dtype)
    before = kernels.NORM if norm is not None else kernels.GATED if gated else kernels.PLAIN
    return Ready(
        before, np.zeros(width, np.float32) if norm is None else np.array(norm, np.float32),
        (packed, ranks.panels, *ranks.forward, ranks.scale), projection_fused.biases(group), width,
        sum(len(m.w) for m in group), len(ranks.scale),
    )  # fmt: skip


def _run(ready: Ready, x: Array, residual: Array | None, eps: float, dtype: Any) -> Array:
    from . import projection_few_tiles as kernels

    n_rows, n_out, word = len(x), ready.n_out, words(dtype)
    rows = _own(x) if x.dtype == float32 and ready.before == 1 else _own(elements(x, dtype))
    under = np.zeros((0, n_out), np.float32) if residual is None else _own(residual.astype(np.float32, copy=False))
    y = np.empty((n_rows, n_out), np.float32 if residual is not None or word is np.float32 else np.uint16)
    with workspace:
        size = kernels.scratch_words(n_rows, ready.width, ready.n_rank)
        scratch = workspace.get("scratch", get_num_threads(), size, dtype=word)
        run_team(kernels.forward, ready.before, rows, ready.norm, eps, *ready.operands, ready.bias, under, y, scratch)
    return y.view(dtype) if residual is None else y.astype(residual.dtype, copy=False)


def _own(x: Array) -> Array:
    """Contiguous and writable: a read-only array is another type to numba, compiled anew."""
    return x if x.flags.c_contiguous and x.flags.writeable else x.copy()
