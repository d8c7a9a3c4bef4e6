from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, ops
from peft_core.ops import norm
from support.cases import Case, every


def normal(*shapes: tuple[int, ...]) -> Any:
    return lambda rng: [rng.normal(size=s) for s in shapes]


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    return x * w / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def layer_norm(x: np.ndarray, w: np.ndarray, bias: Any = 0.0, eps: float = 1e-5) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * w + bias


FUSED = (norm._rms_forward, norm._rms_backward)
EPS = {"eps": 0.1}  # large, so that leaving it out or adding it elsewhere shows


def wide(*arrays: np.ndarray) -> int:
    return max(4, arrays[0].itemsize)


RMS: dict = {"reference": rms_norm, "params": EPS, "extra_bytes": lambda x, w: wide(x) * (x.size // x.shape[-1])}
LAYER: dict = {"reference": layer_norm, "params": EPS, "slack": 2}

CASES = [
    Case("rms_norm", ops.rms_norm, normal((7, 40), (40,)), **RMS, formulas=FUSED,
         retains={0, 1}),
    Case("rms_norm 3d", ops.rms_norm, normal((2, 3, 8), (8,)), **RMS, formulas=FUSED, retains={0, 1}),
    Case("rms_norm one row", ops.rms_norm, normal((8,), (8,)), **RMS, formulas=FUSED, retains={0, 1}),
    Case("rms_norm bf16 w", ops.rms_norm, normal((7, 8), (8,)), **RMS, retains={0, 1}, dtypes=("float32",),
         fixed={1: "bfloat16"}, formulas=FUSED),
    Case("rms_norm float32 w", ops.rms_norm, normal((7, 8), (8,)), **RMS, retains={0, 1}, dtypes=("bfloat16",),
         fixed={1: "float32"}),
    Case("rms_norm autocast", ops.rms_norm, normal((7, 8), (8,)), **RMS, retains={0, 1}, dtypes=("float32",),
         autocast="bfloat16"),
    Case("layer_norm", ops.layer_norm, normal((7, 40), (40,), (40,)), **LAYER, retains={(0, 1, 2): {0, 1}, (2,): set()},
         extra_bytes={(0, 1, 2): lambda x, w, b: 2 * wide(x) * 7}),
    Case("layer_norm no bias", ops.layer_norm, normal((2, 3, 8), (8,)), **LAYER, retains={0, 1},
         extra_bytes=lambda x, w: 2 * wide(x) * 6),
    Case("layer_norm bf16 w", ops.layer_norm, normal((7, 8), (8,), (8,)), **LAYER, retains=None, dtypes=("float32",),
         fixed={1: "bfloat16", 2: "bfloat16"}),
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


@pytest.mark.parametrize("op", [ops.rms_norm, ops.layer_norm])
def test_half_statistics_are_float32(op: Any) -> None:
    """The squares of 300 overflow float16."""
    x = np.full((1, 64), 300, np.float16)
    x[0, ::2] = -300
    y = op(x, np.ones(64, np.float16)).data
    assert np.abs(np.abs(y.astype(float)) - 1).max() < 1e-3


def test_a_mapped_read_only_weight_takes_the_kernel() -> None:
    w = np.ones(8, np.float32)
    w.flags.writeable = False
    x = Tensor(np.ones((2, 8), np.float32), requires_grad=True)
    ops.rms_norm(x, w).backward(np.ones((2, 8)))
    assert not any(f.kernel.broken for f in FUSED)


def test_a_frozen_weight_is_not_asked_for_a_gradient() -> None:
    x, w = Tensor(np.ones((2, 8), np.float32), requires_grad=True), Tensor(np.ones(8, np.float32))
    y = ops.rms_norm(x, w)
    assert y.grad_fn is not None
    assert y.grad_fn.vjp is not None
    assert y.grad_fn.vjp(np.ones((2, 8), np.float32), [None, None])[1] is None
