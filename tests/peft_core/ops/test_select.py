from typing import Any

import numpy as np
import pytest

from peft_core import ops
from support.cases import Case, every

INDEX = np.array([[0, 2, 0], [1, 1, 4]])


def normal(*shapes: tuple[int, ...]) -> Any:
    return lambda rng: [rng.normal(size=s) for s in shapes]


CASES = [
    Case("tril", ops.tril, normal((2, 3, 4)), lambda x: np.tril(x), nonfinite=False),  # what is cut off is cut off
    Case("triu", ops.triu, normal((3, 4)), lambda x, diagonal: np.triu(x, diagonal), params={"diagonal": 1},
         nonfinite=False),
    Case("gather", lambda x: ops.gather(x, INDEX, axis=1), normal((2, 5)),
         lambda x: np.take_along_axis(x, INDEX, 1), extra_bytes=lambda x: INDEX.nbytes),
    Case("gather rows", lambda x: ops.gather(x, INDEX % 2, axis=0), normal((2, 5)),
         lambda x: np.take_along_axis(x[:, :3], INDEX % 2, 0), extra_bytes=lambda x: INDEX.nbytes),
    Case("repeat", ops.repeat, normal((2, 3)), lambda x, times: np.tile(x, times), params={"times": (2, 1, 3)}),
    Case("cumsum", ops.cumsum, normal((3, 4)), lambda x, axis: x.cumsum(axis), params={"axis": -1},
         nonfinite=True),
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_running_counts_are_int64() -> None:
    y = ops.cumsum(np.array([True, False, True]), axis=0)
    assert y.tolist() == [1, 1, 2] and y.dtype == np.int64


def test_errors() -> None:
    x = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"gather of x \(2, 3\) by index \(3,\) \(int64\) along axis 1"):
        ops.gather(x, np.arange(3), axis=1)
    with pytest.raises(IndexError, match="gather got indices from 0 to 3; expected 0 to 2"):
        ops.gather(x, np.array([[0, 3]]), axis=1)
    with pytest.raises(ValueError, match=r"repeat of shape \(2, 3\) by \(2,\); expected a number for each"):
        ops.repeat(x, times=(2,))
    with pytest.raises(ValueError, match=r"tril of shape \(3,\); expected at least two dimensions"):
        ops.tril(np.zeros(3))
