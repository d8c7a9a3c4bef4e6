"""Module and Parameter: a tree of plain attributes, named by their paths.

    class Block(Module):
        def __init__(self):                       # no super().__init__() needed
            self.norm = RMSNorm(8)                # a child, named "norm"
            self.layers = [Linear(8, 8), ...]     # children "layers.0", "layers.1", ...
            self.scale = Parameter(tensor(1.0))   # a parameter, named "scale"

A Module's parameters are its Parameter attributes, its children its Module attributes; lists, tuples and dicts of
them are looked into. A plain Tensor attribute is neither: ``register_buffer`` names those that belong to the model.
There is no metaclass and no registration: what ``vars(module)`` shows is what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..backend import Device, as_device, to_device, xp_of
from ..dtypes import as_dtype, dtype_name, is_float
from ..errors import ModelError
from ..tensor import Tensor
from ..unsupported import missing_attribute
from . import tree


class Parameter(Tensor):
    """A Tensor that is part of a Module's state and, unless told otherwise, trained.

    Raises ValueError if ``requires_grad`` is asked of a dtype that is not floating.
    """

    __slots__ = ()
    _replaces_memory = True

    def __init__(self, data: Any, requires_grad: bool = True) -> None:
        super().__init__(data.data if isinstance(data, Tensor) else data, requires_grad)

    def __repr__(self) -> str:
        return f"Parameter containing:\n{super().__repr__()}"


class LoadedKeys(NamedTuple):
    """What ``load_state_dict(strict=False)`` left alone."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Module:
    """Base of everything that holds Parameters.  Subclasses define ``forward``; calling the module runs it."""

    training: bool = True
    forward_state: ClassVar[tuple[str, ...]] = ("training",)  # attributes that recompute() puts back at the rerun

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes.  Raises NotImplementedError unless the subclass defines it."""
        raise NotImplementedError(
            f"{type(self).__name__} was called but defines no forward(); expected a method forward(self, ...)."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        plain = isinstance(value, Tensor) and not isinstance(value, Parameter)
        if plain and isinstance(vars(self).get(name), Parameter):
            raise TypeError(
                f"{type(self).__name__}.{name} is a Parameter and was set to a plain Tensor, which is neither trained "
                "nor saved; expected a Parameter. Write Parameter(tensor), or .copy_(tensor) under no_grad()."
            )
        object.__setattr__(self, name, value)

    # ------------------------------------------------------------------ what it contains

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """(name, child) of the direct children, each once; an element of a list is named ``layers.0``."""
        seen: set[int] = set()
        for name, value in tree.members(self, Module):
            if id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def children(self) -> Iterator[Module]:
        """The direct children."""
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(path, module) of this module and all below it, parents first; a shared module once, under its first path."""
        return self._named_modules(prefix, set())

    def _named_modules(self, prefix: str, seen: set[int]) -> Iterator[tuple[str, Module]]:
        if id(self) in seen:
            return
        seen.add(id(self))
        yield prefix, self
        for name, child in tree.members(self, Module):
            yield from child._named_modules(tree.join(prefix, name), seen)

    def modules(self) -> Iterator[Module]:
        """This module and all below it, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """(path, parameter), each Parameter once: a tied one under its first path."""
        seen: set[int] = set()
        for path, module in self.named_modules(prefix) if recurse else [(prefix, self)]:
            for name, parameter in tree.members(module, Parameter):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield tree.join(path, name), parameter

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """The parameters, each once."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Set a Tensor attribute that moves with the module and, if ``persistent``, is saved with it.

        Raises TypeError for something that is not a Tensor or is a Parameter.
        """
        if tensor is not None and (not isinstance(tensor, Tensor) or isinstance(tensor, Parameter)):
            raise TypeError(
                f"register_buffer({name!r}) got a {type(tensor).__name__}; expected a Tensor or None. "
                "Wrap an array in Tensor(...); a Parameter needs no registration."
            )
        vars(self).setdefault("_buffers", {})[name] = persistent
        setattr(self, name, tensor)

    def _own_buffers(self, persistent_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, persistent in vars(self).get("_buffers", {}).items():
            buffer = getattr(self, name, None)
            if isinstance(buffer, Tensor) and (persistent or not persistent_only):
                yield name, buffer

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """(path, buffer) of all registered buffers, saved or not."""
        for path, module in self.named_modules(prefix):
            for name, buffer in module._own_buffers():
                yield tree.join(path, name), buffer

    def buffers(self) -> Iterator[Tensor]:
        """The registered buffers."""
        return (buffer for _, buffer in self.named_buffers())

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """The same as setting the attribute.  Raises TypeError for something that is not a Parameter or None."""
        if parameter is not None and not isinstance(parameter, Parameter):
            raise TypeError(f"register_parameter({name!r}) got a {type(parameter).__name__}; expected a Parameter.")
        setattr(self, name, parameter)

    def add_module(self, name: str, module: Module | None) -> None:
        """The same as setting the attribute.  Raises TypeError for something that is not a Module or None."""
        if module is not None and not isinstance(module, Module):
            raise TypeError(f"add_module({name!r}) got a {type(module).__name__}; expected a Module.")
        setattr(self, name, module)

    register_module = add_module

    def get_parameter(self, path: str) -> Parameter:
        """The parameter at ``path``.  Raises AttributeError where there is none."""
        above, _, name = path.rpartition(".")
        found = getattr(self.get_submodule(above), name, None)
        if not isinstance(found, Parameter):
            raise AttributeError(f"no parameter {path!r}; expected a name of named_parameters().")
        return found

    def get_submodule(self, path: str) -> Module:
        """The module at ``path`` ("" is this one).  Raises AttributeError naming the path and what exists there."""
        return tree.resolve(self, path, Module)

    def set_submodule(self, path: str, module: Module) -> None:
        """Put ``module`` in the place of the module at ``path``.

        Raises AttributeError where nothing is there to replace, ValueError for the root or for a place inside a tuple,
        TypeError if ``module`` is not a Module.
        """
        if not isinstance(module, Module):
            raise TypeError(f"set_submodule({path!r}) got a {type(module).__name__}; expected a Module.")
        tree.replace(self, path, module, Module)

    # ------------------------------------------------------------------ state

    def _state(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers under every path they have: a tied one appears more than once."""
        for name, parameter in tree.members(self, Parameter):
            yield tree.join(prefix, name), parameter
        for name, buffer in self._own_buffers(persistent_only=True):
            yield tree.join(prefix, name), buffer
        for name, child in tree.members(self, Module):
            yield from child._state(tree.join(prefix, name))

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """{path: Tensor} of parameters and persistent buffers: the memory itself, detached, under every path it has."""
        return {name: tensor.detach() for name, tensor in self._state(prefix)}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> LoadedKeys:
        """Copy Tensors or arrays into the parameters and buffers of the same names, in the dtype these have.

        All disagreements are reported in one ModelError before anything is written: missing names, unexpected names
        (both allowed by ``strict=False`` and then returned), other shapes, integers where floats belong and vice versa.
        """
        own = dict(self._state())
        arrays = {name: value.data if isinstance(value, Tensor) else value for name, value in state.items()}
        missing = [name for name in own if name not in arrays]
        unexpected = [name for name in arrays if name not in own]
        unfit = [name for name in own if name in arrays and not _fits(arrays[name], own[name])]
        if unfit or (strict and (missing or unexpected)):
            raise ModelError(_mismatch(type(self).__name__, own, arrays, missing, unexpected, unfit, strict))
        for name, tensor in own.items():
            if name in arrays:
                _write(tensor, arrays[name])
        return LoadedKeys(missing, unexpected)

    # ------------------------------------------------------------------ changing all of it

    def to(self, *targets: Any, dtype: Any = None, device: Any = None, non_blocking: bool = False) -> Module:
        """Convert floating parameters and buffers to a dtype and/or move everything to a device; returns self.

        Integer tensors keep their dtype. Parameters stay the same objects, so ties and optimisers hold.
        """
        for target in (*targets, dtype, device):
            if isinstance(target, Device) or (isinstance(target, str) and target.partition(":")[0] in {"cpu", "cuda"}):
                device = as_device(target)
            elif target is not None and not isinstance(target, bool):
                dtype = as_dtype(target)
        for tensor in [*self.parameters(), *self.buffers()]:
            tensor.data = _converted(tensor.data, dtype, device)
            if tensor._grad is not None:
                tensor._grad = _converted(tensor._grad, dtype, device)
        return self

    def float(self) -> Module:
        """Floating parameters and buffers in float32; returns self."""
        return self.to("float32")

    def half(self) -> Module:
        """Floating parameters and buffers in float16; returns self."""
        return self.to("float16")

    def bfloat16(self) -> Module:
        """Floating parameters and buffers in bfloat16; returns self."""
        return self.to("bfloat16")

    def double(self) -> Module:
        """Floating parameters and buffers in float64; returns self."""
        return self.to("float64")

    def cpu(self) -> Module:
        """Everything in host memory; returns self."""
        return self.to("cpu")

    def cuda(self, device: int = 0) -> Module:
        """Everything on a GPU; returns self.  Raises RuntimeError where CuPy is missing."""
        return self.to(f"cuda:{device}")

    def requires_grad_(self, flag: bool = True) -> Module:
        """Train (True) or freeze (False) every parameter; returns self."""
        for parameter in self.parameters():
            parameter.requires_grad = flag
        return self

    def train(self, mode: bool = True) -> Module:
        """Set ``training`` on this module and all below it (dropout acts only while training); returns self."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """``train(False)``."""
        return self.train(False)

    def apply(self, function: Callable[[Module], Any]) -> Module:
        """Call ``function`` on every module, children before their parents; returns self."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, or fill them with zeros."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter._grad is not None:
                parameter._grad[...] = 0

    # ------------------------------------------------------------------ for people

    def extra_repr(self) -> str:
        """What stands between the parentheses of the repr besides the children."""
        return ""

    def __repr__(self) -> str:
        return tree.describe(self, Module)

    if not TYPE_CHECKING:  # a type checker has to see what is missing

        def __getattr__(self, name):
            raise missing_attribute(type(self).__name__, name, [*vars(self), *dir(type(self))])


