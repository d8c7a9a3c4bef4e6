"""Linear: y = x W^T + b."""

from __future__ import annotations

import math
from typing import Any

from .. import creation, ops
from ..random import Generator
from ..tensor import Tensor
from . import init
from .module import Module, Parameter


class Linear(Module):
    """y = x W^T + b.   x (..., I), weight (O, I), bias (O,) or None -> (..., O).

    Both start from U(-1/sqrt(I), 1/sqrt(I)), drawn from ``generator`` (default: the default generator).
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = "float32",
        generator: Generator | None = None,
        device: Any = None,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter(creation.empty(out_features, in_features, dtype=dtype, device=device))  # (O, I)
        init.kaiming_uniform_(self.weight, a=math.sqrt(5), generator=generator)
        self.bias = None
        if bias:
            self.bias = Parameter(creation.empty(out_features, dtype=dtype, device=device))  # (O,)
            bound = 1 / math.sqrt(max(1, in_features))
            init.uniform_(self.bias, -bound, bound, generator)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        return ops.linear(x, self.weight, self.bias)

    def parts(self) -> tuple[Tensor, Parameter | None, tuple] | None:
        """(weight, bias, low-rank terms) for ``project``: a plain Linear has no terms."""
        return self.weight, self.bias, ()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
