import math

import numpy as np
import pytest

from peft_core.errors import ConfigError
from peft_core.nn import Parameter
from peft_core.optim import clip_grad_norm_


def params(*gradients):
    result = []
    for g in gradients:
        result.append(Parameter(np.zeros(np.shape(g), np.float32)))
        result[-1].grad = np.array(g, np.float32)
    return result


def test_scales_all_gradients_by_their_common_norm():
    a, b = given = params([[3.0, 0.0]], [4.0])
    assert clip_grad_norm_(given, 2.0) == 5.0
    np.testing.assert_allclose(a.grad.data, [[6 / (5 + 1e-6), 0]], rtol=1e-7)
    np.testing.assert_allclose(b.grad.data, [8 / (5 + 1e-6)], rtol=1e-7)


def test_leaves_small_gradients_alone_and_takes_generators_tensors_and_none():
    a, b = params([3.0], [4.0])
    c = Parameter(np.zeros(3, np.float32))
    assert clip_grad_norm_((p for p in (a, b, c, a)), 6.0) == 5.0  # a twice is one gradient
    assert a.grad.item() == 3 and c.grad is None
    assert clip_grad_norm_(a, math.inf) == 3 and clip_grad_norm_([c], 1.0) == 0 and clip_grad_norm_([], 1.0) == 0


def test_a_gradient_that_is_a_numpy_scalar_is_scaled():
    p = Parameter(np.ones((), np.float32))
    p.grad = np.float32(8.0)
    clip_grad_norm_(p, 2.0)
    assert abs(p.grad.item() - 2) < 1e-5


def test_sums_in_float64():
    g = np.full(3_000_000, 1e-4, np.float32)
    g[0] = 1.0  # then each further square is below half a unit of a float32 sum
    assert abs(clip_grad_norm_(params(g), math.inf) / math.sqrt((g.astype(np.float64) ** 2).sum()) - 1) < 1e-12
    assert abs(clip_grad_norm_(params([3e30], [4e30]), math.inf) / 5e30 - 1) < 1e-6  # squares beyond float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_returned_and_nothing_changes(bad):
    a, b = params([3.0, bad], [4.0])
    norm = clip_grad_norm_([a, b], 1.0)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    assert a.grad.data[0] == 3 and b.grad.item() == 4


@pytest.mark.parametrize("bad", [0, -1.0, math.nan])
def test_max_norm_has_to_be_positive(bad):
    with pytest.raises(ConfigError, match=rf"max_norm is {bad}; expected a number above 0, or inf to measure only\."):
        clip_grad_norm_(params([1.0]), bad)
