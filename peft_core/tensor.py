"""Tensor: an array (NumPy or CuPy), its gradient, and how it was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .backend import Device, device_of, to_device, to_numpy, xp_of
from .dtypes import as_dtype, dtype_name, is_float
from .errors import GraphError

if TYPE_CHECKING:
    from .tape import Node


class Tensor:
    """An n-dimensional array with a gradient.  ``data``: the NumPy or CuPy array, shared, never copied.

    Raises ValueError if ``requires_grad`` is asked of a dtype that is not floating.
    """

    __slots__ = ("__weakref__", "_grad", "_requires_grad", "data", "grad_fn")
    __array_priority__ = 1000  # numpy_array * tensor asks the Tensor first

    def __init__(self, data: Any, requires_grad: bool = False) -> None:
        self.data = data
        self.grad_fn: Node | None = None
        self._grad: Any = None
        self._requires_grad = False
        if requires_grad:
            self.requires_grad = True

    @classmethod
    def _recorded(cls, data: Any, node: Node) -> Tensor:
        result = Tensor(data)
        result._requires_grad, result.grad_fn = True, node
        return result

    # ------------------------------------------------------------------ what it is

    @property
    def requires_grad(self) -> bool:
        """True if backward() computes a gradient with respect to this Tensor or through it."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        if self.grad_fn is not None:
            raise GraphError(
                f"requires_grad was set on the result of {self.grad_fn.name!r}; expected a leaf. Use .detach() first."
            )
        if flag and not is_float(self.dtype):
            raise ValueError(f"requires_grad on dtype {dtype_name(self.dtype)}; expected a floating dtype.")
        if flag and not getattr(self.data.flags, "writeable", True):
            self.data = self.data.copy()  # what trains is written to; what is read-only may be kept packed, by array
        self._requires_grad = bool(flag)

    def requires_grad_(self, flag: bool = True) -> Tensor:
        """Set ``requires_grad`` and return self."""
        self.requires_grad = flag
        return self

    @property
    def grad(self) -> Tensor | None:
        """The accumulated gradient: a Tensor that shares its memory, or None."""
        return None if self._grad is None else Tensor(self._grad)

    @grad.setter
    def grad(self, value: Any) -> None:
        array = value.data if isinstance(value, Tensor) else value
        if array is not None and array.shape != self.shape:
            raise ValueError(
                f"grad of shape {array.shape} was set on a Tensor of shape {self.shape}; expected the same."
            )
        self._grad = array

    @property
    def is_leaf(self) -> bool:
        """True if no recorded op computed this Tensor."""
        return self.grad_fn is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        return self.data.dtype

    @property
    def device(self) -> Device:
        """Where the array lives."""
        return device_of(self.data)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.data.ndim

    def dim(self) -> int:
        """The number of dimensions."""
        return self.data.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """The number of elements."""
        return self.data.size

    def stride(self, dim: int | None = None) -> Any:
        """Strides in elements (not bytes)."""
        strides = tuple(s // self.data.itemsize for s in self.data.strides)
        return strides if dim is None else strides[dim]

    def is_contiguous(self) -> bool:
        """True if the elements lie in C order without gaps."""
        return bool(self.data.flags.c_contiguous)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        text = np.array2string(to_numpy(self.data), separator=", ", prefix="tensor(", precision=4)
        notes = [] if self.dtype == np.float32 or not is_float(self.dtype) else [f"dtype={dtype_name(self.dtype)}"]
        notes += [f"device={str(self.device)!r}"] if self.device.type != "cpu" else []
        if self.grad_fn is not None:
            notes.append(f"grad_fn={self.grad_fn!r}")
        elif self._requires_grad:
            notes.append("requires_grad=True")
        return f"tensor({', '.join([text, *notes])})"

    # ------------------------------------------------------------------ out of the graph

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array: shared memory on the CPU.  Raises GraphError where a gradient is recorded."""
        if self._requires_grad:
            raise GraphError("numpy() was called on a Tensor that requires grad; expected none. Use .detach().numpy().")
        return to_numpy(self.data)

    def item(self) -> Any:
        """The value of a one-element Tensor as a Python number.  Raises ValueError for more elements."""
        if self.data.size != 1:
            raise ValueError(f"item() on shape {self.shape}; expected one element. Reduce first, or use .tolist().")
        return to_numpy(self.data).item()

    def tolist(self) -> Any:
        """The values as nested lists."""
        return to_numpy(self.data).tolist()

    def detach(self) -> Tensor:
        """The same memory, outside the graph."""
        return Tensor(self.data)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    # ------------------------------------------------------------------ gradients

    def backward(self, gradient: Any = None) -> None:
        """Add d(self)/d(leaf) to ``leaf.grad`` for every leaf that requires it, and free the graph.

        ``gradient``: d(loss)/d(self), of the same shape; optional for one element.  Raises GraphError.
        """
        if not self._requires_grad:
            raise GraphError("backward() on a Tensor without grad_fn; expected the result of recorded ops.")
        if gradient is None:
            if self.data.size != 1:
                raise GraphError(
                    f"backward() without a gradient on shape {self.shape}; expected one element. "
                    "Reduce first (.sum(), .mean()) or pass a gradient of the same shape."
                )
            gradient = xp_of(self.data).ones_like(self.data)
        gy = gradient.data if isinstance(gradient, Tensor) else xp_of(self.data).asarray(gradient, dtype=self.dtype)
        if gy.shape != self.shape:
            raise GraphError(f"backward() got a gradient of shape {gy.shape}; expected {self.shape}.")
        if self.grad_fn is None:
            self._grad = gy.copy() if self._grad is None else self._grad + gy
        else:
            tape.backprop(self.grad_fn, gy)

    # ------------------------------------------------------------------ writing (law 4: leaves, under no_grad)

    def _writable(self, what: str) -> None:
        if tape.is_grad_enabled() or self.grad_fn is not None:
            raise GraphError(
                f"{what} writes into a Tensor that the graph may still need; expected a leaf under no_grad(). "
                "Wrap it in `with no_grad():`, or build a new Tensor."
            )

    def _update(self, symbol: str, ufunc: Any, other: Any) -> Tensor:
        self._writable(symbol)
        self.data[...] = ufunc(self.data, other.data if isinstance(other, Tensor) else other).astype(self.dtype)
        return self

    def __iadd__(self, other: Any) -> Tensor:
        return self._update("+=", xp_of(self.data).add, other)

    def __isub__(self, other: Any) -> Tensor:
        return self._update("-=", xp_of(self.data).subtract, other)

    def __imul__(self, other: Any) -> Tensor:
        return self._update("*=", xp_of(self.data).multiply, other)

    def __itruediv__(self, other: Any) -> Tensor:
        return self._update("/=", xp_of(self.data).true_divide, other)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._writable("x[...] = value")
        index = tuple(_plain(i) for i in index) if isinstance(index, tuple) else _plain(index)
        self.data[index] = value.data if isinstance(value, Tensor) else value

    # ------------------------------------------------------------------ arithmetic

    def __add__(self, other: Any) -> Tensor:
        return ops.add(self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Tensor:
        return ops.mul(self, other)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Tensor:
        return ops.sub(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return ops.sub(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return ops.div(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return ops.div(other, self)

    def __pow__(self, exponent: float) -> Tensor:
        return ops.pow(self, exponent=exponent)

    def __neg__(self) -> Tensor:
        return ops.neg(self)

    def __matmul__(self, other: Any) -> Tensor:
        return ops.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return ops.matmul(other, self)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return ops.eq(self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return ops.ne(self, other)

    def __lt__(self, other: Any) -> Tensor:
        return ops.lt(self, other)

    def __le__(self, other: Any) -> Tensor:
        return ops.le(self, other)

    def __gt__(self, other: Any) -> Tensor:
        return ops.gt(self, other)

    def __ge__(self, other: Any) -> Tensor:
        return ops.ge(self, other)

    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> Tensor:
        return ops.getitem(self, index=tuple(map(_plain, index)) if isinstance(index, tuple) else _plain(index))

    # ------------------------------------------------------------------ shape and type

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape (one size may be -1); shares memory where it can."""
        return ops.reshape(self, shape=_flat(shape))

    view = reshape

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Two dimensions swapped; shares memory."""
        axes = list(range(self.ndim))
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
        return ops.permute(self, axes=tuple(axes))

    def permute(self, *axes: Any) -> Tensor:
        """The dimensions in another order; shares memory."""
        return ops.permute(self, axes=_flat(axes))

    @property
    def T(self) -> Tensor:
        """All dimensions reversed; shares memory."""
        return ops.permute(self, axes=tuple(reversed(range(self.ndim))))

    def contiguous(self) -> Tensor:
        """Itself if contiguous, else a copy in C order."""
        return self if self.is_contiguous() else ops.contiguous(self)

    def to(self, *targets: Any) -> Tensor:
        """In another dtype and/or on another device; itself where nothing changes."""
        result = self
        for target in targets:
            if isinstance(target, Device) or (isinstance(target, str) and target.partition(":")[0] in {"cpu", "cuda"}):
                if to_device(result.data, target) is not result.data:
                    result = ops.to_device(result, device=target)
            elif as_dtype(target) != result.dtype:
                result = ops.astype(result, dtype=as_dtype(target))
        return result

    def float(self) -> Tensor:
        """In float32."""
        return self.to("float32")

    # ------------------------------------------------------------------ reductions

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Sum over ``axis`` (all by default); half types accumulate in float32."""
        return ops.sum(self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Mean over ``axis`` (all by default); half types accumulate in float32."""
        return ops.mean(self, axis=axis, keepdims=keepdims)


def _plain(index: Any) -> Any:
    return index.data if isinstance(index, Tensor) else index


def _flat(sizes: tuple) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else tuple(sizes)


def tensor(data: Any, dtype: Any = None, device: Any = "cpu", requires_grad: bool = False) -> Tensor:
    """A Tensor with a copy of ``data`` (numbers, lists, arrays, Tensors); Python floats become float32, ints int64."""
    source = data.data if isinstance(data, Tensor) else data
    array = xp_of(source).array(source)
    if dtype is not None:
        array = array.astype(as_dtype(dtype))
    elif not hasattr(source, "dtype") and array.dtype == np.float64:
        array = array.astype(np.float32)
    return Tensor(to_device(array, device), requires_grad)


from . import ops, tape  # noqa: E402  the methods above use them, and they need the class: hence at the end
