"""project on register tiles: low-rank terms made ready, what the kernels of projection_tiles.py need, their calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend import Array, xp_of
from ..dtypes import bfloat16, float32
from ..kernels import get_num_threads, run_kernel, tiles_supported
from ..packing import can_pack, elements, packed_backward, packed_forward, words
from ..workspace import workspace
from .common import into

if TYPE_CHECKING:
    from .projection import Member

_PANEL = 48
_CACHED = 288 << 10  # bytes of a block's widest operand: it stays in the second-level cache beside a panel


def _block(width: int, dtype: Any) -> int:
    """Rows of a block: 24 to 96, a multiple of 8."""
    fits = _CACHED // (width * (2 if dtype == bfloat16 else 4)) // 8 * 8
    return min(96, max(24, fits))


# ------------------------------------------------------------------------------------------------ adapters


@dataclass
class Ranks:
    """The low-rank terms of a group, side by side, ranks padded to 16 a linear; as elements and packed for one step."""

    a: Array  # (R, I)
    b: list[Array]  # (O_m, R_m)
    scale: Array  # (R,) float32
    mods: Array  # see projection_tiles
    panels: Array
    places: list[tuple[int, int, int, int]]  # of each term: linear, first row of a, first rank in its linear, ranks

    @staticmethod
    def of(group: list[Member], width: int, dtype: Any) -> Ranks:
        """Gather A and B of all terms; a column of zeros is a rank that does nothing."""
        kind, per = (np.uint16, 2) if dtype == bfloat16 else (np.float32, 1)
        a_rows, bs, scales, mods, panels, places = [], [], [], [], [], []
        first = rank0 = b_grads = b_words = d_b = 0
        for m, member in enumerate(group):
            n_out, n_rank = len(member.w), sum(len(a) for a, *_ in member.terms)
            padded, wide = -(-n_rank // 16) * 16, -(-n_out // _PANEL) * _PANEL
            a, b, scale = (
                np.zeros((padded, width), kind),
                np.zeros((n_out, padded), kind),
                np.zeros(padded, "f4"),
            )
            at = 0
            for term_a, term_b, term_scale, _ in member.terms:
                n = len(term_a)
                a[at : at + n], b[:, at : at + n] = elements(term_a, dtype), elements(term_b, dtype)
                scale[at : at + n] = term_scale
                places.append((m, rank0 + at, at, n))
                at += n
            a_rows.append(a)
            bs.append(b)
            scales.append(scale)
            mods.append((first, n_out, rank0, padded, b_grads, d_b))
            panels += [(first + c, min(_PANEL, n_out - c), b_words + c, wide, rank0 // per, padded // per)
                       for c in range(0, n_out, _PANEL)]  # fmt: skip
            first, rank0 = first + n_out, rank0 + padded
            b_grads, b_words, d_b = b_grads + n_out // per * padded, b_words + padded // per * wide, d_b + padded * wide
        return Ranks(np.concatenate(a_rows), bs, np.concatenate(scales), np.array(mods), np.array(panels), places)

    @functools.cached_property
    def forward(self) -> tuple[Array, Array]:
        """The right operands, in words, of h A^T, (I, R), and of s B^T, (R_m, O_m padded) a linear."""
        word = np.uint32 if self.a.itemsize == 2 else np.float32
        per, bp = 4 // self.a.itemsize, []
        for b in self.b:
            wide = np.zeros((b.shape[1] // per, -(-len(b) // _PANEL) * _PANEL), word)
            if b.size:
                wide[:, : len(b)] = b.view(word).T
            bp.append(wide.reshape(-1))
        return np.ascontiguousarray(self.a.view(word).T).reshape(-1), np.concatenate(bp)

    @functools.cached_property
    def backward(self) -> tuple[Array, Array]:
        """The right operands, in words, of dS A, (R, I padded), and of gy B, (O_m, R_m) a linear."""
        down, width = _down(self.a), self.a.shape[1]
        atp = np.zeros((len(down), -(-width // _PANEL) * _PANEL), down.dtype)
        atp[:, :width] = down
        return atp.reshape(-1), np.concatenate([_down(b).reshape(-1) for b in self.b])


_kept: dict[tuple, Ranks] = {}


def _ranks(group: list[Member], width: int, dtype: Any) -> Ranks:
    """``Ranks.of``, kept where all A and B are read-only: arrays that cannot change, as in ``packing.py``."""
    arrays = [array for member in group for a, b, *_ in member.terms for array in (a, b)]
    if any(array.flags.writeable for array in arrays):
        return Ranks.of(group, width, dtype)
    sizes = tuple((len(member.w), tuple(scale for *_, scale, _ in member.terms)) for member in group)
    key = dtype.char, width, sizes, tuple(map(id, arrays))
    found = _kept.get(key)
    if found is None:
        found = _kept[key] = Ranks.of(group, width, dtype)
        for array in arrays:
            weakref.finalize(array, _kept.pop, key, None)
    return found


def _down(rows: Array) -> Array:
    """Words along the first dimension: two rows of bf16 bits become one, float32 stays."""
    if rows.itemsize == 4:
        return rows
    return rows[0::2].astype(np.uint32) | (rows[1::2].astype(np.uint32) << np.uint32(16))


# ------------------------------------------------------------------------------------------------ the calls


def fits(x: Array, norm: Array | None, gated: bool, group: list[Member], dtype: Any, needs: tuple[bool, ...]) -> bool:
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
        and not needs[2]
        and (x.dtype == float32 or (norm is None and x.dtype == bfloat16))
    )


def biases(group: list[Member]) -> Array:
    """The biases side by side, (O,) float32, or none at all."""
    if all(m.bias is None for m in group):
        return np.zeros(0, np.float32)
    return np.concatenate([np.zeros(len(m.w), "f4") if m.bias is None else m.bias.astype("f4") for m in group])


def run(
    x: Array, residual: Array | None, norm: Array | None, eps: float, gated: bool, group: list[Member], dtype: Any,
    needs: tuple[bool, ...],
) -> tuple[Array, Callable]:  # fmt: skip
    """(y, vjp) of ops.project.   x (N, I), float32 before a norm."""
    from . import projection_tiles as kernels

    before = kernels.NORM if norm is not None else kernels.GATED if gated else kernels.PLAIN
    weights, width = tuple(m.w for m in group), group[0].w.shape[1]
    ranks, n_rows, n_out = _ranks(group, width, dtype), len(x), sum(map(len, weights))
    rows = np.ascontiguousarray(x) if norm is not None else elements(x, dtype)
    n_rank = len(ranks.scale)
    scale_w = np.zeros(width, np.float32) if norm is None else np.ascontiguousarray(norm, np.float32)
    r = np.empty(n_rows if norm is not None else 0, np.float32)
    bias = biases(group)
    under = (
        np.zeros((0, n_out), np.float32)
        if residual is None
        else np.ascontiguousarray(residual.reshape(-1, n_out), "f4")
    )
    y = np.empty((n_rows, n_out), ranks.a.dtype if residual is None else np.float32)
    s = np.empty((n_rows, n_rank), ranks.a.dtype)
    ap, bp = ranks.forward
    block = _block(width, dtype)
    size = block * (width + n_rank + 32) + 8 * _PANEL
    with workspace:
        scratch = workspace.get("scratch", get_num_threads(), size, dtype=words(dtype))
        run_kernel(kernels.forward, before, rows, scale_w, eps, r, packed_forward(*weights, dtype=dtype), ranks.panels,
                   ap, bp, ranks.scale, bias, under, y, s, scratch, block)  # fmt: skip
    result = y.view(dtype) if residual is None else y.astype(residual.dtype, copy=False)
    wants_a = any(needs[at] for m in group for *_, at in m.terms)
    wants_b = any(needs[at + 1] for m in group for *_, at in m.terms)
    kept = rows if wants_a or (needs[0] and before != kernels.PLAIN) else np.zeros((0, rows.shape[1]), rows.dtype)
    call = _Backward(before, weights, ranks, group, kept, x.dtype, dtype, scale_w, r, s if wants_b else s[:0], needs)
    del rows, y, under, x
    return result, call


class _Backward:
    """The vjp of one call, with what it keeps: x where it is wanted, s (N, R), one float a row for a norm."""

    def __init__(self, before: int, weights: tuple[Array, ...], ranks: Ranks, group: list[Member], x: Array,
                 x_dtype: Any, dtype: Any, norm: Array, r: Array, s: Array,
                 needs: tuple[bool, ...]) -> None:  # fmt: skip
        self.before, self.weights, self.ranks, self.group, self.needs = before, weights, ranks, group, needs
        self.x, self.x_dtype, self.dtype, self.norm, self.r, self.s = x, x_dtype, dtype, norm, r, s
        terms = [at for m in group for *_, at in m.terms]
        self.wants = any(needs[at] for at in terms), any(needs[at + 1] for at in terms)

    def __call__(self, gy: Array, acc: list) -> list:
        from . import projection_tiles as kernels

        out: list[Array | None] = [None] * len(self.needs)
        ranks, width, n_rank, n_out = self.ranks, len(self.norm), len(self.ranks.scale), sum(map(len, self.weights))
        wide, block = -(-width // _PANEL) * _PANEL, _block(max(width, n_out), self.dtype)
        g = np.ascontiguousarray(gy).reshape(-1, n_out)
        g = g if g.dtype == float32 else elements(g, self.dtype)
        gx = self._gx(len(g), acc)
        n_threads, (wants_a, wants_b) = get_num_threads(), self.wants
        d_a = np.empty((n_threads, n_rank * wide if wants_a else 0), np.float32)
        d_b = np.empty((n_threads, sum(r * -(-o // _PANEL) * _PANEL for _, o, _, r, *_ in ranks.mods)), np.float32)
        atp, btp = ranks.backward
        size = block * (n_out + width + n_rank + 48 + wide) + n_rank * (block + 16)
        size += block * (max(n_out, width) + 64) + 11 * _PANEL
        x = self.x if len(self.x) else np.zeros((0, width), self.ranks.a.dtype)
        with workspace:
            scratch = workspace.get("scratch", n_threads, size, dtype=words(self.dtype))
            run_kernel(kernels.backward, self.before, g, x, self.norm, self.r,
                       packed_backward(*self.weights, dtype=self.dtype), ranks.mods, atp, btp, ranks.scale, self.s, gx,
                       d_a, d_b, scratch, block, wants_b)  # fmt: skip
        if self.needs[0]:
            gx = gx if self.before == kernels.NORM else gx.view(self.dtype)
            out[0] = self._deliver(gx.reshape(*gy.shape[:-1], gx.shape[1]), acc)
        if self.needs[1]:
            out[1] = gy
        self._terms(d_a.reshape(n_threads, -1, wide)[:, :, :width].sum(axis=0) if wants_a else None, d_b, acc, out)
        return out

    def _gx(self, n_rows: int, acc: list) -> Array:
        """Where dL/dx goes: onto what has arrived behind a norm, else a new bf16 array; empty if nobody wants it."""
        from . import projection_tiles as kernels

        width = len(self.norm)
        if self.before == kernels.NORM:
            if not self.needs[0]:
                return np.zeros((0, width), np.float32)
            arrived = acc[0]
            self.adds = arrived is not None and arrived.dtype == float32 and arrived.flags.c_contiguous
            return arrived.reshape(-1, width) if self.adds else np.zeros((n_rows, width), np.float32)
        width *= 2 if self.before == kernels.GATED else 1
        self.adds = False
        return np.empty((n_rows if self.needs[0] else 0, width), self.ranks.a.dtype)

    def _deliver(self, gx: Array, acc: list) -> Array:
        return acc[0] if self.adds else into(acc[0], gx.astype(self.x_dtype, copy=False))

    def _terms(self, d_a: Array | None, d_b: Array, acc: list, out: list) -> None:
        """dA and dB of each term, cut out of the sums over threads."""
        terms = [term for m in self.group for term in m.terms]
        for (a, b, _, at), (m, row, rank, n) in zip(terms, self.ranks.places, strict=True):
            if d_a is not None and self.needs[at]:
                out[at] = into(acc[at], d_a[row : row + n].astype(a.dtype))
            if self.needs[at + 1]:
                _, n_out, _, n_rank, _, first = self.ranks.mods[m]
                wide = -(-n_out // _PANEL) * _PANEL
                own = d_b[:, first : first + n_rank * wide].reshape(len(d_b), n_rank, wide)
                own = own[:, rank : rank + n, :n_out].sum(axis=0)  # the padding holds anything
                out[at + 1] = into(acc[at + 1], np.ascontiguousarray(own.T).astype(b.dtype, copy=False))
