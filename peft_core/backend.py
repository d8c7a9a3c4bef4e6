"""Where arrays live. The array decides the backend: NumPy is the CPU, CuPy an NVIDIA GPU; there is no global device.

CuPy is imported when a CUDA device is first asked for, never before: until then no CuPy array can exist, so that
"is it in sys.modules" answers for every array at no cost.
"""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

_PIECE = 1 << 22  # elements looked at in one go
Array = Any  # numpy.ndarray or cupy.ndarray: the two share the protocol that the ops are written in


def xp_of(*arrays: Array) -> Any:
    """The array module (numpy or cupy) that owns the arrays; scalars belong to numpy."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and any(isinstance(a, cupy.ndarray) for a in arrays):
        return cupy
    return np


@dataclass(frozen=True)
class Device:
    """A place for arrays: ``type`` "cpu" or "cuda", ``index`` the GPU's number (None for the CPU)."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __repr__(self) -> str:
        return f"device({str(self)!r})"


CPU = Device("cpu")


def as_device(spec: str | Device | None) -> Device:
    """The device meant by "cpu", "cuda", "cuda:1" or a Device (None: the CPU).  Raises ValueError for another name."""
    if spec is None:
        return CPU
    if isinstance(spec, Device):
        return spec
    kind, _, index = spec.partition(":")
    if kind == "cpu" and not index:
        return CPU
    if kind == "cuda" and (not index or index.isdigit()):
        return Device("cuda", int(index or 0))
    raise ValueError(f"device {spec!r} is not known; expected 'cpu', 'cuda' or 'cuda:<number>'.")


def device(spec: str | Device, index: int | None = None) -> Device:
    """The device meant by ("cuda:1"), ("cuda", 1) or ("cpu"): torch's name for ``as_device``."""
    return as_device(spec if index is None else f"{spec}:{index}")


def device_of(array: Array) -> Device:
    """The device that holds ``array``."""
    return CPU if xp_of(array) is np else Device("cuda", int(array.device.id))


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            "a CUDA device was asked for but CuPy is not installed; expected the package cupy-cuda12x or cupy-cuda13x. "
            "Install the extra 'cuda12' or 'cuda13' of this project."
        ) from error
    return cupy


def cupy_or_none() -> Any:
    """CuPy if it can be imported and sees a CUDA device, else None."""
    if importlib.util.find_spec("cupy") is None:
        return None
    try:
        cupy = _cupy()
        return cupy if cupy.cuda.runtime.getDeviceCount() else None
    except Exception:  # a driver that is missing or too old has many names, and all of them mean: no device
        return None


def cuda_device_count() -> int:
    """How many CUDA devices this process can use: 0 without CuPy."""
    cupy = cupy_or_none()
    return 0 if cupy is None else int(cupy.cuda.runtime.getDeviceCount())


def to_device(array: Array, device: str | Device) -> Array:
    """``array`` on ``device``; itself if it is there already.  Raises RuntimeError where CuPy is missing."""
    device = as_device(device)
    if device_of(array) == device:
        return array
    if device == CPU:
        return to_numpy(array)
    cupy = _cupy()
    with cupy.cuda.Device(device.index):
        return cupy.asarray(array)


def to_numpy(array: Array) -> np.ndarray:
    """``array`` in host memory: itself on the CPU, a copy from a GPU."""
    return np.asarray(array) if xp_of(array) is np else array.get()


def address(array: Array) -> int:
    """Where the first element of ``array`` lies."""
    return int(array.__array_interface__["data"][0]) if xp_of(array) is np else int(array.data.ptr)


def all_finite(array: Array) -> bool:
    """Whether no element is NaN or infinite; looked at in pieces, because a mask of a whole weight would be large."""
    flat, xp = array.reshape(-1), xp_of(array)
    if flat.dtype.kind in "iub":
        return True
    return all(bool(xp.isfinite(flat[i : i + _PIECE]).all()) for i in range(0, flat.shape[0], _PIECE))


def peak_rss_bytes() -> int:
    """The largest resident memory this process has had, in bytes."""
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as file:
        # getrusage's figure starts, on Linux, from that of the process that started this one
        return int(next(line for line in file if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes, macOS bytes


def rss_bytes() -> int:
    """Resident memory of this process now, in bytes (the peak where the system does not tell)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_rss_bytes()
