"""What torch.cuda tells about the GPUs; each call asks for CuPy, none but ``is_available`` fails quietly without it."""

from __future__ import annotations

from typing import Any

from . import backend


def device_count() -> int:
    """The number of GPUs that can be used, 0 without CuPy or a driver."""
    return backend.gpu_count()


def is_available() -> bool:
    """True if there is a GPU and CuPy to use it."""
    return device_count() > 0


def synchronize(device: Any = None) -> None:
    """Wait until the GPU has done what it was given.  Raises RuntimeError without CuPy."""
    backend.gpu_synchronize(device)


def memory_allocated(device: Any = None) -> int:
    """Bytes that arrays occupy on the GPU.  Raises RuntimeError without CuPy."""
    return backend.gpu_bytes(device)[0]


def memory_reserved(device: Any = None) -> int:
    """Bytes that the pool holds on the GPU, used or not.  Raises RuntimeError without CuPy."""
    return backend.gpu_bytes(device)[1]


def empty_cache() -> None:
    """Give memory that no array uses back to the driver; nothing where no GPU was used."""
    backend.gpu_empty_cache()
