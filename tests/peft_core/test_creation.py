"""Tensors from nothing: values, dtypes, random streams, refusals."""

import numpy as np
import pytest

import peft_core as pc
from peft_core import Generator, Tensor


def made(t: Tensor) -> tuple:
    return t.tolist(), str(t.dtype)


def test_constants() -> None:
    assert made(pc.zeros(2, 3)) == made(pc.zeros((2, 3))) == made(pc.zeros(size=[2, 3])) == ([[0.0] * 3] * 2, "float32")
    assert made(pc.ones(2, dtype="int64")) == ([1, 1], "int64")
    assert pc.empty(2, 0).shape == (2, 0) and pc.zeros(()).shape == ()
    assert made(pc.full((2,), 7)) == ([7, 7], "int64") and made(pc.full([2], fill_value=0.5)) == ([0.5] * 2, "float32")
    assert made(pc.full((1,), True)) == ([True], "bool") and made(pc.full((1,), Tensor(np.array(2)))) == ([2], "int64")
    assert made(pc.eye(2, 3)) == ([[1, 0, 0], [0, 1, 0]], "float32")
    assert pc.zeros(2, requires_grad=True).requires_grad and not pc.zeros(2).requires_grad


def test_ranges() -> None:
    assert made(pc.arange(3)) == made(pc.arange(end=3)) == ([0, 1, 2], "int64")
    assert made(pc.arange(1, 8, 3)) == made(pc.arange(start=1, end=8, step=3)) == ([1, 4, 7], "int64")
    assert made(pc.arange(0, 1, 0.25)) == ([0, 0.25, 0.5, 0.75], "float32")
    assert str(pc.arange(3, dtype="bfloat16").dtype) == "bfloat16" and pc.arange(Tensor(np.array(2))).tolist() == [0, 1]
    assert made(pc.linspace(0, 1, steps=5)) == ([0, 0.25, 0.5, 0.75, 1], "float32")


def test_data() -> None:
    source = np.arange(3.0)
    assert np.shares_memory(pc.from_numpy(source).data, source) and np.shares_memory(pc.as_tensor(source).data, source)
    assert not np.shares_memory(pc.tensor(source).data, source)
    t = Tensor(source)
    assert pc.as_tensor(t) is t and str(pc.as_tensor(t, dtype="float32").dtype) == "float32"
    assert made(pc.tensor([[Tensor(np.array(1)), 2], [3, 4]])) == ([[1, 2], [3, 4]], "int64")
    assert made(pc.tensor([Tensor(np.ones(2, np.float32))] * 2)) == ([[1, 1], [1, 1]], "float32")
    assert made(pc.as_tensor([1.5])) == ([1.5], "float32")


def test_like_another() -> None:
    x = pc.ones(2, 3, dtype="bfloat16")
    for t, value in [(pc.zeros_like(x), 0), (pc.ones_like(x), 1), (pc.full_like(x, 5), 5)]:
        assert t.shape == (2, 3) and t.dtype == x.dtype and t.tolist() == [[value] * 3] * 2
    assert str(pc.ones_like(x, dtype="bool").dtype) == "bool" and pc.empty_like(x).shape == (2, 3)
    assert pc.rand_like(x).dtype == pc.randn_like(x).dtype == x.dtype
    with pytest.raises(ValueError, match="random numbers like a Tensor of dtype int64; expected a floating dtype"):
        pc.randn_like(pc.arange(3))


def test_random_numbers_follow_the_seed() -> None:
    draws = [
        lambda: pc.rand(40, 50), lambda: pc.randn(40, 50), lambda: pc.randint(0, 9, (40,)), lambda: pc.randperm(40),
        lambda: pc.bernoulli(pc.full((40,), 0.5)), lambda: pc.multinomial(pc.ones(40), 7),
    ]  # fmt: skip
    for draw in draws:
        pc.manual_seed(3)
        first, second = draw().tolist(), draw().tolist()
        pc.manual_seed(3)
        assert draw().tolist() == first != second
    assert pc.rand(9, generator=Generator(1)).tolist() == pc.rand(size=(9,), generator=Generator(1)).tolist()


def test_random_numbers_have_the_distribution_they_are_named_after() -> None:
    pc.manual_seed(0)
    n = 40_000  # bounds: five standard deviations of the estimate
    u, z, k = pc.rand(n).numpy(), pc.randn(n, dtype="float64").numpy(), pc.randint(2, 5, (n,)).numpy()
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 5 / np.sqrt(12 * n)
    assert abs(z.mean()) < 5 / np.sqrt(n) and abs(z.std() - 1) < 5 / np.sqrt(2 * n) and z.dtype == np.float64
    assert set(k.tolist()) == {2, 3, 4} and k.dtype == np.int64
    assert sorted(pc.randperm(50).tolist()) == list(range(50))
    hits = pc.bernoulli(pc.full((n,), 0.3))
    assert str(hits.dtype) == "float32" and abs(float(hits.mean()) - 0.3) < 5 * np.sqrt(0.21 / n)


def test_randint_takes_its_bounds_in_three_ways() -> None:
    assert pc.randint(5, (2, 3)).shape == pc.randint(0, 5, (2, 3)).shape == (2, 3)
    assert pc.randint(low=4, high=5, size=(2,)).tolist() == [4, 4]
    with pytest.raises(
        ValueError, match=r"randint got bounds \(3,\) and size None; expected randint\(\[low,\] high, size"
    ):
        pc.randint(3)


def test_multinomial_draws_with_the_stated_probabilities() -> None:
    pc.manual_seed(0)
    n, weights = 30_000, pc.tensor([[1.0, 0.0, 3.0], [2.0, 2.0, 0.0]])
    places = pc.multinomial(weights, n, replacement=True).numpy()
    assert places.shape == (2, n) and places.dtype == np.int64
    shares = np.stack([np.bincount(row, minlength=3) / n for row in places])
    assert np.abs(shares - [[0.25, 0, 0.75], [0.5, 0.5, 0]]).max() < 5 * np.sqrt(0.25 / n)
    firsts = [pc.multinomial(weights[0], 2).tolist() for _ in range(400)]
    assert all(sorted(pair) == [0, 2] for pair in firsts)
    assert abs(np.mean([pair[0] == 2 for pair in firsts]) - 0.75) < 5 * np.sqrt(0.19 / 400)


@pytest.mark.parametrize("p", [[1.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_multinomial_refuses_what_is_no_distribution(p: list) -> None:
    with pytest.raises(ValueError, match=r"multinomial of 2 places from \[.*expected finite numbers >= 0.*at least 2"):
        pc.multinomial(pc.tensor(p), 2)
