"""The pool of threads under fire: Ctrl-C at any moment, errors, other threads' kernels, another number of threads."""

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from peft_core import kernels


def script(text, *, seconds=60, **environment):
    """What a program prints; it ends in time, whatever hangs."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=seconds,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ctrl_c_arrives_when_every_worker_is_in():
    printed = script("""
        import os, signal, threading, time
        from peft_core import kernels

        kernels.set_num_threads(3)
        finished = []

        def slow(t, T):
            time.sleep(0.5 * t)
            finished.append(t)

        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            kernels.run_kernel(slow)
        except KeyboardInterrupt:
            print("interrupted", *sorted(finished))
        seen = []
        for _ in range(3):
            kernels.run_kernel(lambda t, T: seen.append(t))
        print("then", *sorted(seen))
    """)
    assert printed == "interrupted 0 1 2\nthen 0 0 0 1 1 1 2 2 2\n"


def test_ctrl_c_before_and_after_every_call():
    """Python looks for signals when a call begins and when it is over; here one comes at each of these in turn."""
    printed = script("""
        import sys, time
        from peft_core import kernels

        kernels.set_num_threads(3)
        pool, ran = kernels._get_pool(), []

        def job(t, T):
            time.sleep(0.002 * t)
            ran.append(t)

        def interrupt(frame, event, called):
            global left
            inside = frame.f_code.co_filename == kernels.__file__ and frame.f_code.co_name != "run"
            lock = event != "c_call" or called.__name__ != "__exit__"  # a lock's release itself is not interrupted
            if (inside or event.startswith("c_")) and lock:
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt

        at, left, interrupts = 0, 0, 0
        while left <= 0:
            left = at = at + 1
            ran.clear()
            try:
                sys.setprofile(interrupt)
                pool.run(job, ())
                sys.setprofile(None)
            except KeyboardInterrupt:
                interrupts += 1
            sys.setprofile(None)
            n = len(ran)
            time.sleep(0.008)
            if len(ran) != n:
                print("workers were running after step", at)
            ran.clear()
            pool.run(job, ())
            if sorted(ran) != [0, 1, 2]:
                print("after step", at, "the next job ran", ran)
        print("many" if interrupts > 8 else interrupts)
    """)
    assert printed == "many\n"


def test_the_first_of_two_interrupts_is_waited_for_by_the_next_kernel():
    pool = kernels._Pool(2)
    gate, order = threading.Event(), []

    def slow(t, T):
        if t == 0:
            raise KeyboardInterrupt
        gate.wait(10)
        order.append("slow")

    def cut(self):
        raise KeyboardInterrupt

    pool._come_to_rest = cut.__get__(pool)
    with pytest.raises(KeyboardInterrupt):
        pool.run(slow, ())
    del pool._come_to_rest
    threading.Timer(0.1, gate.set).start()
    pool.run(lambda t, T: order.append("next"), ())
    assert order == ["slow", "next", "next"]
    pool.resize(1)


def test_an_error_reaches_the_thread_whose_kernel_it_is():
    pool, lost, foreign = kernels._Pool(2), [], []

    def fails(t, T):
        if t == 1:
            raise ZeroDivisionError

    def first():
        for _ in range(3000):
            try:
                pool.run(fails, ())
                lost.append(1)
            except ZeroDivisionError:
                pass

    def second():
        for _ in range(3000):
            try:
                pool.run(lambda t, T: None, ())
            except ZeroDivisionError:
                foreign.append(1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=f) for f in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not lost and not foreign
    pool.resize(1)


@pytest.fixture
def threads():
    """The number of threads is put back afterwards."""
    before = kernels.get_num_threads()
    yield before
    kernels.set_num_threads(before)


def elsewhere(call, *args):
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


@pytest.mark.parametrize("later", [1, 2, 5])
def test_a_kernel_has_the_shares_that_its_buffers_were_made_for(threads, later):
    kernels.set_num_threads(3)
    buffer = np.zeros((kernels.get_num_threads(), 1))
    elsewhere(kernels.set_num_threads, later)

    def count(t, T, out):
        out[t] += T

    kernels.run_kernel(count, buffer)
    assert (buffer == 3).all()
    assert kernels.get_num_threads() == later
    buffer = np.zeros((later, 1))
    kernels.run_kernel(count, buffer)
    assert (buffer == later).all()


def test_another_number_of_threads_while_kernels_run(threads):
    stop, seen = threading.Event(), []

    def work():
        while not stop.is_set():
            n, shares = kernels.get_num_threads(), []
            kernels.run_kernel(lambda t, T, out: out.append((t, T)), shares)
            if sorted(shares) != [(t, n) for t in range(n)]:
                seen.append((n, shares))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for i in range(300):
        kernels.set_num_threads(1 + i % 3)
    stop.set()
    thread.join(20)
    assert not thread.is_alive() and not seen


def test_workers_that_are_not_needed_any_more_leave():
    before = set(threading.enumerate())
    pool = kernels._Pool(4)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 3
    pool.resize(2)
    for worker in workers:
        worker.join(10 if worker.name != "peft_core-1" else 0)
    assert [worker.name for worker in workers if worker.is_alive()] == ["peft_core-1"]
    pool.run(lambda t, T: None, ())
    pool.resize(1)


@pytest.mark.parametrize("value", ["abc", "0", "-2", "1.5"])
def test_a_number_of_threads_that_is_none(value):
    printed = script(
        """
        from peft_core import kernels
        for ask in (kernels.get_num_threads, kernels.tiles_supported):
            try:
                print(ask())
            except ValueError as error:
                print(error)
        """,
        PEFT_CORE_NUM_THREADS=value,
    )
    assert printed.count(f"PEFT_CORE_NUM_THREADS is {value!r}; expected a number of threads, at least 1") == 2
