from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, ops
from peft_core.dtypes import bfloat16, float32
from support.cases import Case, every


def normal(*shapes: tuple[int, ...]) -> Any:
    return lambda rng: [rng.normal(size=s) for s in shapes]


def positive(*shapes: tuple[int, ...]) -> Any:
    return lambda rng: [rng.uniform(0.5, 3, size=s) for s in shapes]


def masked(*shapes: tuple[int, ...]) -> Any:
    return lambda rng: [rng.random((3, 5)) < 0.5, *(rng.normal(size=s) for s in shapes)]


PAIR, ROW, COLUMN = ((3, 5), (3, 5)), ((3, 5), (5,)), ((2, 3, 5), (3, 1))

CASES = [
    Case("add", ops.add, normal(*PAIR), lambda a, b: a + b),
    Case("add broadcast", ops.add, normal(*COLUMN), lambda a, b: a + b),
    Case("add itself to a row", ops.add, normal(*ROW[::-1]), lambda a, b: a + b),
    Case("add number", lambda x: ops.add(x, 0.3), normal((3, 5)), lambda x: x + 0.3, slack=2),
    Case("add bf16 to float32", ops.add, normal(*PAIR), lambda a, b: a + b, dtypes=("float32",), fixed={1: "bfloat16"}),
    Case("sub", ops.sub, normal(*ROW), lambda a, b: a - b),
    Case("sub from number", lambda x: ops.sub(1.0, x), normal((3, 5)), lambda x: 1 - x),
    Case("mul", ops.mul, normal(*ROW), lambda a, b: a * b, retains={(0, 1): {0, 1}, (0,): {1}, (1,): {0}}),
    Case("mul bf16 by float32", ops.mul, normal(*PAIR), lambda a, b: a * b, dtypes=("float32",), fixed={0: "bfloat16"},
         retains={0, 1}),
    Case("mul float16 by bf16", ops.mul, normal(*PAIR), lambda a, b: a * b, dtypes=("float16",), fixed={0: "bfloat16"},
         retains={0, 1}, out="float32"),
    Case("mul number", lambda x: ops.mul(x, 2.5), normal((4,)), lambda x: x * 2.5, extra_bytes=lambda x: x.itemsize),
    Case("div", ops.div, positive(*ROW), lambda a, b: a / b, retains={(0, 1): {0, 1}, (0,): {1}}),
    Case("neg", ops.neg, normal((3, 5)), lambda x: -x),
    Case("pow", ops.pow, positive((3, 5)), lambda x, exponent: x**exponent, params={"exponent": 3}, retains={0},
         slack=2),
    Case("pow 0.5", ops.pow, positive((3, 5)), lambda x, exponent: x**exponent, params={"exponent": 0.5}, retains={0}),
    Case("power", ops.power, positive(*ROW), np.power, slack=4,
         retains={(0, 1): {0, 1, "y"}, (0,): {0, 1}, (1,): {0, "y"}}),
    Case("power of a number", lambda x: ops.power(3.0, x), normal((3, 5)), lambda x: 3**x, retains={"y"},
         extra_bytes=lambda x: x.itemsize, slack=2),
    Case("log1p", ops.log1p, positive((3, 5)), np.log1p, retains={0}),
    Case("clone", ops.clone, normal((3, 5)), lambda x: x),
    Case("exp", ops.exp, normal((3, 5)), np.exp, retains={"y"}),
    Case("log", ops.log, positive((3, 5)), np.log, retains={0}),
    Case("sqrt", ops.sqrt, positive((3, 5)), np.sqrt, retains={"y"}),
    Case("rsqrt", ops.rsqrt, positive((3, 5)), lambda x: x**-0.5, retains={0}),
    Case("abs", ops.abs, normal((3, 5)), np.abs, retains={0}),
    Case("sin", ops.sin, normal((3, 5)), np.sin, retains={0}),
    Case("cos", ops.cos, normal((3, 5)), np.cos, retains={0}),
    Case("maximum", ops.maximum, normal(*ROW), np.maximum, retains={0, 1}),
    Case("minimum", ops.minimum, normal(*ROW), np.minimum, retains={0, 1}),
    Case("clip", ops.clip, normal((3, 5)), lambda x, low, high: np.clip(x, low, high),
         params={"low": -0.5, "high": 1.0},
         retains={0}, nonfinite=False),  # inf is limited: that is what clip is for; NaN is tested below
    Case("where", ops.where, masked((3, 5), (5,)), np.where, retains={0}, extra_bytes=lambda c, a, b: a.itemsize),
    Case("masked_fill", lambda m, x: ops.masked_fill(x, m, value=-2.0), masked((3, 5)),
         lambda m, x: np.where(m, -2.0, x),
         retains=None),
    Case("to float32", lambda x: ops.astype(x, dtype="float32"), normal((3, 5)), lambda x: x, out="float32",
         dtypes=("float32", "bfloat16", "float16")),
    Case("to bfloat16", lambda x: ops.astype(x, dtype="bfloat16"), normal((3, 5)), lambda x: x, out="bfloat16",
         slack=4e3,
         dtypes=("float32",)),
    Case("le", ops.le, normal(*ROW), np.less_equal, grads=()),
    Case("equal", ops.eq, lambda rng: [rng.integers(0, 3, (3, 5)), rng.integers(0, 3, (3, 5))], np.equal,
         dtypes=("float32",)),
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_a_float64_scalar_does_not_promote() -> None:
    x = Tensor(np.ones(3, np.float32))
    for y in (x * np.float64(0.5), np.float64(2) * x, x / np.sqrt(8), x + 1, 1 - x, x**2, 2 / x):
        assert y.dtype == float32
    assert (Tensor(np.ones(3, bfloat16)) * 2.0).dtype == bfloat16


def test_a_zero_dimensional_array_keeps_its_dtype() -> None:
    assert ops.mul(np.ones(3, bfloat16), np.array(2, np.float32)).dtype == float32


def test_integers_with_a_float_become_float32() -> None:
    y = ops.mul(np.arange(3), 0.5)
    assert y.dtype == float32
    assert y.tolist() == [0, 0.5, 1]
    assert ops.add(np.arange(3), 1).dtype == np.int64
    assert ops.div(np.arange(3), 2).tolist() == [0, 0.5, 1]


def test_equal_elements_share_the_gradient_of_maximum() -> None:
    a, b = (Tensor(np.array([1.0, 2.0]), requires_grad=True) for _ in range(2))
    ops.maximum(a, b).backward(np.ones(2))
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.tolist() == b.grad.tolist() == [0.5, 0.5]


def test_clip_keeps_nan() -> None:
    assert np.isnan(ops.clip(np.array([np.nan, 3.0]), low=0, high=1).data).tolist() == [True, False]


def test_pow_zero_has_gradient_zero_at_zero() -> None:
    x = Tensor(np.zeros(2, np.float32), requires_grad=True)
    (x**0).backward(np.ones(2))
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0]


def test_a_broadcast_gradient_over_bf16_is_summed_in_float32() -> None:
    row = Tensor(np.zeros(1, bfloat16), requires_grad=True)
    ops.add(np.zeros((20_000, 1), bfloat16), row).backward(np.ones((20_000, 1), bfloat16))
    assert row.grad is not None
    assert abs(row.grad.data.astype(float)[0] - 20_000) < 100  # bf16 additions stop at 256


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(name: str) -> None:
    a, b = np.array([1, 2, 3], np.float32), np.array([2, 2, 2], np.float32)
    expected = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[name]
    assert getattr(ops, name)(a, b).tolist() == expected.tolist()
