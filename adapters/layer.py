"""AdapterLayer: a frozen module with named adapters around it; TrainedCopy: the kind that trains the module itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from peft_core import ops
from peft_core.backend import Array, device_of, to_device, xp_of
from peft_core.dtypes import is_float, promote
from peft_core.nn import Module, Parameter
from peft_core.tensor import Tensor


@dataclass(frozen=True)
class Change:
    """What merging does to one parameter: its name in the module, and old, new and new - old before rounding."""

    name: str
    old: Array
    new: Array
    delta: Array


class AdapterLayer(Module):
    """A frozen module with named adapters around it; ``active`` lists those that are applied.

    Which adapters are active and which are trainable are two things: activity is here, trainability is each
    parameter's ``requires_grad``.
    """

    forward_state = ("training", "active")  # recompute() reruns with the adapters of the first pass

    def __init__(
        self, base_layer: Any, adapters: Mapping[str, Any] | None = None, active: Iterable[str] | None = None
    ) -> None:
        self.base_layer = base_layer
        self.adapters: dict[str, Any] = dict(adapters or {})
        # Replaced as a whole, never changed in place: a recorded forward state keeps the tuple it saw.
        self.active: tuple[str, ...] = tuple(self.adapters if active is None else active)

    def applied(self, names: Sequence[str]) -> tuple[Any, list[Change]]:
        """A new base layer with the adapters ``names`` in its own parameters, and what that changes."""
        raise NotImplementedError(f"{type(self).__name__} defines no applied(); expected a method applied(self, names)")

    def trained(self, name: str) -> Iterator[tuple[str, Parameter]]:
        """(name in the base layer, parameter) of the base's own parameters that adapter ``name`` holds copies of."""
        return iter(())

    def own_parameters(self, name: str) -> list[Parameter]:
        """All parameters of adapter ``name``, in order."""
        return list(self.adapters[name].parameters())


class TrainedCopy(AdapterLayer):
    """A module that an adapter trains as it is (modules_to_save), or of which it trains the biases (bias="all").

    ``adapters`` is name -> a copy of the module whose trained parameters are float32 ones of its own; the others are
    the base's. Of the active adapters one may have a copy here (``set_active`` sees to it); without one the base runs.
    """

    def current(self) -> Module:
        """The copy in use, else the base layer."""
        return next((self.adapters[name] for name in self.active), self.base_layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module in use computes, in the dtype that the base would give."""
        y = self.current()(*args, **kwargs)
        own = next((p.dtype for p in self.base_layer.parameters()), None)
        if not isinstance(y, Tensor) or own is None:
            return y
        inputs = [x.dtype for x in args if isinstance(x, Tensor) and is_float(x.dtype)]
        wanted = promote(own, *inputs)
        return y if promote(y.dtype, wanted) == wanted else ops.astype(y, dtype=wanted)

    def parts(self) -> Any:
        """The base's for ``nn.project`` while it runs; None, to be called as it is, while a copy does."""
        base = getattr(self.base_layer, "parts", None)
        return base() if base is not None and self.current() is self.base_layer else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("base_layer", "adapters", "active"):  # not there yet: copying, unpickling
            raise AttributeError(name)
        return getattr(self.current(), name)

    def trained(self, name: str) -> Iterator[tuple[str, Parameter]]:
        """(name in the base layer, parameter) of what adapter ``name`` trains."""
        shared = {id(p) for p in self.base_layer.parameters()}
        return ((key, p) for key, p in self.adapters[name].named_parameters() if id(p) not in shared)

    def own_parameters(self, name: str) -> list[Parameter]:
        """The trained parameters, without those that are the base's."""
        return [p for _, p in self.trained(name)]

    def applied(self, names: Sequence[str]) -> tuple[Module, list[Change]]:
        """The copy of the one adapter of ``names``, frozen and in the base's dtypes."""
        (name,) = names
        changes, old = [], dict(self.base_layer.named_parameters())
        for key, p in self.trained(name):
            with np.errstate(over="ignore"):
                new = p.data.astype(old[key].dtype)
            if isinstance(new, np.ndarray):
                new.flags.writeable = False  # as the base's own weights, and so as fast
            wide = np.float64 if old[key].dtype == np.float64 else np.float32
            changes.append(Change(key, old[key].data, new, p.data.astype(wide) - old[key].data.astype(wide)))
        return with_parameters(self.base_layer, {change.name: change.new for change in changes}), changes


def copied(module: Module, values: Mapping[str, Array], dtype: Any = np.float32) -> Module:
    """``module`` with new parameters: name -> a copy of that array as ``dtype``; the other parameters are shared."""
    own = dict(module.named_parameters())
    new = {}
    for name, value in values.items():
        array = to_device(value, device_of(own[name].data))
        new[name] = xp_of(array).array(array, dtype=dtype, order="C")
    return with_parameters(module, new)


def with_parameters(module: Module, arrays: Mapping[str, Array]) -> Module:
    """A copy of the tree of ``module`` where frozen parameters over ``arrays`` stand at their names."""
    own = dict(module.named_parameters())
    swap: dict[int, Any] = {id(own[name]): Parameter(array, requires_grad=False) for name, array in arrays.items()}
    return _copy(module, swap)


def _copy(value: Any, swap: dict[int, Any]) -> Any:
    """Modules and containers anew, the Tensors and all else the same, except those that ``swap`` names."""
    if id(value) in swap:
        return swap[id(value)]
    if isinstance(value, Module):
        new = swap[id(value)] = copy.copy(value)
        for name, inner in list(vars(value).items()):
            vars(new)[name] = _copy(inner, swap)
        return new
    if isinstance(value, dict) and not isinstance(value, Tensor):
        return {key: _copy(inner, swap) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(inner, swap) for inner in value)
    return value
