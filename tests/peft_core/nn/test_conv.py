"""Conv2d, MaxPool2d, Flatten: shapes, starting values, settings that are refused.  Values: tests/peft_core/ops."""

import math
from typing import Any

import numpy as np
import pytest

from peft_core import Generator, Tensor, UnsupportedError, manual_seed, nn, ones, randn

pool = nn.functional.max_pool2d


def test_conv2d_is_the_op_with_its_own_weights() -> None:
    x = Tensor(np.random.default_rng(0).standard_normal((2, 4, 6, 5)))
    layer = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=1, dilation=1, groups=2, dtype="float64")
    w, b = layer.weight.numpy() if not layer.weight.requires_grad else layer.weight.data, layer.bias
    assert b is not None and w.shape == (6, 2, 3, 2) and layer.kernel_size == (3, 2) and layer.stride == (2, 1)
    padded = np.pad(x.data, ((0, 0), (0, 0), (1, 1), (1, 1)))
    y = layer(x)
    assert y.shape == (2, 6, 3, 6)
    for o in range(6):  # one pixel of each channel, by hand
        window = padded[1, o // 3 * 2 : o // 3 * 2 + 2, 2:5, 3:5]
        np.testing.assert_allclose(y[1, o, 1, 3].item(), (window * w[o]).sum() + b[o].item(), rtol=1e-12)
    np.testing.assert_allclose(layer(x[1]).data, y[1].data)  # one image without N
    assert nn.Conv2d(4, 2, 3, bias=False).bias is None and nn.Conv2d(4, 2, 3, padding="same")(ones(1, 4, 5, 5)).shape[
        2:
    ] == (5, 5)


def test_conv2d_starts_uniform_within_one_over_root_of_a_window() -> None:
    layer = nn.Conv2d(16, 40, 5, groups=2, generator=Generator(0))
    bound = 1 / math.sqrt(8 * 25)
    assert layer.bias is not None
    for values in (layer.weight.data, layer.bias.data):
        assert 0.9 * bound < np.abs(values).max() <= bound
    assert abs(layer.weight.data.std() / (bound / math.sqrt(3)) - 1) < 0.05
    manual_seed(1)
    first = nn.Conv2d(1, 1, 3).weight.tolist()
    manual_seed(1)
    assert nn.Conv2d(1, 1, 3).weight.tolist() == first


def test_max_pool2d_and_flatten() -> None:
    x = randn(2, 3, 7, 6)
    blocks = x.data[:, :, :6].reshape(2, 3, 3, 2, 3, 2).max((3, 5))
    assert nn.MaxPool2d(2)(x).tolist() == nn.MaxPool2d(kernel_size=2, stride=2)(x).tolist() == blocks.tolist()
    assert nn.MaxPool2d(3, stride=2, padding=1)(x).shape == (2, 3, 4, 3) and nn.MaxPool2d(2)(x[0]).shape == (3, 3, 3)
    assert nn.Flatten()(x).tolist() == x.data.reshape(2, -1).tolist() and nn.Flatten(2)(x).shape == (2, 3, 42)


def test_repr() -> None:
    assert repr(nn.Conv2d(3, 4, 3)) == "Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))"
    assert repr(nn.MaxPool2d(2)) == "MaxPool2d(kernel_size=2, stride=2, padding=0)"


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (lambda: nn.Conv2d(1, 1, 3, padding_mode="reflect"), UnsupportedError, "with padding_mode=.reflect. is not"),
        (lambda: nn.Conv2d(3, 4, 3, groups=2), ValueError, "Conv2d of 3 to 4 channels with groups=2; expected both"),
        (lambda: nn.Conv2d(1, 1, (3, 3, 3)), ValueError, r"Conv2d kernel_size is \(3, 3, 3\); expected an integer or"),
        (lambda: nn.MaxPool2d(2, ceil_mode=True), UnsupportedError, "MaxPool2d with return_indices or ceil_mode is"),
        (lambda: pool(ones(1, 1, 2, 2), 2, return_indices=True), UnsupportedError, "max_pool2d with return_indices or"),
    ],
)  # fmt: skip
def test_refusals(use: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        use()
