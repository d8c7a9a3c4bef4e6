"""Mixed precision: inside ``autocast(dtype)`` products are computed in ``dtype``, everything else as it comes.

Products (linear, low_rank, matmul, attention, the head's loss) round their inputs to the compute dtype, accumulate in
float32 and return the compute dtype. Norms, softmax, losses and the residual stream keep float32, as in
Micikevicius et al., "Mixed precision training" (arXiv:1710.03740), section 3.
"""

from __future__ import annotations

import contextvars
from types import TracebackType
from typing import Any

import numpy as np

from .dtypes import as_dtype, is_float

_compute: contextvars.ContextVar[np.dtype | None] = contextvars.ContextVar("compute_dtype", default=None)


def compute_dtype() -> np.dtype | None:
    """The dtype that products are computed in, or None: the promoted dtype of their inputs."""
    return _compute.get()


class autocast:
    """Context manager that sets the compute dtype (a name, a dtype, or None to switch autocast off).

    Raises ValueError for a dtype that is not a floating one.
    """

    def __init__(self, dtype: Any = "bfloat16") -> None:
        self.dtype = None if dtype is None else as_dtype(dtype)
        if self.dtype is not None and not is_float(self.dtype):
            raise ValueError(f"autocast dtype is {self.dtype}; expected float16, bfloat16, float32, float64 or None.")
        self._tokens: list[contextvars.Token] = []

    def __enter__(self) -> autocast:
        self._tokens.append(_compute.set(self.dtype))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        _compute.reset(self._tokens.pop())
