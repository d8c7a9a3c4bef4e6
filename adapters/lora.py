"""LoRA: y = W x + sum over active adapters of scale * B A x, around a frozen layer (arXiv:2106.09685, section 4.1)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from adapters.layer import AdapterLayer, Change
from peft_core import ops
from peft_core.backend import Array, device_of, to_device
from peft_core.dtypes import dtype_name, is_half
from peft_core.errors import AdapterError, expect
from peft_core.nn import Conv1D, Embedding, Linear, Module, Parameter
from peft_core.random import default_generator
from peft_core.tensor import Tensor


class LowRank(Module):
    """One adapter of one layer: x -> scaling * (B A dropout(x) + lora_bias).

    a: (R, I), b: (O, R), kept as float32 parameters ``A`` and ``B`` whatever the base's dtype; ``scaling`` is a float.
    lora_bias: (O,) or None.  bias: (O,) or None, the base's own bias as this adapter trains it (bias="lora_only").
    """

    def __init__(
        self, a: Any, b: Any, scaling: float, dropout: float = 0.0, *, lora_bias: Any = None, bias: Any = None
    ) -> None:
        self.A = Parameter(_float32(a))
        self.B = Parameter(_float32(b))
        self.lora_bias = None if lora_bias is None else Parameter(_float32(lora_bias))
        self.bias = None if bias is None else Parameter(_float32(bias))
        self.scaling, self.dropout = float(scaling), float(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """scaling * (B A dropout(x) + lora_bias).   x: (..., I).   Returns (..., O).

        Raises AdapterError if the parameters were converted to half precision: small updates would be lost.
        """
        self.expect_float32()
        if self.training and self.dropout:
            x = ops.dropout(x, p=self.dropout, key=default_generator.key())
        y = ops.low_rank(x, self.A, self.B, scale=self.scaling)
        if self.lora_bias is None:
            return y
        offset = ops.mul(self.lora_bias, self.scaling)  # (O,)
        return ops.add(y, offset if offset.dtype == y.dtype else ops.astype(offset, dtype=y.dtype))

    def expect_float32(self) -> None:
        """Raise AdapterError if the parameters were converted to half precision."""
        expect(not is_half(self.A.dtype), AdapterError, f"adapter parameters are {dtype_name(self.A.dtype)}",
               expected="float32", fix="Convert the base model before the adapter is added, not after.")  # fmt: skip

    def delta(self) -> Array:
        """scaling * B A, float32 (O, I): the one place that forms it."""
        return (self.B.data * np.float32(self.scaling)) @ self.A.data  # (O, I)

    def to_device_of(self, array: Array) -> LowRank:
        """The same adapter where ``array`` lives."""
        device = device_of(array)
        for parameter in self.parameters():
            parameter.data = to_device(parameter.data, device)
        return self


class LowRankTable(LowRank):
    """One adapter of one embedding: ids -> scaling * B A[:, ids].   a: (R, V), b: (D, R); dropout does not act."""

    def forward(self, ids: Any) -> Tensor:
        """ids (...) -> (..., D)."""
        self.expect_float32()
        rows = ops.embedding(ids, ops.transpose(self.A))  # (..., R)
        return ops.mul(ops.linear(rows, self.B), self.scaling)  # (..., D)


def _float32(array: Any) -> Array:
    """A float32 array of its own: half precision would lose small updates, and files are mapped read-only."""
    return (array.data if isinstance(array, Tensor) else array).astype(np.float32, order="C")


class LoraLayer(AdapterLayer):
    """A frozen layer with a weight, and the LowRanks around it; ``kind`` is their class."""

    kind: ClassVar[type[LowRank]] = LowRank
    base_layer: Any
    adapters: dict[str, LowRank]

    def forward(self, x: Any) -> Tensor:
        """W x + the sum of the active adapters' terms, in the base layer's output dtype.   x: (..., I) -> (..., O)."""
        y = self.base_layer(x)
        for name in self.active:
            y = _plus(y, self.adapters[name](x))
            bias = self.adapters[name].bias
            if bias is not None:  # the base's is in y already; at the start the two are equal and nothing changes
                y = _plus(y, ops.sub(bias, ops.astype(self.base_layer.bias, dtype=bias.dtype)))
        return y

    @property
    def weight(self) -> Parameter:
        """The base's weight, (O, I), of an embedding or a Conv1D (I, O)."""
        return self.base_layer.weight

    @property
    def in_features(self) -> int:
        """I."""
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        """O."""
        return self.base_layer.out_features

    def trained(self, name: str) -> Any:
        """The base's bias as adapter ``name`` trains it, if it does."""
        bias = self.adapters[name].bias
        return iter(() if bias is None else [("bias", bias)])

    def delta(self, names: Sequence[str] | None = None) -> Array:
        """The sum of scaling * B A over ``names`` (default: the active adapters), float32, in the weight's shape."""
        chosen = self.active if names is None else names
        return sum((self.adapters[name].delta() for name in chosen[1:]), start=self.adapters[chosen[0]].delta())

    def merged(self, names: Sequence[str] | None = None) -> Any:
        """A new plain layer with W + delta, rounded once to W's dtype; this layer and its arrays stay as they are."""
        return self.applied(self.active if names is None else names)[0]

    def applied(self, names: Sequence[str]) -> tuple[Any, list[Change]]:
        """The plain layer with the adapters ``names`` in weight and bias, and what that changes."""
        base, delta = self.base_layer, self.delta(names)
        changes = [Change("weight", base.weight.data, add_delta(base.weight.data, delta), delta)]
        shift = self._bias_delta(names)
        if shift is not None:
            old = base.bias.data if getattr(base, "bias", None) is not None else 0 * shift.astype(base.weight.dtype)
            trained = [self.adapters[name] for name in names if self.adapters[name].bias is not None]
            new = add_delta(old, shift)
            if len(trained) == 1 and not any(self.adapters[name].lora_bias is not None for name in names):
                new = trained[0].bias.data.astype(old.dtype)  # type: ignore[union-attr]  # as it was trained, exactly
            changes.append(Change("bias", old, new, shift))
        return plain_layer({change.name: change.new for change in changes}, base), changes

    def _bias_delta(self, names: Sequence[str]) -> Array | None:
        """What ``names`` add to the base's bias, (O,), or None for nothing."""
        total = None
        for low_rank in (self.adapters[name] for name in names):
            parts = []
            if low_rank.lora_bias is not None:
                parts.append(low_rank.lora_bias.data * np.float32(low_rank.scaling))
            if low_rank.bias is not None:
                parts.append(low_rank.bias.data - self.base_layer.bias.data.astype(np.float32))
            for part in parts:
                total = part if total is None else total + part
        return total


