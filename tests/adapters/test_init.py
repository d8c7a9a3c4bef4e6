import numpy as np

from adapters.init import starting_values
from peft_core.random import Generator


def test_default_is_uniform_within_one_over_root_in_and_b_zero():
    a, b = starting_values(True, 64, 400, 8, Generator(0))
    assert a.shape == (64, 400) and b.shape == (8, 64) and a.dtype == b.dtype == np.float32
    bound = 400**-0.5
    assert 0.99 * bound < np.abs(a).max() <= bound and abs(a.std() - bound / 3**0.5) < 0.01 * bound
    assert not b.any()


def test_gaussian_has_deviation_one_over_r():
    a, b = starting_values("gaussian", 16, 4000, 8, Generator(0))
    assert abs(a.std() - 1 / 16) < 0.001 and abs(a.mean()) < 0.001 and not b.any()


def test_false_draws_b_too():
    _, b = starting_values(False, 16, 40, 800, Generator(0))
    assert 0.24 < np.abs(b).max() <= 0.25


def test_seeded():
    one, again, other = (starting_values(True, 4, 8, 8, Generator(s))[0] for s in (5, 5, 6))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
