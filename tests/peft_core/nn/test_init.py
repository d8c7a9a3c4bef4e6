"""Starting values: bounds and moments of the distributions, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, manual_seed, nn, zeros

init = nn.init
SHAPE = (60, 40, 3, 3)  # fan_in 360, fan_out 540


@pytest.mark.parametrize(
    ("fill", "std", "bound"),
    [
        (lambda w: init.normal_(w, 0.0, 0.3), 0.3, None),
        (lambda w: init.uniform_(w, -2, 2), 2 / math.sqrt(3), 2),
        (lambda w: init.kaiming_uniform_(w, a=math.sqrt(5)), 1 / math.sqrt(3 * 360), 1 / math.sqrt(360)),
        (lambda w: init.kaiming_uniform_(w, nonlinearity="relu"), math.sqrt(2 / 360), math.sqrt(6 / 360)),
        (lambda w: init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"), math.sqrt(2 / 540), None),
        (lambda w: init.xavier_uniform_(w), math.sqrt(2 / 900), math.sqrt(6 / 900)),
        (lambda w: init.xavier_normal_(w, gain=5 / 3), 5 / 3 * math.sqrt(2 / 900), None),
        (lambda w: init.trunc_normal_(w, std=1.0, a=-1.0, b=1.0), 0.5396, 1),  # sqrt(1 - 2 phi(1) / (2 Phi(1) - 1))
    ],
)
def test_distributions(fill: Any, std: float, bound: float | None) -> None:
    manual_seed(0)
    w = zeros(*SHAPE)
    assert fill(w) is w
    values = w.numpy()
    assert abs(values.std() / std - 1) < 0.02 and abs(values.mean()) < 5 * std / math.sqrt(values.size)
    if bound is not None:
        assert 0.99 * bound < np.abs(values).max() <= bound * (1 + 1e-6)


def test_constants_write_into_a_parameter() -> None:
    p = nn.Parameter(Tensor(np.zeros((2, 3), np.float32)))
    assert init.constant_(p, 0.5).tolist() == [[0.5] * 3] * 2 and init.ones_(p).tolist() == [[1] * 3] * 2
    assert init.zeros_(p) is p and p.requires_grad and init.eye_(p).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_gains() -> None:
    assert init.calculate_gain("tanh") == 5 / 3 and init.calculate_gain("relu") == math.sqrt(2)
    assert init.calculate_gain("leaky_relu", 1) == 1 and init.calculate_gain("linear") == 1


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: init.calculate_gain("swish"), "gain of 'swish'; expected 'leaky_relu' or one of linear"),
        (lambda: init.xavier_normal_(zeros(3)), r"xavier_normal_ on shape \(3,\); expected at least two dimensions"),
        (lambda: init.kaiming_normal_(zeros(3, 3), mode="fan"), "kaiming_normal_ got mode='fan'; expected 'fan_in'"),
        (lambda: init.eye_(zeros(3)), r"eye_ on shape \(3,\); expected two dimensions"),
        (lambda: init.trunc_normal_(zeros(3), 0.0, 0.01, 5, 6), r"trunc_normal_ of mean 0.0, std 0.01 within \[5, 6\]"),
    ],
)
def test_refusals(use: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        use()
