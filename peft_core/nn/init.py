"""Starting values.  Functions write into a Tensor and return it; numbers come from a seeded generator.

``generator``: a random.Generator; by default random.default_generator, that ``manual_seed`` restarts.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

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
        tensor._own_memory("nn.init")
        tensor.data[...] = to_device(draw(), tensor.device)
    return tensor


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Numbers from [a, b)."""
    source = generator or random.default_generator
    return _fill(tensor, lambda: source.uniform(tensor.shape, a, b, dtype=tensor.dtype))


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Gaussian numbers."""
    source = generator or random.default_generator
    return _fill(tensor, lambda: source.normal(tensor.shape, mean, std, dtype=tensor.dtype))


def constant_(tensor: Tensor, val: float) -> Tensor:
    """One value everywhere."""
    if not _skipped.get():
        tensor._own_memory("nn.init")
        tensor.data[...] = val
    return tensor


def zeros_(tensor: Tensor) -> Tensor:
    """Zero everywhere."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """One everywhere."""
    return constant_(tensor, 1.0)


def eye_(tensor: Tensor) -> Tensor:
    """The identity.  Raises ValueError for another number of dimensions than two."""
    if tensor.ndim != 2:
        raise ValueError(f"eye_ on shape {tensor.shape}; expected two dimensions.")
    return _fill(tensor, lambda: np.eye(*tensor.shape, dtype=tensor.dtype))


def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0,
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Gaussian numbers, drawn again where they lie outside [a, b].  Raises ValueError for an interval 10 std away."""
    if not (a < b and mean - 10 * std < b and a < mean + 10 * std):
        raise ValueError(f"trunc_normal_ of mean {mean}, std {std} within [{a}, {b}]; expected an interval they reach.")
    source = generator or random.default_generator

    def draw() -> Any:
        x = source.normal(tensor.shape, mean, std, dtype="float64")
        while (outside := (x < a) | (x > b)).any():
            x[outside] = source.normal(int(outside.sum()), mean, std, dtype="float64")
        return x.astype(tensor.dtype)

    return _fill(tensor, draw)


_GAINS = {"linear": 1.0, "conv2d": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3, "relu": math.sqrt(2.0), "selu": 0.75}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """What an activation takes from the standard deviation; ``param``: the slope of "leaky_relu", 0.01 by default.

    Raises ValueError for another name.
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1.0 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in _GAINS:
        raise ValueError(f"gain of {nonlinearity!r}; expected 'leaky_relu' or one of {', '.join(_GAINS)}.")
    return _GAINS[nonlinearity]


def _fans(name: str, tensor: Tensor) -> tuple[int, int]:
    """(fan_in, fan_out) of a weight (out, in, ...): inputs of one output, outputs of one input."""
    if tensor.ndim < 2:
        raise ValueError(f"{name} on shape {tensor.shape}; expected at least two dimensions (out, in, ...).")
    field = math.prod(tensor.shape[2:])
    return max(1, tensor.shape[1] * field), max(1, tensor.shape[0] * field)


def _kaiming_std(name: str, tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    fans = dict(zip(("fan_in", "fan_out"), _fans(name, tensor), strict=True))
    if mode not in fans:
        raise ValueError(f"{name} got mode={mode!r}; expected 'fan_in' or 'fan_out'.")
    return calculate_gain(nonlinearity, a) / math.sqrt(fans[mode])


def kaiming_uniform_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """U(-b, b) with b = gain * sqrt(3 / fan), fan_in = the size of all but the first dimension.

    ``a``: the negative slope of the leaky ReLU that follows; sqrt(5) gives b = 1/sqrt(fan_in), the usual linear layer.
    Raises ValueError for fewer than two dimensions.  (He et al., arXiv:1502.01852, section 2.2.)
    """
    bound = math.sqrt(3.0) * _kaiming_std("kaiming_uniform_", tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """N(0, gain^2 / fan).  Raises ValueError as kaiming_uniform_ does."""
    return normal_(tensor, 0.0, _kaiming_std("kaiming_normal_", tensor, a, mode, nonlinearity), generator)


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """U(-b, b) with b = gain * sqrt(6 / (fan_in + fan_out)).  Raises ValueError for fewer than two dimensions.

    (Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010.)
    """
    bound = gain * math.sqrt(6.0 / sum(_fans("xavier_uniform_", tensor)))
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """N(0, gain^2 * 2 / (fan_in + fan_out)).  Raises ValueError for fewer than two dimensions."""
    return normal_(tensor, 0.0, gain * math.sqrt(2.0 / sum(_fans("xavier_normal_", tensor))), generator)


if not TYPE_CHECKING:

    def __getattr__(name):
        from ..unsupported import missing

        raise missing("peft_core.nn.init", name, [n for n in globals() if n.endswith("_")])
