from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, ops
from support.cases import Case, every


def normal(*shapes: tuple[int, ...]) -> Any:
    return lambda rng: [rng.normal(size=s) for s in shapes]


REPEATED = np.array([0, 2, 0, 0])

CASES = [
    Case("reshape", ops.reshape, normal((3, 4)), lambda x, shape: x.reshape(shape), params={"shape": (2, -1)}),
    Case("permute", ops.permute, normal((2, 3, 4)), lambda x, axes: x.transpose(axes), params={"axes": (2, 0, 1)}),
    Case("transpose", ops.transpose, normal((2, 3, 4)), lambda x, **k: np.swapaxes(x, 0, -1),
         params={"dim0": 0, "dim1": -1}),
    Case("expand", ops.expand, normal((3, 1)), lambda x, shape: np.broadcast_to(x, (2, 3, 4)),
         params={"shape": (2, -1, 4)}),
    Case("expand nothing", ops.expand, normal((3, 2)), lambda x, shape: x, params={"shape": (3, 2)}),
    Case("flatten", ops.flatten, normal((2, 3, 4)), lambda x, **k: x.reshape(2, 12), params={"start": 1}),
    Case("squeeze", ops.squeeze, normal((1, 3, 1)), lambda x: x[0, :, 0]),
    Case("squeeze one", ops.squeeze, normal((1, 3, 1)), lambda x, axis: x[0], params={"axis": 0}),
    Case("unsqueeze", ops.unsqueeze, normal((3, 4)), lambda x, axis: x[..., None], params={"axis": -1}),
    Case("contiguous", lambda x: ops.contiguous(ops.permute(x, axes=(1, 0))), normal((3, 4)), lambda x: x.T,
         retains=None),
    Case("slice", ops.getitem, normal((4, 5)), lambda x, index: x[1:, ::2],
         params={"index": (slice(1, None), slice(None, None, 2))},
         nonfinite=True),
    Case("row", ops.getitem, normal((4, 5)), lambda x, index: x[2], params={"index": 2}),
    Case("element", ops.getitem, normal((4, 5)), lambda x, index: x[index], params={"index": (1, -1)}),
    Case("new axis", ops.getitem, normal((4, 5)), lambda x, index: x[index], params={"index": (Ellipsis, None, 3)}),
    Case("repeated rows", ops.getitem, normal((4, 5)), lambda x, index: x[index], params={"index": REPEATED},
         extra_bytes=lambda x: REPEATED.nbytes),
    Case("list of rows", ops.getitem, normal((4, 5)), lambda x, index: x[index], params={"index": [3, 1, 3]},
         extra_bytes=lambda x: 24),
    Case("pairs", ops.getitem, normal((4, 5)), lambda x, index: x[index], params={"index": (REPEATED, REPEATED)},
         extra_bytes=lambda x: REPEATED.nbytes),
    Case("mask", ops.getitem, normal((4,)), lambda x, index: x[index],
         params={"index": np.array([True, False, True, True])},
         extra_bytes=lambda x: 4),
    Case("concatenate", lambda *xs, axis: ops.concatenate(xs, axis=axis), normal((2, 3), (2, 1), (2, 4)),
         lambda *xs, axis: np.concatenate(xs, axis), params={"axis": -1}),
    Case("concatenate mixed", lambda *xs: ops.concatenate(xs), normal((2, 3), (1, 3)), lambda *xs: np.concatenate(xs),
         dtypes=("float32",), fixed={1: "bfloat16"}),
    Case("stack", lambda *xs: ops.stack(xs, axis=1), normal((2, 3), (2, 3)), lambda *xs: np.stack(xs, 1)),
    Case("split", lambda x: ops.split(x, [2, 3], axis=1)[1], normal((2, 5)), lambda x: x[:, 2:]),
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_views_share_memory() -> None:
    x = np.zeros((4, 6), np.float32)
    for y in (ops.reshape(x, shape=(24,)), ops.transpose(x), ops.getitem(x, index=slice(1, 3)), *ops.split(x, 2)):
        assert np.shares_memory(x, y.data)


def test_split_by_size_leaves_a_smaller_last_piece() -> None:
    assert [t.shape for t in ops.split(np.zeros((5, 2)), 2)] == [(2, 2), (2, 2), (1, 2)]


def test_both_pieces_of_a_split_send_gradients() -> None:
    x = Tensor(np.arange(4.0), requires_grad=True)
    a, b = ops.split(x, 2)
    (a * 2 + b * 3).backward(np.ones(2))
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 3, 3]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"split sizes \[1, 2\] sum to 3; expected 5, the size of axis 0."):
        ops.split(np.zeros((5, 2)), [1, 2])
