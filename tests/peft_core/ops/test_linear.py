from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, autocast, ops
from peft_core.dtypes import bfloat16, float32
from support.cases import Case, every, reachable_arrays


def normal(*shapes: tuple[int, ...]) -> Any:
    return lambda rng: [rng.normal(size=s) for s in shapes]


def linear(x: np.ndarray, w: np.ndarray, bias: Any = 0.0) -> np.ndarray:
    return np.einsum("...i,oi->...o", x, w) + bias


def low_rank(x: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    return scale * np.einsum("...i,ri,or->...o", x, a, b)


LINEAR = normal((6, 5), (4, 5))
WITH_BIAS = normal((6, 5), (4, 5), (4,))
LOW_RANK: dict = {"inputs": normal((6, 5), (2, 5), (4, 2)), "reference": low_rank, "params": {"scale": 0.7}}
F32 = ("float32",)
S_BYTES = {(0, 1, 2): lambda x, a, b: 4 * 6 * 2, (2,): lambda x, a, b: 4 * 6 * 2}

CASES = [
    Case("linear", ops.linear, LINEAR, linear, retains={(0, 1): {0, 1}, (0,): {1}, (1,): {0}}),
    Case("linear bias", ops.linear, WITH_BIAS, linear,
         retains={(0, 1, 2): {0, 1}, (0,): {1}, (2,): set(), (0, 2): {1}}),
    Case("linear 3d", ops.linear, normal((2, 3, 5), (4, 5)), linear, retains={0, 1}),
    Case("linear vector", ops.linear, normal((5,), (4, 5), (4,)), linear, retains={0, 1}),
    Case("linear no rows", ops.linear, normal((0, 5), (4, 5)), linear, retains={0, 1}, nonfinite=False),  # no output
    Case("linear frozen bf16", ops.linear, WITH_BIAS, linear, fixed={1: "bfloat16"}, dtypes=F32,
         retains={(0, 1, 2): {0, 1}, (0,): {1}}),
    Case("linear bf16 x, float32 w", ops.linear, LINEAR, linear, fixed={0: "bfloat16"}, dtypes=F32, retains={0, 1}),
    Case("linear autocast", ops.linear, WITH_BIAS, linear, autocast="bfloat16", out="bfloat16", slack=3,
         retains={0, 1}, dtypes=F32),
    Case("linear autocast frozen bf16", ops.linear, LINEAR, linear, autocast="bfloat16", out="bfloat16", slack=3,
         fixed={1: "bfloat16"}, retains={0, 1}, dtypes=F32),
    Case("linear autocast float16", ops.linear, LINEAR, linear, autocast="float16", out="float16", slack=3,
         retains={0, 1}, dtypes=F32),
    Case("low_rank", ops.low_rank, **LOW_RANK, slack=2, extra_bytes={(0, 1, 2): lambda x, a, b: max(4, x.itemsize) * 12,
         (2,): lambda x, a, b: max(4, x.itemsize) * 12},
         retains={(0, 1, 2): {0, 1, 2}, (2,): set(), (0,): {1, 2}, (1,): {0, 2}, (0, 1): {0, 1, 2}}),
    Case("low_rank autocast", ops.low_rank, **LOW_RANK, autocast="bfloat16", out="bfloat16", slack=4, dtypes=F32,
         extra_bytes=S_BYTES, retains={(0, 1, 2): {0, 1, 2}, (2,): set()}),
    Case("low_rank bf16 x", ops.low_rank, **LOW_RANK, fixed={0: "bfloat16"}, dtypes=F32, extra_bytes=S_BYTES,
         retains={(0, 1, 2): {0, 1, 2}}),
    Case("matmul", ops.matmul, normal((3, 4), (4, 5)), np.matmul, retains={(0, 1): {0, 1}, (0,): {1}, (1,): {0}}),
    Case("matmul batch", ops.matmul, normal((2, 3, 4), (2, 4, 5)), np.matmul, retains={0, 1}),
    Case("matmul broadcast", ops.matmul, normal((6, 1, 3, 4), (2, 4, 5)), np.matmul, retains={0, 1}),
    Case("matmul matrix vector", ops.matmul, normal((2, 3, 4), (4,)), np.matmul, retains={0, 1}),
    Case("matmul vector matrix", ops.matmul, normal((4,), (2, 4, 5)), np.matmul, retains={0, 1}),
    Case("matmul vectors", ops.matmul, normal((4,), (4,)), np.matmul, retains={0, 1}, slack=4),
    Case("matmul autocast", ops.matmul, normal((3, 4), (4, 5)), np.matmul, autocast="bfloat16", out="bfloat16", slack=3,
         retains={0, 1}, dtypes=F32),
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_bf16_products_accumulate_in_float32() -> None:
    ones = np.ones((1, 20_000), bfloat16)
    assert abs(ops.linear(ones, ones).item() - 20_000) < 100
    with autocast("bfloat16"):
        assert abs(ops.matmul(ones.astype(float32), ones.T.astype(float32)).item() - 20_000) < 100


def test_autocast_holds_for_backward_as_it_was_in_the_forward() -> None:
    x, w = Tensor(np.ones((2, 3), np.float32) / 3, requires_grad=True), Tensor(np.ones((2, 3), np.float32), True)
    with autocast("bfloat16"):
        y = ops.linear(x, w)
    y.backward(np.ones((2, 2)))
    assert w.grad is not None
    assert w.grad.dtype == float32
    assert w.grad.data[0, 0] == 2 * np.float32(bfloat16.type(np.float32(1) / 3))


def test_a_numpy_scalar_as_scale_does_not_promote() -> None:
    x, a, b = (np.ones((2, 2), np.float32) for _ in range(3))
    assert ops.low_rank(x, a, b, scale=np.float64(16) / np.sqrt(8)).dtype == float32


def test_a_frozen_linear_keeps_no_activation() -> None:
    x, w = Tensor(np.ones((2, 3), np.float32), requires_grad=True), Tensor(np.ones((4, 3), np.float32))
    y = ops.linear(x, w)
    assert y.grad_fn is not None
    assert all(a is w.data for a in reachable_arrays(y.grad_fn.vjp))


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"linear of x \(2, 3\) and w \(4, 5\); expected x \(\.\.\., I\) and w \(O, I\)"
    ):
        ops.linear(np.ones((2, 3)), np.ones((4, 5)))
    with pytest.raises(ValueError, match=r"low_rank of x \(2, 3\) and w \(1, 5\)"):
        ops.low_rank(np.ones((2, 3)), np.ones((1, 5)), np.ones((4, 1)))
    with pytest.raises(ValueError, match=r"low_rank of a \(1, 3\) and b \(4, 2\); expected a \(R, I\) and b \(O, R\)"):
        ops.low_rank(np.ones((2, 3)), np.ones((1, 3)), np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"matmul of \(2, 3\) and \(4, 5\); expected"):
        ops.matmul(np.ones((2, 3)), np.ones((4, 5)))
