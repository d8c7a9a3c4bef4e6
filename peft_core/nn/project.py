"""project: several linears over one input, the one place where their products may be fused."""

from __future__ import annotations

from ..tensor import Tensor
from .module import Module


def project(x: Tensor, *linears: Module) -> tuple[Tensor, ...]:
    """(linear(x) for each of ``linears``), for linears that read the same input: q/k/v, gate/up.

    x (..., I) -> a tuple of (..., O_i).  Today each product is computed in its turn, with the same numbers as separate
    calls. Code that has several linears over one input calls this, so that fusing them changes this function alone.
    """
    return tuple(linear(x) for linear in linears)
