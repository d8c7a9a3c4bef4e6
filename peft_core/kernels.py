"""Fused CPU kernels beside their formulas: numba, imported at the first kernel call, on one small pool of our own.

    @formula
    def scale_rows(x, w):                                   # the definition in plain array code; GPU arrays run it
        return (x * w[:, None],)

    @scale_rows.cpu(out=lambda x, w: (np.empty_like(x),))   # the fused form: thread t of T takes its share of the rows
    def _(t, T, x, w, y):
        for i in range(len(x) * t // T, len(x) * (t + 1) // T):
            ...

Calling ``scale_rows(x, w)`` takes the kernel where every float array is a float32 NumPy array, else the formula.

Why not numba's own threads: its pool and the BLAS library's spin against each other for the same cores (a step of one
second took 35). A worker here sleeps on a lock until it is called, and ``parallel=True`` compiles four times as long.
Fast-math comes without ``nnan`` and ``ninf``: with them a diverged run shows a finite loss.
``PEFT_CORE_KERNELS=off`` uses the formulas alone, ``PEFT_CORE_TILES=off`` does without the tiles of ``tiles.py``;
``PEFT_CORE_NUM_THREADS`` sets the number of threads. Numba's own ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES``, set
together (haswell and +avx2,+fma), have everything compiled for a lesser CPU: the tiles follow.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .dtypes import bfloat16, is_float

_SMALL = 1 << 14  # elements in all arrays of a call
FAST_MATH = {"reassoc", "contract", "arcp", "nsz", "afn"}


def available_cpus() -> int:
    """How many CPUs this process may use: its affinity mask, cut by the control group's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return max(1, cpus)


_QUIT, _ASLEEP, _TEAM_WORDS = 32, 48, 64  # places in the words of tile_team.py, which says what they mean


class _Worker:
    """One thread of a pool.  The locks are bells: a ring too many or one that was missed does no harm, for it is the
    numbers that say what there is to do and what is done."""

    def __init__(self) -> None:
        self.go, self.done = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.done.acquire()
        self.number = 0  # of the last job that this worker is through with
        self.leaves = False


def _ring(bell: threading.Lock) -> None:
    if bell.locked():  # only one thread rings a bell, so it stays locked until the next line
        bell.release()


class _Pool:
    """``size`` workers; the caller is worker 0, the others are daemon threads that sleep on a lock between calls.

    Ctrl-C can arrive between any two steps of ``run``, in a notebook while the next kernel is soon to come: ``run``
    leaves with it only when no worker computes any more.
    """

    def __init__(self, size: int) -> None:
        self.size = 1
        self._job: tuple[int, Callable, tuple, int, int] | None = None
        self._number = 0
        self._error: BaseException | None = None
        self._busy = threading.Lock()  # two Python threads may both call a kernel
        self._workers: list[_Worker] = []
        self._team: np.ndarray | None = None  # the words of tile_team.py, imported late: see there
        self._serve: Any = None
        self._awake = False  # the job is tile_team.serve, and the workers are in it or have left it by themselves
        self.resize(size)

    def resize(self, size: int) -> None:
        """Have ``size`` workers as soon as no kernel runs."""
        with self._busy:
            self._rest()
            workers, leaving = self._workers[: size - 1], self._workers[size - 1 :]
            for t in range(len(workers) + 1, size):
                workers.append(_Worker())
                thread = threading.Thread(target=self._work, args=(t, workers[-1]), daemon=True, name=f"peft_core-{t}")
                thread.start()
            self._workers, self.size = workers, size
            for worker in leaving:
                worker.leaves = True
                _ring(worker.go)

    def _work(self, t: int, worker: _Worker) -> None:
        while True:
            worker.go.acquire()
            job = self._job
            if worker.leaves:
                return
            if job is None or job[0] == worker.number:
                continue
            number, kernel, args, shares, size = job
            try:
                for share in range(t, shares, size):
                    kernel(share, shares, *args)
            except BaseException as error:
                self._error = error
            del job, kernel, args  # a worker at rest keeps no array alive
            worker.number = number
            _ring(worker.done)

    def run(self, kernel: Callable, args: tuple, shares: int | None = None) -> None:
        """Run the ``shares`` of a kernel's work, by default as many as there are workers."""
        with self._busy:
            self._rest()  # from being awake, or from a second interrupt that cut the wait after the first one short
            self._number, self._error = self._number + 1, None
            shares = shares or self.size
            self._job = self._number, kernel, args, shares, self.size
            try:
                self._call()
                for share in range(0, shares, self.size):
                    kernel(share, shares, *args)
                self._wait()
            except BaseException:
                self._come_to_rest()
                raise
            self._job = None
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _call(self) -> None:
        for worker in self._workers:
            _ring(worker.go)

    def _wait(self) -> None:
        for worker in self._workers:
            while worker.number != self._number:
                worker.done.acquire()

    def _come_to_rest(self) -> None:
        """Wait for all workers, however often the wait is interrupted."""
        while self._job is not None:
            try:
                self._call()  # who was not called yet is waited for like the others
                self._wait()
                self._job = None
            except BaseException:  # the exception that led here is the one that is raised
                continue

    def _rest(self) -> None:
        """Have no job: the workers leave ``serve`` for their bells, and what was interrupted comes to its end."""
        if self._job is None:
            return
        if self._team is not None:
            self._team[_QUIT] = 1
        self._come_to_rest()
        if self._team is not None:
            self._team[_QUIT] = self._team[_ASLEEP] = 0
        self._awake = False

    def run_awake(self, kernel: Callable, args: tuple) -> None:
        """Run ``kernel(team, parts, *args)``, which shares its parts with the workers, awake from then on for a moment.

        It returns when all parts are done.  See tile_team.py.
        """
        with self._busy:
            if self._team is None:
                from . import tile_team

                self._team, self._serve = np.zeros(_TEAM_WORDS, np.int64), tile_team.serve
            if not self._awake or self._team[_ASLEEP]:
                self._rest()
            if not self._awake and self.size > 1:
                self._number += 1
                self._job = self._number, self._serve, (self._team,), self.size, self.size
                self._awake = True
                self._call()
            kernel(self._team, getattr(_told, "n", None) or self.size, *args)


