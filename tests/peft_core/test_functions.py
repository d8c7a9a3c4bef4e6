"""The face's functions and methods, against NumPy: both spellings reach the op, with torch's and NumPy's keywords."""

import math
from typing import Any

import numpy as np
import pytest

import peft_core as pc
from peft_core import Tensor, UnsupportedError
from peft_core.dtypes import as_dtype

X = np.random.default_rng(0).standard_normal((3, 4))
Y = np.random.default_rng(1).standard_normal((3, 4))
BITS = X > 0

UNARY = {
    "abs": np.abs, "exp": np.exp, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "neg": np.negative, "floor": np.floor,
    "ceil": np.ceil, "round": np.rint, "sign": np.sign, "clone": np.array, "isnan": np.isnan, "isinf": np.isinf,
    "isfinite": np.isfinite, "square": np.square, "reciprocal": np.reciprocal, "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "logical_not": lambda x: x == 0,
}  # fmt: skip
OF_POSITIVE = {"log": np.log, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)}
BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "maximum": np.maximum,
    "minimum": np.minimum, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "floor_divide": np.floor_divide, "remainder": np.remainder, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "max": np.maximum, "min": np.minimum, "matmul": lambda x, y: x @ y,
}  # fmt: skip


def close(t: Tensor, wanted: Any) -> None:
    wanted = np.asarray(wanted)
    assert t.shape == wanted.shape and t.dtype == wanted.dtype
    np.testing.assert_allclose(t.numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*UNARY, *OF_POSITIVE])
def test_of_one(name: str) -> None:
    reference, x = ({**UNARY, **OF_POSITIVE})[name], X if name in UNARY else np.abs(X)
    close(getattr(pc, name)(Tensor(x)), reference(x))
    close(getattr(pc, name)(input=Tensor(x)), reference(x))
    close(getattr(Tensor(x), name)(), reference(x))


@pytest.mark.parametrize("name", BINARY)
def test_of_two(name: str) -> None:
    y = Y.T if name == "matmul" else Y
    close(getattr(pc, name)(Tensor(X), Tensor(y)), BINARY[name](X, y))
    close(getattr(Tensor(X), name)(Tensor(y)), BINARY[name](X, y))
    if name not in ("max", "min"):
        close(getattr(pc, name)(Tensor(X), other=Tensor(y)), BINARY[name](X, y))


def test_bits_and_powers() -> None:
    a, b = Tensor(BITS), Tensor(Y > 0)
    close(pc.bitwise_and(a, b), BITS & (Y > 0))
    close(a | b, BITS | (Y > 0))
    close(a ^ b, BITS ^ (Y > 0))
    close(~a, ~BITS)
    close(a & True, BITS)
    close(True | a, np.ones_like(BITS))
    positive = np.abs(X) + 0.1
    for t in (pc.pow(Tensor(positive), Tensor(Y)), Tensor(positive) ** Tensor(Y), Tensor(positive).pow(Tensor(Y))):
        close(t, positive**Y)
    close(pc.pow(2.0, Tensor(Y)), 2.0**Y)
    close(Tensor(X).pow(3), X**3)
    close(pc.add(Tensor(X), Tensor(Y), alpha=2), X + 2 * Y)
    close(Tensor(X).sub(Tensor(Y), alpha=0.5), X - 0.5 * Y)
    close(Tensor(X).clamp(-0.5, 0.5), np.clip(X, -0.5, 0.5))
    close(pc.clamp(Tensor(X), min=0), np.maximum(X, 0))
    close(pc.clip(Tensor(X), max=0), np.minimum(X, 0))


