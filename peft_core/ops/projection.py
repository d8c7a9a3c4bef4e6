"""project: several linears with low-rank terms over one input, with what stands before and after them in one op.

    h = x  |  rms_norm(x) * norm  |  silu(gate) * up with x = [gate, up]
    y = [residual +] concatenation over m of (h w_m^T + bias_m + sum over terms of scale (h a^T) b^T)

This is where a transformer's time goes. As one op it keeps neither the norm's output, nor silu(gate) * up, nor an input
that only a frozen weight would want: backward makes h again from x, which is kept anyway. The same boundaries serve a
fused kernel: rows stay in cache from the norm through the products to the residual sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, xp_of
from ..blas import product
from ..dtypes import accumulate_dtype
from ..tape import op
from . import projection_few, projection_fused
from .activation import _swiglu_backward, _swiglu_forward
from .common import into, rounded, widen
from .linear import factor, product_dtype
from .norm import _rms_backward, _rms_forward


class Layout(NamedTuple):
    """How project's flat list of tensors is made up: per linear w, bias if ``biased``, then a and b per scale."""

    biased: tuple[bool, ...]
    scales: tuple[tuple[float, ...], ...]


@dataclass
class Member:
    """One linear of the group: its arrays, their places among project's inputs, and its columns of y."""

    w: Array  # (O, I)
    w_at: int
    bias: Array | None  # (O,)
    terms: list[tuple[Array, Array, float, int]]  # a (R, I), b (O, R), scale, the place of a (b stands behind it)
    columns: slice


def members(tensors: tuple[Array, ...], layout: Layout, first: int) -> Iterator[Member]:
    """The linears behind the flat list; ``first`` is the place of its first tensor among the op's inputs."""
    at = start = 0
    for biased, scales in zip(layout.biased, layout.scales, strict=True):
        w, w_at = tensors[at], at + first
        bias = tensors[at + 1] if biased else None
        at += 1 + biased
        terms = [(tensors[at + 2 * i], tensors[at + 2 * i + 1], scale, first + at + 2 * i)
                 for i, scale in enumerate(scales)]  # fmt: skip
        at += 2 * len(scales)
        yield Member(w, w_at, bias, terms, slice(start, start + len(w)))
        start += len(w)


class Plain:
    """h = x."""

    def forward(self, x: Array) -> Array:
        """x (N, I) -> h (N, I)."""
        return x

    def backward(self, gh: Array, x: Array) -> Array:
        """gh (N, I) -> gx."""
        return gh


class Gated(Plain):
    """h = silu(gate) * up, x = [gate, up]."""

    def forward(self, x: Array) -> Array:
        """x (N, 2 I) -> h (N, I)."""
        gate, up = np.split(x, 2, axis=1)
        return _swiglu_forward(gate.reshape(-1), up.reshape(-1))[0].reshape(gate.shape)

    def backward(self, gh: Array, x: Array) -> Array:
        """gh (N, I) -> gx (N, 2 I)."""
        gate, up = np.split(x, 2, axis=1)
        halves = _swiglu_backward(gh.reshape(-1), gate.reshape(-1), up.reshape(-1))
        return xp_of(x).concatenate([g.reshape(gate.shape) for g in halves], axis=1)


class Norm(Plain):
    """h = x / rms(x) * w.  Keeps one float a row."""

    def __init__(self, w: Array, eps: float) -> None:
        self.w, self.eps = w, eps

    def forward(self, x: Array) -> Array:
        """x (N, I) -> h (N, I)."""
        h, self.r = _rms_forward(x, widen(self.w, x.dtype), self.eps)
        return h

    def backward(self, gh: Array, x: Array) -> Array:
        """gh (N, I) -> gx."""
        return _rms_backward(gh, x, widen(self.w, x.dtype), self.r)[0]


@op
def project(
    x: Array,
    residual: Array | None,
    norm: Array | None,
    *tensors: Array,
    layout: Layout,
    eps: float = 1e-5,
    gated: bool = False,
    needs: tuple[bool, ...],
) -> Any:
    """See the module.  x (..., I) or (..., 2 I) if ``gated``, residual (..., O), norm (I,) -> y (..., O).

    y has the residual's dtype if there is one, else that of products.  Retains: x for its own gradient through norm or
    gate, or where an a or w trains; s = scale h a^T (N, R) where b trains; the weights.
    """
    if not any(needs):
        y = projection_few.attempt(x, residual, norm, tensors, layout, eps, gated)
        if y is not None:
            return y, None
    group = list(members(tensors, layout, 3))
    dtype = product_dtype(x, group[0].w)
    if projection_fused.fits(x, norm, gated, group, dtype, needs):
        y, vjp = projection_fused.run(x.reshape(-1, x.shape[-1]), residual, norm, eps, gated, group, dtype, needs)
        return y.reshape(*x.shape[:-1], y.shape[1]), vjp
    before = Norm(norm, eps) if norm is not None else Gated() if gated else Plain()
    run = _Projection(before, group, dtype, needs)
    y = run.forward(x.reshape(-1, x.shape[-1]))  # (N, O)
    shape = (*x.shape[:-1], y.shape[1])
    if residual is not None:
        y = rounded(y.reshape(shape) + residual, residual.dtype, xp_of(x))
    return rounded(y, dtype if residual is None else residual.dtype, xp_of(x)).reshape(shape), run.backward


