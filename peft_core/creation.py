"""Tensors from nothing: constants, ranges, random numbers, and from data that exists.

``dtype``: a name or a dtype, float32 by default; ``device``: "cpu" or "cuda".  Random numbers come from ``generator``,
by default the one that ``manual_seed`` restarts; they are the same on every device and are not torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from . import random
from .backend import to_device, xp_of
from .dtypes import as_dtype, is_float
from .random import Generator
from .tensor import Tensor, _flat

__all__ = [
    "arange", "as_tensor", "bernoulli", "empty", "empty_like", "eye", "from_numpy", "full", "full_like", "linspace",
    "multinomial", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor",
    "zeros", "zeros_like",
]  # fmt: skip


F = TypeVar("F", bound=Callable)


def _sized(function: F) -> F:
    """``function(*size)``, which may be called with ``size=`` as well."""

    @functools.wraps(function)
    def made(*size: Any, **settings: Any) -> Tensor:
        return function(*((settings.pop("size"),) if "size" in settings else size), **settings)

    return made  # type: ignore[return-value]


def _made(array: Any, dtype: Any, device: Any, requires_grad: bool = False) -> Tensor:
    if dtype is not None:
        array = array.astype(as_dtype(dtype), copy=False)
    return Tensor(to_device(array, device), requires_grad)


def tensor(data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """A Tensor with a copy of ``data`` (numbers, lists, arrays, Tensors); Python floats become float32, ints int64.

    Without ``device`` an array on a GPU stays there.
    """
    source = _without_tensors(data)
    array = xp_of(source).array(source)
    if dtype is None and not hasattr(source, "dtype") and array.dtype == np.float64:
        dtype = np.float32
    return _made(array, dtype, _device(array, device), requires_grad)


def _without_tensors(data: Any) -> Any:
    if isinstance(data, Tensor):
        return data.data
    if isinstance(data, list | tuple) and any(isinstance(x, list | tuple | Tensor) for x in data):
        return [x.tolist() if isinstance(x, Tensor) else _without_tensors(x) for x in data]
    return data


def _device(array: Any, device: Any) -> Any:
    return Tensor(array).device if device is None else device


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """``data`` as a Tensor, sharing its memory where dtype and device allow it; a Tensor stays itself."""
    if isinstance(data, Tensor):
        return data.to(*(target for target in (dtype, device) if target is not None))
    return _made(data, dtype, _device(data, device)) if hasattr(data, "dtype") else tensor(data, dtype, device)


def from_numpy(array: np.ndarray) -> Tensor:
    """A Tensor that shares the array's memory."""
    return Tensor(np.asarray(array))


# ------------------------------------------------------------------ constants


