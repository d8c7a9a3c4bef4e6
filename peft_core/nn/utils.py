"""Clipping of gradients under the names of ``torch.nn.utils``: a face over peft_core.optim.clip."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..backend import xp_of
from ..errors import ConfigError, DivergedError, expect
from ..optim.clip import clip_grad_norm_ as _clip
from ..tensor import Tensor

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``peft_core.optim.clip_grad_norm_``, which returns a float, with the norm as a Tensor of the gradients' dtype.

    Gradients whose norm is NaN or infinite are left as they are.  Raises DivergedError for them if
    ``error_if_nonfinite``, ConfigError for a ``norm_type`` other than 2.  ``foreach`` has no effect.
    """
    expect(float(norm_type) == 2, ConfigError, f"clip_grad_norm_(norm_type={norm_type}) is not supported", expected="2")
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = _clip(given, math.inf if error_if_nonfinite else max_norm)
    expect(math.isfinite(norm) or not error_if_nonfinite, DivergedError, f"the gradient norm is {norm}",
           expected="a finite norm", fix="No gradient was changed.")  # fmt: skip
    if error_if_nonfinite:
        _clip(given, max_norm)
    gradients = [p._grad for p in given if p._grad is not None]
    dtype = gradients[0].dtype if gradients else "float32"
    return Tensor(xp_of(*gradients).asarray(norm, dtype=dtype))


def clip_grad_value_(parameters: Iterable[Tensor] | Tensor, clip_value: float, foreach: bool | None = None) -> None:
    """Limit every element of every gradient to [-clip_value, clip_value]; NaN stays.  ``foreach`` has no effect."""
    for p in [parameters] if isinstance(parameters, Tensor) else parameters:
        if p._grad is not None:
            xp = xp_of(p._grad)
            p._grad = xp.asarray(xp.clip(p._grad, -float(clip_value), float(clip_value)))
