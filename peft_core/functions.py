"""The ops under torch's names, as functions and as methods of Tensor: a face, nothing is computed here.

A function below is ``peft_core.name(x, ...)`` and, marked ``@both``, ``x.name(...)`` too.  ``dim=`` and ``axis=``,
``keepdim=`` and ``keepdims=`` mean the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import ops
from .dtypes import as_dtype
from .tensor import Tensor
from .unsupported import unsupported

__all__ = [
    "abs", "add", "all", "allclose", "amax", "amin", "any", "argmax", "argmin", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "bmm", "ceil", "clamp", "clip", "clone", "cos", "cumsum", "div", "dot", "einsum",
    "eq", "equal", "exp", "floor", "floor_divide", "gather", "ge", "gt", "index_select", "isfinite", "isinf", "isnan",
    "le", "log", "log1p", "log_softmax", "logical_and", "logical_not", "logical_or", "logsumexp", "lt", "masked_fill",
    "matmul", "max", "maximum", "mean", "min", "minimum", "mm", "mul", "ne", "neg", "norm", "outer", "pow",
    "reciprocal", "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "sin", "softmax", "sqrt", "square", "std",
    "sub", "sum", "tanh", "tril", "triu", "var", "where",
]  # fmt: skip

_SAME = {"axis": "dim", "keepdims": "keepdim", "input": "x", "other": "y", "tensor2": "y", "mat2": "y"}


def _spelled(function: Callable) -> Callable:
    """``function`` with torch's and NumPy's spellings of its keywords.  Raises UnsupportedError for ``out=``."""

    @functools.wraps(function)
    def spelled(*args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            return function(*args)
        if kwargs.pop("out", None) is not None:
            unsupported(f"{function.__name__}(out=...)", "no function writes into its arguments; use what it returns")
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
        return source(x, y)

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
    return ops.add(x, y if alpha == 1 else ops.mul(y, alpha))


@both
def sub(x: Any, y: Any, alpha: float = 1) -> Tensor:
    """x - alpha y."""
    return ops.sub(x, y if alpha == 1 else ops.mul(y, alpha))


@both
def pow(x: Any, exponent: Any) -> Tensor:
    """x ** exponent, for numbers and Tensors."""
    number = not isinstance(exponent, Tensor)
    return ops.pow(x, exponent=exponent) if number and isinstance(x, Tensor) else ops.power(x, exponent)


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


# ------------------------------------------------------------------ reductions


class Extreme(NamedTuple):
    """What ``max`` and ``min`` over one dimension return."""

    values: Tensor
    indices: Tensor


def _cast(x: Any, dtype: Any) -> Any:
    return x if dtype is None else ops.astype(x, dtype=as_dtype(dtype))


@both
def sum(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum over ``dim`` (all by default); half types accumulate in float32."""
    return ops.sum(_cast(x, dtype), axis=dim, keepdims=keepdim)


@both
def mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The mean over ``dim`` (all by default); half types accumulate in float32."""
    return ops.mean(_cast(x, dtype), axis=dim, keepdims=keepdim)


@both
def var(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: int | None = None) -> Tensor:
    """The variance over ``dim``: sum((x - mean)^2) / (n - correction); ``unbiased``: correction 1, else 0."""
    n = int(unbiased) if correction is None else correction
    return ops.var(x, axis=dim, keepdims=keepdim, correction=n)


@both
def std(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: int | None = None) -> Tensor:
    """The square root of ``var``."""
    return ops.sqrt(var(x, dim, unbiased, keepdim, correction))


@both
def norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    """sqrt(sum(x^2)) over ``dim``, or sum(|x|) for p = 1.  Raises UnsupportedError for another p."""
    if p == 1:
        return ops.sum(ops.abs(x), axis=dim, keepdims=keepdim)
    if p not in (2, "fro"):
        unsupported(f"norm with p={p!r}", "expected 1 or 2")
    return ops.sqrt(ops.sum(ops.mul(x, x), axis=dim, keepdims=keepdim))


def _extreme(name: str, x: Any, dim: Any, keepdim: bool) -> Any:
    if isinstance(dim, Tensor):
        return getattr(ops, f"{name}imum")(x, dim)
    if dim is None:
        return getattr(ops, name)(x)
    indices = getattr(ops, f"arg{name}")(x, axis=dim, keepdims=True)
    values = ops.gather(x, indices, axis=dim)
    return Extreme(*(t if keepdim else ops.squeeze(t, dim) for t in (values, indices)))


@both
def max(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest element; with ``dim`` (values, indices), the first of equals; with a Tensor instead, maximum."""
    return _extreme("max", x, dim, keepdim)


