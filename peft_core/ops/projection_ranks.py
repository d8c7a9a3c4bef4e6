"""The low-rank terms of a project call, side by side: gathered, packed for the tiles, and their gradients cut out."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..backend import Array
from ..dtypes import bfloat16, float32
from ..kept import Kept
from .common import into

if TYPE_CHECKING:
    from .projection import Member

PANEL = 48  # columns that a tile makes


class Linear(NamedTuple):
    """One linear's place in a group: in columns of y, ranks (padded to 16), words of B each way, elements of dB."""

    first: int
    n_out: int
    rank0: int
    n_rank: int
    b_grad: int  # where the right operand (O_m, R_m) of gy B begins
    d_b: int  # where dB^T (R_m, O_m padded) begins
    b_word: int  # where the right operand (R_m, O_m padded) of s B^T begins
    wide: int  # O_m, padded to whole panels


class Term(NamedTuple):
    """One term's place: its linear, first row of A, first rank in its linear, ranks."""

    linear: int
    row: int
    rank: int
    n: int


@dataclass(frozen=True)
class Geometry:
    """Where everything stands, for linears of these sizes and ranks."""

    linears: tuple[Linear, ...]
    terms: tuple[Term, ...]
    scale: Array  # (R,) float32
    mods: Array  # (M, 6), see projection_tiles
    panels: Array  # (P, 6), see projection_tiles

    @property
    def n_rank(self) -> int:
        """R, all ranks, padded linear by linear."""
        return len(self.scale)


Sizes = tuple[tuple[int, tuple[tuple[int, float], ...]], ...]  # of each linear: O_m, and rank and scale of each term


