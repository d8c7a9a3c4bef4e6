"""Tensor: an array (NumPy or CuPy), its gradient, and how it was computed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .backend import Device, device_of, to_numpy, xp_of
from .dtypes import dtype_name, is_float
from .errors import GraphError
from .methods import Methods, matched, plain
from .unsupported import missing, unsupported

if TYPE_CHECKING:
    from .tape import Node


class Tensor(Methods):
    """An n-dimensional array with a gradient.  ``data``: the NumPy or CuPy array, shared, never copied.

    Raises TypeError for data that is no array, ValueError if ``requires_grad`` is asked of integers.
    """

    __slots__ = ("__weakref__", "_data", "_grad", "_requires_grad", "grad_fn")
    _data: Any
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
    def data(self) -> Any:
        """The NumPy or CuPy array itself; a Tensor that is assigned leaves its array."""
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value._data
        elif not hasattr(value, "dtype"):
            raise TypeError(f"a Tensor of a {type(value).__name__}; expected an array. Use tensor(...) for numbers.")
        self._data = value

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
        """A copy of ``value``: a Tensor or an array of this shape, dtype and device (ValueError), or None."""
        array = plain(value)
        if array is None:
            self._grad = None
            return
        if not hasattr(array, "dtype"):
            raise TypeError(f"grad was set to a {type(value).__name__}; expected a Tensor, an array or None.")
        given = (array.shape, array.dtype, device_of(array))
        wanted = (self.shape, self.dtype, self.device)
        if given != wanted:
            raise ValueError(
                f"grad of shape {given[0]}, dtype {dtype_name(given[1])} on {given[2]} was set on a Tensor of shape "
                f"{wanted[0]}, dtype {dtype_name(wanted[1])} on {wanted[2]}; expected the same of each."
            )
        self._grad = xp_of(array).array(array)  # law 4: an optimiser's in-place step must reach nobody else's memory

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

    def stride(self, dim: int | None = None) -> Any:
        """Strides in elements (not bytes)."""
        strides = tuple(s // self.data.itemsize for s in self.data.strides)
        return strides if dim is None else strides[dim]

    def is_contiguous(self) -> bool:
        """True if the elements lie in C order without gaps."""
        return bool(self.data.flags.c_contiguous)

    @property
    def is_cuda(self) -> bool:
        """True for a Tensor on a GPU."""
        return self.device.type == "cuda"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.data.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.data.nbytes

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.data.itemsize

    def nelement(self) -> int:
        """The number of elements."""
        return self.data.size

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

    def __iter__(self) -> Iterator[Tensor]:
        if not self.ndim:
            raise TypeError("iteration over a Tensor without dimensions; expected at least one. Use .item().")
        return (self[i] for i in range(len(self)))

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.ndim and spec else format(repr(self), spec)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    # ------------------------------------------------------------------ gradients

    def backward(
        self, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """Add d(self)/d(leaf) to ``leaf.grad`` for every leaf that requires it, and free the graph.

        ``gradient``: d(loss)/d(self), of the same shape; optional for one element.  Raises GraphError, and
        UnsupportedError for the arguments after it.
        """
        if create_graph:
            unsupported("backward(create_graph=True)", "gradients are plain arrays: there is no second derivative")
        if retain_graph:
            unsupported("backward(retain_graph=True)", "saved values are freed on the way; add the losses and call "
                        "backward once, or run the forward again")  # fmt: skip
        if inputs is not None:
            unsupported("backward(inputs=...)", "set requires_grad to False on the leaves that need no gradient")
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

    # ------------------------------------------------------------------ arithmetic

    def __add__(self, other: Any) -> Tensor:
        return ops.add(*matched(self, other))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Tensor:
        return ops.mul(*matched(self, other))

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Tensor:
        return ops.sub(*matched(self, other))

    def __rsub__(self, other: Any) -> Tensor:
        return ops.sub(*matched(other, self))

    def __truediv__(self, other: Any) -> Tensor:
        return ops.div(*matched(self, other))

    def __rtruediv__(self, other: Any) -> Tensor:
        return ops.div(*matched(other, self))

    def __pow__(self, exponent: Any) -> Tensor:
        return ops.power(*matched(self, exponent)) if isinstance(exponent, Tensor) else ops.pow(self, exponent=exponent)

    def __neg__(self) -> Tensor:
        return ops.neg(self)

    def __matmul__(self, other: Any) -> Tensor:
        return ops.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return ops.matmul(other, self)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return ops.eq(self, other) if _is_number(other) else NotImplemented

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return ops.ne(self, other) if _is_number(other) else NotImplemented

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
        return ops.getitem(self, index=tuple(map(plain, index)) if isinstance(index, tuple) else plain(index))

    def __rpow__(self, base: Any) -> Tensor:
        return ops.power(base, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return ops.floor_divide(*matched(self, other))

    def __rfloordiv__(self, other: Any) -> Tensor:
        return ops.floor_divide(*matched(other, self))

    def __rmod__(self, other: Any) -> Tensor:
        return ops.remainder(*matched(other, self))

    def __mod__(self, other: Any) -> Tensor:
        return ops.remainder(*matched(self, other))

    def __abs__(self) -> Tensor:
        return ops.abs(self)

    def __and__(self, other: Any) -> Tensor:
        return ops.bitwise_and(self, other)

    def __or__(self, other: Any) -> Tensor:
        return ops.bitwise_or(self, other)

    def __xor__(self, other: Any) -> Tensor:
        return ops.bitwise_xor(self, other)

    def __invert__(self) -> Tensor:
        return ops.bitwise_not(self)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    # ------------------------------------------------------------------ the others: functions, reductions, shapes

    def __getattr__(self, name: str) -> Any:
        raise missing("Tensor", name, dir(Tensor))

    @property
    def T(self) -> Tensor:
        """All dimensions reversed; shares memory."""
        return ops.permute(self, axes=tuple(reversed(range(self.ndim))))

    @property
    def mT(self) -> Tensor:
        """The last two dimensions swapped; shares memory."""
        return ops.transpose(self)

    def contiguous(self) -> Tensor:
        """Itself if contiguous, else a copy in C order."""
        return self if self.is_contiguous() else ops.contiguous(self)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) or hasattr(x, "dtype")


def _flat(sizes: tuple) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else tuple(sizes)


from . import methods, ops, tape  # noqa: E402  the methods use them, and they need the class: hence at the end

methods._bind()
