"""Optimizer: groups of parameters with their settings, the state per parameter, and both to a dict and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from .. import tape
from ..backend import to_device, to_numpy
from ..dtypes import dtype_name, is_half
from ..errors import ConfigError, expect
from ..tensor import Tensor


def positive(name: str, value: Any) -> None:
    """Raise ConfigError unless ``value`` is a finite number >= 0."""
    expect(isinstance(value, Real) and 0 <= float(value) < math.inf, ConfigError,
           f"{name} is {value!r}", expected="a finite number of at least 0")  # fmt: skip


_SAME_NUMBERS = {"foreach", "fused"}  # torch's names for how, not what, is computed: accepted, without effect
_VARIANTS = {"amsgrad", "maximize", "capturable", "differentiable"}


def refuse_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for one of torch's variants that is switched on, TypeError for an option nobody knows."""
    for option, value in options.items():
        if option not in _SAME_NUMBERS | _VARIANTS:
            raise TypeError(f"{name} got an option {option!r}; expected torch's names for its settings.")
        expect(option in _SAME_NUMBERS or not value, ConfigError, f"{name}({option}={value!r}) is not supported",
               expected=f"{option}=False")  # fmt: skip


class Optimizer:
    """Base of the optimisers.  Subclasses define ``check(group)`` and ``update(parameter, gradient, state, group)``.

    ``params``: Tensors, or dicts {"params": Tensors, <setting>: value, ...}, each a group with its own settings;
    ``defaults``: the settings a group does not name. ``param_groups`` is a list of dicts that may be changed between
    steps (``group["lr"]``); a scheduler notes the first rate in it as "initial_lr". ``state[parameter]`` is a dict of
    plain arrays and numbers, in the parameter's dtype. Parameters are float32 or float64 and are written in place.

    Raises ConfigError for no parameters, a parameter given twice, an unknown setting or one out of range, and for half
    precision parameters: their updates would be lost in rounding.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self.defaults = defaults
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Tensor, dict[str, Any]] = {}
        if isinstance(params, Tensor):
            raise TypeError("params is a single Tensor; expected a list of Tensors or of groups. Write [tensor].")
        given = list(params)
        expect(given, ConfigError, "the optimizer got no parameters", expected="at least one",
               fix="Is everything frozen? Look at requires_grad of model.named_parameters().")  # fmt: skip
        for group in given if isinstance(given[0], dict) else [{"params": given}]:
            self.add_param_group(group)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add {"params": Tensors, <setting>: value, ...}.  Raises ConfigError or TypeError as the class does."""
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f'a group is {type(group).__name__} without "params"; expected {{"params": Tensors, ...}}.')
        unknown = [key for key in group if key not in {*self.defaults, "params", "initial_lr", "name"}]
        expect(not unknown, ConfigError, f"{type(self).__name__} has no setting {', '.join(map(repr, unknown))}",
               expected=f"some of {', '.join(self.defaults)}")  # fmt: skip
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        seen = {id(p) for g in self.param_groups for p in g["params"]}
        for i, p in enumerate(params):
            if not isinstance(p, Tensor):
                raise TypeError(f"parameter {i} of a group is a {type(p).__name__}; expected a Tensor.")
            expect(p.is_leaf, ConfigError, f"parameter {i} of a group was computed by {p.grad_fn!r}", expected="a leaf")
            expect(id(p) not in seen, ConfigError, f"parameter {i} of a group, shape {p.shape}, was given before",
                   expected="every parameter once")  # fmt: skip
            seen.add(id(p))
            if p.requires_grad:
                _refuse_half(p, f"trainable parameter {i} of a group")
        full = {"params": params, **self.defaults, **{k: v for k, v in group.items() if k != "params"}}
        positive("lr", full["lr"])
        positive("weight_decay", full["weight_decay"])
        self.check(full)
        self.param_groups.append(full)

    def check(self, group: dict[str, Any]) -> None:
        """Raise ConfigError for a setting out of range."""

    def update(self, parameter: Tensor, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Write the new value into ``parameter.data``; ``state`` is {} at the first call.  For subclasses."""
        raise NotImplementedError(f"{type(self).__name__} defines no update(); expected one, as SGD has.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure``, run first, returned (a loss).

        Raises ConfigError for a parameter in half precision.
        """
        loss = None
        if closure is not None:
            with tape.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p._grad is None:
                    continue
                _refuse_half(p, f"parameter {i} of a group")
                if not getattr(p.data.flags, "writeable", True):
                    p.data = p.data.copy()  # mapped from a file: the optimiser writes into memory of its own
                self.update(p, p._grad, self.state.setdefault(p, {}), group)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or fill them with zeros."""
        for group in self.param_groups:
            for p in group["params"]:
                if set_to_none:
                    p._grad = None
                elif p._grad is not None:
                    p._grad[...] = 0

    # ------------------------------------------------------------------ to a dict and back

    def state_dict(self) -> dict[str, Any]:
        """{"state": {index: {name: array or number}}, "param_groups": [{..., "params": [index, ...]}]}.

        Parameters are numbered through all groups; arrays are the optimiser's own memory, not copies.
        """
        order = [p for group in self.param_groups for p in group["params"]]
        index = {id(p): i for i, p in enumerate(order)}
        groups = [{**group, "params": [index[id(p)] for p in group["params"]]} for group in self.param_groups]
        return {"state": {i: dict(self.state[p]) for i, p in enumerate(order) if self.state.get(p)},
                "param_groups": groups}  # fmt: skip

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over settings and state of ``state_dict()``, copied, on each parameter's device.

        Raises ConfigError, before anything is changed, where the groups or the shapes are not those of this optimiser.
        """
        sizes = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in saved["param_groups"]]
        expect(given == sizes, ConfigError, f"the saved optimizer has groups of {given} parameters",
               expected=f"groups of {sizes}", fix="Build the optimizer as it was when it was saved.")  # fmt: skip
        order = [p for group in self.param_groups for p in group["params"]]
        slots = [i for group in saved["param_groups"] for i in group["params"]]
        lost = set(saved["state"]) - set(slots)
        expect(not lost, ConfigError, f"the saved state has entries {sorted(map(repr, lost))}",
               expected=f"some of the parameters' numbers, {slots}")  # fmt: skip
        state: dict[Tensor, dict[str, Any]] = {}
        unfit: list[str] = []
        for p, slot in zip(order, slots, strict=True):
            for name, value in saved["state"].get(slot, {}).items():
                array = value.data if isinstance(value, Tensor) else value
                if getattr(array, "ndim", 0) and tuple(array.shape) != p.shape:
                    unfit.append(f"{name} of parameter {slot} has shape {tuple(array.shape)}, the parameter {p.shape}")
                else:
                    state.setdefault(p, {})[name] = _own(array, p)
        expect(not unfit, ConfigError, "the saved optimizer does not fit: " + "; ".join(unfit), expected="equal shapes",
               fix="Load the state that was saved with these parameters.")  # fmt: skip
        for group, loaded in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in loaded.items() if k in {*group, "initial_lr"} - {"params"}})
        self.state = state


def _own(value: Any, parameter: Tensor) -> Any:
    """A copy of saved state in the parameter's dtype and place; 0-d arrays (torch's ``step``) become numbers."""
    if value is None or isinstance(value, int | float):
        return value
    if value.ndim == 0 and (parameter.ndim or value.dtype != parameter.dtype):
        return to_numpy(value).item()
    return to_device(value.astype(parameter.dtype), parameter.device)


def _refuse_half(p: Tensor, which: str) -> None:
    expect(not is_half(p.dtype), ConfigError, f"{which} (shape {p.shape}) is {dtype_name(p.dtype)}",
           expected="float32: in half precision small updates are rounded away",
           fix='Keep what trains in float32, as in model.to("float32"), and compute under autocast().')  # fmt: skip