@functools.lru_cache(maxsize=256)
def geometry(sizes: Sizes, per: int) -> Geometry:
    """The places of linears and terms; a word holds ``per`` elements.  A row of zeros in A is a rank without effect."""
    linears, terms, scale, panels = [], [], [], []
    at = Linear(0, 0, 0, 0, 0, 0, 0, 0)
    for m, (n_out, own) in enumerate(sizes):
        n_rank = -(-sum(n for n, _ in own) // 16) * 16
        at = at._replace(n_out=n_out, n_rank=n_rank, wide=-(-n_out // PANEL) * PANEL)
        linears.append(at)
        rank = 0
        for n, factor in own:
            terms.append(Term(m, at.rank0 + rank, rank, n))
            scale += [factor] * n
            rank += n
        scale += [0.0] * (n_rank - rank)
        panels += [(at.first + c, min(PANEL, n_out - c), at.b_word + c, at.wide, at.rank0 // per, n_rank // per)
                   for c in range(0, n_out, PANEL)]  # fmt: skip
        at = at._replace(
            first=at.first + n_out, rank0=at.rank0 + n_rank, b_grad=at.b_grad + n_out // per * n_rank,
            d_b=at.d_b + n_rank * at.wide, b_word=at.b_word + n_rank // per * at.wide,
        )  # fmt: skip
    mods = np.array([linear[:6] for linear in linears], np.int64)
    return Geometry(tuple(linears), tuple(terms), np.array(scale, np.float32), mods, np.array(panels, np.int64))


class Ranks:
    """All A and B of a group as elements (bf16 bits or float32), and packed for either direction when it comes.

    ``keeps``: what is packed is kept for the next call.
    """

    def __init__(self, group: list[Member], width: int, dtype: Any, *, keeps: bool) -> None:
        from . import projection_ranks_tiles as kernels

        kind, word, per = (np.uint16, np.uint32, 2) if dtype == bfloat16 else (np.float32, np.float32, 1)
        self.places = geometry(_sizes(group), per)
        self.kind, self.word, self.width, self.keeps = kind, word, width, keeps
        self._forward: tuple[Array, Array] | None = None
        self._backward: tuple[Array, Array] | None = None
        self.a = np.zeros((self.places.n_rank, width), kind)  # (R, I)
        self.b = [np.zeros((m.n_out, m.n_rank), kind) for m in self.places.linears]  # (O_m, R_m)
        for (a, b, *_), at in zip(_terms(group), self.places.terms, strict=True):
            kernels.gather(0, 1, _floats(a), _floats(b), at.row, at.rank, self.a, self.b[at.linear])

    def forward(self) -> tuple[Array, Array]:
        """The right operands, in words, of h A^T, (I, R), and of s B^T, (R_m, O_m padded) a linear."""
        found = self._forward or self._packed_forward()
        self._forward = found if self.keeps else None
        return found

    def backward(self) -> tuple[Array, Array]:
        """The right operands, in words, of dS A, (R, I padded), and of gy B, (O_m, R_m) a linear."""
        found = self._backward or self._packed_backward()
        self._backward = found if self.keeps else None
        return found

    def _packed_forward(self) -> tuple[Array, Array]:
        per, last = 4 // self.a.itemsize, self.places.linears[-1]
        bp = np.zeros(last.b_word + last.n_rank // per * last.wide, self.word)
        for b, m in zip(self.b, self.places.linears, strict=True):
            if m.n_rank:
                bp[m.b_word :][: m.n_rank // per * m.wide].reshape(-1, m.wide)[:, : m.n_out] = b.view(self.word).T
        return np.ascontiguousarray(self.a.view(self.word).T).reshape(-1), bp

    def _packed_backward(self) -> tuple[Array, Array]:
        from . import projection_ranks_tiles as kernels

        per, wide = 4 // self.a.itemsize, -(-self.width // PANEL) * PANEL
        atp = np.zeros(self.places.n_rank // per * wide, self.word)
        kernels.pair(0, 1, self.a, atp, 0, wide)
        btp = np.empty(sum(b.size for b in self.b) // per, self.word)
        for b, m in zip(self.b, self.places.linears, strict=True):
            kernels.pair(0, 1, b, btp, m.b_grad, m.n_rank)
        return atp, btp

    def gradient_words(self) -> int:
        """Elements of dB^T that a thread sums, linear after linear."""
        last = self.places.linears[-1]
        return last.d_b + last.n_rank * last.wide

    def deliver(
        self, d_a: Array, d_b: Array, group: list[Member], needs: tuple[bool, ...], acc: list, out: list
    ) -> None:
        """dA and dB of each term into ``out``, from the threads' sums d_a (T, R I padded, or T, 0) and d_b (T, ...)."""
        from . import projection_ranks_tiles as kernels

        wide = -(-self.width // PANEL) * PANEL
        for (a, b, _, place), at in zip(_terms(group), self.places.terms, strict=True):
            m = self.places.linears[at.linear]
            if needs[place] and d_a.shape[1]:
                ga = np.empty(a.shape, np.float32)
                kernels.cut_a(0, 1, d_a, at.row * wide, wide, ga)
                out[place] = into(acc[place], ga.astype(a.dtype, copy=False))
            if needs[place + 1]:
                gb = np.empty(b.shape, np.float32)
                kernels.cut_b(0, 1, d_b, m.d_b + at.rank * m.wide, m.wide, gb)
                out[place + 1] = into(acc[place + 1], gb.astype(b.dtype, copy=False))


def _floats(x: Array) -> Array:
    """x as float32 that a kernel takes: a read-only array is another type to numba, compiled anew."""
    fits = x.dtype == float32 and x.flags.writeable and x.flags.c_contiguous
    return x if fits else np.array(x, float32, order="C")


def _terms(group: list[Member]) -> list[tuple]:
    return [term for member in group for term in member.terms]


def _sizes(group: list[Member]) -> Sizes:
    return tuple((len(m.w), tuple((len(a), scale) for a, _, scale, _ in m.terms)) for m in group)


_kept = Kept()


def ranks_of(group: list[Member], width: int, dtype: Any) -> Ranks:
    """``Ranks``, kept where all A and B are read-only: arrays that cannot change, as in ``packing.py``."""
    arrays = [array for a, b, *_ in _terms(group) for array in (a, b)]
    writable = [array for array in arrays if array.flags.writeable]
    if writable:
        for array in writable:
            _kept.forget(array)
        return Ranks(group, width, dtype, keeps=False)
    key = dtype.char, width, _sizes(group)
    found = _kept.find(key, arrays)
    if found is None:
        found = Ranks(group, width, dtype, keeps=True)
        _kept.keep(key, arrays, found)
    return found
