"""Freed memory kept for the next array instead of being returned: a step frees and asks for the same sizes again.

glibc maps every large array anew, and the system clears each 4 KiB page of it when it is first touched. For the
activations of a training step that costs some 8 % of the time.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from types import TracebackType
from typing import Any

from .workspace import workspace

# mallopt's names in <malloc.h>, and glibc's own starting values (mallopt(3))
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NATURAL = {_MMAP_THRESHOLD: 128 << 10, _TRIM_THRESHOLD: 128 << 10, _TOP_PAD: 0}
_KEEPING = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 64 << 20}


@functools.cache
def _glibc() -> Any:
    """The C library if it has mallopt and malloc_trim, else None (musl, macOS, Windows)."""
    try:
        library = ctypes.CDLL(None)
        return library if library.gnu_get_libc_version and library.mallopt and library.malloc_trim else None
    except (OSError, AttributeError, TypeError):
        return None


class keep_freed_memory:
    """Context manager: memory freed inside stays with the process; what is left over is returned at the end.

    With it go the kernels' work buffers. Where the C library is not glibc nothing else happens. May be nested and used
    from several threads: the last one out returns the memory. Settings of the environment (MALLOC_TRIM_THRESHOLD_ and
    the like) are replaced by glibc's own values afterwards, for mallopt cannot be asked.
    """

    _lock = threading.Lock()
    _inside = 0

    def __enter__(self) -> None:
        self._change(1)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._change(-1)

    @classmethod
    def _change(cls, by: int) -> None:
        library = _glibc()
        with cls._lock:
            cls._inside += by
            if cls._inside != (1 if by > 0 else 0):
                return
            if by < 0:
                workspace.clear()  # as large as the longest row wanted it
            if library is not None:
                for name, value in (_KEEPING if by > 0 else _NATURAL).items():
                    library.mallopt(name, value)
                if by < 0:
                    library.malloc_trim(0)
