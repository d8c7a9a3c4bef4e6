"""Conv1D: the linear layer of GPT-2, whose weight is stored (in, out)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import ops
from ..backend import Array
from ..dtypes import as_dtype
from ..random import Generator
from ..tensor import Tensor
from . import init
from .linear import Linear
from .module import Parameter


class Conv1D(Linear):
    """y = x W + b.   x (..., I), weight (I, O), bias (O,) or None -> (..., O).

    A Linear that holds its weight the other way round, as GPT-2's checkpoints do; the name is transformers'.  The
    weight starts from N(0, 0.02^2), drawn from ``generator`` (default: the default generator), the bias at zero.
    (Radford et al., "Language models are unsupervised multitask learners", 2019.)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = "float32",
        generator: Generator | None = None,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter(np.empty((in_features, out_features), as_dtype(dtype)))  # (I, O)
        init.normal_(self.weight, std=0.02, generator=generator)
        self.bias = None
        if bias:
            self.bias = Parameter(np.empty(out_features, as_dtype(dtype)))  # (O,)
            init.zeros_(self.bias)
        self._seen: tuple[Array, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        return ops.linear(x, self.matrix(), self.bias)

    def parts(self) -> tuple[Tensor, Parameter | None, tuple] | None:
        """(W^T, bias, ()) for ``project``."""
        return self.matrix(), self.bias, ()

    def matrix(self) -> Tensor:
        """W^T (O, I), a view.  Of a frozen weight the same array each time: ops keep packed forms by array."""
        if self.weight.requires_grad:
            return ops.transpose(self.weight)
        if self._seen is None or self._seen[0] is not self.weight.data:
            self._seen = self.weight.data, Tensor(self.weight.data.T)
        return self._seen[1]