_pool: _Pool | None = None
_pool_pid = 0
_told = threading.local()  # .n: what this Python thread was last told to be the number of threads


def _get_pool() -> _Pool:
    global _pool, _pool_pid
    if _pool is None or _pool_pid != os.getpid():  # threads do not survive a fork
        _pool, _pool_pid = _Pool(_threads_at_start()), os.getpid()
    return _pool


def _threads_at_start() -> int:
    text = os.environ.get("PEFT_CORE_NUM_THREADS", "").strip()
    if not text:
        return available_cpus()
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"PEFT_CORE_NUM_THREADS is {text!r}; expected a number of threads, at least 1, or nothing.")
    return int(text)


def get_num_threads() -> int:
    """The number of threads that a kernel runs on."""
    _told.n = n = _get_pool().size
    return n


def set_num_threads(n: int) -> None:
    """Run kernels on ``n`` threads from now on.  Raises ValueError for n < 1."""
    if n < 1:
        raise ValueError(f"set_num_threads({n}); expected at least 1.")
    _get_pool().resize(n)
    _told.n = n


_OFF = {"off", "0", "no"}
_enabled = os.environ.get("PEFT_CORE_KERNELS", "on").lower() not in _OFF


def kernels_enabled() -> bool:
    """False where ``PEFT_CORE_KERNELS=off`` or ``use_kernels(False)`` asked for the formulas alone."""
    return _enabled


