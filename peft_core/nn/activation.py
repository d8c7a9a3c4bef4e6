"""Activations as modules.  ``inplace`` is accepted and changes nothing: no op writes into its inputs."""

from __future__ import annotations

from typing import Any

from .. import ops
from ..tensor import Tensor
from .module import Module


class ReLU(Module):
    """max(x, 0)."""

    def __init__(self, inplace: bool = False) -> None:
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> the same shape."""
        return ops.relu(x)


class SiLU(Module):
    """x / (1 + e^-x)."""

    def __init__(self, inplace: bool = False) -> None:
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> the same shape."""
        return ops.silu(x)


class GELU(Module):
    """x Phi(x), or its approximation by a hyperbolic tangent for ``approximate="tanh"``."""

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> the same shape."""
        return ops.gelu(x, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> the same shape."""
        return ops.tanh(x)


class Sigmoid(Module):
    """1 / (1 + e^-x)."""

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> the same shape."""
        return ops.sigmoid(x)


class Softmax(Module):
    """exp(x) / sum(exp(x)) over ``dim``."""

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> the same shape."""
        return ops.softmax(x, axis=self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LogSoftmax(Softmax):
    """log(softmax(x)) over ``dim``."""

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> the same shape."""
        return ops.log_softmax(x, axis=self.dim)


class Identity(Module):
    """x; arguments of the constructor are accepted and ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def forward(self, x: Any) -> Any:
        """x itself."""
        return x
