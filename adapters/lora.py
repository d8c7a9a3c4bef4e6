"""LoRA: y = W x + sum over active adapters of scale * B A x, around a frozen Linear (arXiv:2106.09685, section 4.1)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from peft_core import ops
from peft_core.backend import Array, device_of, to_device
from peft_core.dtypes import dtype_name, is_half
from peft_core.errors import AdapterError, expect
from peft_core.nn import Conv1D, Linear, Module, Parameter
from peft_core.random import default_generator
from peft_core.tensor import Tensor


class LowRank(Module):
    """One adapter of one layer: x -> scaling * B A dropout(x).

    a: (R, I), b: (O, R), kept as float32 parameters ``A`` and ``B`` whatever the base's dtype; ``scaling`` is a float.
    """

    def __init__(self, a: Any, b: Any, scaling: float, dropout: float = 0.0) -> None:
        self.A = Parameter(_float32(a))
        self.B = Parameter(_float32(b))
        self.scaling, self.dropout = float(scaling), float(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """scaling * B A dropout(x).   x: (..., I).   Returns (..., O).

        Raises AdapterError if the parameters were converted to half precision: small updates would be lost.
        """
        expect(not is_half(self.A.dtype), AdapterError, f"adapter parameters are {dtype_name(self.A.dtype)}",
               expected="float32", fix="Convert the base model before the adapter is added, not after.")  # fmt: skip
        if self.training and self.dropout:
            x = ops.dropout(x, p=self.dropout, key=default_generator.key())
        return ops.low_rank(x, self.A, self.B, scale=self.scaling)

    def delta(self) -> Array:
        """scaling * B A, float32 (O, I): the one place that forms it."""
        return (self.B.data * np.float32(self.scaling)) @ self.A.data  # (O, I)

    def to_device_of(self, array: Array) -> LowRank:
        """The same adapter where ``array`` lives."""
        device = device_of(array)
        self.A.data, self.B.data = to_device(self.A.data, device), to_device(self.B.data, device)
        return self


def _float32(array: Any) -> Array:
    """A float32 array of its own: half precision would lose small updates, and files are mapped read-only."""
    return (array.data if isinstance(array, Tensor) else array).astype(np.float32, order="C")


class LoraLinear(Module):
    """A frozen Linear with named adapters around it; ``active`` lists those that are applied.

    Which adapters are active and which are trainable are two things: activity is here, trainability is each
    parameter's ``requires_grad``.
    """

    forward_state = ("training", "active")  # recompute() reruns with the adapters of the first pass

    def __init__(
        self, base_layer: Linear, adapters: dict[str, LowRank] | None = None, active: Iterable[str] | None = None
    ) -> None:
        self.base_layer = base_layer
        self.adapters: dict[str, LowRank] = dict(adapters or {})
        # Replaced as a whole, never changed in place: a recorded forward state keeps the tuple it saw.
        self.active: tuple[str, ...] = tuple(self.adapters if active is None else active)

    def forward(self, x: Tensor) -> Tensor:
        """W x + the sum of the active adapters' terms, in the base layer's output dtype.   x: (..., I) -> (..., O)."""
        y = self.base_layer(x)
        for name in self.active:
            term = self.adapters[name](x)
            y = ops.add(y, term if term.dtype == y.dtype else ops.astype(term, dtype=y.dtype))
        return y

    def parts(self) -> tuple | None:
        """(weight, bias, ((A, B, scaling), ...)) of the active adapters for ``nn.project``.

        None where the layer is more than that: dropout in training, or a base that is no plain Linear.
        """
        active = [self.adapters[name] for name in self.active]
        plain = type(self.base_layer) in (Linear, Conv1D) and not any(is_half(a.A.dtype) for a in active)
        base = self.base_layer.parts()
        if base is None or not plain or any(a.training and a.dropout for a in active):
            return None
        return *base[:2], tuple((a.A, a.B, a.scaling) for a in active)

    @property
    def weight(self) -> Parameter:
        """The base's weight, (O, I), of a Conv1D (I, O)."""
        return self.base_layer.weight

    @property
    def bias(self) -> Parameter | None:
        """The base's bias, (O,), or None."""
        return self.base_layer.bias

    @property
    def in_features(self) -> int:
        """I."""
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        """O."""
        return self.base_layer.out_features

    def delta(self, names: Sequence[str] | None = None) -> Array:
        """The sum of scaling * B A over ``names`` (default: the active adapters), float32, in the weight's shape."""
        chosen = self.active if names is None else names
        delta = sum((self.adapters[name].delta() for name in chosen[1:]), start=self.adapters[chosen[0]].delta())
        return delta.T if isinstance(self.base_layer, Conv1D) else delta

    def merged(self, names: Sequence[str] | None = None) -> Linear:
        """A new plain Linear with W + delta, rounded once to W's dtype; this layer and its arrays stay as they are."""
        weight = self.base_layer.weight
        return plain_linear(add_delta(weight.data, self.delta(names)), self.base_layer)


def add_delta(weight: Array, delta: Array) -> Array:
    """W + delta in float32 (float64 for a float64 W), rounded once to W's dtype: a new array of W's shape."""
    wide = np.float64 if weight.dtype == np.float64 else np.float32
    with np.errstate(over="ignore"):  # float16 may overflow to inf: the caller looks for it and says which tensor
        return (weight.astype(wide) + delta).astype(weight.dtype)


def plain_linear(weight: Array, like: Linear) -> Linear:
    """A frozen Linear with ``weight`` and the bias of ``like``; nothing is drawn and then thrown away."""
    new = copy.copy(like)
    new.weight = Parameter(weight, requires_grad=False)
    return new
