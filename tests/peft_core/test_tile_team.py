"""A call shared with workers that are awake: every part once, whoever is there to do it."""

import threading
import time

import numpy as np
import pytest

from peft_core import kernels

pytestmark = pytest.mark.skipif(
    not (kernels.tiles_supported(np.float32) and kernels.team_supported()), reason="no tiles on this CPU"
)


@pytest.fixture(scope="module")
def counted():
    """A kernel that adds 1 to its part of x, and 1 to y at the number of each part."""
    from numba import njit

    from peft_core.kernels import FAST_MATH
    from peft_core.tile_team import share

    options = {"nogil": True, "error_model": "numpy", "fastmath": FAST_MATH}

    @njit(**options)
    def part(t, T, x, y):
        for i in range(len(x) * t // T, len(x) * (t + 1) // T):
            x[i] += 1
        y[t] += 1

    @njit(**options)
    def kernel(team, parts, x, y):
        share(team, parts, part, (x, y))

    return kernel


@pytest.fixture
def pool():
    before = kernels.get_num_threads()
    yield kernels._get_pool
    kernels.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_part_is_done_once(threads, counted, pool):
    kernels.set_num_threads(threads)
    x, y = np.zeros(1000, np.float32), np.zeros(threads, np.int64)
    for n in range(1, 501):
        kernels.run_team(counted, x, y)
        assert (x == n).all() and (y == n).all()  # done when the call returns
        if n % 50 == 0:
            time.sleep(0.002)  # the workers go to sleep


def test_nobody_is_waited_for_who_has_not_begun(counted):
    x, y = np.zeros(10, np.float32), np.zeros(5, np.int64)
    counted(np.zeros(kernels._TEAM_WORDS, np.int64), 5, x, y)  # a team without workers
    assert (x == 1).all() and (y == 1).all()


def test_a_call_returns_when_the_slowest_part_is_done(pool):
    from numba import njit

    from peft_core.kernels import FAST_MATH
    from peft_core.tile_team import share

    options = {"nogil": True, "error_model": "numpy", "fastmath": FAST_MATH}

    @njit(**options)
    def part(t, T, y):
        number = y[t]
        for i in range(t * 2_000_000):
            number = (number * 1103515245 + 12345 + i) % 2147483648
        y[t] = number | 1

    @njit(**options)
    def kernel(team, parts, y):
        share(team, parts, part, (y,))

    kernels.set_num_threads(2)
    for _ in range(40):
        y = np.zeros(2, np.int64)
        kernels.run_team(kernel, y)
        assert y.all()


def test_workers_leave_when_nothing_comes_and_are_called_again(counted, pool):
    kernels.set_num_threads(3)
    x, y = np.zeros(10, np.float32), np.zeros(3, np.int64)
    for n in range(1, 4):
        kernels.run_team(counted, x, y)
        assert pool()._awake
        deadline = time.monotonic() + 30
        while pool()._team[kernels._ASLEEP] < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert pool()._team[kernels._ASLEEP] == 2 and (y == n).all()


def test_kernels_of_both_kinds_in_turn(counted, pool):
    kernels.set_num_threads(3)
    x, y, seen = np.zeros(10, np.float32), np.zeros(3, np.int64), []
    for n in range(1, 101):
        kernels.run_team(counted, x, y)
        kernels.run_kernel(lambda t, T: seen.append(t))
        assert sorted(seen) == [0, 1, 2] and (y == n).all()
        seen.clear()


def test_two_threads_call_at_once(counted, pool):
    kernels.set_num_threads(2)
    arrays = [(np.zeros(100, np.float32), np.zeros(2, np.int64)) for _ in range(3)]

    def call(x, y):
        for _ in range(300):
            kernels.run_team(counted, x, y)

    threads = [threading.Thread(target=call, args=pair) for pair in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((x == 300).all() and (y == 300).all() for x, y in arrays)


def test_a_pool_that_is_closed_lets_its_workers_go(counted, pool):
    kernels.set_num_threads(1)
    before = set(threading.enumerate())
    kernels.set_num_threads(4)
    kernels.run_team(counted, np.zeros(10, np.float32), np.zeros(4, np.int64))
    workers = set(threading.enumerate()) - before
    assert len(workers) == 3
    kernels.set_num_threads(1)
    for worker in workers:
        worker.join(timeout=30)
    assert not any(worker.is_alive() for worker in workers)
