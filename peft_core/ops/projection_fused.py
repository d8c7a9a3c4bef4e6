"""project on register tiles: what the kernels of projection_tiles.py need, and their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..backend import Array, xp_of
from ..dtypes import bfloat16, float32
from ..kernels import get_num_threads, run_kernel, tiles_supported
from ..packing import can_pack, elements, packed_backward, packed_forward, words
from ..workspace import workspace
from .common import into
from .projection_ranks import PANEL, Ranks, ranks_of

if TYPE_CHECKING:
    from .projection import Member

PLAIN, NORM, LAYER, GATED, GELU = range(5)  # what stands before the products, in the kernels
NORMS = NORM, LAYER
_CACHED = 288 << 10  # bytes of a block's widest operand: it stays in the second-level cache beside a panel


def _block(width: int, dtype: Any) -> int:
    """Rows of a block: 24 to 96, a multiple of 8."""
    fits = _CACHED // (width * (2 if dtype == bfloat16 else 4)) // 8 * 8
    return min(96, max(24, fits))


# ------------------------------------------------------------------------------------------------ the calls


class Before(NamedTuple):
    """What stands before the products, as ``project`` was called."""

    norm: Array | None
    shift: Array | None
    eps: float
    activation: str | None

    def kind(self) -> int:
        """Its number in the kernels."""
        if self.norm is not None:
            return NORM if self.shift is None else LAYER
        return {None: PLAIN, "swiglu": GATED, "gelu_tanh": GELU}[self.activation]


class NormArrays(NamedTuple):
    """A norm's weights (I,), zeros without one; a LayerNorm's shift (I,); what backward needs of each row (N,)."""

    w: Array
    shift: Array
    r: Array
    mean: Array

    @staticmethod
    def of(before: Before, width: int, n_rows: int) -> NormArrays:
        """float32, empty where the norm has no such part."""
        w = np.zeros(width, np.float32) if before.norm is None else np.ascontiguousarray(before.norm, np.float32)
        shift = np.zeros(0, np.float32) if before.shift is None else np.ascontiguousarray(before.shift, np.float32)
        r = np.empty(n_rows if before.norm is not None else 0, np.float32)
        return NormArrays(w, shift, r, np.empty(n_rows if len(shift) else 0, np.float32))


def fits(x: Array, before: Before, group: list[Member], dtype: Any, needs: tuple[bool, ...]) -> bool:
    """True where the kernels compute this call: frozen read-only weights, a CPU whose tiles compute in ``dtype``."""
    width = group[0].w.shape[1]
    even = dtype != bfloat16 or (width % 2 == 0 and all(len(m.w) % 2 == 0 for m in group))
    return (
        xp_of(x, group[0].w) is np
        and tiles_supported(dtype)
        and all(can_pack(m.w, dtype) and not needs[m.w_at] for m in group)
        and all(m.bias is None or not needs[m.w_at + 1] for m in group)
        and even
        and x.size > 0
        and not any(needs[2:4])
        and (x.dtype == float32 or (before.norm is None and x.dtype == bfloat16))
    )


def biases(group: list[Member]) -> Array:
    """The biases side by side, (O,) float32, or none at all."""
    if all(m.bias is None for m in group):
        return np.zeros(0, np.float32)
    return np.concatenate([np.zeros(len(m.w), "f4") if m.bias is None else m.bias.astype("f4") for m in group])


def run(
    x: Array, residual: Array | None, before: Before, group: list[Member], dtype: Any, needs: tuple[bool, ...]
) -> tuple[Array, Callable]:
    """(y, vjp) of ops.project.   x (N, I), float32 before a norm."""
    from . import projection_tiles as kernels

    kind, normed = before.kind(), before.norm is not None
    weights, width = tuple(m.w for m in group), group[0].w.shape[1]
    ranks, n_rows, n_out = ranks_of(group, width, dtype), len(x), sum(map(len, weights))
    rows = np.ascontiguousarray(x) if normed else elements(x, dtype)
    places = ranks.places
    n_rank = places.n_rank
    norm = NormArrays.of(before, width, n_rows)
    bias = biases(group)
    under = (
        np.zeros((0, n_out), np.float32)
        if residual is None
        else np.ascontiguousarray(residual.reshape(-1, n_out), "f4")
    )
    y = np.empty((n_rows, n_out), ranks.kind if residual is None else np.float32)
    s = np.empty((n_rows, n_rank), ranks.kind)
    ap, bp = ranks.forward()
    block = _block(width, dtype)
    size = block * (width + n_rank + 32) + 8 * PANEL
    with workspace:
        scratch = workspace.get("scratch", get_num_threads(), size, dtype=words(dtype))
        run_kernel(kernels.forward, kind, rows, *norm, before.eps, packed_forward(*weights, dtype=dtype), places.panels,
                   ap, bp, places.scale, bias, under, y, s, scratch, block)  # fmt: skip
    result = y.view(dtype) if residual is None else y.astype(residual.dtype, copy=False)
    wants_a = any(needs[at] for m in group for *_, at in m.terms)
    wants_b = any(needs[at + 1] for m in group for *_, at in m.terms)
    kept = rows if wants_a or (needs[0] and kind != PLAIN) else np.zeros((0, rows.shape[1]), rows.dtype)
    call = _Backward(kind, weights, ranks, group, kept, x.dtype, dtype, norm, s if wants_b else s[:0], needs)
    del rows, y, under, x
    return result, call


class _Backward:
    """The vjp of one call, with what it keeps: x where it is wanted, s (N, R), one float a row for a norm."""

    def __init__(self, kind: int, weights: tuple[Array, ...], ranks: Ranks, group: list[Member], x: Array,
                 x_dtype: Any, dtype: Any, norm: NormArrays, s: Array, needs: tuple[bool, ...]) -> None:  # fmt: skip
        self.kind, self.weights, self.ranks, self.group, self.needs = kind, weights, ranks, group, needs
        self.x, self.x_dtype, self.dtype, self.norm, self.s = x, x_dtype, dtype, norm, s
        terms = [at for m in group for *_, at in m.terms]
        self.wants = any(needs[at] for at in terms), any(needs[at + 1] for at in terms)

    def __call__(self, gy: Array, acc: list) -> list:
        from . import projection_tiles as kernels

        out: list[Array | None] = [None] * len(self.needs)
        ranks, places, width, n_out = self.ranks, self.ranks.places, len(self.norm.w), sum(map(len, self.weights))
        n_rank = places.n_rank
        wide, block = -(-width // PANEL) * PANEL, _block(max(width, n_out), self.dtype)
        g = np.ascontiguousarray(gy).reshape(-1, n_out)
        g = g if g.dtype == float32 else elements(g, self.dtype)
        gx = self._gx(len(g), acc)
        n_threads, (wants_a, wants_b) = get_num_threads(), self.wants
        d_a = np.empty((n_threads, n_rank * wide if wants_a else 0), np.float32)
        d_b = np.empty((n_threads, ranks.gradient_words()), np.float32)
        atp, btp = ranks.backward()
        size = block * (n_out + width + n_rank + 48 + wide) + n_rank * (block + 16)
        size += block * (max(n_out, width) + 64) + 11 * PANEL
        x = self.x if len(self.x) else np.zeros((0, width), self.ranks.kind)
        with workspace:
            scratch = workspace.get("scratch", n_threads, size, dtype=words(self.dtype))
            run_kernel(kernels.backward, self.kind, g, x, *self.norm,
                       packed_backward(*self.weights, dtype=self.dtype), places.mods, atp, btp, places.scale, self.s,
                       gx, d_a, d_b, scratch, block, wants_b)  # fmt: skip
        if self.needs[0]:
            gx = gx if self.kind in NORMS else gx.view(self.dtype)
            out[0] = self._deliver(gx.reshape(*gy.shape[:-1], gx.shape[1]), acc)
        if self.needs[1]:
            out[1] = gy
        ranks.deliver(d_a, d_b, self.group, self.needs, acc, out)
        return out

    def _gx(self, n_rows: int, acc: list) -> Array:
        """Where dL/dx goes: onto what has arrived behind a norm, else a new bf16 array; empty if nobody wants it."""
        width = len(self.norm.w)
        if self.kind in NORMS:
            if not self.needs[0]:
                return np.zeros((0, width), np.float32)
            arrived = acc[0]
            self.adds = arrived is not None and arrived.dtype == float32 and arrived.flags.c_contiguous
            return arrived.reshape(-1, width) if self.adds else np.zeros((n_rows, width), np.float32)
        width *= 2 if self.kind == GATED else 1
        self.adds = False
        return np.empty((n_rows if self.needs[0] else 0, width), self.ranks.kind)

    def _deliver(self, gx: Array, acc: list) -> Array:
        return acc[0] if self.adds else into(acc[0], gx.astype(self.x_dtype, copy=False))