@both
def min(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The smallest element; with ``dim`` (values, indices), the first of equals; with a Tensor instead, minimum."""
    return _extreme("min", x, dim, keepdim)


@both
def amax(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The largest element over ``dim``; equal ones share the gradient."""
    return ops.max(x, axis=dim, keepdims=keepdim)


@both
def amin(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The smallest element over ``dim``; equal ones share the gradient."""
    return ops.min(x, axis=dim, keepdims=keepdim)


@both
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the largest element over ``dim`` stands."""
    return ops.argmax(x, axis=dim, keepdims=keepdim)


@both
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the smallest element over ``dim`` stands."""
    return ops.argmin(x, axis=dim, keepdims=keepdim)


@both
def any(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """True where some element over ``dim`` is not zero."""
    return ops.any(x, axis=dim, keepdims=keepdim)


@both
def all(x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """True where every element over ``dim`` is not zero."""
    return ops.all(x, axis=dim, keepdims=keepdim)


@both
def cumsum(x: Any, dim: int) -> Tensor:
    """Running sums along ``dim``."""
    return ops.cumsum(x, axis=dim)


@both
def softmax(x: Any, dim: int, dtype: Any = None) -> Tensor:
    """exp(x) / sum(exp(x)) over ``dim``, of x in ``dtype`` where one is given."""
    return ops.softmax(_cast(x, dtype), axis=dim)


@both
def log_softmax(x: Any, dim: int, dtype: Any = None) -> Tensor:
    """log(softmax(x)) over ``dim``, of x in ``dtype`` where one is given."""
    return ops.log_softmax(_cast(x, dtype), axis=dim)


@both
def logsumexp(x: Any, dim: int, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))) over ``dim``."""
    return ops.logsumexp(x, axis=dim, keepdims=keepdim)


# ------------------------------------------------------------------ choosing


@both
def masked_fill(x: Any, mask: Any, value: Any) -> Tensor:
    """x with the number ``value`` where ``mask`` (bool, or TypeError) holds; the two broadcast."""
    if mask.dtype.kind != "b":
        raise TypeError(f"masked_fill got a mask of dtype {mask.dtype}; expected bool. Compare first, as in mask == 0.")
    shape = np.broadcast_shapes(x.shape, mask.shape)
    x = x if x.shape == shape else ops.expand(x, shape=shape)
    return ops.masked_fill(x, mask, value=value.item() if isinstance(value, Tensor) else value)


@_spelled
def where(condition: Any, x: Any = None, y: Any = None) -> Tensor:
    """x where ``condition`` holds, else y.  Raises UnsupportedError for the form without x and y."""
    if x is None or y is None:
        unsupported("where(condition) alone", "expected where(condition, x, y)")
    return ops.where(condition, x, y)


@both
def tril(x: Any, diagonal: int = 0) -> Tensor:
    """Zeros above the diagonal."""
    return ops.tril(x, diagonal=diagonal)


@both
def triu(x: Any, diagonal: int = 0) -> Tensor:
    """Zeros below the diagonal."""
    return ops.triu(x, diagonal=diagonal)


@both
def gather(x: Any, dim: int, index: Any) -> Tensor:
    """Elements of x along ``dim`` by ``index``, which has as many dimensions."""
    return ops.gather(x, index, axis=dim)


@both
def index_select(x: Any, dim: int, index: Any) -> Tensor:
    """The slices of x along ``dim`` at the positions of the vector ``index``."""
    return x[(slice(None),) * (dim % x.ndim) + (index,)]
