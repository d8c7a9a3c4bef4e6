"""Frozen weights in the order in which the tile of ``tiles.py`` reads them, packed once and kept with the array.

The rule: a read-only array cannot change, so only read-only bfloat16 arrays are packed. (Weights mapped from a file
are read-only. Who makes a read-only view of memory and goes on writing to the memory breaks the rule.) What was packed
lives as long as the array object does. The pages of a mapped file are let go of after packing: the packed copy is read
from then on, and the system reads the file again should anybody ask.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

import numpy as np

from .dtypes import bfloat16
from .kernels import run_kernel, tiles_supported

_packed: dict[tuple[bool, tuple[int, ...]], np.ndarray] = {}
_lock = threading.Lock()


def can_pack(w: Any) -> bool:
    """True for a weight (O, I) that may be packed here: a read-only bfloat16 NumPy array, where tiles are supported."""
    return (
        isinstance(w, np.ndarray)
        and w.ndim == 2
        and w.size > 0
        and w.dtype == bfloat16
        and not w.flags.writeable
        and tiles_supported()
    )


def packed_forward(*ws: np.ndarray) -> np.ndarray:
    """The right operand of x w^T: [O/48][ceil(I/2)][48] pairs, uint32, zero padded; several weights one after another.

    ``can_pack`` must hold for each of them.
    """
    return _once(ws, True)


def packed_backward(*ws: np.ndarray) -> np.ndarray:
    """The right operand of g w: [I/48][ceil(O/2)][48] pairs, uint32, zero padded; w is all of them stacked on O.

    ``can_pack`` must hold for each of them.
    """
    return _once(ws, False)


def _once(ws: tuple[np.ndarray, ...], forward: bool) -> np.ndarray:
    for w in ws:
        if not can_pack(w):
            raise ValueError(
                f"cannot pack {type(w).__name__} of {getattr(w, 'dtype', None)} {getattr(w, 'shape', '')}; expected a "
                "read-only bfloat16 array (O, I) and a CPU with AVX512-BF16."
            )
    key = forward, tuple(map(id, ws))
    with _lock:
        if key not in _packed:
            _packed[key] = _pack_rows(ws) if forward else _pack_columns(ws)
            for w in ws:
                weakref.finalize(w, _packed.pop, key, None)  # before its id can be another array's
                drop_mapped_pages(w)
        return _packed[key]


def _pack_rows(ws: tuple[np.ndarray, ...]) -> np.ndarray:
    from . import tiles

    sizes = [-(-len(w) // tiles.COLUMNS) * tiles.COLUMNS * ((w.shape[1] + 1) // 2) for w in ws]
    out, at = np.empty(sum(sizes), np.uint32), 0
    for w, size in zip(ws, sizes, strict=True):
        run_kernel(tiles.pack_rows, np.ascontiguousarray(w).view(np.uint16), out[at : at + size])
        at += size
    return out


def _pack_columns(ws: tuple[np.ndarray, ...]) -> np.ndarray:
    from . import tiles

    w = np.ascontiguousarray(ws[0] if len(ws) == 1 else np.concatenate(ws))  # (O, I)
    out = np.empty(-(-w.shape[1] // tiles.COLUMNS) * tiles.COLUMNS * ((len(w) + 1) // 2), np.uint32)
    run_kernel(tiles.pack_columns, w.view(np.uint16), out)
    return out


def drop_mapped_pages(x: np.ndarray) -> bool:
    """Let go of the memory under ``x`` where it is mapped read-only from a file; False where it is not."""
    mapped = _map_of(x)
    if mapped is None or x.flags.writeable or not x.flags.c_contiguous or not hasattr(mapped, "madvise"):
        return False
    start = x.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages of x alone
    size = (start + x.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size <= 0:
        return False
    mapped.madvise(mmap.MADV_DONTNEED, first, size)
    return True


def _map_of(x: Any) -> mmap.mmap | None:
    while x is not None and not isinstance(x, mmap.mmap):
        x = x.obj if isinstance(x, memoryview) else getattr(x, "base", None)
    return x
