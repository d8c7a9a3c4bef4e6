"""Activations and softmax. Half types are computed in float32 and rounded once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backend import Array, xp_of
from ..dtypes import promote
from ..kernels import formula
from ..tape import op
from .common import into, rounded, widen


def _logistic(x: Array, xp: Any) -> Array:
    """1 / (1 + e^-x) without an exponential that overflows."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x < 0, e, x.dtype.type(1)) / (1 + e)


@op
def relu(x: Array) -> Any:
    """max(x, 0); the gradient at 0 is 0.  Retains the output."""
    xp, dtype = xp_of(x), x.dtype
    y = rounded(xp.maximum(widen(x), 0), dtype, xp)
    return y, (lambda gy: rounded(widen(gy) * (widen(y) > 0), dtype, xp),)


@op
def sigmoid(x: Array) -> Any:
    """1 / (1 + e^-x).  Retains the output."""
    xp, dtype = xp_of(x), x.dtype
    y = rounded(_logistic(widen(x), xp), dtype, xp)

    def gx(gy: Array) -> Array:
        wide = widen(y)
        return rounded(widen(gy) * wide * (1 - wide), dtype, xp)

    return y, (gx,)


@op
def tanh(x: Array) -> Any:
    """The hyperbolic tangent.  Retains the output."""
    xp, dtype = xp_of(x), x.dtype
    y = rounded(xp.tanh(widen(x)), dtype, xp)
    return y, (lambda gy: rounded(widen(gy) * (1 - widen(y) ** 2), dtype, xp),)


@op
def silu(x: Array) -> Any:
    """x / (1 + e^-x).  Retains x."""
    xp, dtype = xp_of(x), x.dtype

    def gx(gy: Array) -> Array:
        wide = widen(x)
        s = _logistic(wide, xp)
        return rounded(widen(gy) * s * (1 + wide * (1 - s)), dtype, xp)

    return rounded(widen(x) * _logistic(widen(x), xp), dtype, xp), (gx,)


# ---------------------------------------------------------------------------------------------- gelu


@functools.cache
def _erfc_series() -> tuple[float, ...]:
    """Chebyshev coefficients of log(erfc(x) / t) + x^2 in t = 2 / (2 + x), for x in [0, 6] (t in [1/4, 1])."""

    def target(u: Any) -> Any:  # u in [-1, 1]
        t = 0.625 + 0.375 * u
        x = 2 / t - 2
        return np.array([math.log(math.erfc(a) / b) + a * a for a, b in zip(x, t, strict=True)])

    return tuple(np.polynomial.chebyshev.chebinterpolate(target, 24).tolist())


def erf(x: Array, xp: Any) -> Array:
    """The error function, to 1e-14 in float64 arithmetic, from array operations alone; in x's dtype."""
    magnitude = xp.minimum(xp.abs(x).astype(np.float64), 6.0)  # 1 - erf(6) = 2e-17; a NaN stays
    t = 2 / (2 + magnitude)
    u = (t - 0.625) / 0.375
    above, here = 0.0 * u, 0.0 * u  # Clenshaw's recurrence
    series = _erfc_series()
    for c in reversed(series[1:]):
        above, here = here, 2 * u * here - above + c
    erfc = t * xp.exp(u * here - above + series[0] - magnitude * magnitude)
    return (xp.sign(x) * (1 - erfc)).astype(x.dtype)


_SQRT_HALF, _DENSITY = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)
_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


@formula
def _gelu_erf(x: Array) -> tuple[Array]:
    return (x * (0.5 + 0.5 * erf(x * _SQRT_HALF, xp_of(x))),)