def _fits(array: Any, tensor: Tensor) -> bool:
    return tuple(array.shape) == tensor.shape and is_float(array.dtype) == is_float(tensor.dtype)


def _converted(array: Any, dtype: Any, device: Device | None) -> Any:
    result = array
    if dtype is not None and array.dtype != dtype and is_float(array.dtype):
        result = array.astype(dtype)
        _set_writable(result, _is_writable(array))  # a frozen weight stays one that the kernels may pack
    return result if device is None else to_device(result, device)


def _write(tensor: Tensor, value: Any) -> None:
    writable = _is_writable(tensor.data)
    if not writable:  # a mapped file: it is replaced, never written to
        tensor.data = xp_of(tensor.data).empty(tensor.shape, tensor.dtype)
    tensor.data[...] = to_device(value, tensor.device).astype(tensor.dtype, copy=False)
    _set_writable(tensor.data, writable or not isinstance(tensor, Parameter))  # a buffer may be there to be written to


def _is_writable(array: Any) -> bool:
    return getattr(array.flags, "writeable", True)


def _set_writable(array: Any, flag: bool) -> None:
    if not flag and hasattr(array.flags, "writeable"):
        array.flags.writeable = False


def _mismatch(model: str, own: dict, arrays: dict, missing: list, unexpected: list, unfit: list, strict: bool) -> str:
    lines = [f"the state does not fit {model}; nothing was loaded; expected the names, shapes and kinds of {model}:"]
    if strict:
        lines += [f"  missing     {name} {own[name].shape}" for name in missing]
        lines += [f"  unexpected  {name} {tuple(arrays[name].shape)}" for name in unexpected]
    for name in unfit:
        got, want = arrays[name], own[name]
        lines.append(f"  does not fit  {name}: got {dtype_name(got.dtype)} {tuple(got.shape)}, "
                     f"expected {dtype_name(want.dtype)} {want.shape}")  # fmt: skip
    if strict and (missing or unexpected):
        lines.append("Load the state of this model, or pass strict=False to ignore missing and unexpected names.")
    return "\n".join(lines)
