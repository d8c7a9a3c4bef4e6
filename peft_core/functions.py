"""The ops under torch's names, as functions and as methods of Tensor: a face, nothing is computed here.

A function below is ``peft_core.name(x, ...)`` and, marked ``@both``, ``x.name(...)`` too.  ``dim=`` and ``axis=``,
``keepdim=`` and ``keepdims=`` mean the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from . import ops
from .methods import matched
from .tensor import Tensor
from .unsupported import unsupported

__all__ = [
    "abs", "add", "allclose", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bmm", "ceil", "clamp",
    "clip", "clone", "cos", "div", "dot", "einsum", "eq", "equal", "exp", "floor", "floor_divide", "ge", "gt",
    "isfinite", "isinf", "isnan", "le", "log", "log1p", "logical_and", "logical_not", "logical_or", "lt", "matmul",
    "maximum", "minimum", "mm", "mul", "mv", "ne", "neg", "outer", "pow", "reciprocal", "relu", "remainder", "round",
    "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "sub", "tanh",
]  # fmt: skip

_SAME = {  # a parameter's name in torch or NumPy -> its name here
    "axis": "dim", "keepdims": "keepdim", "input": "x", "other": "y", "tensor2": "y", "mat2": "y", "vec": "y",
    "split_size": "sizes", "split_size_or_sections": "sizes",
}  # fmt: skip
_MANY = ("dims", "shape", "size", "sizes", "repeats")  # keywords for what is given as *arguments


def _spelled(function: Callable) -> Callable:
    """``function`` with torch's and NumPy's spellings of its keywords.  Raises UnsupportedError for ``out=``."""

    takes_many = bool(function.__code__.co_flags & inspect.CO_VARARGS)

    @functools.wraps(function)
    def spelled(*args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            return function(*args)
        if kwargs.pop("out", None) is not None:
            unsupported(f"{function.__name__}(out=...)", "no function writes into its arguments; use what it returns")
        if takes_many:
            args += tuple(kwargs.pop(name) for name in _MANY if name in kwargs)
        return function(*args, **{_SAME.get(name, name): value for name, value in kwargs.items()})

    return spelled


def both(function: Callable) -> Callable:
    """Make ``function(x, ...)`` a method of Tensor as well."""
    spelled = _spelled(function)
    setattr(Tensor, function.__name__, spelled)
    return spelled


def _unary(name: str) -> Callable:
    source = getattr(ops, name)

    def plain(x: Any) -> Tensor:
        return source(x)

    plain.__name__ = plain.__qualname__ = name
    plain.__doc__ = source.__doc__
    return both(plain)


abs, exp, log, log1p, sqrt, rsqrt = map(_unary, ("abs", "exp", "log", "log1p", "sqrt", "rsqrt"))
sin, cos, tanh, sigmoid, relu, neg = map(_unary, ("sin", "cos", "tanh", "sigmoid", "relu", "neg"))
floor, ceil, round, sign, clone = map(_unary, ("floor", "ceil", "round", "sign", "clone"))
isnan, isinf, isfinite, bitwise_not = map(_unary, ("isnan", "isinf", "isfinite", "bitwise_not"))


def _binary(name: str) -> Callable:
    source = getattr(ops, name)

    def plain(x: Any, y: Any) -> Tensor:
        return source(*matched(x, y))

    plain.__name__ = plain.__qualname__ = name
    plain.__doc__ = source.__doc__
    return both(plain)


mul, div, maximum, minimum = map(_binary, ("mul", "div", "maximum", "minimum"))
eq, ne, lt, le, gt, ge = map(_binary, ("eq", "ne", "lt", "le", "gt", "ge"))
floor_divide, remainder = map(_binary, ("floor_divide", "remainder"))
bitwise_and, bitwise_or, bitwise_xor = map(_binary, ("bitwise_and", "bitwise_or", "bitwise_xor"))


@both
def add(x: Any, y: Any, alpha: float = 1) -> Tensor:
    """x + alpha y."""
    x, y = matched(x, y)
    return ops.add(x, y if alpha == 1 else ops.mul(y, alpha))


@both
def sub(x: Any, y: Any, alpha: float = 1) -> Tensor:
    """x - alpha y."""
    x, y = matched(x, y)
    return ops.sub(x, y if alpha == 1 else ops.mul(y, alpha))


@both
def pow(x: Any, exponent: Any) -> Tensor:
    """x ** exponent, for numbers and Tensors."""
    number = not isinstance(exponent, Tensor)
    return ops.pow(x, exponent=exponent) if number and isinstance(x, Tensor) else ops.power(*matched(x, exponent))


@both
def square(x: Any) -> Tensor:
    """x * x."""
    return ops.mul(x, x)


@both
def reciprocal(x: Any) -> Tensor:
    """1 / x."""
    return ops.div(1.0, x)


@both
def clamp(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """x limited to [min, max], numbers; None: no limit."""
    return ops.clip(x, low=min, high=max)


@both
def clip(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """The same as clamp."""
    return ops.clip(x, low=min, high=max)


def _of_bools(name: str, ufunc: Callable) -> Callable:
    def plain(x: Any, y: Any) -> Tensor:
        return ufunc(ops.ne(x, 0), ops.ne(y, 0))

    plain.__name__ = plain.__qualname__ = name
    plain.__doc__ = f"{name.removeprefix('logical_')} of what is not zero: bool, without a gradient."
    return both(plain)


logical_and, logical_or = _of_bools("logical_and", ops.bitwise_and), _of_bools("logical_or", ops.bitwise_or)


@both
def logical_not(x: Any) -> Tensor:
    """True where x is zero; without a gradient."""
    return ops.eq(x, 0)


@both
def allclose(x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """True if |x - y| <= atol + rtol |y| everywhere."""
    x, y = ops.astype(x, dtype="float64").detach(), ops.astype(y, dtype="float64").detach()
    with np.errstate(invalid="ignore"):  # inf - inf; equal ones are found below
        near = ops.abs(ops.sub(x, y)) <= atol + rtol * ops.abs(y)
    return bool(ops.all(ops.bitwise_or(near, x == y)))


@both
def equal(x: Tensor, y: Tensor) -> bool:
    """True if shapes and all elements are equal."""
    return x.shape == y.shape and bool(ops.all(ops.eq(x, y)))


# ------------------------------------------------------------------ products


@both
def matmul(x: Any, y: Any) -> Tensor:
    """x @ y; batch dimensions broadcast."""
    return ops.matmul(x, y)


@both
def bmm(x: Any, y: Any) -> Tensor:
    """x (B, I, K) @ y (B, K, O).  Raises ValueError for other shapes."""
    return _product("bmm", x, y, 3)


@both
def mm(x: Any, y: Any) -> Tensor:
    """x (I, K) @ y (K, O).  Raises ValueError for other shapes."""
    return _product("mm", x, y, 2)


@both
def mv(x: Any, y: Any) -> Tensor:
    """x (I, K) @ y (K,).  Raises ValueError for other shapes."""
    if x.ndim != 2 or y.ndim != 1:
        raise ValueError(f"mv of {x.shape} and {y.shape}; expected a matrix and a vector.")
    return ops.matmul(x, y)


@both
def dot(x: Any, y: Any) -> Tensor:
    """The inner product of two vectors.  Raises ValueError for other shapes."""
    return _product("dot", x, y, 1)


def _product(name: str, x: Any, y: Any, ndim: int) -> Tensor:
    if x.ndim != ndim or y.ndim != ndim or (ndim == 3 and x.shape[0] != y.shape[0]):
        raise ValueError(f"{name} of {x.shape} and {y.shape}; expected {ndim} dimensions each, with equal batches.")
    return ops.matmul(x, y)


@both
def outer(x: Any, y: Any) -> Tensor:
    """x_i y_j of two vectors."""
    return ops.mul(ops.unsqueeze(x, 1), ops.unsqueeze(y, 0))


einsum = ops.einsum
