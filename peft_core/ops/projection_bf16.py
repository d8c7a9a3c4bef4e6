"""project in bf16 on the CPU: packed frozen weights, what the kernels of projection_tiles.py need, and their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend import Array, xp_of
from ..dtypes import bfloat16, float32
from ..kernels import get_num_threads, run_kernel
from ..packing import can_pack, packed_backward, packed_forward
from ..workspace import workspace
from .common import into

if TYPE_CHECKING:
    from .projection import Member

_FORWARD_ROWS, _BACKWARD_ROWS = 96, 48  # rows of a block: what the second-level cache holds beside a panel
_PANEL = 48


def bits(x: Array) -> Array:
    """The bf16 bits of an array, uint16, contiguous."""
    return np.ascontiguousarray(x.astype(bfloat16, copy=False)).view(np.uint16)


# ------------------------------------------------------------------------------------------------ adapters


@dataclass
class Ranks:
    """The low-rank terms of a group, side by side, ranks padded to 16 a linear; rounded and packed for one step."""

    a: Array  # (R, I) bf16 bits
    b: list[Array]  # (O_m, R_m) bf16 bits
    scale: Array  # (R,) float32
    mods: Array  # see projection_tiles
    panels: Array
    places: list[tuple[int, int, int, int]]  # of each term: linear, first row of a, first rank in its linear, ranks

    @staticmethod
    def of(group: list[Member], width: int) -> Ranks:
        """Gather A and B of all terms; a column of zeros is a rank that does nothing."""
        a_rows, bs, scales, mods, panels, places = [], [], [], [], [], []
        first = rank0 = b_pairs = b_words = d_b = 0
        for m, member in enumerate(group):
            n_out, n_rank = len(member.w), sum(len(a) for a, *_ in member.terms)
            padded, wide = -(-n_rank // 16) * 16, -(-n_out // _PANEL) * _PANEL
            a, b, scale = (
                np.zeros((padded, width), np.uint16),
                np.zeros((n_out, padded), np.uint16),
                np.zeros(padded, "f4"),
            )
            at = 0
            for term_a, term_b, term_scale, _ in member.terms:
                n = len(term_a)
                a[at : at + n], b[:, at : at + n], scale[at : at + n] = bits(term_a), bits(term_b), term_scale
                places.append((m, rank0 + at, at, n))
                at += n
            a_rows.append(a)
            bs.append(b)
            scales.append(scale)
            mods.append((first, n_out, rank0, padded, b_pairs, d_b))
            panels += [(first + c, min(_PANEL, n_out - c), b_words + c, wide, rank0 // 2, padded // 2)
                       for c in range(0, n_out, _PANEL)]  # fmt: skip
            first, rank0 = first + n_out, rank0 + padded
            b_pairs, b_words, d_b = b_pairs + n_out // 2 * padded, b_words + padded // 2 * wide, d_b + padded * wide
        return Ranks(np.concatenate(a_rows), bs, np.concatenate(scales), np.array(mods), np.array(panels), places)

    def forward(self) -> tuple[Array, Array]:
        """The right operands of h A^T, (I/2, R), and of s B^T, (R_m/2, O_m padded) a linear."""
        ap = np.ascontiguousarray(self.a.view(np.uint32).T)
        bp = []
        for b in self.b:
            wide = np.zeros((b.shape[1] // 2, -(-len(b) // _PANEL) * _PANEL), np.uint32)
            if b.size:
                wide[:, : len(b)] = b.view(np.uint32).T
            bp.append(wide.reshape(-1))
        return ap.reshape(-1), np.concatenate(bp)

    def backward(self) -> tuple[Array, Array]:
        """The right operands of dS A, (R/2, I padded), and of gy B, (O_m/2, R_m) a linear."""
        width = self.a.shape[1]
        atp = np.zeros((len(self.a) // 2, -(-width // _PANEL) * _PANEL), np.uint32)
        atp[:, :width] = _pairs(self.a)
        return atp.reshape(-1), np.concatenate([_pairs(b).reshape(-1) for b in self.b])


def _pairs(rows: Array) -> Array:
    return rows[0::2].astype(np.uint32) | (rows[1::2].astype(np.uint32) << np.uint32(16))


# ------------------------------------------------------------------------------------------------ the calls


def fits(x: Array, norm: Array | None, gated: bool, group: list[Member], dtype: Any, needs: tuple[bool, ...]) -> bool:
    """True where the kernels compute this call: bf16, frozen read-only weights, even sizes, a CPU with tiles."""
    width = group[0].w.shape[1]
    return (
        dtype == bfloat16
        and xp_of(x, group[0].w) is np
        and all(can_pack(m.w) and not needs[m.w_at] and len(m.w) % 2 == 0 for m in group)
        and all(m.bias is None or not needs[m.w_at + 1] for m in group)
        and width % 2 == 0
        and x.size > 0
        and not needs[2]
        and (x.dtype == float32 if norm is not None else x.dtype == bfloat16)
    )


def run(
    x: Array, residual: Array | None, norm: Array | None, eps: float, gated: bool, group: list[Member],
    needs: tuple[bool, ...],
) -> tuple[Array, Callable]:  # fmt: skip
    """(y, vjp) of ops.project.   x (N, I), float32 before a norm, else bf16."""
    from . import projection_tiles as kernels

    before = kernels.NORM if norm is not None else kernels.GATED if gated else kernels.PLAIN
    weights, width = tuple(m.w for m in group), group[0].w.shape[1]
    ranks, n_rows, n_out = Ranks.of(group, width), len(x), sum(map(len, weights))
    rows = np.ascontiguousarray(x) if norm is not None else bits(x)
    n_rank = len(ranks.scale)
    scale_w = np.zeros(width, np.float32) if norm is None else np.ascontiguousarray(norm, np.float32)
    r = np.empty(n_rows if norm is not None else 0, np.float32)
    bias = np.zeros(0, np.float32)
    if any(m.bias is not None for m in group):
        bias = np.concatenate([np.zeros(len(m.w), "f4") if m.bias is None else m.bias.astype("f4") for m in group])
    under = (
        np.zeros((0, n_out), np.float32)
        if residual is None
        else np.ascontiguousarray(residual.reshape(-1, n_out), "f4")
    )
    y = np.empty((n_rows, n_out), np.uint16 if residual is None else np.float32)
    s = np.empty((n_rows, n_rank), np.uint16)
    ap, bp = ranks.forward()
    block = _FORWARD_ROWS
    words = block * (width // 2 + n_rank // 2 + 32) + 8 * _PANEL
    with workspace:
        scratch = workspace.get("scratch", get_num_threads(), words)
        run_kernel(kernels.forward, before, rows, scale_w, eps, r, packed_forward(*weights), ranks.panels, ap, bp,
                   ranks.scale, bias, under, y, s, scratch, block)  # fmt: skip
    result = y.view(bfloat16) if residual is None else y.astype(residual.dtype, copy=False)
    wants_a = any(needs[at] for m in group for *_, at in m.terms)
    wants_b = any(needs[at + 1] for m in group for *_, at in m.terms)
    kept = rows if wants_a or (needs[0] and before != kernels.PLAIN) else np.zeros((0, rows.shape[1]), rows.dtype)
    del rows, y, under, x
    call = _Backward(before, weights, ranks, group, kept, scale_w, r, s if wants_b else s[:0], needs, wants_a, wants_b)
    return result, call


class _Backward:
    """The vjp of one call, with what it keeps: x where it is wanted, s (N, R) as bf16, one float a row for a norm."""

    def __init__(self, before: int, weights: tuple[Array, ...], ranks: Ranks, group: list[Member], x: Array,
                 norm: Array, r: Array, s: Array, needs: tuple[bool, ...], wants_a: bool,
                 wants_b: bool) -> None:  # fmt: skip
        self.before, self.weights, self.x, self.norm, self.r, self.s = before, weights, x, norm, r, s
        self.ranks, self.group, self.needs, self.wants = ranks, group, needs, (wants_a, wants_b)

    def __call__(self, gy: Array, acc: list) -> list:
        from . import projection_tiles as kernels

        out: list[Array | None] = [None] * len(self.needs)
        ranks, width, n_rank = self.ranks, len(self.norm), len(self.ranks.scale)
        wide, block = -(-width // _PANEL) * _PANEL, _BACKWARD_ROWS
        g = np.ascontiguousarray(gy).reshape(-1, sum(map(len, self.weights)))
        g = g if g.dtype == float32 else bits(g)
        gx = self._gx(len(g), acc)
        n_threads, (wants_a, wants_b) = get_num_threads(), self.wants
        d_a = np.empty((n_threads, n_rank * wide if wants_a else 0), np.float32)
        d_b = np.empty((n_threads, sum(r * -(-o // _PANEL) * _PANEL for _, o, _, r, *_ in ranks.mods)), np.float32)
        atp, btp = ranks.backward()
        n_out = g.shape[1]
        words = block * (n_out // 2 + width // 2 + n_rank // 2 + 48 + wide) + n_rank * (block // 2 + 16)
        words += block // 2 * (max(n_out, width) + 64) + 11 * _PANEL
        x = self.x if len(self.x) else np.zeros((0, width), np.uint16)
        with workspace:
            scratch = workspace.get("scratch", n_threads, words)
            run_kernel(kernels.backward, self.before, g, x, self.norm, self.r, packed_backward(*self.weights),
                       ranks.mods, atp, btp, ranks.scale, self.s, gx, d_a, d_b, scratch, block, wants_b)  # fmt: skip
        if self.needs[0]:
            gx = gx if self.before == kernels.NORM else gx.view(bfloat16)
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
        return np.empty((n_rows if self.needs[0] else 0, width), np.uint16)

    def _deliver(self, gx: Array, acc: list) -> Array:
        return acc[0] if self.adds else into(acc[0], gx)

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
