"""project for few rows without gradients: what it takes is made ready once and found again at the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..backend import Array
from ..kept import Kept
from ..kernels import get_num_threads, run_team, team_supported, tiles_supported
from ..packing import elements, packed_forward, words
from ..workspace import workspace
from . import projection_fused
from .projection_fused import GATED, NORMS, Before
from .projection_ranks import ranks_of

if TYPE_CHECKING:
    from .projection import Layout

ROWS = 16  # above, a thread does better with rows of its own


class Ready(NamedTuple):
    """A group of linears with its low-rank terms, as projection_few_tiles.py reads them."""

    kind: int  # what stands before the products, see projection_fused
    norm: tuple[Array, Array]  # of projection_fused.NormArrays: w and shift
    operands: tuple[Array, ...]  # packed weights, panels, A, B, scale
    bias: Array
    width: int
    n_out: int
    n_rank: int

    def takes(self, x: Array, residual: Array | None) -> bool:
        """True for an x (N, I), or (N, 2 I) before a gate, with a residual (N, O) or none."""
        return x.shape[1] == self.width * (2 if self.kind == GATED else 1) and (
            residual is None or residual.shape == (len(x), self.n_out)
        )


_kept = Kept()


def attempt(
    x: Array, residual: Array | None, before: Before, tensors: tuple[Array, ...], layout: Layout, dtype: Any
) -> Array | None:
    """y of ops.project, or None where these kernels do not compute this call."""
    if x.ndim != 2 or not 0 < len(x) <= ROWS or type(x) is not np.ndarray:
        return None
    if not (tiles_supported(dtype) and team_supported()):
        return None
    norm, shift, eps, activation = before
    arrays = [a for a in (norm, shift, *tensors) if a is not None]
    key = dtype.char, x.dtype.char, activation, layout, norm is None, shift is None
    ready = _kept.find(key, arrays)
    if ready is None:
        ready = _made_ready(x, residual, before, tensors, layout, dtype)
        if ready is None:
            return None
        writable = [a for a in arrays if a.flags.writeable]
        for a in writable:
            _kept.forget(a)
        if not writable:  # arrays that cannot change, as in packing.py
            _kept.keep(key, arrays, ready)
    return _run(ready, x, residual, eps, dtype) if ready.takes(x, residual) else None


def _made_ready(
    x: Array, residual: Array | None, before: Before, tensors: tuple[Array, ...], layout: Layout, dtype: Any
) -> Ready | None:
    from .projection import check_shapes, members

    group = list(members(tensors, layout, 4))
    check_shapes(x, residual, before, group)
    if not projection_fused.fits(x, before, group, dtype, (False,) * (4 + len(tensors))):
        return None
    width = group[0].w.shape[1]
    ranks = ranks_of(group, width, dtype)
    norm = projection_fused.NormArrays.of(before, width, 0)
    return Ready(
        before.kind(), (_own(norm.w), _own(norm.shift)),
        (packed_forward(*(m.w for m in group), dtype=dtype), ranks.places.panels, *ranks.forward(), ranks.places.scale),
        projection_fused.biases(group), width, sum(len(m.w) for m in group), ranks.places.n_rank,
    )  # fmt: skip


def _run(ready: Ready, x: Array, residual: Array | None, eps: float, dtype: Any) -> Array:
    from . import projection_few_tiles as kernels

    n_rows, n_out, word = len(x), ready.n_out, words(dtype)
    rows = _own(x) if ready.kind in NORMS else _own(elements(x, dtype))
    under = np.zeros((0, n_out), np.float32) if residual is None else _own(residual.astype(np.float32, copy=False))
    y = np.empty((n_rows, n_out), np.float32 if residual is not None or word is np.float32 else np.uint16)
    with workspace:
        size = kernels.scratch_words(n_rows, ready.width, ready.n_rank)
        scratch = workspace.get("scratch", get_num_threads(), size, dtype=word)
        run_team(kernels.forward, ready.kind, rows, *ready.norm, eps, *ready.operands, ready.bias, under, y, scratch)
    return y.view(dtype) if residual is None else y.astype(residual.dtype, copy=False)


def _own(x: Array) -> Array:
    """Contiguous and writable: a read-only array is another type to numba, compiled anew."""
    return x if x.flags.c_contiguous and x.flags.writeable else x.copy()
