import math
from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, ops
from peft_core.ops import activation
from support.cases import Case, every

_erf = np.vectorize(math.erf, otypes=[float])


def normal(*shapes: tuple[int, ...], scale: float = 1.5) -> Any:
    return lambda rng: [scale * rng.normal(size=s) for s in shapes]


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    if approximate == "tanh":
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + _erf(x / np.sqrt(2)))


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


FUSED = (activation._swiglu_forward, activation._swiglu_backward)
CASES = [
    Case("relu", ops.relu, normal((4, 5)), lambda x: np.maximum(x, 0), retains={"y"}),
    Case("sigmoid", ops.sigmoid, normal((4, 5)), logistic, retains={"y"}),
    Case("tanh", ops.tanh, normal((4, 5), scale=0.7), np.tanh, retains={"y"}, slack=2),
    Case("silu", ops.silu, normal((4, 5)), lambda x: x * logistic(x), retains={0}),
    Case("gelu", ops.gelu, normal((4, 50)), gelu, retains={0},
         formulas=(activation._gelu_erf, activation._gelu_erf_backward)),
    Case("gelu tanh", ops.gelu, normal((4, 50)), gelu, params={"approximate": "tanh"}, retains={0}),
    Case("swiglu", ops.swiglu, normal((4, 50), (4, 50)), lambda g, u: g * logistic(g) * u, retains={0, 1},
         formulas=FUSED),
    Case("swiglu wide", ops.swiglu, normal((3, 40), (3, 40), scale=30), lambda g, u: g * logistic(g) * u,
         retains={0, 1},
         formulas=FUSED),
    Case("swiglu bf16 up", ops.swiglu, normal((3, 8), (3, 8)), lambda g, u: g * logistic(g) * u, retains={0, 1},
         dtypes=("float32",), fixed={1: "bfloat16"}),
    Case("softmax", ops.softmax, normal((4, 5)), softmax, retains={"y"}),
    Case("softmax axis 0", ops.softmax, normal((4, 5)), softmax, params={"axis": 0}, retains={"y"}),
    Case("log_softmax", ops.log_softmax, normal((4, 5)), lambda x: np.log(softmax(x)), retains={"y"}, slack=2),
    Case("logsumexp", ops.logsumexp, normal((4, 5)), lambda x: np.log(np.exp(x).sum(-1)), retains={0, "y"}, slack=2),
    Case("logsumexp keepdims", ops.logsumexp, normal((4, 5)), lambda x, **k: np.log(np.exp(x).sum(**k)),
         retains={0, "y"},
         params={"axis": 0, "keepdims": True}, slack=2),
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_erf_is_exact_to_rounding() -> None:
    x = np.concatenate([np.linspace(-7, 7, 4001), [0.0, 1e-9, np.inf, -np.inf]])
    assert np.abs(activation.erf(x, np) - _erf(x)).max() < 1e-14
    assert np.abs(activation.erf(x.astype(np.float32), np) - _erf(x.astype(np.float32))).max() < 1e-7


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_arguments_neither_warn_nor_overflow(dtype: str) -> None:
    x = np.array([-1e4, -200, 200, 1e4], dtype)
    with np.errstate(all="raise", under="ignore"):
        assert np.abs(ops.sigmoid(x).data - [0, 0, 1, 1]).max() < 1e-30
        assert np.abs(ops.silu(x).data - [0, 0, 200, 1e4]).max() < 1e-30
        assert np.abs(ops.swiglu(x, np.ones_like(x)).data - [0, 0, 200, 1e4]).max() < 1e-30
        assert np.isfinite(ops.softmax(x).data).all()
        assert ops.logsumexp(x).item() == 1e4


def test_logsumexp_of_nothing_is_minus_infinity() -> None:
    assert ops.logsumexp(np.full(3, -np.inf, np.float32)).item() == -np.inf


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"gelu with approximate = 'erf'; expected 'none' or 'tanh'."):
        ops.gelu(np.ones(2), approximate="erf")
    with pytest.raises(ValueError, match=r"swiglu of gate \(2,\) and up \(3,\); expected one shape."):
        ops.swiglu(np.ones(2), np.ones(3))


@pytest.mark.reference
def test_against_torch() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=(3, 7)) * 3
    for ours, theirs in [
        (ops.gelu, torch.nn.functional.gelu),
        (lambda t: ops.gelu(t, approximate="tanh"), lambda t: torch.nn.functional.gelu(t, approximate="tanh")),
        (ops.silu, torch.nn.functional.silu),
        (ops.log_softmax, lambda t: torch.log_softmax(t, -1)),
    ]:
        mine, other = Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
        y, z = ours(mine), theirs(other)
        y.backward(np.cos(x))
        z.backward(torch.tensor(np.cos(x)))
        assert np.abs(y.data - z.detach().numpy()).max() < 1e-12
        assert mine.grad is not None
        assert np.abs(mine.grad.data - other.grad.numpy()).max() < 1e-12
