"""Frozen weights in the order in which the tile of ``tiles.py`` reads them, packed once and kept with the array.

Only read-only arrays are packed, such as weights mapped from a file: they cannot change (the rule: ``kept.py``). What
was packed lives as long as the array object does. The pages of a mapped file are let go of after packing: the packed
copy is read from then on, and the system reads the file again should anybody ask.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np

from .dtypes import bfloat16, is_float
from .files import FileMap
from .kept import Kept
from .kernels import run_kernel, tiles_supported

_packed = Kept()
_lock = threading.Lock()


def can_pack(w: Any, dtype: Any) -> bool:
    """True for a weight (O, I) that may be packed here for products in ``dtype``: a read-only matrix of floats."""
    if not isinstance(w, np.ndarray):
        return False
    if w.flags.writeable:
        _packed.forget(w)
        return False
    return w.ndim == 2 and w.size > 0 and is_float(w.dtype) and w.dtype.itemsize <= 4 and tiles_supported(dtype)


def words(dtype: Any) -> type:
    """What kernels on tiles hold operands of ``dtype`` in: uint32 (two bfloat16) or float32."""
    return np.uint32 if dtype == bfloat16 else np.float32


def elements(x: np.ndarray, dtype: Any) -> np.ndarray:
    """x rounded to ``dtype`` and contiguous, as kernels on tiles read it: the bits (uint16) of bfloat16, or float32."""
    if x.dtype == bfloat16 and dtype == np.float32:  # the upper half of a float32: three times as fast as astype
        return (np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    x = np.ascontiguousarray(x.astype(dtype, copy=False))
    return x.view(np.uint16) if dtype == bfloat16 else x


def packed_forward(*ws: np.ndarray, dtype: Any) -> np.ndarray:
    """The right operand of x w^T: [O/48][I in words][48] words, zero padded; several weights one after another.

    ``can_pack`` must hold for each of them.
    """
    return _once(ws, dtype, True)


def packed_backward(*ws: np.ndarray, dtype: Any) -> np.ndarray:
    """The right operand of g w: [I/48][O in words][48] words, zero padded; w is all of them stacked on O.

    ``can_pack`` must hold for each of them.
    """
    return _once(ws, dtype, False)


def _once(ws: tuple[np.ndarray, ...], dtype: Any, forward: bool) -> np.ndarray:
    key = forward, words(dtype)
    found = _packed.find(key, ws)
    if found is not None:
        return found
    for w in ws:
        if not can_pack(w, dtype):
            raise ValueError(
                f"cannot pack {type(w).__name__} of {getattr(w, 'dtype', None)} {getattr(w, 'shape', '')} for {dtype}; "
                "expected a read-only matrix of floats and a CPU whose tiles compute in bfloat16 or float32."
            )
    with _lock:
        found = _packed.find(key, ws)  # another thread was here first
        if found is None:
            found = _pack_rows(ws, dtype) if forward else _pack_columns(ws, dtype)
            _packed.keep(key, ws, found)
            for w in ws:
                drop_mapped_pages(w)
        return found


def _room(size: int, kind: type) -> np.ndarray:
    """``size`` words from the start of a page, in small pages.

    NumPy asks for huge ones where it allocates much. They make no product faster here, but packing slower: a thread
    waits for 2 MB that nobody has used yet, on a virtual machine ten times as long as for pages that are at hand.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return np.frombuffer(mmap.mmap(-1, max(size, 1) * 4, **private), kind, size)


def _pack_rows(ws: tuple[np.ndarray, ...], dtype: Any) -> np.ndarray:
    from . import packing_tiles, tiles

    per = 2 if dtype == bfloat16 else 1
    sizes = [-(-len(w) // tiles.COLUMNS) * tiles.COLUMNS * -(-w.shape[1] // per) for w in ws]
    out, at = _room(sum(sizes), words(dtype)), 0
    for w, size in zip(ws, sizes, strict=True):
        run_kernel(packing_tiles.pack_rows, elements(w, dtype), out[at : at + size])
        at += size
    return out


def _pack_columns(ws: tuple[np.ndarray, ...], dtype: Any) -> np.ndarray:
    from . import packing_tiles, tiles

    w = elements(ws[0] if len(ws) == 1 else np.concatenate(ws), dtype)  # (O, I)
    per = 4 // w.itemsize
    out = _room(-(-w.shape[1] // tiles.COLUMNS) * tiles.COLUMNS * -(-len(w) // per), words(dtype))
    run_kernel(packing_tiles.pack_columns, w, out)
    return out


def drop_mapped_pages(x: np.ndarray) -> bool:
    """Let go of the memory under ``x`` where it is mapped from a file of ours; False where it is not."""
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


def _map_of(x: Any) -> FileMap | None:
    while x is not None and not isinstance(x, mmap.mmap):
        x = x.obj if isinstance(x, memoryview) else getattr(x, "base", None)
    return x if isinstance(x, FileMap) else None