def full(size: Any, fill_value: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """``fill_value`` everywhere; without ``dtype``: float32 for a float, int64 for an int, bool for a bool."""
    value = fill_value.item() if isinstance(fill_value, Tensor) else fill_value
    kind = type(value) if isinstance(value, bool | int) else np.float32
    return _made(np.full(size, value, as_dtype(kind if dtype is None else dtype)), None, device, requires_grad)


@_sized
def zeros(*size: Any, dtype: Any = "float32", device: Any = None, requires_grad: bool = False) -> Tensor:
    """Zero everywhere; ``size`` as numbers or one tuple."""
    return _made(np.zeros(_flat(size), _or_float(dtype)), None, device, requires_grad)


@_sized
def ones(*size: Any, dtype: Any = "float32", device: Any = None, requires_grad: bool = False) -> Tensor:
    """One everywhere; ``size`` as numbers or one tuple."""
    return _made(np.ones(_flat(size), _or_float(dtype)), None, device, requires_grad)


@_sized
def empty(*size: Any, dtype: Any = "float32", device: Any = None, requires_grad: bool = False) -> Tensor:
    """Memory as it comes; ``size`` as numbers or one tuple."""
    return _made(np.empty(_flat(size), _or_float(dtype)), None, device, requires_grad)


def _or_float(dtype: Any) -> np.dtype:
    return as_dtype("float32" if dtype is None else dtype)


def eye(n: int, m: int | None = None, dtype: Any = "float32", device: Any = None) -> Tensor:
    """The identity matrix (n, n), or (n, m)."""
    return _made(np.eye(n, m, dtype=_or_float(dtype)), None, device)


def arange(
    *bounds: Any, start: Any = None, end: Any = None, step: Any = None, dtype: Any = None, device: Any = None,
    requires_grad: bool = False,
) -> Tensor:  # fmt: skip
    """start, start + step, ... below the end, as range() takes them; int64, or float32 where a bound is a float."""
    given = [*bounds, *(b for b in (start, end, step) if b is not None)]
    numbers = [b.item() if isinstance(b, Tensor) else b for b in given]
    if dtype is None:
        dtype = "float32" if any(isinstance(b, float) for b in numbers) else "int64"
    return _made(np.arange(*numbers), dtype, device, requires_grad)


def linspace(start: float, end: float, steps: int, dtype: Any = None, device: Any = None) -> Tensor:
    """``steps`` evenly spaced numbers from start to end, both included; float32 by default."""
    return _made(np.linspace(start, end, steps), _or_float(dtype), device)


# ------------------------------------------------------------------ random numbers


@_sized
def rand(
    *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, generator: Generator | None = None
) -> Tensor:
    """Numbers from [0, 1)."""
    source = generator or random.default_generator
    return _made(source.uniform(_flat(size), dtype=_or_float(dtype)), None, device, requires_grad)


@_sized
def randn(
    *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, generator: Generator | None = None
) -> Tensor:
    """Gaussian numbers of mean 0 and standard deviation 1."""
    source = generator or random.default_generator
    return _made(source.normal(_flat(size), dtype=_or_float(dtype)), None, device, requires_grad)


def randint(
    *bounds: Any, low: Any = None, high: Any = None, size: Any = None, dtype: Any = "int64", device: Any = None,
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """randint([low = 0,] high, size): integers from [low, high).  Raises ValueError where the size is missing."""
    bounds += tuple(b for b in (low, high) if b is not None)
    if size is None and bounds and isinstance(bounds[-1], tuple | list):
        *bounds, size = bounds  # type: ignore[assignment]
    if size is None or not 1 <= len(bounds) <= 2:
        raise ValueError(f"randint got bounds {tuple(bounds)} and size {size}; expected randint([low,] high, size).")
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return _made((generator or random.default_generator).integers(low, high, tuple(size)), dtype, device)


def randperm(n: int, dtype: Any = "int64", device: Any = None, generator: Generator | None = None) -> Tensor:
    """0 ... n - 1 in random order."""
    return _made((generator or random.default_generator).permutation(n), dtype, device)


def multinomial(x: Any, num_samples: int, replacement: bool = False, generator: Generator | None = None) -> Tensor:
    """``num_samples`` places of each row, drawn with the probabilities x / x.sum(); x (C,) or (B, C) -> int64.

    Without ``replacement`` no place is drawn twice.  Raises ValueError for negative or non-finite numbers, and for
    rows with fewer places of positive probability than are drawn.
    """
    p = as_tensor(x).to("float64")
    array, xp = p.data, xp_of(p.data)
    needed = 1 if replacement else num_samples
    if not bool(xp.isfinite(array).all() and (array >= 0).all() and ((array > 0).sum(-1) >= needed).all()):
        raise ValueError(f"multinomial of {num_samples} places from {array.tolist() if array.size < 9 else array.shape}"
                         f"; expected finite numbers >= 0, of which at least {needed} in a row > 0.")  # fmt: skip
    shape = (*p.shape[:-1], num_samples if replacement else 1, p.shape[-1])
    u = 1 - rand(shape, dtype="float64", device=p.device, generator=generator).data  # (0, 1]
    with np.errstate(divide="ignore"):
        first = -xp.log(u) / array[..., None, :]  # exponential times of rate p: the first to ring has probability p
    if replacement:
        return _made(xp.argmin(first, axis=-1), "int64", p.device)
    return _made(xp.argsort(first[..., 0, :], axis=-1)[..., :num_samples], "int64", p.device)


def bernoulli(p: Any, generator: Generator | None = None) -> Tensor:
    """1 with the probability that each element of ``p`` states, else 0; in p's dtype."""
    p = as_tensor(p)
    draws = rand(p.shape, dtype="float64", device=p.device, generator=generator)
    return _made(draws.data < p.data, p.dtype, p.device)


# ------------------------------------------------------------------ like another Tensor


def _like(x: Tensor, dtype: Any, device: Any) -> dict[str, Any]:
    return {"dtype": x.dtype if dtype is None else dtype, "device": x.device if device is None else device}


def zeros_like(x: Tensor, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """Zeros of x's shape, by default of its dtype and on its device."""
    return zeros(x.shape, requires_grad=requires_grad, **_like(x, dtype, device))


def ones_like(x: Tensor, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """Ones of x's shape, by default of its dtype and on its device."""
    return ones(x.shape, requires_grad=requires_grad, **_like(x, dtype, device))


def empty_like(x: Tensor, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """Memory as it comes, of x's shape, by default of its dtype and on its device."""
    return empty(x.shape, requires_grad=requires_grad, **_like(x, dtype, device))


def full_like(x: Tensor, fill_value: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """``fill_value`` everywhere, of x's shape, by default of its dtype and on its device."""
    return full(x.shape, fill_value, requires_grad=requires_grad, **_like(x, dtype, device))


def rand_like(x: Tensor, dtype: Any = None, device: Any = None, generator: Generator | None = None) -> Tensor:
    """Numbers from [0, 1) of x's shape, by default of its dtype and on its device."""
    return rand(x.shape, generator=generator, **_like(x, _floating(x, dtype), device))


def randn_like(x: Tensor, dtype: Any = None, device: Any = None, generator: Generator | None = None) -> Tensor:
    """Gaussian numbers of x's shape, by default of its dtype and on its device."""
    return randn(x.shape, generator=generator, **_like(x, _floating(x, dtype), device))


def _floating(x: Tensor, dtype: Any) -> Any:
    if dtype is None and not is_float(x.dtype):
        raise ValueError(f"random numbers like a Tensor of dtype {x.dtype}; expected a floating dtype. Pass dtype=.")
    return dtype
