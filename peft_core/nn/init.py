"""Starting values.  Functions write into a Tensor and return it; numbers come from a seeded generator.

``generator``: a random.Generator; by default random.default_generator, that ``manual_seed`` restarts.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import random
from ..backend import to_device
from ..random import Generator
from ..tensor import Tensor

_skipped: contextvars.ContextVar[bool] = contextvars.ContextVar("skip_init", default=False)


@contextmanager
def skip_init() -> Iterator[None]:
    """Modules made inside keep uninitialised memory: for a model whose weights are read from a file next."""
    token = _skipped.set(True)
    try:
        yield
    finally:
        _skipped.reset(token)


def _fill(tensor: Tensor, draw: Any) -> Tensor:
    if not _skipped.get():
        tensor.data[...] = to_device(draw(), tensor.device)
    return tensor


def uniform_(tensor: Tensor, low: float = 0.0, high: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Numbers from [low, high)."""
    source = generator or random.default_generator
    return _fill(tensor, lambda: source.uniform(tensor.shape, low, high, dtype=tensor.dtype))


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Gaussian numbers."""
    source = generator or random.default_generator
    return _fill(tensor, lambda: source.normal(tensor.shape, mean, std, dtype=tensor.dtype))


def constant_(tensor: Tensor, value: float) -> Tensor:
    """One value everywhere."""
    if not _skipped.get():
        tensor.data[...] = value
    return tensor


def zeros_(tensor: Tensor) -> Tensor:
    """Zero everywhere."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """One everywhere."""
    return constant_(tensor, 1.0)


def kaiming_uniform_(tensor: Tensor, a: float = 0.0, generator: Generator | None = None) -> Tensor:
    """U(-b, b) with b = sqrt(6 / ((1 + a^2) * fan_in)), fan_in = the size of all but the first dimension.

    ``a``: the negative slope of the leaky ReLU that follows; sqrt(5) gives b = 1/sqrt(fan_in), the usual linear layer.
    Raises ValueError for fewer than two dimensions.  (He et al., arXiv:1502.01852, section 2.2.)
    """
    if tensor.ndim < 2:
        raise ValueError(f"kaiming_uniform_ on shape {tensor.shape}; expected at least two dimensions (out, in, ...).")
    bound = math.sqrt(6.0 / ((1.0 + a * a) * max(1, math.prod(tensor.shape[1:]))))
    return uniform_(tensor, -bound, bound, generator)
