from typing import Any

import numpy as np
import pytest

from peft_core import ops
from support.cases import Case, every


def normal(rng: np.random.Generator) -> list:
    return [3 * rng.normal(size=(3, 5)), 1 + rng.random(5)]


def wide(rng: np.random.Generator) -> list:
    return [np.round(4 * rng.normal(size=(3, 5))) + 0.3]  # far from the steps, so that a difference sees none


CASES = [  # a slope of 0 swallows what arrives, and signs and whole numbers have no infinity: no row plants them
    Case("floor", ops.floor, wide, np.floor, nonfinite=False),
    Case("ceil", ops.ceil, wide, np.ceil, nonfinite=False),
    Case("round", ops.round, wide, np.rint, nonfinite=False),
    Case("sign", ops.sign, wide, np.sign, nonfinite=False),
    Case("floor_divide", ops.floor_divide, normal, np.floor_divide, grads=(), dtypes=("float32", "float64"),
         nonfinite=False),
    Case("remainder", ops.remainder, normal, np.remainder, retains={(0, 1): {0, 1}, (0,): ()},
         dtypes=("float32", "float64"), slack=10, nonfinite=False),
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_tests_and_bits() -> None:
    x = np.array([0.0, np.nan, np.inf, -1.0], np.float32)
    assert ops.isnan(x).tolist() == [False, True, False, False]
    assert ops.isinf(x).tolist() == [False, False, True, False]
    assert ops.isfinite(x).tolist() == [True, False, False, True]
    a, b = np.array([True, True, False]), np.array([True, False, False])
    assert ops.bitwise_and(a, b).tolist() == [True, False, False]
    assert ops.bitwise_or(a, b).tolist() == [True, True, False]
    assert ops.bitwise_xor(a, b).tolist() == [False, True, False]
    assert ops.bitwise_not(a).tolist() == [False, False, True]
    assert ops.bitwise_and(np.array([6]), 3).tolist() == [2]
    with pytest.raises(TypeError, match="& of float32 elements; expected bool or integers"):
        ops.bitwise_and(x, x)
    with pytest.raises(TypeError, match="~ of float32 elements; expected bool or integers"):
        ops.bitwise_not(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_places_and_quantifiers(dtype: str) -> None:
    x = ops.astype(np.array([[1, 5, 5], [7, 0, 2]]), dtype=dtype)
    assert ops.argmax(x).item() == 3 and ops.argmin(x).item() == 4
    assert ops.argmax(x, axis=1).tolist() == [1, 0] and ops.argmin(x, axis=0, keepdims=True).tolist() == [[0, 1, 1]]
    assert ops.argmax(x, keepdims=True).shape == (1, 1) and ops.argmax(x).dtype == np.int64
    assert ops.any(x).item() and not ops.all(x).item()
    assert ops.all(x, axis=1).tolist() == [True, False] and ops.any(x, axis=0, keepdims=True).shape == (1, 3)


def test_a_nan_is_the_largest_and_the_smallest() -> None:
    x = np.array([1.0, np.nan, 9.0])
    assert ops.argmax(x).item() == ops.argmin(x).item() == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_order_is_stable_both_ways(dtype: str) -> None:
    x = ops.astype(np.array([[2, 1, 2, 0], [5, 5, 5, 5]]), dtype=dtype)
    assert ops.argsort(x).tolist() == [[3, 1, 0, 2], [0, 1, 2, 3]]
    assert ops.argsort(x, descending=True).tolist() == [[0, 2, 1, 3], [0, 1, 2, 3]]
    assert ops.argsort(x, axis=0, descending=True).tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]]
    assert ops.argsort(x).dtype == np.int64
    many = (np.arange(90) * 7 % 3).tolist()  # Python's sort is stable, NumPy's usual one is not beyond 16 elements
    y = ops.astype(np.array(many), dtype=dtype)
    assert ops.argsort(y).tolist() == sorted(range(90), key=lambda i: many[i])
    assert ops.argsort(y, descending=True).tolist() == sorted(range(90), key=lambda i: -many[i])


def test_a_nan_is_the_largest_in_order() -> None:
    x = np.array([1.0, np.nan, 9.0])
    assert ops.argsort(x).tolist() == [0, 2, 1] and ops.argsort(x, descending=True).tolist() == [1, 2, 0]


def test_places_of_what_is_not_zero() -> None:
    found = ops.nonzero(np.array([[0.0, np.nan], [-1.0, 0.0]]))
    assert found.tolist() == [[0, 1], [1, 0]] and found.dtype == np.int64
    assert ops.nonzero(np.zeros(3)).shape == (0, 1)
