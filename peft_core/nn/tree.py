"""Paths through a tree of Modules: finding, replacing and printing what plain attributes, lists and dicts hold.

The functions take the class ``Module`` (or ``Parameter``) as ``kind``, so that this file needs no import of module.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_CONTAINERS = {list: "ModuleList", tuple: "ModuleTuple", dict: "ModuleDict"}


def join(prefix: str, name: str) -> str:
    """``prefix.name``, or the name alone below the root."""
    return f"{prefix}.{name}" if prefix else name


def members(module: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """(name, value) of the attributes of ``kind``, in the order they were set, through lists, tuples and dicts.

    Raises ValueError for a dict key that contains a dot: no path could name it.
    """
    for name, value in vars(module).items():
        yield from _flat(name, value, kind)


def _flat(name: str, value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    if isinstance(value, kind):
        yield name, value
    elif isinstance(value, list | tuple | dict):
        for key, element in _items(value):
            found = _flat(f"{name}.{key}", element, kind)
            if "." in key and (first := next(found, None)) is not None:
                raise ValueError(f"key {key!r} of {name!r} contains a dot; expected none: {first[0]!r} is no path. "
                                 "Choose another key.")  # fmt: skip
            yield from found


def _items(container: Any) -> list[tuple[str, Any]]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return [(str(key), value) for key, value in pairs]


def _below(value: Any, kind: type) -> dict[str, Any]:
    """name -> what a path may go through next: modules, and containers that hold modules."""
    found = vars(value).items() if isinstance(value, kind) else _items(value)
    return {name: child for name, child in found if any(True for _ in _flat(name, child, kind))}


def resolve(root: Any, path: str, kind: type) -> Any:
    """The module at ``path`` below ``root``.  Raises AttributeError naming the path and what exists there."""
    value, done = root, ""
    for name in path.split(".") if path else []:
        names = _below(value, kind)
        if name not in names:
            shown = [*names][:12]
            listed = ", ".join(shown) + (f", ... ({len(names)} in all)" if len(names) > len(shown) else "")
            where = f"{done!r}" if done else type(root).__name__
            raise AttributeError(
                f"no module {path!r}: {where} has no {name!r}; expected one of: {listed or '(nothing)'}."
            )
        value, done = names[name], join(done, name)
    if not isinstance(value, kind):
        raise AttributeError(f"{path!r} is a {type(value).__name__}; expected a module in it: "
                             f"{', '.join(join(path, name) for name in _below(value, kind))}.")  # fmt: skip
    return value


def replace(root: Any, path: str, module: Any, kind: type) -> None:
    """Put ``module`` at ``path``, where a module stands now.  Raises AttributeError or ValueError."""
    if not path:
        raise ValueError("set_submodule('') would replace the model itself; expected the path of a module inside it.")
    resolve(root, path, kind)
    parent: Any = root
    *above, last = path.split(".")
    for name in above:
        parent = _below(parent, kind)[name]
    if isinstance(parent, tuple):
        raise ValueError(f"set_submodule({path!r}): {'.'.join(above)!r} is a tuple; expected a list or a dict, "
                         "whose elements can be replaced.")  # fmt: skip
    if isinstance(parent, list):
        parent[int(last)] = module
    elif isinstance(parent, dict):
        parent[next(key for key in parent if str(key) == last)] = module
    else:
        setattr(parent, last, module)


# ---------------------------------------------------------------------- repr


def describe(module: Any, kind: type) -> str:
    """The tree below ``module``, one line a module; equal neighbours in a list are counted, not repeated."""
    return _block(type(module).__name__, module.extra_repr(), _parts(vars(module).items(), kind))


def _parts(items: Any, kind: type) -> list[tuple[str, str]]:
    parts = []
    for name, value in items:
        if isinstance(value, kind):
            parts.append((str(name), repr(value)))
        elif isinstance(value, list | tuple | dict) and any(True for _ in _flat("", value, kind)):
            inside = _parts(_items(value), kind)
            word = next(word for container, word in _CONTAINERS.items() if isinstance(value, container))
            parts.append((str(name), _block(word, "", inside if isinstance(value, dict) else _counted(inside))))
    return parts


def _counted(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    runs: list[list] = []  # [first name, last name, text, count]
    for name, text in parts:
        if runs and runs[-1][2] == text:
            runs[-1][1], runs[-1][3] = name, runs[-1][3] + 1
        else:
            runs.append([name, name, text, 1])
    return [(first, text) if n == 1 else (f"{first}-{last}", f"{n} x {text}") for first, last, text, n in runs]


def _block(word: str, extra: str, parts: list[tuple[str, str]]) -> str:
    if not parts:
        return f"{word}({extra})"
    lines = [extra] if extra else []
    lines += [f"({name}): {text}" for name, text in parts]
    return "\n".join([f"{word}(", *("  " + line.replace("\n", "\n  ") for line in lines), ")"])
