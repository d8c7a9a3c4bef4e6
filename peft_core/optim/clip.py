"""Clipping by the norm of all gradients together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..backend import xp_of
from ..errors import ConfigError, expect
from ..tensor import Tensor

_CHUNK = 1 << 16  # elements widened to float64 at a time: few enough to stay in a core's cache


def clip_grad_norm_(params: Iterable[Tensor] | Tensor, max_norm: float) -> float:
    """Scale all gradients by max_norm / (norm + 1e-6) if that is below 1; returns the norm before.

    norm = sqrt(sum of squares over all gradients), summed in float64; ``max_norm`` inf only measures. A norm that is
    NaN or infinite is returned and the gradients are left as they are: whoever calls decides what to do about it.
    Raises ConfigError unless max_norm > 0.  (Pascanu et al., arXiv:1211.5063, section 3.2.)
    """
    expect(max_norm > 0, ConfigError, f"max_norm is {max_norm}", expected="a number above 0, or inf to measure only")
    given = [params] if isinstance(params, Tensor) else params
    unique = {id(p): p for p in given if p._grad is not None}
    norm = _norm([p._grad for p in unique.values()])
    scale = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and scale < 1:
        for p in unique.values():
            p._grad *= scale
    return norm


def _norm(gradients: list[Any]) -> float:
    if not gradients:
        return 0.0
    xp = xp_of(gradients[0])
    squares = [xp.zeros((), "float64")]
    for g in gradients:
        flat = g.reshape(-1)
        for i in range(0, flat.size, _CHUNK):
            part = flat[i : i + _CHUNK].astype("float64")
            squares.append(xp.square(part).sum())  # not a dot product: BLAS would wake its own threads for it
    return math.sqrt(float(xp.stack(squares).sum()))  # one wait for a GPU, not one per gradient