@_gelu_erf.cpu(out=lambda x: (np.empty_like(x),))
def _(t, T, x, y):  # type: ignore[no-untyped-def]
    half, root = np.float32(0.5), np.float32(_SQRT_HALF)
    for i in range(len(x) * t // T, len(x) * (t + 1) // T):
        y[i] = x[i] * (half + half * math.erf(x[i] * root))


@formula
def _gelu_erf_backward(gy: Array, x: Array) -> tuple[Array]:
    xp = xp_of(x)
    return (gy * (0.5 + 0.5 * erf(x * _SQRT_HALF, xp) + x * xp.exp(-0.5 * x * x) * _DENSITY),)


@_gelu_erf_backward.cpu(out=lambda gy, x: (np.empty_like(x),))
def _(t, T, gy, x, gx):  # type: ignore[no-untyped-def]
    half, root, density = np.float32(0.5), np.float32(_SQRT_HALF), np.float32(_DENSITY)
    for i in range(len(x) * t // T, len(x) * (t + 1) // T):
        below = half + half * math.erf(x[i] * root)
        gx[i] = gy[i] * (below + x[i] * math.exp(-half * x[i] * x[i]) * density)


def _gelu_tanh(x: Array) -> tuple[Array]:
    return (x * (0.5 + 0.5 * xp_of(x).tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))),)


def _gelu_tanh_backward(gy: Array, x: Array) -> tuple[Array]:
    t = xp_of(x).tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))
    return (gy * (0.5 + 0.5 * t + 0.5 * x * (1 - t * t) * _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)),)


_GELU: dict[str, tuple[Callable, Callable]] = {
    "none": (_gelu_erf, _gelu_erf_backward),
    "tanh": (_gelu_tanh, _gelu_tanh_backward),
}


@op
def gelu(x: Array, *, approximate: str = "none") -> Any:
    """x Phi(x), Phi the normal distribution function, or with "tanh" its approximation by a hyperbolic tangent.

    "tanh": x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).  Retains x.  Raises ValueError for another ``approximate``.
    Source: Hendrycks and Gimpel, "Gaussian error linear units" (arXiv:1606.08415), section 2.
    """
    if approximate not in _GELU:
        raise ValueError(f"gelu with approximate = {approximate!r}; expected 'none' or 'tanh'.")
    xp, dtype, shape, (forward, backward) = xp_of(x), x.dtype, x.shape, _GELU[approximate]

    def gx(gy: Array) -> Array:
        return rounded(backward(widen(gy).reshape(-1), widen(x).reshape(-1))[0], dtype, xp).reshape(shape)

    return rounded(forward(widen(x).reshape(-1))[0], dtype, xp).reshape(shape), (gx,)


# ---------------------------------------------------------------------------------------------- swiglu

# In the kernels e^-z is 2^n e^f with n whole, f in [-0.35, 0.35] and Taylor's series of e^f: unlike a call into the
# C library it vectorises. The exponent is limited by comparisons that a NaN fails, so that it comes out.


@formula
def _swiglu_forward(gate: Array, up: Array) -> tuple[Array]:
    return (gate * _logistic(gate, xp_of(gate)) * up,)


