"""What a Tensor can do besides computing: become another type, move, be written to.  The base class of Tensor.

Writing (law 4) works on leaves under ``no_grad()`` and raises GraphError anywhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import random
from .backend import Device, address, to_device, xp_of
from .dtypes import as_dtype, dtype_name, is_float
from .errors import GraphError

if TYPE_CHECKING:
    from . import creation, ops, tape


def plain(value: Any) -> Any:
    """The array of a Tensor, anything else as it is."""
    return getattr(value, "data", value) if isinstance(value, Methods) else value


def matched(a: Any, b: Any) -> tuple[Any, Any]:
    """a and b with torch's rule for Tensors without dimensions: where the other one has some and is of the same kind
    (floats, integers), they take its dtype.  The ops themselves know no such rule: an array keeps its dtype there."""
    if not (isinstance(a, Methods) and isinstance(b, Methods)) or bool(a.data.ndim) == bool(b.data.ndim):
        return a, b
    full, scalar = (a, b) if a.data.ndim else (b, a)
    if scalar.data.dtype == full.data.dtype or _kind(scalar.data.dtype) > _kind(full.data.dtype):
        return a, b
    scalar = scalar._as(full.data.dtype)
    return (full, scalar) if a is full else (scalar, full)


def _kind(dtype: Any) -> int:
    return 2 if is_float(dtype) else int(dtype.kind != "b")


def _is_device(target: Any) -> bool:
    return isinstance(target, Device) or (isinstance(target, str) and target.partition(":")[0] in {"cpu", "cuda"})


class Methods:
    """Conversions, new Tensors like this one, and in-place updates."""

    __slots__ = ()

    _replaces_memory = False  # True for Parameters

    data: Any
    grad_fn: Any

    # ------------------------------------------------------------------ another dtype, another device

    def to(self, *targets: Any, dtype: Any = None, device: Any = None, copy: bool = False, **ignored: Any) -> Any:
        """In another dtype and/or on another device, or as another Tensor is; itself where nothing changes.

        ``copy``: memory of its own in any case.  ``non_blocking`` and ``memory_format`` change nothing.
        """
        _expect_ignorable("to", ignored)
        result: Any = self
        for target in (*targets, device, dtype):
            for one in (target.device, target.dtype) if isinstance(target, Methods) else (target,):  # type: ignore[attr-defined]
                result = result if one is None or isinstance(one, bool) else result._as(one)
        return ops.clone(result) if copy and result is self else result

    def _as(self, target: Any) -> Any:
        if _is_device(target):
            return self if to_device(self.data, target) is self.data else ops.to_device(self, device=target)
        dtype = as_dtype(target)
        return self if dtype == self.data.dtype else ops.astype(self, dtype=dtype)

    def float(self) -> Any:
        """In float32."""
        return self._as("float32")

    def half(self) -> Any:
        """In float16."""
        return self._as("float16")

    def bfloat16(self) -> Any:
        """In bfloat16."""
        return self._as("bfloat16")

    def double(self) -> Any:
        """In float64."""
        return self._as("float64")

    def long(self) -> Any:
        """In int64."""
        return self._as("int64")

    def int(self) -> Any:
        """In int32."""
        return self._as("int32")

    def bool(self) -> Any:
        """True where an element is not zero."""
        return self._as("bool")

    def cpu(self) -> Any:
        """In host memory."""
        return self._as("cpu")

    def cuda(self, device: Any = None, non_blocking: Any = None) -> Any:
        """On a GPU, by default the first.  Raises RuntimeError where CuPy is missing."""
        return self._as(f"cuda:{device}" if isinstance(device, int) else device or "cuda")

    def type(self, dtype: Any = None) -> Any:
        """In another dtype, or without one the dtype's name."""
        return dtype_name(self.data.dtype) if dtype is None else self._as(dtype)

    def type_as(self, other: Any) -> Any:
        """In the dtype and on the device of ``other``."""
        return self.to(other)

    def data_ptr(self) -> Any:
        """The address of the first element."""
        return address(self.data)

    # ------------------------------------------------------------------ new ones like this

    def _new(self, make: Any, dtype: Any, device: Any, requires_grad: Any = False) -> Any:
        own = {"dtype": dtype or self.data.dtype, "device": device or self.device}  # type: ignore[attr-defined]
        return make(**own, requires_grad=requires_grad)

    def new_zeros(self, *size: Any, dtype: Any = None, device: Any = None, requires_grad: Any = False) -> Any:
        """Zeros of another shape, by default of this dtype and on this device."""
        return self._new(lambda **own: creation.zeros(*size, **own), dtype, device, requires_grad)

    def new_ones(self, *size: Any, dtype: Any = None, device: Any = None, requires_grad: Any = False) -> Any:
        """Ones of another shape, by default of this dtype and on this device."""
        return self._new(lambda **own: creation.ones(*size, **own), dtype, device, requires_grad)

    def new_empty(self, *size: Any, dtype: Any = None, device: Any = None, requires_grad: Any = False) -> Any:
        """Memory as it comes in another shape, by default of this dtype and on this device."""
        return self._new(lambda **own: creation.empty(*size, **own), dtype, device, requires_grad)

    def new_full(self, size: Any, value: Any, dtype: Any = None, device: Any = None, requires_grad: Any = False) -> Any:
        """``value`` in another shape, by default of this dtype and on this device."""
        return self._new(lambda **own: creation.full(size, value, **own), dtype, device, requires_grad)

    def new_tensor(self, data: Any, dtype: Any = None, device: Any = None, requires_grad: Any = False) -> Any:
        """A copy of ``data``, by default in this dtype and on this device."""
        return self._new(lambda **own: creation.tensor(data, **own), dtype, device, requires_grad)

    # ------------------------------------------------------------------ writing

    def _writable(self, what: str) -> None:
        if tape.is_grad_enabled() or self.grad_fn is not None:
            raise GraphError(
                f"{what} writes into a Tensor that the graph may still need; expected a leaf under no_grad(). "
                "Wrap it in `with no_grad():`, or make a new Tensor, as in x = x + y."
            )
        self._own_memory(what)

    def _own_memory(self, what: str) -> None:
        """Where the array is read-only, as one mapped from a file: a Parameter gets a copy, others a GraphError.

        Never the array itself: the kernels keep packed copies of it. And of a Tensor that is no Parameter nobody knows
        whose memory it shares; a write into a copy would be lost on them.
        """
        if getattr(self.data.flags, "writeable", True):
            return
        if any(n > 1 and not stride for n, stride in zip(self.data.shape, self.data.strides, strict=True)):
            raise GraphError(
                f"{what} writes into an expanded Tensor of shape {self.data.shape}, several elements of which are the "
                "same memory; expected one place for each. Use x = x.clone() first."
            )
        if not self._replaces_memory:
            raise GraphError(
                f"{what} writes into read-only memory (a file, a frozen weight or a view of one); expected a "
                "Parameter, or memory of its own. Write into the Parameter itself, or use x = x.clone() first."
            )
        self.data = self.data.copy()

    def _write(self, what: str, value: Any) -> Any:
        self._writable(what)
        self.data[...] = to_device(value, self.device) if hasattr(value, "ndim") else value  # type: ignore[attr-defined]
        return self

    def _update(self, what: str, name: str, other: Any) -> Any:
        self._writable(what)
        self.data[...] = getattr(xp_of(self.data), name)(self.data, plain(other)).astype(self.data.dtype)
        return self

    def __iadd__(self, other: Any) -> Any:
        return self._update("+=", "add", other)

    def __isub__(self, other: Any) -> Any:
        return self._update("-=", "subtract", other)

    def __imul__(self, other: Any) -> Any:
        return self._update("*=", "multiply", other)

    def __itruediv__(self, other: Any) -> Any:
        return self._update("/=", "true_divide", other)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._writable("x[...] = value")
        index = tuple(map(plain, index)) if isinstance(index, tuple) else plain(index)
        self.data[index] = plain(value)

    def add_(self, other: Any, *, alpha: Any = 1) -> Any:
        """x += alpha other."""
        return self._update("add_()", "add", plain(other if alpha == 1 else ops.mul(other, alpha)))

    def sub_(self, other: Any, *, alpha: Any = 1) -> Any:
        """x -= alpha other."""
        return self._update("sub_()", "subtract", plain(other if alpha == 1 else ops.mul(other, alpha)))

    def mul_(self, other: Any) -> Any:
        """x *= other."""
        return self._update("mul_()", "multiply", other)

    def div_(self, other: Any) -> Any:
        """x /= other."""
        return self._update("div_()", "true_divide", other)

    def addcmul_(self, a: Any, b: Any, *, value: Any = 1) -> Any:
        """x += value a b."""
        return self._update("addcmul_()", "add", ops.mul(ops.mul(a, b), value))

    def addcdiv_(self, a: Any, b: Any, *, value: Any = 1) -> Any:
        """x += value a / b."""
        return self._update("addcdiv_()", "add", ops.mul(ops.div(a, b), value))

    def lerp_(self, end: Any, weight: Any) -> Any:
        """x += weight (end - x)."""
        return self._update("lerp_()", "add", ops.mul(ops.sub(end, self), weight))

    def clamp_(self, min: Any = None, max: Any = None) -> Any:
        """x limited to [min, max]."""
        return self._write("clamp_()", xp_of(self.data).clip(self.data, min, max))

    def zero_(self) -> Any:
        """Zero everywhere."""
        return self._write("zero_()", 0)

    def fill_(self, value: Any) -> Any:
        """``value`` everywhere."""
        return self._write("fill_()", plain(value))

    def copy_(self, other: Any, non_blocking: Any = None) -> Any:
        """The elements of ``other``, which may be broadcast."""
        return self._write("copy_()", plain(other))

    def masked_fill_(self, mask: Any, value: Any) -> Any:
        """``value`` where ``mask`` holds."""
        return self._write("masked_fill_()", ops.masked_fill(self, mask, value=value).data)

    def normal_(self, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> Any:
        """Gaussian numbers."""
        source = generator or random.default_generator
        return self._write("normal_()", source.normal(self.data.shape, mean, std, dtype=self.data.dtype))

    def uniform_(self, low: Any = 0.0, high: Any = 1.0, *, generator: Any = None) -> Any:
        """Numbers from [low, high)."""
        source = generator or random.default_generator
        return self._write("uniform_()", source.uniform(self.data.shape, low, high, dtype=self.data.dtype))


def _expect_ignorable(name: str, given: dict[str, Any]) -> None:
    if strange := set(given) - {"non_blocking", "memory_format"}:
        raise TypeError(f"{name}() got {', '.join(sorted(strange))}; expected dtype, device, copy or non_blocking.")


def _bind() -> None:
    """Import what the methods use: these modules need the class Tensor, which needs this one."""
    global creation, ops, tape
    from . import creation, ops, tape
