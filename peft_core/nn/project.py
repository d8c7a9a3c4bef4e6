"""project: linears over one input, with the norm or gate before them and the residual after them, as one op."""

from __future__ import annotations

from typing import Any

from .. import ops
from ..ops.projection import Layout
from ..tensor import Tensor
from .module import Module
from .norm import LayerNorm, RMSNorm


def project(
    x: Tensor,
    *linears: Any,
    norm: Module | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """[residual +] the outputs of ``linears`` side by side, for linears that read the same input.

    x (..., I) -> (..., sum of O).  Their input is norm(x) if ``norm`` is given, silu(gate) * up with x = [gate, up]
    for "swiglu", gelu(x) by the hyperbolic tangent for "gelu_tanh", else x.  Fused into one op where every linear says
    what it is made of: ``linear.parts()`` gives (weight, bias, ((a, b, scale), ...)), or None when it cannot say it so
    (dropout).  Else each is called in turn.
    """
    fused = type(norm) is RMSNorm or (type(norm) is LayerNorm and norm.bias is not None)
    if norm is not None and not fused:
        x, norm = norm(x), None
    tensors: list[Tensor] = []
    biased, scales = [], []
    for linear in linears:
        parts = linear.parts() if hasattr(linear, "parts") else None
        if parts is None:
            return _composed(x, linears, norm, activation, residual)
        weight, bias, terms = parts
        tensors += [weight] if bias is None else [weight, bias]
        biased.append(bias is not None)
        for a, b, _ in terms:
            tensors += [a, b]
        scales.append(tuple([scale for *_, scale in terms]))
    layout = Layout(tuple(biased), tuple(scales))
    weight, shift, eps = (None, None, 0.0)
    if isinstance(norm, RMSNorm | LayerNorm):
        # no getattr with a default: what a Module lacks is answered with a search for names like it, 50 us
        weight, shift, eps = norm.weight, norm.bias if isinstance(norm, LayerNorm) else None, norm.eps
    return ops.project(x, residual, weight, shift, *tensors, layout=layout, eps=eps, activation=activation)


def _composed(
    x: Tensor, linears: tuple, norm: Module | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    if norm is not None:
        x = norm(x)
    if activation == "gelu_tanh":
        x = ops.gelu(x, approximate="tanh")
    if activation == "swiglu":
        half = x.shape[-1] // 2
        x = ops.swiglu(x[..., :half], x[..., half:])
    outputs = [linear(x) for linear in linears]
    y = outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, axis=-1)
    return y if residual is None else ops.add(residual, y)
