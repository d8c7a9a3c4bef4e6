from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, ops
from peft_core.dtypes import bfloat16, float32
from support.cases import Case, every


def normal(*shapes: tuple[int, ...]) -> Any:
    return lambda rng: [rng.normal(size=s) for s in shapes]


def distinct(rng: np.random.Generator) -> list:
    return [rng.permutation(np.linspace(-2, 2, 24)).reshape(4, 6)]


ROWS = {"axis": 1}
CASES = [
    Case("sum", ops.sum, normal((4, 6)), np.sum),
    Case("sum rows", ops.sum, normal((4, 6)), np.sum, params={"axis": -1, "keepdims": True}),
    Case("sum two axes", ops.sum, normal((2, 3, 4)), np.sum, params={"axis": (0, -1)}),
    Case("mean", ops.mean, normal((4, 6)), np.mean),
    Case("mean columns", ops.mean, normal((4, 6)), np.mean, params={"axis": 0}),
    Case("max", ops.max, distinct, np.max, retains={0, "y"}),
    Case("max rows", ops.max, distinct, np.max, params=ROWS, retains={0, "y"}),
    Case("min rows", ops.min, distinct, np.min, params={"axis": 1, "keepdims": True}, retains={0, "y"}),
    Case("var", ops.var, normal((4, 6)), lambda x, axis: x.var(axis, ddof=1), params=ROWS, retains={0}),
    Case("var biased", ops.var, normal((4, 6)), lambda x, correction: x.var(), params={"correction": 0}, retains={0}),
]


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_bf16_sums_accumulate_in_float32() -> None:
    ones = np.ones((20_000,), bfloat16)
    assert abs(ops.sum(ones).item() - 20_000) < 100  # bf16 additions stop at 256
    assert ops.mean(ones).item() == 1
    assert ops.sum(ones).dtype == bfloat16


def test_integers() -> None:
    assert ops.sum(np.arange(4)).item() == 6
    assert ops.sum(np.array([True, True])).dtype == np.int64
    assert ops.mean(np.arange(4)).dtype == float32


def test_equal_maxima_share_the_gradient() -> None:
    x = Tensor(np.array([3.0, 1.0, 3.0]), requires_grad=True)
    ops.max(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0, 0.5]


def test_an_axis_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexError, match=r"axis 2 of an array with 2 dimensions; expected -2 <= axis < 2."):
        ops.sum(np.zeros((2, 2)), axis=2)
