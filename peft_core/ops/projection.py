"""project: several linears with low-rank terms over one input, with what stands before and after them in one op.

    h = x  |  rms_norm(x) * norm  |  layer_norm(x) * norm + shift  |  silu(gate) * up, x = [gate, up]  |  gelu(x)
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
from .activation import _gelu_tanh, _gelu_tanh_backward, _swiglu_backward, _swiglu_forward
from .common import into, rounded, widen
from .linear import factor, product_dtype
from .norm import _layer_backward, _layer_forward, _rms_backward, _rms_forward


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


class Gelu(Plain):
    """h = gelu(x), by the hyperbolic tangent."""

    def forward(self, x: Array) -> Array:
        """x (N, I) -> h (N, I)."""
        return _gelu_tanh(x)[0]

    def backward(self, gh: Array, x: Array) -> Array:
        """gh (N, I) -> gx."""
        return _gelu_tanh_backward(gh, x)[0]


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

    def own(self, gh: Array, x: Array) -> tuple[Array, Array | None]:
        """The gradients of w and of what is added, (I,)."""
        return (gh * x * self.r[:, None]).sum(axis=0), None


class LayerNorm(Norm):
    """h = (x - mean(x)) / std(x) * w + shift.  Keeps two floats a row."""

    def __init__(self, w: Array, shift: Array, eps: float) -> None:
        super().__init__(w, eps)
        self.shift = shift

    def forward(self, x: Array) -> Array:
        """x (N, I) -> h (N, I)."""
        h, self.mean, self.r = _layer_forward(x, widen(self.w, x.dtype), widen(self.shift, x.dtype), self.eps)
        return h

    def backward(self, gh: Array, x: Array) -> Array:
        """gh (N, I) -> gx."""
        return _layer_backward(gh, (x - self.mean) * self.r, widen(self.w, x.dtype), self.r)

    def own(self, gh: Array, x: Array) -> tuple[Array, Array | None]:
        """The gradients of w and shift, (I,)."""
        return (gh * (x - self.mean) * self.r).sum(axis=0), gh.sum(axis=0)


ACTIVATIONS: dict[str | None, type[Plain]] = {None: Plain, "swiglu": Gated, "gelu_tanh": Gelu}


@op
def project(
    x: Array,
    residual: Array | None,
    norm: Array | None,
    shift: Array | None,
    *tensors: Array,
    layout: Layout,
    eps: float = 1e-5,
    activation: str | None = None,
    needs: tuple[bool, ...],
) -> Any:
    """See the module.  x (..., I), for "swiglu" (..., 2 I), residual (..., O), norm and shift (I,) -> y (..., O).

    norm alone is that of RMSNorm, with ``shift`` that of LayerNorm.  activation: None, "swiglu" or "gelu_tanh".
    y has the residual's dtype if there is one, else that of products.  Retains: x for its own gradient through norm or
    activation, or where an a or w trains; s = scale h a^T (N, R) where b trains; the weights.
    Raises ValueError for shapes that do not fit.
    """
    dtype, before = product_dtype(x, tensors[0]), projection_fused.Before(norm, shift, eps, activation)
    if not any(needs):
        y = projection_few.attempt(x, residual, before, tensors, layout, dtype)
        if y is not None:
            return y, None
    group = list(members(tensors, layout, 4))
    check_shapes(x, residual, before, group)
    if projection_fused.fits(x, before, group, dtype, needs):
        y, vjp = projection_fused.run(x.reshape(-1, x.shape[-1]), residual, before, group, dtype, needs)
        return y.reshape(*x.shape[:-1], y.shape[1]), vjp
    run = _Projection(_before(norm, shift, eps, activation), group, dtype, needs)
    y = run.forward(x.reshape(-1, x.shape[-1]))  # (N, O)
    shape = (*x.shape[:-1], y.shape[1])
    if residual is not None:
        y = rounded(y.reshape(shape) + residual, residual.dtype, xp_of(x))
    return rounded(y, dtype if residual is None else residual.dtype, xp_of(x)).reshape(shape), run.backward


def _before(norm: Array | None, shift: Array | None, eps: float, activation: str | None) -> Plain:
    if norm is None:
        return ACTIVATIONS[activation]()
    return Norm(norm, eps) if shift is None else LayerNorm(norm, shift, eps)


def check_shapes(x: Array, residual: Array | None, before: projection_fused.Before, group: list[Member]) -> None:
    """Raise ValueError for shapes that do not fit, or for what cannot stand before the products."""
    norm, shift, _, activation = before
    if activation not in ACTIVATIONS or (norm is not None and activation) or (norm is None and shift is not None):
        behind = " behind a norm" if norm is not None else ""
        raise ValueError(
            f"project with activation = {activation!r}{behind}, norm {norm is not None} and shift {shift is not None}; "
            "expected a norm, with or without a shift, or an activation of None, 'swiglu' or 'gelu_tanh'."
        )
    width, total = group[0].w.shape[-1], group[-1].columns.stop
    wrong = [f"{name} {array.shape}, expected {shape}" for name, array, shape in (
        ("x", x, (*x.shape[:-1], width * (2 if activation == "swiglu" else 1))),
        ("norm", norm, (width,)), ("shift", shift, (width,)), ("residual", residual, (*x.shape[:-1], total)),
    ) if array is not None and array.shape != shape]  # fmt: skip
    for m in group:
        n_out = len(m.w)
        sizes = [("w", m.w, (n_out, width)), ("bias", m.bias, (n_out,))]
        for a, b, *_ in m.terms:
            sizes += [("a", a, (len(a), width)), ("b", b, (n_out, len(a)))]
        wrong += [f"{name} {array.shape}, expected {shape}" for name, array, shape in sizes
                  if array is not None and array.shape != shape]  # fmt: skip
    if wrong:
        raise ValueError(f"project of x {x.shape} by {len(group)} linears got {'; '.join(wrong)}.")


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
        if self.wants_h or any(self.needs[2:4]) or (self.needs[0] and type(self.before) is not Plain):
            self.x = x
        self.x_shape, self.x_dtype = x.shape, x.dtype
        return y

    def backward(self, gy: Array, acc: list) -> list:
        """The gradients of x, residual, norm and the group's tensors."""
        xp, out = xp_of(gy), [None] * len(self.needs)
        g = factor(gy, self.dtype).reshape(-1, gy.shape[-1])  # (N, O)
        h = self._h(self.x) if self.wants_h else None
        below = self.needs[0] or any(self.needs[2:4])
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
        if any(self.needs[2:4]) and isinstance(self.before, Norm):
            for at, g in zip((2, 3), self.before.own(gh, x), strict=True):
                if self.needs[at]:
                    out[at] = rounded(g, self.before.w.dtype, xp)
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
