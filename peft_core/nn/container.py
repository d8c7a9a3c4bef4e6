"""Sequential, ModuleList and ModuleDict.  A plain list, tuple or dict of Modules as an attribute does as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .module import Module


class _Numbered(Module):
    """Modules named "0", "1", ..."""

    def _all(self) -> list[Module]:
        return [value for name, value in vars(self).items() if name.isdigit()]

    def _set(self, modules: Iterable[Any]) -> None:
        modules = list(modules)
        for i, module in enumerate(modules):
            if not isinstance(module, Module):
                raise TypeError(f"{type(self).__name__} argument {i} is a {type(module).__name__}; expected a Module.")
            setattr(self, str(i), module)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: Any) -> Any:
        found = self._all()[index]
        return self._of(found) if isinstance(index, slice) else found

    def _of(self, modules: list[Module]) -> Any:
        return type(self)(*modules)

    def __setitem__(self, index: int, module: Module) -> None:
        all_of_them = self._all()
        all_of_them[index] = module
        self._set(all_of_them)

    def append(self, module: Module) -> Any:
        """Add a module at the end; returns self.  Raises TypeError for another thing."""
        self._set([*self._all(), module])
        return self

    def extend(self, modules: Iterable[Module]) -> Any:
        """Add modules at the end; returns self.  Raises TypeError for another thing."""
        self._set([*self._all(), *modules])
        return self

    def insert(self, index: int, module: Module) -> None:
        """Add a module before position ``index``.  Raises TypeError for another thing."""
        all_of_them = self._all()
        all_of_them.insert(index, module)
        self._set(all_of_them)


class Sequential(_Numbered):
    """Modules applied one after the other; their names are "0", "1", ... or the keys of one dict.

    Raises TypeError for another thing.
    """

    def __init__(self, *modules: Any) -> None:
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            self._set(modules)

    def _all(self) -> list[Module]:
        return [value for value in vars(self).values() if isinstance(value, Module)]

    def forward(self, x: Any) -> Any:
        """The last module's output."""
        for module in self:
            x = module(x)
        return x


class ModuleList(_Numbered):
    """A list of Modules, named "0", "1", ...; it has no forward.  Raises TypeError for another thing in it."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self._set(modules)

    def _of(self, modules: list[Module]) -> Any:
        return ModuleList(modules)


class ModuleDict(Module):
    """A dict of Modules under their keys; it has no forward.  Raises TypeError for another thing in it."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        self._keys: list[str] = []
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        if not isinstance(module, Module):
            raise TypeError(f"ModuleDict got a {type(module).__name__} for {name!r}; expected a Module.")
        if "." in name or (name not in self._keys and hasattr(self, name)):
            raise KeyError(f"ModuleDict cannot use the key {name!r}; expected one without a dot that no method has.")
        self._keys += [] if name in self._keys else [name]
        setattr(self, name, module)

    def __getitem__(self, name: str) -> Module:
        if name not in self._keys:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self) -> list[str]:
        """The keys in order of insertion."""
        return list(self._keys)

    def values(self) -> list[Module]:
        """The modules in order of insertion."""
        return [self[name] for name in self._keys]

    def items(self) -> list[tuple[str, Module]]:
        """(key, module) in order of insertion."""
        return [(name, self[name]) for name in self._keys]
