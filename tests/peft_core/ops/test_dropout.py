from typing import Any

import numpy as np
import pytest

from peft_core import get_num_threads, ops, set_num_threads
from peft_core.kernels import use_kernels
from peft_core.ops.dropout import _drop
from peft_core.random import mix64
from support.cases import Case, every

KEY = 0xFEDCBA9876543210  # its sum with a position passes 2^63


def dropped(x: np.ndarray, p: float, key: int) -> np.ndarray:
    hashes = [mix64((key + i) % 2**64) >> 32 for i in range(x.size)]
    return np.where(np.reshape(hashes, x.shape) < p * 2**32, 0, x / (1 - p))


CASES = [
    Case("dropout", ops.dropout, lambda rng: [rng.normal(size=(9, 11))], dropped, params={"p": 0.3, "key": KEY},
         formulas=(_drop,), slack=2),
    Case("dropout small key", ops.dropout, lambda rng: [rng.normal(size=(99,))], dropped, params={"p": 0.6, "key": 5},
         formulas=(_drop,), slack=2),
    Case("dropout nothing", ops.dropout, lambda rng: [rng.normal(size=(9, 11))], lambda x, p, key: x,
         params={"p": 0.0, "key": 1}),
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_the_kernel_equals_the_formula_to_the_bit_on_any_number_of_threads() -> None:
    x = np.random.default_rng(0).normal(size=(37, 11)).astype(np.float32)
    with use_kernels(False):
        expected = ops.dropout(x, p=0.4, key=KEY).data
    before = get_num_threads()
    try:
        for n in (1, 3):
            set_num_threads(n)
            assert (ops.dropout(x, p=0.4, key=KEY).data == expected).all()
    finally:
        set_num_threads(before)


def test_the_share_that_is_dropped() -> None:
    y = ops.dropout(np.ones(100_000, np.float32), p=0.2, key=3).data
    assert abs((y == 0).mean() - 0.2) < 0.005  # four deviations
    other = ops.dropout(np.ones(100_000, np.float32), p=0.2, key=4).data
    assert abs(((y == 0) & (other == 0)).mean() - 0.04) < 0.005  # keys next to each other are independent


def test_everything_dropped() -> None:
    assert (ops.dropout(np.ones(9, np.float32), p=1.0, key=3).data == 0).all()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"dropout with p = 1.5; expected 0 <= p <= 1."):
        ops.dropout(np.ones(2), p=1.5, key=0)
