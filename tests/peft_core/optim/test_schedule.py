import math

import pytest

from peft_core.errors import ConfigError
from peft_core.optim import schedule


def values(*args, **kwargs):
    factor = schedule(*args, **kwargs)
    return [factor(step) for step in range(7)]


def test_factors():
    assert values("constant", 6, warmup_steps=3) == [1.0] * 7
    assert values("constant_with_warmup", 6, warmup_steps=4) == [0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert values("linear", 6, warmup_steps=2) == [0, 0.5, 1, 0.75, 0.5, 0.25, 0]
    assert values("linear", 4) == [1, 0.75, 0.5, 0.25, 0, 0, 0]
    half = math.sqrt(0.5)
    expected = [0, 0.5, 1, (1 + half) / 2, 0.5, (1 - half) / 2, 0]
    assert values("cosine", 6, warmup_steps=2) == pytest.approx(expected, abs=1e-15)


def test_errors():
    text = r"schedule 'cosin' is not known; expected one of constant, constant_with_warmup, linear, cosine\."
    with pytest.raises(ConfigError, match=text):
        schedule("cosin", 10)
    with pytest.raises(ConfigError, match="total_steps is 10, warmup_steps -1; expected numbers of at least 0"):
        schedule("linear", 10, -1)