@_swiglu_forward.cpu(out=lambda gate, up: (np.empty_like(gate),))
def _(t, T, gate, up, y):  # type: ignore[no-untyped-def]
    f4 = np.float32
    for i in range(len(gate) * t // T, len(gate) * (t + 1) // T):
        z = -gate[i]
        z = f4(87.0) if z > f4(87.0) else z
        z = f4(-87.0) if z < f4(-87.0) else z
        n = np.floor(z * f4(1.44269504) + f4(0.5))
        f = z - n * f4(0.693147181)
        e = f4(1 / 6) + f * (f4(1 / 24) + f * (f4(1 / 120) + f * f4(1 / 720)))
        e = f4(1) + f * (f4(1) + f * (f4(0.5) + f * e))
        e = e * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        y[i] = gate[i] / (f4(1) + e) * up[i]


@formula
def _swiglu_backward(gy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    s = _logistic(gate, xp_of(gate))
    return gy * up * s * (1 + gate * (1 - s)), gy * gate * s


@_swiglu_backward.cpu(out=lambda gy, gate, up: (np.empty_like(gate), np.empty_like(gate)))
def _(t, T, gy, gate, up, g_gate, g_up):  # type: ignore[no-untyped-def]
    f4 = np.float32
    for i in range(len(gate) * t // T, len(gate) * (t + 1) // T):
        z = -gate[i]
        z = f4(87.0) if z > f4(87.0) else z
        z = f4(-87.0) if z < f4(-87.0) else z
        n = np.floor(z * f4(1.44269504) + f4(0.5))
        f = z - n * f4(0.693147181)
        e = f4(1 / 6) + f * (f4(1 / 24) + f * (f4(1 / 120) + f * f4(1 / 720)))
        e = f4(1) + f * (f4(1) + f * (f4(0.5) + f * e))
        e = e * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        s = f4(1) / (f4(1) + e)
        g_up[i] = gy[i] * gate[i] * s
        g_gate[i] = gy[i] * up[i] * s * (f4(1) + gate[i] * (f4(1) - s))


@op
def swiglu(gate: Array, up: Array) -> Any:
    """silu(gate) * up, for two arrays of one shape.  Retains gate and up.  Raises ValueError for different shapes.

    Source: Shazeer, "GLU variants improve transformer" (arXiv:2002.05202), equation 5.
    """
    if gate.shape != up.shape:
        raise ValueError(f"swiglu of gate {gate.shape} and up {up.shape}; expected one shape.")
    xp, shape, dtypes = xp_of(gate), gate.shape, (gate.dtype, up.dtype)
    dtype = promote(*dtypes)

    def flat(x: Array) -> Array:
        return widen(x, dtype).reshape(-1)

    def vjp(gy: Array, acc: list) -> list:
        found = _swiglu_backward(flat(gy), flat(gate), flat(up))
        return [into(a, rounded(g, d, xp).reshape(shape)) for a, g, d in zip(acc, found, dtypes, strict=True)]

    return rounded(_swiglu_forward(flat(gate), flat(up))[0], dtype, xp).reshape(shape), vjp


# ---------------------------------------------------------------------------------------------- softmax


@op
def softmax(x: Array, *, axis: int = -1) -> Any:
    """e^x / sum(e^x) over ``axis``.  Retains the output."""
    xp, dtype = xp_of(x), x.dtype
    e = xp.exp(widen(x) - widen(x).max(axis=axis, keepdims=True))
    y = rounded(e / e.sum(axis=axis, keepdims=True), dtype, xp)

    def gx(gy: Array) -> Array:
        g, p = widen(gy), widen(y)
        return rounded(p * (g - (g * p).sum(axis=axis, keepdims=True)), dtype, xp)

    return y, (gx,)


def _log_sum_exp(x: Array, axis: int, xp: Any) -> Array:
    top = x.max(axis=axis, keepdims=True)
    top = xp.where(xp.isfinite(top), top, x.dtype.type(0))  # a row of -inf gives -inf and not NaN
    with np.errstate(divide="ignore"):
        return top + xp.log(xp.exp(x - top).sum(axis=axis, keepdims=True))


@op
def log_softmax(x: Array, *, axis: int = -1) -> Any:
    """x - log(sum(e^x)) over ``axis``.  Retains the output."""
    xp, dtype = xp_of(x), x.dtype
    y = rounded(widen(x) - _log_sum_exp(widen(x), axis, xp), dtype, xp)

    def gx(gy: Array) -> Array:
        g = widen(gy)
        return rounded(g - xp.exp(widen(y)) * g.sum(axis=axis, keepdims=True), dtype, xp)

    return y, (gx,)


@op
def logsumexp(x: Array, *, axis: int = -1, keepdims: bool = False) -> Any:
    """log(sum(e^x)) over ``axis``.  Retains x and the output."""
    xp, dtype = xp_of(x), x.dtype
    kept = _log_sum_exp(widen(x), axis, xp)  # the reduced axis has size 1
    kept_shape = kept.shape
    y = rounded(kept if keepdims else xp.squeeze(kept, axis), dtype, xp)

    def gx(gy: Array) -> Array:
        return rounded(widen(gy).reshape(kept_shape) * xp.exp(widen(x) - widen(y).reshape(kept_shape)), dtype, xp)

    return y, (gx,)
