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
``PEFT_CORE_NUM_THREADS`` sets the number of threads.
"""

from __future__ import annotations

import functools
import os
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


class _Pool:
    """``size`` workers; the caller is worker 0, the others are daemon threads that sleep on a lock between calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._job: tuple = (None, ())
        self._error: BaseException | None = None
        self._busy = threading.Lock()  # two Python threads may both call a kernel
        self._team: np.ndarray | None = None  # the words of tile_team.py, imported late: see there
        self._serve: Any = None
        self._awake = False  # the workers are in tile_team.serve, or have left it and were not called since
        self._go = [threading.Lock() for _ in range(size)]
        self._done = [threading.Lock() for _ in range(size)]
        for lock in self._go + self._done:
            lock.acquire()
        for t in range(1, size):
            threading.Thread(target=self._work, args=(t,), daemon=True, name=f"peft_core-{t}").start()

    def _work(self, t: int) -> None:
        while True:
            self._go[t].acquire()
            kernel, args = self._job
            if kernel is None:
                return
            try:
                kernel(t, self.size, *args)
            except BaseException as error:
                self._error = error
            del kernel, args  # a worker at rest keeps no array alive
            self._done[t].release()

    def run(self, kernel: Callable, args: tuple) -> None:
        with self._busy:
            self._rest()
            self._error = None
            self._start(kernel, args)
            try:
                kernel(0, self.size, *args)
            finally:
                for t in range(1, self.size):
                    self._done[t].acquire()
                self._job = (None, ())
        if self._error is not None:
            raise self._error

    def _start(self, kernel: Callable | None, args: tuple) -> None:
        self._job = (kernel, args)
        for t in range(1, self.size):
            self._go[t].release()

    def run_awake(self, kernel: Callable, args: tuple) -> None:
        """Run ``kernel(team, parts, *args)``, which shares its parts with the workers, awake from then on for a moment.

        It returns when all parts are done.  See tile_team.py.
        """
        with self._busy:
            if self._team is None:
                from . import tile_team

                self._team, self._serve = np.zeros(_TEAM_WORDS, np.int64), tile_team.serve
            if self._awake and self._team[_ASLEEP]:
                self._rest()
            if not self._awake and self.size > 1:
                self._start(self._serve, (self._team,))
                self._awake = True
            kernel(self._team, self.size, *args)

    def _rest(self) -> None:
        """Have the workers leave ``serve`` for their locks: a call for all of them waits for that."""
        if self._awake and self._team is not None:
            self._team[_QUIT] = 1
            for t in range(1, self.size):
                self._done[t].acquire()
            self._team[_QUIT] = self._team[_ASLEEP] = 0
            self._job, self._awake = (None, ()), False

    def close(self) -> None:
        with self._busy:
            self._rest()
            self._start(None, ())


_pool: _Pool | None = None
_pool_pid = 0


def _get_pool() -> _Pool:
    global _pool, _pool_pid
    if _pool is None or _pool_pid != os.getpid():  # threads do not survive a fork
        size = int(os.environ.get("PEFT_CORE_NUM_THREADS") or available_cpus())
        _pool, _pool_pid = _Pool(max(1, size)), os.getpid()
    return _pool


def get_num_threads() -> int:
    """The number of threads that a kernel runs on."""
    return _get_pool().size


def set_num_threads(n: int) -> None:
    """Run kernels on ``n`` threads from now on.  Raises ValueError for n < 1."""
    global _pool, _pool_pid
    if n < 1:
        raise ValueError(f"set_num_threads({n}); expected at least 1.")
    if _pool is not None and _pool_pid == os.getpid():
        _pool.close()
    _pool, _pool_pid = _Pool(n), os.getpid()


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

    That takes AVX-512 (AVX512-BF16 for bfloat16), kernels on, and ``PEFT_CORE_TILES`` not off.
    """
    wanted = _enabled and os.environ.get("PEFT_CORE_TILES", "on").lower() not in _OFF
    return wanted and dtype in (bfloat16, np.float32) and _tiles_run(dtype == bfloat16)


@functools.cache
def _tiles_run(half: bool) -> bool:
    try:
        from llvmlite import binding

        features = binding.get_host_cpu_features()
        if not (features.get("avx512f") and (features.get("avx512bf16") or not half)):
            return False
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
    """Run ``compiled(t, T, *args)``, an ``njit(nogil)`` function, on every thread t of the pool's T at once."""
    _get_pool().run(compiled, args)


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
                    self._compiled = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=FAST_MATH)(
                        self.function
                    )
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
