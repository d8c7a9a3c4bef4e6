from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, ops
from support.cases import Case, every


def direct(x, w, bias=None, *, stride=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1), groups=1):
    """The sum over taps, one output pixel at a time."""
    x = np.pad(x, ((0, 0), (0, 0), *padding))
    per_in, per_out = w.shape[1], w.shape[0] // groups
    size = [
        (n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], w.shape[2:], stride, dilation, strict=True)
    ]
    y = np.zeros((len(x), len(w), *size))
    for n, o, p, q in np.ndindex(*y.shape):
        first = o // per_out * per_in
        for c, i, j in np.ndindex(*w.shape[1:]):
            pixel = x[n, first + c, p * stride[0] + i * dilation[0], q * stride[1] + j * dilation[1]]
            y[n, o, p, q] += w[o, c, i, j] * pixel
    return y if bias is None else y + bias[:, None, None]


def pooled(x, *, kernel, stride=None, padding=0, dilation=1):
    stride = stride or kernel
    x = np.pad(x, ((0, 0), (0, 0), (padding,) * 2, (padding,) * 2), constant_values=-np.inf)
    size = [(n - dilation * (kernel - 1) - 1) // stride + 1 for n in x.shape[2:]]
    y = np.zeros((*x.shape[:2], *size))
    for n, c, p, q in np.ndindex(*y.shape):
        reach = dilation * (kernel - 1) + 1
        y[n, c, p, q] = x[n, c, p * stride :, q * stride :][:reach:dilation, :reach:dilation].max()
    return y


def conv(name: str, *shapes: tuple[int, ...], given: dict | None = None, **plain: Any) -> Case:
    """``given``: the face's spelling of the settings ``plain``."""
    return Case(name, lambda *xs: ops.conv2d(*xs, **(plain if given is None else given)),
                lambda rng: [rng.normal(size=s) for s in shapes], lambda *xs: direct(*xs, **plain), retains={0, 1},
                slack=3)  # fmt: skip


def distinct(rng):
    return [rng.permutation(np.linspace(-2, 2, 2 * 2 * 5 * 6)).reshape(2, 2, 5, 6)]


def pool(name: str, n_out: int, **params: Any) -> Case:
    return Case(name, ops.max_pool2d, distinct, pooled, params=params, extra_bytes=lambda x: n_out)


CASES = [
    conv("conv2d", (2, 3, 5, 6), (4, 3, 3, 2)),
    conv("conv2d bias", (2, 3, 5, 6), (4, 3, 3, 2), (4,)),
    conv("conv2d strided", (2, 2, 7, 6), (3, 2, 3, 3), given={"stride": (2, 1), "padding": 1}, stride=(2, 1),
         padding=((1, 1), (1, 1))),
    conv("conv2d dilated", (1, 2, 7, 7), (2, 2, 2, 3), given={"dilation": 2}, dilation=(2, 2)),
    conv("conv2d groups", (2, 4, 4, 4), (6, 2, 2, 2), (6,), groups=2),
    conv("conv2d depthwise", (1, 3, 4, 4), (3, 1, 3, 3), given={"groups": 3, "padding": "same"}, groups=3,
         padding=((1, 1), (1, 1))),
    conv("conv2d same, even kernel", (1, 2, 4, 5), (2, 2, 2, 4), given={"padding": "same"}, padding=((0, 1), (1, 2))),
    conv("conv2d one pixel", (2, 3, 4, 4), (5, 3, 1, 1), given={"padding": "valid"}),
    pool("max_pool2d", 2 * 2 * 2 * 3, kernel=2),
    pool("max_pool2d overlapping", 2 * 2 * 3 * 3, kernel=3, stride=2, padding=1),
    pool("max_pool2d dilated", 2 * 2 * 3 * 4, kernel=2, stride=1, dilation=2),
]  # fmt: skip


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_the_output_is_contiguous_as_a_view_wants_it() -> None:
    x, w = np.ones((2, 3, 5, 5)), np.ones((4, 3, 2, 2))
    assert ops.conv2d(x, w).is_contiguous() and ops.conv2d(x, w, np.ones(4)).is_contiguous()
    assert ops.max_pool2d(x, kernel=2).is_contiguous()


def test_the_first_of_equal_maxima_takes_the_gradient() -> None:
    x = Tensor(np.ones((1, 1, 2, 2)), True)
    ops.max_pool2d(x, kernel=2).backward(np.ones((1, 1, 1, 1)))
    assert x.grad is not None
    assert x.grad.tolist() == [[[[1, 0], [0, 0]]]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda x: ops.conv2d(x, np.ones((2, 4, 1, 1))),
            r"conv2d of x \(1, 3, 4, 4\) and w \(2, 4, 1, 1\) with groups=1",
        ),
        (lambda x: ops.conv2d(x, np.ones((2, 3, 5, 1))), r"has output \(0, 4\); expected at least 1 x 1"),
        (lambda x: ops.conv2d(x, np.ones((2, 3, 1, 1)), padding="full"), "padding='full'; expected numbers"),
        (lambda x: ops.conv2d(x, np.ones((2, 3, 1, 1)), stride=2, padding="same"), r"'same' and stride \(2, 2\)"),
        (lambda x: ops.conv2d(x, np.ones((2, 3, 1, 1)), stride=(1, 2, 3)), "conv2d stride is .*; expected an integer"),
        (lambda x: ops.max_pool2d(x, kernel=2, padding=2), "expected x .* and a padding of at most half the kernel"),
        (lambda x: ops.max_pool2d(x, kernel=5), r"max_pool2d of a padded image \(4, 4\) with kernel \(5, 5\)"),
    ],
)
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(np.ones((1, 3, 4, 4)))
