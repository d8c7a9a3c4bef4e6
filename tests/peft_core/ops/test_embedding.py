from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, ops
from peft_core.dtypes import bfloat16
from peft_core.errors import DataError
from support.cases import Case, every

IDS = np.array([2, 0, 2, 2, 4])
CASES = [
    Case("embedding", ops.embedding, lambda rng: [IDS, rng.normal(size=(5, 3))], lambda ids, w: w[ids], retains={0}),
    Case("embedding 2d", ops.embedding, lambda rng: [IDS[:4].reshape(2, 2), rng.normal(size=(5, 3))],
         lambda ids, w: w[ids], retains={0}),
    Case("embedding int32", ops.embedding, lambda rng: [IDS.astype(np.int32), rng.normal(size=(5, 3))],
         lambda ids, w: w[ids], retains={0}),
]  # fmt: skip


def test_the_padding_row_gets_no_gradient() -> None:
    for padding in (2, -3):
        w = Tensor(np.ones((5, 2)), True)
        ops.embedding(IDS, w, padding=padding).backward(np.ones((5, 2)))
        assert w.grad is not None and w.grad.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0], [1, 1]]


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_repeated_rows_add_up_in_float32() -> None:
    w = Tensor(np.zeros((1, 1), bfloat16), requires_grad=True)
    ops.embedding(np.zeros(2000, np.int64), w).backward(np.ones((2000, 1)))
    assert w.grad is not None
    assert w.grad.data[0, 0] == 2000  # bf16 additions stop at 256


def test_no_ids() -> None:
    assert ops.embedding(np.zeros(0, np.int64), np.zeros((4, 3))).shape == (0, 3)


def test_errors() -> None:
    with pytest.raises(DataError, match=r"embedding ids range from -1 to 5; expected 0 <= id < 5"):
        ops.embedding(np.array([-1, 5]), np.zeros((5, 3)))
    with pytest.raises(DataError, match=r"embedding ids have dtype float32; expected integers"):
        ops.embedding(np.zeros(2, np.float32), np.zeros((5, 3)))
