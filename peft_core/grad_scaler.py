"""GradScaler: a loss scale that keeps float16 gradients from vanishing, found by trying.

The loss is multiplied by the scale and the gradients divided by it. A step with an infinite or NaN gradient is skipped
and the scale falls; after ``growth_interval`` good steps it rises. (Micikevicius et al., "Mixed precision training",
arXiv:1710.03740, section 3.2.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import amp, ops
from .backend import xp_of
from .dtypes import float32, is_half
from .errors import ConfigError, GraphError, expect
from .optim import Optimizer
from .tensor import Tensor


@dataclass
class _Round:
    """What has happened to one optimizer since the last update()."""

    found: list[bool] = field(default_factory=list)  # per look at its gradients: was there an inf or NaN?
    unscaled: bool = False
    stepped: bool = False


class GradScaler:
    """``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``, the numbers being torch's.

    update() multiplies the scale by ``backoff_factor`` if any gradient was infinite or NaN, else, after
    ``growth_interval`` updates without one, by ``growth_factor``; the scale is kept in float32. With enabled=False
    everything passes through; so it does, with a warning, for ``device`` "cuda" without a CUDA device.
    Raises ConfigError for a setting out of range, GraphError for calls in an order that has no meaning.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = getattr(device, "type", device)
        expect(device in amp._TORCH, ConfigError, f"GradScaler device is {device!r}", expected="'cuda' or 'cpu'")
        self._enabled = amp._usable(device, enabled, "GradScaler")
        expect(growth_factor > 1, ConfigError, f"growth_factor is {growth_factor}", expected="a number above 1")
        expect(0 < backoff_factor < 1, ConfigError, f"backoff_factor is {backoff_factor}", expected="between 0 and 1")
        self._scale = float(np.float32(init_scale))
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._growth_tracker = growth_interval, 0
        self._used = False  # scale() was called: without it there is nothing to divide by
        self._rounds: dict[int, _Round] = {}

    # ------------------------------------------------------------------ one step

    def scale(self, outputs: Any) -> Any:
        """``outputs``, a Tensor or a list, tuple or other iterable of them, times the scale.

        A scalar loss in half precision comes out in float32, which can hold the product.
        """
        if not self._enabled:
            return outputs
        self._used = True
        if isinstance(outputs, Tensor):
            with np.errstate(over="ignore"):  # what float16 cannot hold is found as infinite later
                product = ops.mul(outputs, Tensor(xp_of(outputs.data).asarray(self._scale, dtype=float32)))
                return product.to(outputs.dtype) if outputs.ndim else product
        if not isinstance(outputs, Iterable):
            raise TypeError(f"scale() got a {type(outputs).__name__}; expected a Tensor or an iterable of Tensors.")
        scaled = [self.scale(output) for output in outputs]
        return tuple(scaled) if isinstance(outputs, tuple) else scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, in place, and note if one is not finite.

        step() does so itself where this was not called.  Raises GraphError for a second call before update(), for one
        after step() and for one before scale(); ValueError for float16 gradients.
        """
        if not self._enabled:
            return
        state = self._rounds.setdefault(id(optimizer), _Round())
        expect(not state.unscaled, GraphError, "unscale_() was called twice on one optimizer since the last update()",
               expected="once, after all gradients of the step are there")  # fmt: skip
        expect(not state.stepped, GraphError, "unscale_() was called after step()", expected="it before step()")
        expect(self._used, GraphError, "unscale_() was called before scale()", expected="scaler.scale(loss).backward()")
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p._grad is not None]
        finite = []
        for p in parameters:
            if is_half(p._grad.dtype):
                raise ValueError(f"unscale_() met a {p._grad.dtype} gradient of shape {p.shape}; expected float32. "
                                 "Keep what trains in float32, and compute under autocast().")  # fmt: skip
            finite.append(xp_of(p._grad).isfinite(p._grad).all())
            p._grad = _times(p._grad, float(np.float32(1.0 / self._scale)))
        if finite:  # one wait for a GPU, not one per gradient
            state.found.append(not bool(xp_of(finite[0]).stack(finite).all()))
        state.unscaled = True

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """optimizer.step(), unless a gradient is infinite or NaN; returns what that returns, or None.

        Raises GraphError for a second call before update() and where no parameter has a gradient.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        expect("closure" not in kwargs and not args, GraphError, "step() of a GradScaler got a closure",
               expected="none: its gradients could not be scaled")  # fmt: skip
        state = self._rounds.setdefault(id(optimizer), _Round())
        expect(not state.stepped, GraphError, "step() was called twice on one optimizer since the last update()",
               expected="update() between two steps")  # fmt: skip
        if not state.unscaled:
            self.unscale_(optimizer)
        expect(state.found, GraphError, "step() found no gradient in the optimizer's parameters",
               expected="scaler.scale(loss).backward() before it")  # fmt: skip
        state.stepped = True
        return None if any(state.found) else optimizer.step(**kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale to what the steps since the last update met, or set it.

        Raises GraphError where no gradients were looked at since.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(np.float32(float(new_scale)))
        else:
            found = [bad for state in self._rounds.values() for bad in state.found]
            expect(found, GraphError, "update() without a step since the last one",
                   expected="scaler.step(optimizer) before it")  # fmt: skip
            self._adapt(any(found))
        self._rounds = {}

    def _adapt(self, bad: bool) -> None:
        if bad:
            self._scale, self._growth_tracker = float(np.float32(self._scale * self._backoff_factor)), 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            with np.errstate(over="ignore"):
                grown = float(np.float32(self._scale * self._growth_factor))
            self._scale = grown if math.isfinite(grown) else self._scale
            self._growth_tracker = 0

    # ------------------------------------------------------------------ what it is

    def get_scale(self) -> float:
        """The scale; 1 if not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """True unless switched off."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """What the scale grows by."""
        return self._growth_factor

    def set_growth_factor(self, value: float) -> None:
        """Set what the scale grows by."""
        self._growth_factor = value

    def get_backoff_factor(self) -> float:
        """What the scale falls by."""
        return self._backoff_factor

    def set_backoff_factor(self, value: float) -> None:
        """Set what the scale falls by."""
        self._backoff_factor = value

    def get_growth_interval(self) -> int:
        """How many good updates let the scale grow."""
        return self._growth_interval

    def set_growth_interval(self, value: int) -> None:
        """Set how many good updates let the scale grow."""
        self._growth_interval = value

    def state_dict(self) -> dict[str, Any]:
        """The scale, its settings and the good updates so far, under torch's names; {} if not enabled."""
        if not self._enabled:
            return {}
        names = ("growth_factor", "backoff_factor", "growth_interval")
        return {"scale": self._scale, **{n: getattr(self, "_" + n) for n in names},
                "_growth_tracker": self._growth_tracker}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state_dict()``.  Raises ConfigError for the empty one of a scaler that was not enabled."""
        if not self._enabled:
            return
        expect(state, ConfigError, "the saved GradScaler state is empty", expected="one of an enabled GradScaler")
        for name in ("scale", "growth_factor", "backoff_factor", "growth_interval"):
            setattr(self, "_" + name, state[name])
        self._growth_tracker = state["_growth_tracker"]


def _times(gradient: Any, factor: float) -> Any:
    """In place where the array can be written to; inf and NaN stay, without a warning."""
    with np.errstate(invalid="ignore", over="ignore"):
        if getattr(getattr(gradient, "flags", None), "writeable", True):
            gradient *= factor
            return gradient
        return gradient * factor
