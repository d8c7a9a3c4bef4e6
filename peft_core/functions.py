"""The ops under torch's names, as functions and as methods of Tensor: a face, nothing is computed here.

A function below is ``peft_core.name(x, ...)`` and, marked ``@both``, ``x.name(...)`` too.  ``dim=`` and ``axis=``,
``keepdim=`` and ``keepdims=`` mean the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import ops
from .dtypes import as_dtype
from .tensor import Tensor
from .unsupported import unsupported

__all__ = [
    "abs", "add", "all", "allclose", "amax", "amin", "any", "argmax", "argmin", "argsort", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "bmm", "ceil", "clamp", "clip", "clone", "cos", "cumsum", "div", "dot", "einsum",
    "eq", "equal", "exp", "floor", "floor_divide", "gather", "ge", "gt", "index_select", "isfinite", "isinf", "isnan",
    "le", "log", "log1p", "log_softmax", "logical_and", "logical_not", "logical_or", "logsumexp", "lt", "masked_fill",
    "matmul", "max", "maximum", "mean", "min", "minimum", "mm", "mul", "mv", "ne", "neg", "nonzero", "norm", "outer", "pow",
    "reciprocal", "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "sin", "softmax", "sort", "sqrt", "square", "std",
    "sub", "sum", "tanh", "topk", "tril", "triu", "var", "where",
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


# ------------------------------------------------------------------ reductions


class Found(NamedTuple):
    """What ``max``, ``min``, ``sort`` and ``topk`` over one dimension return."""

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
    return Found(*(t if keepdim else ops.squeeze(t, dim) for t in (values, indices)))


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
def argsort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Where the elements of ``dim`` stand in order, equal ones in their own order whatever ``stable`` says."""
    return ops.argsort(x, axis=dim, descending=descending)


@both
def sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Found:
    """The elements in order along ``dim``, and where they stood; equal ones in their own order."""
    indices = ops.argsort(x, axis=dim, descending=descending)
    return Found(ops.gather(x, indices, axis=dim), indices)


@both
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Found:
    """The ``k`` largest or smallest elements along ``dim``, in order, and where they stood.

    Raises ValueError for more of them than there are.
    """
    if not 0 <= k <= x.shape[dim]:
        raise ValueError(f"topk of {k} along dimension {dim} of shape {x.shape}; expected at most {x.shape[dim]}.")
    indices = ops.argsort(x, axis=dim, descending=largest)[(slice(None),) * (dim % x.ndim) + (slice(k),)]
    return Found(ops.gather(x, indices, axis=dim), indices)


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
def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    """x where ``condition`` holds, else y; without the two, ``nonzero(condition, as_tuple=True)``."""
    if x is None and y is None:
        return nonzero(condition, as_tuple=True)
    return ops.where(condition, x, y)


def _where(x: Tensor, condition: Any, y: Any) -> Tensor:
    """x where ``condition`` holds, else y."""
    return ops.where(condition, x, y)


Tensor.where = _where  # type: ignore[attr-defined]  # the method takes x first, the function the condition


@both
def nonzero(x: Any, as_tuple: bool = False) -> Any:
    """The places of the elements that are not zero: (number, dimensions), or a vector for each dimension."""
    places = ops.nonzero(x)
    return tuple(places[:, i] for i in range(x.ndim)) if as_tuple else places


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
