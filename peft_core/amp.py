"""Mixed precision: inside ``autocast(dtype)`` products are computed in ``dtype``, everything else as it comes.

Products (linear, low_rank, matmul, attention, the head's loss) round their inputs to the compute dtype, accumulate in
float32 and return the compute dtype. Norms, softmax, losses and the residual stream keep float32, as in
Micikevicius et al., "Mixed precision training" (arXiv:1710.03740), section 3.
"""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from .backend import cuda_device_count
from .dtypes import as_dtype, bfloat16, float16, is_float, is_half

_compute: contextvars.ContextVar[np.dtype | None] = contextvars.ContextVar("compute_dtype", default=None)


def compute_dtype() -> np.dtype | None:
    """The dtype that products are computed in, or None: the promoted dtype of their inputs."""
    return _compute.get()


_DEFAULT: Any = object()  # None is a value: it switches autocast off
_TORCH = {"cuda": float16, "cpu": bfloat16}  # torch's device types, and the dtype that each takes by default


class autocast:
    """Context manager and decorator that sets the compute dtype, in two ways of calling.

    ``autocast(dtype)``: a name, a dtype, or None to switch autocast off; bfloat16 by default.
    ``autocast(device_type, dtype=None, enabled=True)``, as torch's: "cuda" (float16 by default) or "cpu" (bfloat16).
    The device type picks the default and nothing else, as arrays decide where products are computed; without a CUDA
    device, "cuda" warns and is off. ``cache_enabled`` has no effect: nothing is cached.

    Raises ValueError for a dtype that is not a floating one, after a device type for one that is not half precision,
    and for another device type.
    """

    def __init__(
        self, device_type: Any = _DEFAULT, dtype: Any = _DEFAULT, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        device = getattr(device_type, "type", device_type)
        self.dtype: np.dtype | None
        if isinstance(device, str) and (device in _TORCH or device_type is not device):
            self.dtype, enabled = self._torch(device, dtype), _usable(device, enabled, "autocast")
        elif device_type is not _DEFAULT and dtype is not _DEFAULT:
            raise ValueError(f"autocast device_type is {device_type!r}; expected 'cuda' or 'cpu'.")
        else:
            spec = dtype if device_type is _DEFAULT else device_type
            self.dtype = None if spec is None else bfloat16 if spec is _DEFAULT else as_dtype(spec)
            if self.dtype is not None and not is_float(self.dtype):
                raise ValueError(
                    f"autocast dtype is {self.dtype}; expected float16, bfloat16, float32, float64 or None."
                )
        if not enabled:
            self.dtype = None
        self._tokens: list[contextvars.Token] = []

    @staticmethod
    def _torch(device: str, dtype: Any) -> np.dtype:
        chosen = _TORCH[device] if dtype is _DEFAULT or dtype is None else as_dtype(dtype)
        if not is_half(chosen):
            raise ValueError(f"autocast({device!r}) got dtype {chosen}; expected float16 or bfloat16. "
                             "To compute in full precision pass enabled=False.")  # fmt: skip
        return chosen

    def __enter__(self) -> autocast:
        self._tokens.append(_compute.set(self.dtype))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        _compute.reset(self._tokens.pop())

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside


def _usable(device: str, enabled: bool, what: str) -> bool:
    """``enabled``, but False with a warning for "cuda" where there is no CUDA device."""
    if enabled and device == "cuda" and not cuda_device_count():
        warnings.warn(f"{what}('cuda') without a CUDA device is switched off.", UserWarning, stacklevel=3)
        return False
    return bool(enabled)


def __getattr__(name: str) -> Any:
    if name == "GradScaler":  # torch's place for it; imported late, as ops import this file
        from .grad_scaler import GradScaler

        return GradScaler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
