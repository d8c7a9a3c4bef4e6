"""A training run to disk and back, exactly: parameters, moments, gradients of a half-done step, random state, progress.

A directory with state.safetensors (every array) and state.json (the rest, and a checksum of both).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from . import random
from .backend import to_device
from .dtypes import dtype_name
from .errors import ConfigError, FileError, expect
from .files import atomic_dir, atomic_write
from .nn import Module
from .optim import Optimizer
from .safetensors_io import load_file, save_file
from .tensor import Tensor
from .train import TrainState

VERSION = 1
_ARRAYS, _REST = "state.safetensors", "state.json"
_DAMAGED = "Use an older state, or start the run anew."


def save_training_state(
    directory: str | os.PathLike,
    model: Module,
    optimizer: Optimizer,
    state: TrainState,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write all that ``load_training_state`` needs to continue bit for bit, in place of an older state.

    ``extra``: values of your own (numbers, texts, lists, tuples, dicts, arrays).  The directory appears whole or not at
    all.  Raises FileError if it holds something else, if a value cannot be stored, or if the system refuses.
    """
    directory = Path(directory)
    known = not directory.is_dir() or {p.name for p in directory.iterdir()} <= {_ARRAYS, _REST}
    expect(known, FileError, f"{directory} holds other files", expected="a new directory or an older training state",
           fix="Choose a directory for the state alone.")  # fmt: skip
    parameters = _trainable(model)
    arrays: dict[str, Any] = {f"parameter/{name}": p.data for name, p in parameters.items()}
    if state.micro:
        arrays |= {f"gradient/{name}": p._grad for name, p in parameters.items() if p._grad is not None}
    optimizer_state = _named(optimizer.state_dict(), _optimizer_names(parameters, optimizer))
    rest = {
        "version": VERSION,
        "progress": asdict(state),
        "optimizer_class": type(optimizer).__name__,
        "optimizer": _pack(optimizer_state, "optimizer", arrays),
        "random": _pack(random.get_state(), "random", arrays),
        "extra": _pack(dict(extra or {}), "extra", arrays),
    }
    with atomic_dir(directory, replace=True) as folder:
        save_file(arrays, folder / _ARRAYS)
        rest["arrays_sha256"] = _sha256_of(folder / _ARRAYS)
        rest["sha256"] = _digest(rest)
        atomic_write(folder / _REST, json.dumps(rest, indent=1) + "\n")


