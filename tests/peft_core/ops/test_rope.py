from typing import Any

import numpy as np
import pytest

from peft_core import ops
from peft_core.ops.rope import _rotate
from support.cases import Case, every


def inputs(rng: np.random.Generator) -> list:
    angle = rng.uniform(0, 6, size=(5, 4))
    return [rng.normal(size=(5, 3, 8)), np.cos(angle), np.sin(angle)]


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    z = (x[..., :4] + 1j * x[..., 4:]) * (cos + 1j * sin)[:, None, :]  # rotation of the plane, as complex numbers
    return np.concatenate([z.real, z.imag], -1)


CASES = [
    Case("rope", ops.rope, inputs, rotated, grads=(0,), fixed={1: "float32", 2: "float32"}, retains={1, 2}, slack=2,
         formulas=(_rotate,), nonfinite=False),  # a complex NaN spoils both parts; see below
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


@pytest.mark.parametrize("position", [0, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nan_spoils_its_pair(position: int, dtype: Any) -> None:
    x, cos, sin = (a.astype(np.float32) for a in inputs(np.random.default_rng(0)))
    x[2, 1, position] = np.nan
    where = np.argwhere(np.isnan(ops.rope(x.astype(dtype), cos, sin).data)).tolist()
    assert where == [[2, 1, position % 4], [2, 1, position % 4 + 4]]


def test_rotating_by_nothing_changes_nothing() -> None:
    x = np.random.default_rng(0).normal(size=(2, 1, 4)).astype(np.float32)
    one = np.ones((2, 2), np.float32)
    assert (ops.rope(x, one, 0 * one).data == x).all()


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"rope of x \(2, 1, 4\) with cos \(2, 3\) and sin \(2, 2\); expected x \(N, H, K\)"
    ):
        ops.rope(np.ones((2, 1, 4)), np.ones((2, 3)), np.ones((2, 2)))
