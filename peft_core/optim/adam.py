"""Adam and AdamW: one formula and one fused CPU kernel; they differ in where the weight decay goes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..backend import xp_of
from ..errors import ConfigError, expect
from ..kernels import formula
from ..tensor import Tensor
from .optimizer import Optimizer, positive, refuse_options


@formula
def _adam(
    p: Any, g: Any, m: Any, v: Any, pull: float, keep: float, rate1: float, beta2: float, rate2: float, size: float,
    root: float, eps: float,
) -> None:  # fmt: skip
    """In place: g += pull p (in a copy); p = keep p; m += rate1 (g - m); v = beta2 v + rate2 g^2;
    p -= size m / (sqrt(v) / root + eps).  Adam decays by ``pull``, AdamW by ``keep``."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf come out as from the kernel, without a warning
        if pull:
            g = g + pull * p
        p *= keep
        m += rate1 * (g - m)
        v *= beta2
        v += rate2 * (g * g)
        down = xp_of(v).sqrt(v)
        down /= root
        down += eps
        p -= size * (m / down)


@_adam.cpu()
def _(t, T, p, g, m, v, pull, keep, rate1, beta2, rate2, size, root, eps):  # type: ignore[no-untyped-def]  # all (n,)
    f = np.float32  # Python numbers are doubles to numba and would drag every line into float64
    pull_, keep_, rate1_, beta2_, rate2_ = f(pull), f(keep), f(rate1), f(beta2), f(rate2)
    size_, root_, eps_ = f(size), f(root), f(eps)
    for i in range(len(p) * t // T, len(p) * (t + 1) // T):
        gi = g[i] + pull_ * p[i] if pull_ else g[i]
        mi = m[i] + rate1_ * (gi - m[i])
        vi = beta2_ * v[i] + rate2_ * (gi * gi)
        m[i] = mi
        v[i] = vi
        p[i] = keep_ * p[i] - size_ * (mi / (np.sqrt(vi) / root_ + eps_))


class Adam(Optimizer):
    """g += wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p = p - lr m' / (sqrt(v') + eps).

    m' = m / (1 - b1^t), v' = v / (1 - b2^t), t the number of this step, from 1. State per parameter: "step" (int),
    "exp_avg" (m), "exp_avg_sq" (v). Raises ConfigError for a setting out of range and for torch's variants (amsgrad,
    maximize, ...).  (Kingma and Ba, "Adam: a method for stochastic optimization", arXiv:1412.6980, algorithm 1.)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        refuse_options(type(self).__name__, {"amsgrad": amsgrad, **options})
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def check(self, group: dict[str, Any]) -> None:
        """Raise ConfigError for a setting out of range."""
        betas = group["betas"]
        expect(len(betas) == 2 and all(0 <= b < 1 for b in betas), ConfigError, f"betas are {betas}",
               expected="two numbers in [0, 1)")  # fmt: skip
        positive("eps", group["eps"])

    def decay(self, group: dict[str, Any]) -> tuple[float, float]:
        """(pull, keep): what is added to the gradient per p, and what is left of p."""
        return float(group["weight_decay"]), 1.0

    def update(self, parameter: Tensor, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step on ``parameter.data``, in place."""
        xp = xp_of(parameter.data)
        if not state:
            state["step"] = 0
            state["exp_avg"] = xp.zeros(parameter.shape, parameter.dtype)
            state["exp_avg_sq"] = xp.zeros(parameter.shape, parameter.dtype)
        state["step"] = t = int(state["step"]) + 1
        beta1, beta2 = group["betas"]
        numbers = (*self.decay(group), 1 - beta1, float(beta2), 1 - beta2,
                   group["lr"] / (1 - beta1**t), math.sqrt(1 - beta2**t), float(group["eps"]))  # fmt: skip
        arrays = (parameter.data, gradient, state["exp_avg"], state["exp_avg_sq"])
        if parameter.data.flags.c_contiguous:  # the kernel walks flat memory
            _adam(*(xp.ascontiguousarray(a).reshape(-1) for a in arrays), *numbers)
        else:
            _adam.function(*arrays, *numbers)


class AdamW(Adam):
    """Adam with decoupled decay: g stays as it is, and p = (1 - lr wd) p before the step.  Settings as Adam's.

    (Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv:1711.05101, algorithm 2.)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)

    def decay(self, group: dict[str, Any]) -> tuple[float, float]:
        """(pull, keep): nothing is added to the gradient, p shrinks by itself."""
        return 0.0, 1 - group["lr"] * group["weight_decay"]