def load_training_state(
    directory: str | os.PathLike, model: Module, optimizer: Optimizer
) -> tuple[TrainState, dict[str, Any]]:
    """Put a saved run back into a model and an optimizer built as they were; returns its progress and ``extra``.

    Nothing is changed unless all of it fits.  Raises FileError for a missing, damaged or unknown state, and, with all
    mismatches in one text, where names, shapes, dtypes or the optimizer are others than those of this run.
    """
    directory = Path(directory)
    rest = _read(directory)
    arrays = load_file(directory / _ARRAYS)
    parameters = _trainable(model)
    order = _optimizer_names(parameters, optimizer)
    try:
        state = TrainState(**{f.name: rest["progress"][f.name] for f in fields(TrainState)})
        saved_optimizer = _unpack(rest["optimizer"], arrays)
        random_state = _unpack(rest["random"], arrays)
        extra = _unpack(rest["extra"], arrays)
        saved_class = rest["optimizer_class"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        happened = f"{directory} is not a complete training state ({error!r})"
        raise FileError(f"{happened}; expected all of its fields and arrays. {_DAMAGED}") from error
    problems = _parameter_problems(parameters, arrays)
    problems += _optimizer_problems(saved_optimizer, saved_class, optimizer, order)
    expect(not problems, FileError, f"{directory} does not fit this run: {'; '.join(problems)}",
           expected="the parameters and the optimizer that it was saved with",
           fix="Build model, adapter and optimizer from the same configuration.")  # fmt: skip
    try:
        optimizer.load_state_dict(_numbered(saved_optimizer, order))
    except ConfigError as error:
        raise FileError(f"{directory} does not fit this run: {error}") from error
    for name, p in parameters.items():
        p.data = to_device(np.array(arrays[f"parameter/{name}"]), p.device)  # a copy: the mapped file is read-only
        gradient = arrays.get(f"gradient/{name}")
        p._grad = None if gradient is None else to_device(np.array(gradient), p.device)
    random.set_state(random_state)
    return state, extra


# ---------------------------------------------------------------------- files


def _read(directory: Path) -> dict[str, Any]:
    """state.json, after its checksum and that of the arrays were compared."""
    path = directory / _REST
    try:
        rest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(
            f"{path} could not be read ({error.strerror}); expected a directory that save_training_state wrote. "
            "Check the path."
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is damaged ({error}); expected a JSON object. {_DAMAGED}") from error
    expect(isinstance(rest, dict) and "version" in rest, FileError, f"{path} is not a training state",
           expected='an object with "version"', fix="Check the path.")  # fmt: skip
    expect(rest["version"] == VERSION, FileError, f"{path} has version {rest['version']!r}", expected=str(VERSION),
           fix="Continue with the version of this library that wrote it.")  # fmt: skip
    expect(rest.get("sha256") == _digest(rest), FileError, f"{path} was changed or damaged after it was written",
           expected="the content that its checksum is of", fix=_DAMAGED)  # fmt: skip
    arrays = directory / _ARRAYS
    expect(arrays.is_file(), FileError, f"{arrays} is missing", expected="it next to state.json", fix=_DAMAGED)
    expect(rest["arrays_sha256"] == _sha256_of(arrays), FileError,
           f"{arrays} was changed or damaged after it was written",
           expected="the bytes that the checksum in state.json is of", fix=_DAMAGED)  # fmt: skip
    return rest


def _digest(rest: dict[str, Any]) -> str:
    content = {key: value for key, value in rest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------- nested values <-> JSON and arrays


def _pack(value: Any, path: str, arrays: dict[str, Any]) -> Any:
    """``value`` as JSON, its arrays put into ``arrays`` under their paths.  Raises FileError for another type."""
    if isinstance(value, Tensor):
        value = value.data
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_pack(v, f"{path}/{i}", arrays) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": _pack(list(value), path, arrays)}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key.startswith("$")]
        expect(not wrong, FileError, f"{path} has the keys {wrong}", expected="texts that do not start with '$'",
               fix="Convert them with str().")  # fmt: skip
        return {key: _pack(v, f"{path}/{key}", arrays) for key, v in value.items()}
    expect(hasattr(value, "dtype"), FileError, f"{path} is a {type(value).__name__}",
           expected="numbers, texts, lists, tuples, dicts and arrays",
           fix="Store it in another form.")  # fmt: skip
    while path in arrays:  # {"a/b": x, "a": {"b": y}}: one path, two arrays
        path += "'"
    arrays[path] = value
    return {"$array": path}


def _unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, arrays) for v in value]
    if isinstance(value, dict):
        if "$tuple" in value:
            return tuple(_unpack(value["$tuple"], arrays))
        if "$array" in value:
            return np.array(arrays[value["$array"]])
        return {key: _unpack(v, arrays) for key, v in value.items()}
    return value


# ---------------------------------------------------------------------- names instead of numbers


def _trainable(model: Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _optimizer_names(parameters: Mapping[str, Tensor], optimizer: Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in its order: numbers would hide a changed order."""
    names = {id(p): name for name, p in parameters.items()}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"#{i}") for i, p in enumerate(order)]  # "#3": not a trainable parameter of the model


def _renamed(optimizer_state: Mapping[str, Any], key_of: Callable[[Any], Any]) -> dict[str, Any]:
    groups = [{**g, "params": [key_of(i) for i in g["params"]]} for g in optimizer_state["param_groups"]]
    return {**optimizer_state, "state": {key_of(i): s for i, s in optimizer_state["state"].items()},
            "param_groups": groups}  # fmt: skip


def _named(optimizer_state: Mapping[str, Any], order: list[str]) -> dict[str, Any]:
    return _renamed(optimizer_state, lambda i: order[i])


def _numbered(optimizer_state: Mapping[str, Any], order: list[str]) -> dict[str, Any]:
    number = {name: i for i, name in enumerate(order)}
    return _renamed(optimizer_state, number.__getitem__)


# ---------------------------------------------------------------------- does it fit


def _parameter_problems(parameters: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray]) -> list[str]:
    saved = {k.removeprefix("parameter/"): a for k, a in arrays.items() if k.startswith("parameter/")}
    problems = [f"{name} is trained here and not in the state" for name in _missing(parameters, saved)]
    problems += [f"{name} is in the state and not trained here" for name in _missing(saved, parameters)]
    for name in parameters.keys() & saved.keys():
        p, a = parameters[name], saved[name]
        if (p.shape, p.dtype) != (a.shape, a.dtype):
            problems.append(f"{name} is {_kind(a)} in the state and {_kind(p.data)} here")
    return sorted(problems)


def _optimizer_problems(
    saved: Mapping[str, Any], saved_class: str, optimizer: Optimizer, order: list[str]
) -> list[str]:
    if saved_class != type(optimizer).__name__:
        return [f"the optimizer was {saved_class} and is {type(optimizer).__name__}"]
    names = iter(order)
    here = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    then = [group["params"] for group in saved["param_groups"]]
    saved_order = [name for group in then for name in group]
    problems = [f"the optimizer had {name} and has it not here" for name in _missing(saved_order, order)]
    problems += [f"the optimizer has {name} and had it not then" for name in _missing(order, saved_order)]
    if not problems and then != here:
        return ["the optimizer had its parameters in another order or in other groups"]
    return problems


def _missing(wanted: Iterable[str], there: Iterable[str]) -> list[str]:
    return sorted(set(wanted) - set(there))


def _kind(array: Any) -> str:
    return f"{dtype_name(array.dtype)} {tuple(array.shape)}"
