"""Activations as modules, against float64 formulas."""

import math
from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, nn

X = np.random.default_rng(0).standard_normal((3, 4))
CDF = np.vectorize(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))))(X)
SOFTMAX = np.exp(X) / np.exp(X).sum(1, keepdims=True)


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (nn.ReLU(), np.maximum(X, 0)),
        (nn.ReLU(inplace=True), np.maximum(X, 0)),
        (nn.SiLU(), X / (1 + np.exp(-X))),
        (nn.GELU(), X * CDF),
        (nn.GELU(approximate="tanh"), 0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))),
        (nn.Tanh(), np.tanh(X)),
        (nn.Sigmoid(), 1 / (1 + np.exp(-X))),
        (nn.Softmax(dim=1), SOFTMAX),
        (nn.LogSoftmax(dim=1), np.log(SOFTMAX)),
        (nn.Identity(3, unused=True), X),
    ],
)
def test_values(module: Any, wanted: np.ndarray) -> None:
    x = X.copy()
    np.testing.assert_allclose(module(Tensor(x)).data, wanted, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(x, X)
    assert module(Tensor(X.astype(np.float32))).dtype == np.float32 and not list(module.parameters())


def test_repr() -> None:
    assert repr(nn.GELU("tanh")) == "GELU(approximate='tanh')" and repr(nn.Softmax(dim=1)) == "Softmax(dim=1)"
    assert repr(nn.ReLU()) == "ReLU()"
