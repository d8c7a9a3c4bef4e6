"""Conv2d, MaxPool2d and Flatten: what a network over images (N, C, Y, X) is made of."""

from __future__ import annotations

import math
from typing import Any

from .. import creation, ops
from ..ops.conv import pair
from ..random import Generator
from ..tensor import Tensor
from ..unsupported import unsupported
from . import functional, init
from .module import Module, Parameter


class Conv2d(Module):
    """Cross-correlation with learned kernels.   x (N, I, Y, X), weight (O, I / groups, i, j), bias (O,) or None.

    ``padding``: zeros on each side, "valid" or "same".  Both start from U(-b, b), b = 1/sqrt(I / groups * i * j).
    Raises UnsupportedError for another ``padding_mode`` than "zeros", ValueError for channels that ``groups`` does not
    divide.
    """

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = "float32",
        generator: Generator | None = None,
    ) -> None:
        if padding_mode != "zeros":
            unsupported(f"Conv2d with padding_mode={padding_mode!r}", "expected 'zeros'")
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"Conv2d of {in_channels} to {out_channels} channels with groups={groups}; "
                             "expected both divisible by groups.")  # fmt: skip
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = pair(kernel_size, "Conv2d kernel_size"), pair(stride, "Conv2d stride")
        self.padding = padding if isinstance(padding, str) else pair(padding, "Conv2d padding")
        self.dilation = pair(dilation, "Conv2d dilation")
        shape = (out_channels, in_channels // groups, *self.kernel_size)  # (O, I / groups, i, j)
        self.weight = Parameter(creation.empty(shape, dtype=dtype, device=device))
        init.kaiming_uniform_(self.weight, a=math.sqrt(5), generator=generator)
        self.bias = None
        if bias:
            self.bias = Parameter(creation.empty(out_channels, dtype=dtype, device=device))  # (O,)
            bound = 1 / math.sqrt(max(1, math.prod(shape[1:])))
            init.uniform_(self.bias, -bound, bound, generator)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, I, Y, X) -> (N, O, P, Q), or one image without N."""
        return functional.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"


class MaxPool2d(Module):
    """The largest element of each window; ``stride`` is the kernel's size by default.

    Raises UnsupportedError for return_indices and ceil_mode.
    """

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        if return_indices or ceil_mode:
            unsupported("MaxPool2d with return_indices or ceil_mode", "expected neither")
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C, Y, X) -> (N, C, P, Q), or one image without N."""
        return functional.max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride or self.kernel_size}, padding={self.padding}"


class Flatten(Module):
    """Dimensions ``start_dim`` to ``end_dim`` joined into one: by default all but the first."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        """x (N, ...) -> (N, product)."""
        return ops.flatten(x, self.start_dim, self.end_dim)