class _Projection:
    """One call: the forward, and what its backward keeps."""

    def __init__(self, before: Plain, group: list[Member], dtype: np.dtype, needs: tuple[bool, ...]) -> None:
        self.before, self.group, self.dtype, self.needs = before, group, dtype, needs
        self.wide = accumulate_dtype(dtype)
        self.wants_h = any(needs[m.w_at] or any(needs[at] for *_, at in m.terms) for m in group)
        self.x: Array | None = None

    def _h(self, x: Array) -> Array:
        return factor(self.before.forward(widen(x, self.wide)), self.dtype)

    def forward(self, x: Array) -> Array:
        """x (N, I) -> y (N, O) in the dtype that products are summed in."""
        xp, h = xp_of(x), self._h(x)
        y = xp.empty((len(h), self.group[-1].columns.stop), self.wide)
        self.s: list[Array | None] = []
        for m in self.group:
            part = y[:, m.columns]
            product(h, factor(m.w, self.dtype).T, out=part)  # (N, O_m)
            for a, b, scale, at in m.terms:
                s = product(h, factor(a, self.dtype).T)  # (N, R)
                s *= self.wide.type(scale)
                part += product(s, factor(b, self.dtype).T)
                self.s.append(s if self.needs[at + 1] else None)
            if m.bias is not None:
                part += factor(m.bias, self.dtype)
        if self.wants_h or self.needs[2] or (self.needs[0] and type(self.before) is not Plain):
            self.x = x
        self.x_shape, self.x_dtype = x.shape, x.dtype
        return y

    def backward(self, gy: Array, acc: list) -> list:
        """The gradients of x, residual, norm and the group's tensors."""
        xp, out = xp_of(gy), [None] * len(self.needs)
        g = factor(gy, self.dtype).reshape(-1, gy.shape[-1])  # (N, O)
        h = self._h(self.x) if self.wants_h else None
        below = self.needs[0] or self.needs[2]
        gh: Array = None
        for i, m in enumerate(self.group):
            gm = g[:, m.columns]  # (N, O_m)
            if below:
                part = product(gm, factor(m.w, self.dtype))  # (N, I)
                gh = part if gh is None else into(gh, part)
            if self.needs[m.w_at]:
                out[m.w_at] = product(gm.T, h)
            if m.bias is not None and self.needs[m.w_at + 1]:
                out[m.w_at + 1] = gm.sum(axis=0)
            first = sum(len(k.terms) for k in self.group[:i])
            for (a, b, scale, at), s in zip(m.terms, self.s[first : first + len(m.terms)], strict=True):
                self._term(gm, gh, h, (a, b, scale, at), s, out)
        self.s = []
        if below:
            self._below(gh, gy.shape[:-1], acc, out)
        if self.needs[1]:
            out[1] = gy
        for m in self.group:
            self._round(m, acc, out, xp)
        return out

    def _term(self, gm: Array, gh: Array, h: Array, term: tuple, s: Array | None, out: list) -> None:
        a, b, scale, at = term
        if gh is not None or self.needs[at]:
            ds = product(gm, factor(b, self.dtype))  # (N, R)
            ds *= self.wide.type(scale)
            if gh is not None:
                gh += product(ds, factor(a, self.dtype))
            if self.needs[at]:
                out[at] = product(ds.T, h)
        if s is not None:
            out[at + 1] = product(gm.T, s)

    def _below(self, gh: Array, lead: tuple[int, ...], acc: list, out: list) -> None:
        xp, x = xp_of(gh), None if self.x is None else widen(self.x, self.wide)
        if self.needs[2] and isinstance(self.before, Norm):
            out[2] = rounded((gh * x * self.before.r[:, None]).sum(axis=0), self.before.w.dtype, xp)
        if self.needs[0]:
            gx = rounded(self.before.backward(gh, x), self.x_dtype, xp)
            out[0] = into(acc[0], gx.reshape(*lead, self.x_shape[-1]))

    def _round(self, m: Member, acc: list, out: list, xp: Any) -> None:
        places = [(m.w_at, m.w), *((m.w_at + 1, m.bias) for _ in range(m.bias is not None))]
        for a, b, _, at in m.terms:
            places += [(at, a), (at + 1, b)]
        for at, array in places:
            if out[at] is not None:
                out[at] = into(acc[at], rounded(out[at], array.dtype, xp))
