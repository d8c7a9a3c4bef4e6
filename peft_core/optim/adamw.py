"""AdamW: Adam with decoupled weight decay, formula and fused CPU kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..backend import xp_of
from ..errors import ConfigError, expect
from ..kernels import formula
from ..tensor import Tensor
from .optimizer import Optimizer, positive


@formula
def _adamw(
    p: Any, g: Any, m: Any, v: Any, keep: float, rate1: float, beta2: float, rate2: float, size: float, root: float,
    eps: float,
) -> None:  # fmt: skip
    """In place: p = keep p; m += rate1 (g - m); v = beta2 v + rate2 g^2; p -= size m / (sqrt(v) / root + eps)."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf come out as from the kernel, without a warning
        p *= keep
        m += rate1 * (g - m)
        v *= beta2
        v += rate2 * (g * g)
        down = xp_of(v).sqrt(v)
        down /= root
        down += eps
        p -= size * (m / down)


@_adamw.cpu()
def _(t, T, p, g, m, v, keep, rate1, beta2, rate2, size, root, eps):  # type: ignore[no-untyped-def]  # all (n,)
    f = np.float32  # Python numbers are doubles to numba and would drag every line into float64
    keep_, rate1_, beta2_, rate2_, size_, root_, eps_ = f(keep), f(rate1), f(beta2), f(rate2), f(size), f(root), f(eps)
    for i in range(len(p) * t // T, len(p) * (t + 1) // T):
        gi = g[i]
        mi = m[i] + rate1_ * (gi - m[i])
        vi = beta2_ * v[i] + rate2_ * (gi * gi)
        m[i] = mi
        v[i] = vi
        p[i] = keep_ * p[i] - size_ * (mi / (np.sqrt(vi) / root_ + eps_))


class AdamW(Optimizer):
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p = (1 - lr wd) p - lr m' / (sqrt(v') + eps).

    m' = m / (1 - b1^t), v' = v / (1 - b2^t), t the number of this step, from 1. State per parameter: "step" (int),
    "exp_avg" (m), "exp_avg_sq" (v). Raises ConfigError for a setting out of range.
    (Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv:1711.05101, algorithm 2.)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def check(self, group: dict[str, Any]) -> None:
        """Raise ConfigError for a setting out of range."""
        betas = group["betas"]
        expect(len(betas) == 2 and all(0 <= b < 1 for b in betas), ConfigError, f"betas are {betas}",
               expected="two numbers in [0, 1)")  # fmt: skip
        positive("eps", group["eps"])

    def update(self, parameter: Tensor, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step on ``parameter.data``, in place."""
        xp = xp_of(parameter.data)
        if not state:
            state["step"] = 0
            state["exp_avg"] = xp.zeros(parameter.shape, parameter.dtype)
            state["exp_avg_sq"] = xp.zeros(parameter.shape, parameter.dtype)
        state["step"] = t = int(state["step"]) + 1
        beta1, beta2 = group["betas"]
        numbers = (1 - group["lr"] * group["weight_decay"], 1 - beta1, float(beta2), 1 - beta2,
                   group["lr"] / (1 - beta1**t), math.sqrt(1 - beta2**t), float(group["eps"]))  # fmt: skip
        arrays = (parameter.data, gradient, state["exp_avg"], state["exp_avg_sq"])
        if parameter.data.flags.c_contiguous:  # the kernel walks flat memory
            _adamw(*(xp.ascontiguousarray(a).reshape(-1) for a in arrays), *numbers)
        else:
            _adamw.function(*arrays, *numbers)