def test_products() -> None:
    a, b, v = Tensor(X), Tensor(Y.T), Tensor(Y[0])
    close(a.mm(b), X @ Y.T)
    close(pc.mm(a, mat2=b), X @ Y.T)
    close(pc.mv(a, v), X @ Y[0])
    close(v.dot(v), np.array(Y[0] @ Y[0]))
    close(pc.outer(v, v), np.outer(Y[0], Y[0]))
    close(pc.bmm(Tensor(X[None]), Tensor(Y.T[None])), (X @ Y.T)[None])
    close(pc.einsum("ij,kj->ik", a, Tensor(Y)), X @ Y.T)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: pc.mm(x, x[0]), r"mm of \(3, 4\) and \(4,\); expected 2 dimensions each"),
        (
            lambda x: pc.bmm(x[None], x[None].expand(2, 3, 4)),
            r"bmm of .*expected 3 dimensions each, with equal batches",
        ),
        (lambda x: x.dot(x), "dot of .*expected 1 dimensions each"),
        (lambda x: x.mv(x), r"mv of \(3, 4\) and \(3, 4\); expected a matrix and a vector"),
        (lambda x: pc.topk(x, 5), r"topk of 5 along dimension -1 of shape \(3, 4\); expected at most 4"),
        (lambda x: x[None].t(), r"t\(\) of shape \(1, 3, 4\); expected at most two dimensions"),
    ],
)
def test_shapes_that_do_not_fit(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(Tensor(X))


def test_what_is_no_number_of_the_result() -> None:
    assert pc.allclose(Tensor(X), Tensor(X + 1e-9)) and not Tensor(X).allclose(Tensor(X + 1e-3))
    assert pc.equal(Tensor(X), Tensor(X.copy())) and not pc.equal(Tensor(X), Tensor(X[:2]))
    assert pc.allclose(Tensor(np.array([math.inf])), Tensor(np.array([math.inf])))
    with pytest.raises(UnsupportedError, match=r"exp\(out=...\) is not supported: no function writes"):
        pc.exp(Tensor(X), out=Tensor(X))


# ------------------------------------------------------------------ reductions.py


def test_sums_and_their_keywords() -> None:
    x = Tensor(X)
    close(x.sum(), X.sum())
    for t in (x.sum(1), x.sum(dim=1), x.sum(axis=1), pc.sum(x, 1), pc.sum(input=x, dim=-1)):
        close(t, X.sum(1))
    close(x.mean(dim=(0, 1), keepdim=True), X.mean((0, 1), keepdims=True))
    close(x.mean(0, keepdims=True), X.mean(0, keepdims=True))
    close(x.var(), X.var(ddof=1))
    close(x.var(dim=1, unbiased=False), X.var(1))
    close(x.std(1, correction=2, keepdim=True), X.std(1, ddof=2, keepdims=True))
    close(x.cumsum(dim=-1), X.cumsum(-1))
    close(x.norm(), np.linalg.norm(X))
    close(x.norm(p=1, dim=1), np.abs(X).sum(1))
    close(pc.logsumexp(x, dim=1, keepdim=True), np.log(np.exp(X).sum(1, keepdims=True)))
    softmax = np.exp(X) / np.exp(X).sum(0)
    close(x.softmax(0), softmax)
    close(pc.log_softmax(x, dim=0), np.log(softmax))
    assert str(pc.softmax(Tensor(X.astype(np.float16)), dim=0, dtype="float32").dtype) == "float32"
    assert str(Tensor(X.astype(np.float16)).sum(dtype="float64").dtype) == "float64"
    with pytest.raises(UnsupportedError, match="norm with p=3 is not supported: expected 1 or 2"):
        x.norm(p=3)


def test_extremes() -> None:
    x = Tensor(X)
    close(x.max(), X.max())
    for found, axis in [(x.max(1), 1), (pc.max(x, dim=0), 0)]:
        values, indices = found
        close(values, X.max(axis))
        close(indices, X.argmax(axis))
        assert found.values is values and found.indices is indices
    close(x.min(dim=1, keepdim=True).values, X.min(1, keepdims=True))
    close(x.amax((0, 1)), X.max())
    close(x.amin(0), X.min(0))
    close(x.argmax(dim=1, keepdim=True), X.argmax(1)[:, None])
    close(pc.argmin(x), np.array(X.argmin()))
    assert bool(pc.any(x > 0)) and pc.all(x > 0, dim=1).tolist() == (X > 0).all(1).tolist()


def test_order() -> None:
    x = Tensor(X)
    values, indices = pc.sort(x, dim=0, descending=True)
    close(values, -np.sort(-X, 0))
    close(indices, np.argsort(-X, 0))
    close(x.argsort(), np.argsort(X))
    close(x.topk(2).values, -np.sort(-X)[:, :2])
    close(pc.topk(x, k=2, dim=0, largest=False).indices, np.argsort(X, 0)[:2])
    assert x.topk(0).values.shape == (3, 0)


def test_the_gradient_of_a_sorted_element_goes_to_its_place() -> None:
    x = Tensor(np.array([3.0, 1.0, 2.0]), True)
    (x.topk(2).values * Tensor(np.array([10.0, 1.0]))).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [10, 0, 1]


def test_choice() -> None:
    x, y, mask = Tensor(X), Tensor(Y), Tensor(BITS)
    close(pc.where(mask, x, y), np.where(BITS, X, Y))
    close(x.where(mask, y), np.where(BITS, X, Y))
    close(pc.where(mask, x, 0.0), np.where(BITS, X, 0))
    for found, wanted in zip(pc.where(mask), np.where(BITS), strict=True):
        close(found, wanted)
    close(pc.nonzero(mask), np.argwhere(BITS))
    close(mask[0].nonzero(as_tuple=True)[0], BITS[0].nonzero()[0])
    close(x.masked_fill(mask, -1), np.where(BITS, -1, X))
    close(x[0].masked_fill(mask, Tensor(np.array(2.0))), np.where(BITS, 2, np.broadcast_to(X[0], X.shape)))
    close(x.tril(), np.tril(X))
    close(pc.triu(x, diagonal=1), np.triu(X, 1))
    index = np.array([[0, 1], [2, 3], [1, 1]])
    close(x.gather(1, Tensor(index)), np.take_along_axis(X, index, 1))
    close(pc.index_select(x, 1, Tensor(index[:, 0])), X[:, index[:, 0]])
    with pytest.raises(TypeError, match=r"mask of dtype int64; expected bool. Compare first"):
        x.masked_fill(Tensor(index), 0)


@pytest.mark.parametrize(
    ("array", "scalar", "wanted"),
    [
        ("float16", "float32", "float16"),
        ("bfloat16", "float64", "bfloat16"),
        ("float32", "float64", "float32"),
        ("float16", "int64", "float16"),
        ("int64", "float32", "float32"),
        ("int64", "float64", "float64"),
        ("int32", "int64", "int32"),
        ("bool", "int64", "int64"),
        ("int64", "bool", "int64"),
    ],
)
def test_an_array_without_dimensions_counts_only_where_its_kind_is_higher(array: str, scalar: str, wanted: str) -> None:
    x, s = (Tensor(np.ones(shape).astype(as_dtype(name))) for shape, name in (((2,), array), ((), scalar)))
    mask = Tensor(np.array(True))
    for y in (x + s, s * x, x - s, pc.mul(x, s), s.add(x), x.pow(s), pc.where(mask, x, s), pc.maximum(x, s)):
        assert str(y.dtype) == wanted
    assert (s * s).dtype == s.dtype and (x == s).tolist() == [True, True]


def test_the_gradient_of_an_array_without_dimensions_has_its_dtype() -> None:
    x, s = Tensor(np.full(3, 2, np.float16), True), Tensor(np.array(0.5, np.float32), True)
    y = x * s
    y.backward(np.ones(3, np.float16))
    assert x.grad is not None and s.grad is not None
    assert str(x.grad.dtype) == "float16" and str(s.grad.dtype) == "float32" and s.grad.item() == 6