class LoraLinear(LoraLayer):
    """A frozen Linear, or Conv1D, with LowRanks around it."""

    def parts(self) -> tuple | None:
        """(weight, bias, ((A, B, scaling), ...)) of the active adapters for ``nn.project``.

        None where the layer is more than that now: dropout in training, a bias that trains, or another base; then it
        is called as it is.
        """
        terms = []
        for name in self.active:
            a = self.adapters[name]
            if (a.training and a.dropout) or a.lora_bias is not None or a.bias is not None or is_half(a.A.dtype):
                return None
            terms.append((a.A, a.B, a.scaling))
        base = self.base_layer.parts() if type(self.base_layer) in (Linear, Conv1D) else None
        return None if base is None else (*base[:2], tuple(terms))

    def delta(self, names: Sequence[str] | None = None) -> Array:
        """The sum of scaling * B A over ``names``, float32, in the weight's shape."""
        delta = super().delta(names)
        return delta.T if isinstance(self.base_layer, Conv1D) else delta

    @property
    def bias(self) -> Parameter | None:
        """The base's bias, (O,), or None."""
        return self.base_layer.bias


class LoraEmbedding(LoraLayer):
    """A frozen Embedding with LowRankTables around it: W and its delta are (V, D), that is (I, O)."""

    kind = LowRankTable

    @property
    def in_features(self) -> int:
        """V."""
        return int(self.base_layer.weight.shape[0])

    @property
    def out_features(self) -> int:
        """D."""
        return int(self.base_layer.weight.shape[1])

    def delta(self, names: Sequence[str] | None = None) -> Array:
        """The sum of (scaling * B A)^T over ``names``, float32 (V, D)."""
        return super().delta(names).T


WRAPPERS: dict[type[Module], type[LoraLayer]] = {Linear: LoraLinear, Embedding: LoraEmbedding}


def wrapper_of(module: Module) -> type[LoraLayer] | None:
    """The class that adapts ``module``, which may be wrapped already; None if there is none."""
    if isinstance(module, LoraLayer):
        return type(module)
    return next((wrapper for kind, wrapper in WRAPPERS.items() if isinstance(module, kind)), None)


def _plus(y: Tensor, term: Tensor) -> Tensor:
    return ops.add(y, term if term.dtype == y.dtype else ops.astype(term, dtype=y.dtype))


def add_delta(weight: Array, delta: Array) -> Array:
    """W + delta in float32 (float64 for a float64 W), rounded once to W's dtype: a new array of W's shape."""
    wide = np.float64 if weight.dtype == np.float64 else np.float32
    with np.errstate(over="ignore"):  # float16 may overflow to inf: the caller looks for it and says which tensor
        return (weight.astype(wide) + delta).astype(weight.dtype)


def plain_layer(arrays: dict[str, Array], like: Any) -> Any:
    """A frozen layer with ``arrays`` as its parameters and the rest of ``like``; nothing is drawn and thrown away."""
    new = copy.copy(like)
    for name, array in arrays.items():
        setattr(new, name, frozen(array))
    return new


def frozen(array: Array) -> Parameter:
    """A Parameter over ``array``, which is nobody else's: read-only as the base's own weights, and so as fast."""
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    return Parameter(array, requires_grad=False)
