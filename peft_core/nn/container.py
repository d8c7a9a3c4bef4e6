"""Sequential.  Other containers are plain: a list, a tuple or a dict of Modules as an attribute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .module import Module


class Sequential(Module):
    """Modules applied one after the other; their names are "0", "1", ...   Raises TypeError for another thing."""

    def __init__(self, *modules: Module) -> None:
        for i, module in enumerate(modules):
            if not isinstance(module, Module):
                raise TypeError(f"Sequential argument {i} is a {type(module).__name__}; expected a Module.")
            setattr(self, str(i), module)

    def _all(self) -> list[Module]:
        return [value for name, value in vars(self).items() if name.isdigit()]

    def __iter__(self) -> Iterator[Module]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: int) -> Module:
        return self._all()[index]

    def forward(self, x: Any) -> Any:
        """The last module's output."""
        for module in self:
            x = module(x)
        return x
