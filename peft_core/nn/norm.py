"""RMSNorm and LayerNorm, over the last dimension."""

from __future__ import annotations

from typing import Any

from .. import creation, ops
from ..tensor import Tensor
from ..unsupported import unsupported
from . import init
from .module import Module, Parameter


def _width(dim: Any) -> int:
    """``dim`` itself, or the one size of torch's ``normalized_shape``."""
    sizes = (dim,) if isinstance(dim, int) else tuple(dim)
    if len(sizes) != 1:
        unsupported(f"a norm over {len(sizes)} dimensions", "expected the last one; flatten those before")
    return sizes[0]


def _expect_affine(name: str, elementwise_affine: bool) -> None:
    if not elementwise_affine:
        unsupported(f"{name}(elementwise_affine=False)", "expected a weight; it starts at one and can be frozen")


class RMSNorm(Module):
    """y = x / sqrt(mean(x^2) + eps) * weight.   x (..., D), weight (D,), starting at one.

    (Zhang and Sennrich, "Root mean square layer normalization", arXiv:1910.07467, equation 4.)
    """

    weight: Parameter

    def __init__(
        self,
        dim: Any,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        dtype: Any = "float32",
        device: Any = None,
    ) -> None:
        _expect_affine("RMSNorm", elementwise_affine)
        self.eps = eps
        self.weight = Parameter(creation.empty(_width(dim), dtype=dtype, device=device))  # (D,)
        init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return ops.rms_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.   x (..., D); weight starts at one, bias at zero.

    (Ba et al., "Layer normalization", arXiv:1607.06450, equation 4.)
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        dim: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: Any = "float32",
        device: Any = None,
    ) -> None:
        _expect_affine("LayerNorm", elementwise_affine)
        self.eps = eps
        self.weight = Parameter(creation.empty(_width(dim), dtype=dtype, device=device))  # (D,)
        init.ones_(self.weight)
        self.bias = None
        if bias:
            self.bias = Parameter(creation.empty(_width(dim), dtype=dtype, device=device))  # (D,)
            init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"