class use_kernels:
    """Context manager that switches the fused kernels on or off, for tests and for comparisons."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __enter__(self) -> None:
        global _enabled
        self._before, _enabled = _enabled, self.enabled

    def __exit__(self, *exc: object) -> None:
        global _enabled
        _enabled = self._before


def tiles_supported(dtype: Any = bfloat16) -> bool:
    """True where kernels on the register tile of ``tiles.py`` run with operands of ``dtype``, bfloat16 or float32.

    That takes kernels on, ``PEFT_CORE_TILES`` not off, and a tile that numba can compile for this CPU.
    """
    wanted = _enabled and os.environ.get("PEFT_CORE_TILES", "on").lower() not in _OFF
    return wanted and dtype in (bfloat16, np.float32) and _tiles_run(dtype == bfloat16)


@functools.cache
def _tiles_run(half: bool) -> bool:
    _get_pool()  # what is wrong with it is not the tiles' fault
    try:
        from . import tiles

        # pairs of ones in bf16, whose float32 is 1.0019; and twos
        a, w, c = np.full(8, 0x3F803F80, np.uint32), np.full(48, 0x40004000, np.uint32), np.zeros(8 * 48, np.float32)
        if half:
            run_kernel(tiles.probe, a, w, c)
            return bool((c == 4).all())
        run_kernel(tiles.probe, a.view(np.float32), w.view(np.float32), c)
        return bool((c == a.view(np.float32)[0] * w.view(np.float32)[0]).all())
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"peft_core: the {'bfloat16' if half else 'float32'} tiles cannot be compiled here, plain formulas are "
              f"used instead ({type(error).__name__}: {first})", file=sys.stderr)  # fmt: skip
        return False


def run_kernel(compiled: Callable, *args: Any) -> None:
    """Run ``compiled(t, T, *args)``, an ``njit(nogil)`` function, for every share t of T at once.

    T is what this Python thread last heard from ``get_num_threads()``, and so what it made buffers for: another one may
    have called ``set_num_threads`` since. The pool works on T shares whatever its size is now.
    """
    _get_pool().run(compiled, args, getattr(_told, "n", None))


def dispatcher(function: Callable, *parts: str) -> Any:
    """numba's, which compiles ``function`` for types as they come and keeps it on disk.

    It compiles anew when the function's own file has changed. What else goes into the machine code, the options here
    and ``parts``, is in the stamp of the file too.
    """
    import numba

    made: Any = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST_MATH)(function)
    index: Any = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if hasattr(index, "_source_stamp"):
        index._source_stamp = (index._source_stamp, *parts, *sorted(FAST_MATH))
    return made


@functools.cache
def team_supported() -> bool:
    """True where ``run_team`` works: on x86-64, whose clock and pause tile_team.py waits by."""
    return platform.machine().lower() in ("x86_64", "amd64")


def run_team(compiled: Callable, *args: Any) -> None:
    """Run ``compiled(team, parts, *args)``, a kernel built on ``tile_team.share``: for calls of microseconds."""
    _get_pool().run_awake(compiled, args)


class _Kernel:
    """A numba function compiled at its first call with a new set of argument types."""

    def __init__(self, function: Callable) -> None:
        self.function, self.broken = function, False
        self._compiled: Any = None  # numba's dispatcher
        self._known: set[tuple] = set()

    def run(self, args: tuple) -> bool:
        """Run on the pool; False if it cannot be compiled here (said once, and the formula is used from then on)."""
        # read-only arrays (mapped weights) are another type to numba
        signature = tuple((a.dtype, a.ndim, a.flags.writeable) if isinstance(a, np.ndarray) else type(a) for a in args)
        if signature not in self._known:
            try:
                import numba  # costs 0.3 s: nobody pays for it before the first kernel

                if self._compiled is None:
                    self._compiled = dispatcher(self.function)
                self._compiled.compile(tuple(numba.typeof(a) for a in (0, 1, *args)))
            except Exception as error:
                self.broken = True
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                print(f"peft_core: kernel {self.function.__qualname__} cannot be compiled here, its plain formula is "
                      f"used instead ({type(error).__name__}: {first})", file=sys.stderr)  # fmt: skip
                return False
            self._known.add(signature)
        if sum([a.size for a in args if isinstance(a, np.ndarray)]) <= _SMALL:
            self._compiled(0, 1, *args)  # done before another thread would be awake
        else:
            _get_pool().run(self._compiled, args)
        return True


class Formula:
    """A function of arrays with an optional fused CPU kernel.  See the module's docstring."""

    def __init__(self, function: Callable) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.kernel: _Kernel | None = None
        self._out: Callable[..., tuple] | None = None

    def cpu(self, out: Callable[..., tuple] | None = None) -> Callable[[Callable], Formula]:
        """Attach the kernel ``(t, T, *args, *out(*args))``; without ``out`` it works in place on its arguments."""

        def attach(kernel: Callable) -> Formula:
            self.kernel = _Kernel(kernel)
            self._out = out
            return self

        return attach

    def __call__(self, *args: Any) -> Any:
        """The formula's value: what ``function(*args)`` returns, a tuple of arrays or (in place) None."""
        if self.kernel is None or self.kernel.broken or not _enabled or not _takes_kernel(args):
            return self.function(*args)
        if self._out is None:  # in place: a copy of a strided argument would lose what is written
            strided = any(isinstance(a, np.ndarray) and not a.flags.c_contiguous for a in args)
            return None if not strided and self.kernel.run(args) else self.function(*args)
        inputs = tuple(np.ascontiguousarray(a) if isinstance(a, np.ndarray) and a.ndim else a for a in args)
        outs = self._out(*inputs)
        return outs if self.kernel.run((*inputs, *outs)) else self.function(*args)


def _takes_kernel(args: tuple) -> bool:
    arrays = [a for a in args if hasattr(a, "dtype") and hasattr(a, "ndim")]
    return all(
        isinstance(a, np.ndarray | np.generic) and (not is_float(a.dtype) or a.dtype == np.float32) for a in arrays
    )


def formula(function: Callable) -> Formula:
    """Decorator: ``function`` is the plain array form of something that may get a fused kernel."""
    return Formula(function)
