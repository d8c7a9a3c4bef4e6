import math

import numpy as np
import pytest

from peft_core.errors import ConfigError, DivergedError
from peft_core.nn import Parameter
from peft_core.nn.utils import clip_grad_norm_, clip_grad_value_


def params(*gradients):
    result = []
    for g in gradients:
        result.append(Parameter(np.zeros(np.shape(g), np.float32)))
        result[-1].grad = np.array(g, np.float32)
    return result


def test_the_norm_is_a_tensor():
    a, b = given = params([3.0, 0.0], 4.0)
    norm = clip_grad_norm_((p for p in given), 2.0, error_if_nonfinite=True, foreach=True)
    assert norm.item() == 5 and norm.dtype == np.float32 and norm.shape == ()
    np.testing.assert_allclose(a.grad.data, [6 / (5 + 1e-6), 0], rtol=1e-6)
    np.testing.assert_allclose(b.grad.data, 8 / (5 + 1e-6), rtol=1e-6)
    assert clip_grad_norm_(Parameter(np.zeros(1, np.float32)), 1.0).item() == 0


def test_norms_that_are_not_finite_or_not_the_second():
    a, b = given = params([3.0, math.inf], [4.0])
    assert clip_grad_norm_(given, 1.0).item() == math.inf and b.grad.item() == 4
    with pytest.raises(DivergedError, match=r"gradient norm is inf; expected a finite norm\. No gradient was changed"):
        clip_grad_norm_(given, 1.0, error_if_nonfinite=True)
    with pytest.raises(ConfigError, match=r"clip_grad_norm_\(norm_type=inf\) is not supported; expected 2"):
        clip_grad_norm_(given, 1.0, norm_type=math.inf)
    assert a.grad.data[0] == 3 and b.grad.item() == 4


def test_clip_by_value():
    a, b = params([3.0, -3.0, math.nan], 4.0)
    clip_grad_value_([a, b, Parameter(np.zeros(1, np.float32))], 2.0)
    np.testing.assert_array_equal(a.grad.data, [2, -2, math.nan])
    assert b.grad.item() == 2
    clip_grad_value_(b, 1)
    assert b.grad.item() == 1
