"""The CUDA device under the names of ``torch.cuda``: is there one, and how much of its memory is in use.

Without a CUDA device the questions answer False and 0 and ``empty_cache()`` does nothing, as in torch; what needs one
raises RuntimeError. The numbers are those of CuPy's memory pool, in bytes.
"""

from __future__ import annotations

from typing import Any

from .. import backend
from . import amp

__all__ = [
    "amp", "current_device", "device_count", "empty_cache", "get_device_name", "is_available", "is_bf16_supported",
    "max_memory_allocated", "memory_allocated", "memory_reserved", "reset_peak_memory_stats", "synchronize",
]  # fmt: skip

_watch: Any = None  # the running peak per device, from the first question about it on


def is_available() -> bool:
    """True if CuPy is installed and sees a CUDA device."""
    return device_count() > 0


def device_count() -> int:
    """How many CUDA devices there are; 0 without CuPy."""
    return backend.cuda_device_count()


def is_bf16_supported() -> bool:
    """True where there is a CUDA device: bfloat16 products are summed in float32 on any of them."""
    return is_available()


def memory_allocated(device: Any = None) -> int:
    """Bytes of arrays that are alive on ``device``."""
    return _of_pool("used_bytes", device)


def memory_reserved(device: Any = None) -> int:
    """Bytes that the pool holds on ``device``, in use or not."""
    return _of_pool("total_bytes", device)


def max_memory_allocated(device: Any = None) -> int:
    """The largest ``memory_allocated`` since the first call of this or of ``reset_peak_memory_stats``."""
    cupy = backend.cupy_or_none()
    if cupy is None:
        return 0
    index = _index(cupy, device)
    return max(_watched(cupy).peak.get(index, 0), memory_allocated(index))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let ``max_memory_allocated`` start again from what is in use now."""
    cupy = backend.cupy_or_none()
    if cupy is not None:
        index = _index(cupy, device)
        _watched(cupy).peak[index] = memory_allocated(index)


def empty_cache() -> None:
    """Give memory that the pool holds and no array uses back to the device."""
    cupy = backend.cupy_or_none()
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()


def synchronize(device: Any = None) -> None:
    """Wait until everything asked of ``device`` is done.  Raises RuntimeError without a CUDA device."""
    cupy = _needed("synchronize()")
    with cupy.cuda.Device(_index(cupy, device)) as current:
        current.synchronize()


def current_device() -> int:
    """The number of the device that new arrays go to.  Raises RuntimeError without a CUDA device."""
    return int(_needed("current_device()").cuda.Device().id)


def get_device_name(device: Any = None) -> str:
    """What the maker calls it.  Raises RuntimeError without a CUDA device."""
    cupy = _needed("get_device_name()")
    return cupy.cuda.runtime.getDeviceProperties(_index(cupy, device))["name"].decode()


def _needed(what: str) -> Any:
    cupy = backend.cupy_or_none()
    if cupy is None:
        raise RuntimeError(f"cuda.{what} without a CUDA device; expected an NVIDIA GPU and the package cupy-cuda12x or "
                           "cupy-cuda13x. Ask cuda.is_available() first.")  # fmt: skip
    return cupy


def _index(cupy: Any, device: Any) -> int:
    """The number meant by None (the current device), a number, "cuda:1" or a Device."""
    if device is None:
        return int(cupy.cuda.Device().id)
    if isinstance(device, int):
        return device
    found = backend.as_device(device)
    if found.index is None:
        raise ValueError(f"device {str(found)!r} has no CUDA memory; expected 'cuda', 'cuda:<number>' or a number.")
    return found.index


def _of_pool(question: str, device: Any) -> int:
    cupy = backend.cupy_or_none()
    if cupy is None:
        return 0
    with cupy.cuda.Device(_index(cupy, device)):
        return int(getattr(cupy.get_default_memory_pool(), question)())


def _watched(cupy: Any) -> Any:
    """The hook that follows the pool's allocations; it is put in place once."""
    global _watch
    if _watch is None:

        class Watch(cupy.cuda.MemoryHook):  # type: ignore[misc]  # the class is only known once CuPy is
            """Notes the most that was in use at any allocation."""

            name = "PeakMemory"

            def __init__(self) -> None:
                self.peak: dict[int, int] = {}

            def malloc_postprocess(self, **arguments: Any) -> None:
                index = arguments["device_id"]
                self.peak[index] = max(self.peak.get(index, 0), cupy.get_default_memory_pool().used_bytes())

        _watch = Watch()
        _watch.__enter__()
    return _watch
