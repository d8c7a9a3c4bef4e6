"""Matrix products on the CPU: NumPy's BLAS, one thread each, on our own pool.

BLAS libraries keep their threads spinning between calls. On cores that anything else uses too, a second process or our
own kernels, that costs a factor of ten and more. So BLAS is held to one thread inside a product and the product is cut
into shares that the pool of ``kernels.py`` works on; outside, the caller's setting stands.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .backend import Array, xp_of
from .kernels import get_num_threads, run_kernel

_SMALL = 1 << 21  # multiply-adds below which handing out shares costs more than it gains


@functools.cache
def _libraries() -> list[Any]:
    """The BLAS libraries in this process, as things with get_num_threads and set_num_threads."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas").lib_controllers


class _OneThread:
    """Inside, BLAS runs on the thread that calls it."""

    def __enter__(self) -> None:
        self.before = [(library, library.get_num_threads()) for library in _libraries()]
        for library, n in self.before:
            if n != 1:
                library.set_num_threads(1)

    def __exit__(self, *exc: object) -> None:
        for library, n in self.before:
            if n != 1:
                library.set_num_threads(n)


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b as NumPy's matmul, of float32 or float64 arrays with two or more dimensions each; into ``out`` if given.

    The same bits from run to run with the same number of threads.
    """
    xp = xp_of(a, b)
    if xp is not np:
        return xp.matmul(a, b, out=out)
    with _OneThread():
        rows, columns = a.shape[-2], b.shape[-1]
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        work = rows * columns * a.shape[-1] * int(np.prod(lead, dtype=np.int64))
        if work < _SMALL or get_num_threads() == 1:
            return np.matmul(a, b, out=out)
        if out is None:
            out = np.empty((*lead, rows, columns), np.result_type(a, b))
        run_kernel(_by_rows if rows >= columns or rows >= 64 else _by_columns, a, b, out, np.geterr())
        return out


def _by_rows(t: int, T: int, a: Array, b: Array, out: Array, errors: Any) -> None:
    share = slice(a.shape[-2] * t // T, a.shape[-2] * (t + 1) // T)
    with np.errstate(**errors):  # each thread has its own
        np.matmul(a[..., share, :], b, out=out[..., share, :])


def _by_columns(t: int, T: int, a: Array, b: Array, out: Array, errors: Any) -> None:
    share = slice(b.shape[-1] * t // T, b.shape[-1] * (t + 1) // T)
    with np.errstate(**errors):
        np.matmul(a, b[..., share], out=out[..., share])
