"""SGD: stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..backend import xp_of
from ..errors import ConfigError, expect
from ..tensor import Tensor
from .optimizer import Optimizer, positive, refuse_options


class SGD(Optimizer):
    """g += weight_decay * p;  v = momentum * v + (1 - dampening) * g;  p -= lr * v, or lr * (g + momentum * v).

    The last is nesterov; v starts as the first g, undamped. State: "momentum_buffer", where momentum is not zero.
    Raises ConfigError for a setting out of range, and for nesterov without momentum or with dampening.
    (Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, section 2; here
    the rate stands outside v, as in torch.)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        refuse_options("SGD", options)
        super().__init__(params, {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
                                  "nesterov": nesterov})  # fmt: skip

    def check(self, group: dict[str, Any]) -> None:
        """Raise ConfigError for a setting out of range."""
        momentum, dampening = group["momentum"], group["dampening"]
        positive("momentum", momentum)
        expect(not group["nesterov"] or (momentum > 0 and dampening == 0), ConfigError,
               f"nesterov with momentum {momentum} and dampening {dampening}",
               expected="a momentum above 0 and no dampening")  # fmt: skip

    def update(self, parameter: Tensor, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step on ``parameter.data``, in place."""
        p, g = parameter.data, gradient
        if group["weight_decay"]:
            g = g + group["weight_decay"] * p
        if group["momentum"]:
            v = state.get("momentum_buffer")
            if v is None:
                state["momentum_buffer"] = v = xp_of(p).array(g)  # an array also where g is a scalar: it is added into
            else:
                v *= group["momentum"]
                v += (1 - group["dampening"]) * g
            g = g + group["momentum"] * v if group["nesterov"] else v
        p -= group["lr"] * g
