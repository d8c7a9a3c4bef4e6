"""Work buffers that kernels use again from call to call: fresh ones would cost a page fault every 4 KiB, each time."""

from __future__ import annotations

import math
import threading
from types import TracebackType
from typing import Any

import numpy as np

_LINE = 64  # bytes of a cache line: a vector that lies across two costs two


class Workspace:
    """Named flat arrays that only grow.  ``with workspace:`` while their contents matter: one user at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._arrays: dict[str, np.ndarray] = {}

    def __enter__(self) -> Workspace:
        self._lock.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release()

    def get(self, name: str, *shape: int, dtype: Any = np.uint32) -> np.ndarray:
        """An array of this shape with whatever was left in it."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        held = self._arrays.get(name)
        if held is None or held.nbytes < size:
            held = np.empty(size + _LINE, np.uint8)
            held = self._arrays[name] = held[-held.ctypes.data % _LINE :]
        return held[:size].view(dtype).reshape(shape)

    def clear(self) -> None:
        """Let go of all of it."""
        with self:
            self._arrays.clear()


workspace = Workspace()
