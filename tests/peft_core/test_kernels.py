"""The kernel mechanism: which form is taken, the pool of threads, and what happens where nothing compiles."""

import weakref

import numpy as np
import pytest

from peft_core import kernels
from peft_core.kernels import formula, use_kernels


def _make():
    @formula
    def scaled(x, k):
        scaled.formula_runs += 1
        return (x * k,)

    scaled.formula_runs = 0

    @scaled.cpu(out=lambda x, k: (np.empty_like(x),))
    def scaled_kernel(t, T, x, k, y):
        for i in range(len(x) * t // T, len(x) * (t + 1) // T):
            for j in range(x.shape[1]):
                y[i, j] = x[i, j] * k

    return scaled


scaled = _make()
x32 = np.arange(12, dtype=np.float32).reshape(4, 3)
x_large = np.arange(30_000, dtype=np.float32).reshape(300, 100)  # enough for more than one thread


@pytest.mark.parametrize(
    ("x", "kernel"),
    [(x32, True), (x32[::-1, ::2], True), (x32.astype(np.float64), False), (x32.astype(np.float16), False)],
)
def test_float32_takes_the_kernel_and_other_floats_the_formula(x, kernel):
    scaled.formula_runs = 0
    (y,) = scaled(x, x.dtype.type(2))
    np.testing.assert_array_equal(y, x * 2)
    assert y.dtype == x.dtype and scaled.formula_runs == (0 if kernel else 1)


def test_use_kernels_switches_them_off():
    scaled.formula_runs = 0
    with use_kernels(False):
        assert not kernels.kernels_enabled()
        scaled(x32, np.float32(2))
    assert scaled.formula_runs == 1 and kernels.kernels_enabled()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_number_of_threads_gives_the_same(threads):
    before = kernels.get_num_threads()
    try:
        kernels.set_num_threads(threads)
        assert kernels.get_num_threads() == threads
        for x in (x32, x_large):
            np.testing.assert_array_equal(scaled(x, np.float32(3))[0], x * 3)
    finally:
        kernels.set_num_threads(before)


def test_a_small_call_wakes_nobody(monkeypatch):
    scaled(x32, np.float32(2))  # compiled
    scaled(x_large, np.float32(2))
    calls, pool = [], kernels._get_pool()
    monkeypatch.setattr(pool, "run", lambda kernel, args: calls.append(kernel))
    np.testing.assert_array_equal(scaled(x32, np.float32(2))[0], x32 * 2)
    assert not calls
    scaled(x_large, np.float32(2))
    assert len(calls) == 1


def test_the_number_of_threads_is_at_least_one():
    assert kernels.available_cpus() >= 1
    with pytest.raises(ValueError, match=r"set_num_threads\(0\); expected at least 1"):
        kernels.set_num_threads(0)


def test_an_error_in_a_worker_reaches_the_caller():
    pool = kernels._Pool(2)

    def fails(t, T):
        if t == 1:
            raise ZeroDivisionError("in thread 1")

    with pytest.raises(ZeroDivisionError, match="in thread 1"):
        pool.run(fails, ())
    pool.run(lambda t, T: None, ())  # the pool is still alive
    pool.resize(1)


def test_a_kernel_that_does_not_compile_falls_back_with_one_line(capsys):
    @formula
    def doubled(x):
        return (x * 2,)

    @doubled.cpu(out=lambda x: (np.empty_like(x),))
    def broken(t, T, x, y):
        y[:] = not_a_name(x)  # noqa: F821

    for _ in range(2):
        np.testing.assert_array_equal(doubled(x32)[0], x32 * 2)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "broken cannot be compiled here, its plain formula is used instead" in printed


def test_an_in_place_kernel_writes_where_it_is_told():
    @formula
    def decay(x):
        x *= np.float32(0.5)

    @decay.cpu()
    def decay_kernel(t, T, x):
        for i in range(len(x) * t // T, len(x) * (t + 1) // T):
            x[i] *= np.float32(0.5)

    for x in (np.ones(5, np.float32), np.ones(10, np.float32)[::2], np.ones(5)):
        decay(x)
        assert (x == 0.5).all()


def test_nan_and_infinity_survive_fast_math():
    @formula
    def total(x):
        return (np.array([x.sum()]),)

    @total.cpu(out=lambda x: (np.zeros(1, np.float32),))
    def total_kernel(t, T, x, y):
        if t == 0:
            s = np.float32(0)
            for v in x:
                s += v
            y[0] = s if np.isfinite(s) else s * np.float32(1)

    x = np.ones(100, np.float32)
    for bad in (np.nan, np.inf):
        x[50] = bad
        assert not np.isfinite(total(x)[0][0])


def test_the_pool_at_rest_keeps_no_array_alive():
    x = x_large.copy()
    gone = weakref.ref(x)
    scaled(x, np.float32(2))
    del x
    assert gone() is None


@pytest.mark.parametrize("kind", ["formula", "tiles"])
def test_other_options_compile_anew(kind, monkeypatch):
    def stamp():
        def kernel(t, T, x, y):
            y[t] = x[t]

        if kind == "tiles":
            from peft_core.tile_parts import kernel as decorator

            return decorator(kernel)._cache._cache_file._source_stamp
        made = kernels._Kernel(kernel)
        made.run((x32[0], np.empty(3)))
        return made._compiled._cache._cache_file._source_stamp

    before = stamp()
    assert stamp() == before
    monkeypatch.setattr(kernels, "FAST_MATH", kernels.FAST_MATH - {"afn"})
    assert stamp() != before
