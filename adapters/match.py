"""Which layers a LoraConfig means, with which rank and alpha; an entry that means nothing is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from adapters.config import LoraConfig, after_name, at_end
from adapters.layer import AdapterLayer, TrainedCopy
from adapters.lora import LoraLayer, wrapper_of
from peft_core.errors import ConfigError, expect
from peft_core.nn import Linear, Module, Parameter

Entries = dict[str, Callable[[str], bool]]  # an entry of the config -> "do you mean this path?"


@dataclass(frozen=True)
class Match:
    """The chosen layers: ``targets`` is path -> (rank, alpha) in model order, ``counts`` entry -> number of layers.

    ``biases``: the targets whose own bias trains.  ``copies``: path -> names of the parameters that train as they are,
    for modules_to_save and for the biases of other modules.
    """

    targets: dict[str, tuple[int, float]]
    counts: dict[str, int]
    biases: frozenset[str] = frozenset()
    copies: dict[str, list[str]] = field(default_factory=dict)

    def whole(self) -> list[str]:
        """The base's names of all parameters that train as they are."""
        return [f"{path}.{name}" for path, names in self.copies.items() for name in names] + [
            f"{path}.bias" for path in self.targets if path in self.biases
        ]


def named_layers(model: Module) -> Iterator[tuple[str, Module]]:
    """Every module under the path it has without adapters: what an AdapterLayer is made of stays hidden."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in inside):
            continue
        if isinstance(module, AdapterLayer):
            inside.append(path + "." if path else "")
        yield path, module


def hidden_layers(model: Module) -> Iterator[tuple[str, Module, str, TrainedCopy]]:
    """(path, module, path of the copy, the copy) of what stands inside modules that an adapter trains as a whole."""
    for path, module in named_layers(model):
        if isinstance(module, TrainedCopy):
            for inner, child in module.base_layer.named_modules():
                if inner:
                    yield f"{path}.{inner}", child, path, module


def base_of(module: Module) -> Module:
    """``module`` itself, or what it is wrapped around."""
    return module.base_layer if isinstance(module, AdapterLayer) else module


def is_linear(module: Module) -> bool:
    """Whether ``module`` is a Linear, with or without adapters."""
    return isinstance(base_of(module), Linear) and not isinstance(module, TrainedCopy)


def base_weight(module: Module) -> Module | None:
    """The layer that LoRA can wrap: ``module``, or what it is wrapped around; None for another kind."""
    return None if wrapper_of(module) is None else base_of(module)


def model_name(model: Any) -> str:
    """The name that people know a model by: its checkpoint's architecture, else its class."""
    names = getattr(getattr(model, "config", None), "architectures", None)
    return str(names[0]) if names else type(model).__name__


def selects(names: list[str] | str, path: str) -> bool:
    """PEFT's rule: a text is a regular expression for the full path, a list names paths or their last components."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith("." + name) for name in names)


def layer_index(path: str, patterns: list[str] | str | None) -> int | None:
    """The first number in ``path`` that follows a name (or one of ``patterns``): the layer it is in, else None."""
    listed = [patterns] if isinstance(patterns, str) else list(patterns or [])
    shapes = [after_name(pattern) for pattern in listed] or [r".*?\.[^.]*\.(\d+)\."]
    for shape in shapes:
        found = re.match(shape, path)
        if found:
            return int(found.group(found.lastindex or 1))
    return None


def pattern_matches(key: str, path: str) -> bool:
    """PEFT's rule for a key of rank_pattern or alpha_pattern: a regular expression for the end of a path."""
    return re.match(at_end(key), path) is not None


def pattern_value(table: dict[str, Any], path: str, default: Any) -> Any:
    """The value of the first key that matches ``path``, in the order of the table, else ``default``."""
    return next((value for key, value in table.items() if pattern_matches(key, path)), default)


def match_modules(model: Module, config: LoraConfig, *, strict: bool = True) -> Match:
    """The layers of ``model`` that ``config`` means; with ``strict=False`` an entry may mean nothing.

    Raises ConfigError, naming what the model has, for every entry of target_modules, exclude_modules,
    layers_to_transform, layers_pattern, rank_pattern, alpha_pattern and modules_to_save that changes nothing, for a
    target that is neither linear nor an embedding, and for a module that would be adapted in two ways.
    """
    layers = dict(named_layers(model))
    able = [path for path, module in layers.items() if wrapper_of(module) is not None]
    linear = [path for path in able if is_linear(layers[path])]
    every = [*layers, *(path for path, *_ in hidden_layers(model))]
    kept = _without_excluded(model, config, able, linear, every if strict else None)
    entries = _entries(model, config)
    _expect_adaptable(config, layers, entries)
    _expect_none_hidden(model, config, entries)
    paths = [path for path in kept if any(chooses(path) for chooses in entries.values())]
    if strict:
        _expect_all_match(model, entries, paths, able, linear)
        _expect_layers(config, entries, paths)
    paths = [path for path in paths if in_layers(config, path)]
    if strict:
        for name in ("rank_pattern", "alpha_pattern"):
            _expect_patterns_used(name, getattr(config, name), paths)
    targets = {
        path: (pattern_value(config.rank_pattern, path, config.r),
               pattern_value(config.alpha_pattern, path, config.lora_alpha))
        for path in paths
    }  # fmt: skip
    tables = [path for path in paths if not is_linear(layers[path])] if config.lora_bias else []
    expect(not tables, ConfigError, f"lora_bias is true and {tables} are embeddings", expected="linear targets only",
           fix="Remove lora_bias or the embedding.")  # fmt: skip
    biases = _with_bias(layers, paths) if config.bias != "none" else frozenset()
    copies = match_copies(model, config, paths, strict=strict)
    return Match(targets, {entry: sum(map(chooses, paths)) for entry, chooses in entries.items()}, biases, copies)


def _entries(model: Module, config: LoraConfig) -> Entries:
    """One question "do you mean this path?" for each entry of target_modules."""
    names = config.target_modules
    have = _last_names(path for path, module in named_layers(model) if is_linear(module))
    expect(names, ConfigError, f"target_modules is {names!r}", expected="the layers to adapt",
           fix=f'Name some of: {have} (or "all-linear").')  # fmt: skip
    assert names is not None
    if names != "all-linear":
        return _choosers(names)
    head = getattr(model, "get_output_embeddings", lambda: None)()  # a model without it has no head
    every = [*named_layers(model), *((path, module) for path, module, *_ in hidden_layers(model))]
    chosen = {path for path, module in every if module is not head and isinstance(base_of(module), Linear)}
    return {"all-linear": chosen.__contains__}


def _choosers(names: list[str] | str) -> Entries:
    if isinstance(names, str):
        return {names: partial(selects, names)}
    return {name: partial(selects, [name]) for name in names}


def _last_names(paths: Iterable[str]) -> str:
    """The distinct last components, in model order."""
    return " ".join(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths)) or "(no linear layer)"


def _without_excluded(
    model: Module, config: LoraConfig, able: list[str], linear: list[str], every: list[str] | None
) -> list[str]:
    names = config.exclude_modules
    if not names:
        return able
    idle = [name for name, chooses in _choosers(names).items() if every and not any(map(chooses, every))]
    expect(not idle, ConfigError, f"exclude_modules {idle!r} matches no layer of {model_name(model)}",
           expected=f"names among: {_last_names(linear)}", fix="Remove or correct it.")  # fmt: skip
    return [path for path in able if not selects(names, path)]


def _expect_adaptable(config: LoraConfig, layers: dict[str, Module], entries: Entries) -> None:
    """A named norm or a module another adapter trains is refused: dropping it silently would train less than asked."""
    for name, chooses in entries.items():
        for path, module in layers.items():
            if not path or not chooses(path) or (config.exclude_modules and selects(config.exclude_modules, path)):
                continue
            expect(not isinstance(module, TrainedCopy), ConfigError,
                   f"target_modules {name!r} matches {path}, which adapters {_names_at(module)} train as a whole",
                   expected="one kind of adapter per module", fix="Delete that adapter first.")  # fmt: skip
            holds = any(isinstance(value, Parameter) for value in vars(module).values())
            if name != "all-linear" and holds and wrapper_of(module) is None:
                raise ConfigError(
                    f"target_modules {name!r} matches {path}, which is {_article(type(module).__name__)}; expected "
                    "linear layers and embeddings only. Adapters on other layers are not supported: remove it, or name "
                    "it in modules_to_save."
                )


def _expect_none_hidden(model: Module, config: LoraConfig, entries: Entries) -> None:
    """Inside a module that another adapter trains as a whole nothing can be adapted, and nothing is dropped."""
    for path, module, above, owner in hidden_layers(model):
        excluded = config.exclude_modules and selects(config.exclude_modules, path)
        for name, chooses in entries.items():
            if chooses(path) and in_layers(config, path) and not excluded and wrapper_of(module) is not None:
                _refuse_hidden(f"target_modules {name!r}", path, above, owner)


def _refuse_hidden(what: str, path: str, above: str, owner: TrainedCopy) -> None:
    raise ConfigError(
        f"{what} matches {path} inside {above}, which adapters {_names_at(owner)} train as a whole; expected one kind "
        "of adapter per module. Delete that adapter first."
    )


def _names_at(module: Module) -> list[str]:
    return list(module.adapters) if isinstance(module, AdapterLayer) else []


def _article(name: str) -> str:
    return ("an " if name[:1].lower() in "aeiou" else "a ") + name


def _expect_all_match(model: Module, entries: Entries, paths: list[str], able: list[str], linear: list[str]) -> None:
    """Every entry chooses something; what the model has instead goes into the message."""
    idle = [name for name, chooses in entries.items() if not any(map(chooses, paths))]
    if not idle:
        return
    excluded = any(entries[name](path) for name in idle for path in able)
    raise ConfigError(
        f"target_modules {idle!r} matches no linear layer of {model_name(model)}"
        + (" outside exclude_modules" if excluded else "")
        + f'. Available: {_last_names(linear)} (or "all-linear").'
    )


def in_layers(config: LoraConfig, path: str) -> bool:
    """Whether layers_to_transform leaves ``path``."""
    layers = config.layers_to_transform
    wanted = [layers] if isinstance(layers, int) else layers
    return wanted is None or layer_index(path, config.layers_pattern) in wanted


def _expect_layers(config: LoraConfig, entries: Entries, paths: list[str]) -> None:
    """Every number of layers_to_transform and every layers_pattern exists, and no entry loses all its layers."""
    layers, patterns = config.layers_to_transform, config.layers_pattern
    if layers is None:
        return
    wanted = layers if isinstance(layers, list) else [layers]
    for pattern in [patterns] if isinstance(patterns, str) else patterns or []:
        expect(any(layer_index(path, pattern) is not None for path in paths), ConfigError,
               f"layers_pattern {pattern!r} matches no path of the chosen layers",
               expected=f"a part of: {paths[0]}")  # fmt: skip
    have = sorted({i for path in paths if (i := layer_index(path, patterns)) is not None})
    missing = [i for i in wanted if i not in have]
    expect(not missing, ConfigError, f"layers_to_transform {missing} matches no layer",
           expected=f"numbers among {_ranges(have)}")  # fmt: skip
    chosen = [path for path in paths if in_layers(config, path)]
    idle = [name for name, chooses in entries.items() if not any(map(chooses, chosen))]
    expect(not idle, ConfigError, f"target_modules {idle!r} matches no linear layer inside layers {wanted}",
           expected=f"names among: {_last_names(chosen)}")  # fmt: skip


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 3 as "0-3"."""
    if numbers and numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "(none: no path has a layer number)"


def _with_bias(layers: dict[str, Module], paths: list[str]) -> frozenset[str]:
    return frozenset(path for path in paths if isinstance(getattr(base_of(layers[path]), "bias", None), Parameter))


def match_copies(model: Module, config: LoraConfig, targets: list[str], *, strict: bool = True) -> dict[str, list[str]]:
    """path -> names of the parameters that train as they are: modules_to_save, and with bias="all" other biases.

    PEFT's rule for modules_to_save: a path that ends with the entry, "norm" is "input_layernorm" too.
    Raises ConfigError for an entry that names no module with parameters, and where LoRA and a copy would meet.
    """
    layers = dict(named_layers(model))
    copies: dict[str, list[str]] = {}
    for entry in config.modules_to_save or []:
        found = [path for path in layers if path and path.endswith(entry) and _own_names(layers[path])]
        expect(found or not strict, ConfigError, f"modules_to_save {entry!r} matches no module of {model_name(model)}",
               expected=f"names such as {_last_names(p for p, m in layers.items() if p and _direct(m))}")  # fmt: skip
        copies.update({path: _own_names(layers[path]) for path in found})
    copies = {path: names for path, names in copies.items() if not any(path.startswith(o + ".") for o in copies)}
    if config.bias == "all":
        for path, module in layers.items():
            inside = any(path == other or path.startswith(other + ".") for other in [*copies, *targets])
            if path and not inside and isinstance(vars(base_of(module)).get("bias"), Parameter):
                copies[path] = ["bias"]
    for path in copies:
        _expect_one_kind(path, layers, targets)
    for path, module, above, owner in hidden_layers(model):
        if any(path.startswith(other + ".") for other in copies):
            continue
        for entry in config.modules_to_save or []:
            if path.endswith(entry) and _own_names(module):
                _refuse_hidden(f"modules_to_save {entry!r}", path, above, owner)
        if config.bias == "all" and isinstance(vars(module).get("bias"), Parameter):
            _refuse_hidden("bias 'all'", f"{path}.bias", above, owner)
    return copies


def _own_names(module: Module) -> list[str]:
    return [name for name, _ in base_of(module).named_parameters()]


def _direct(module: Module) -> bool:
    return any(isinstance(value, Parameter) for value in vars(base_of(module)).values())


def _expect_one_kind(path: str, layers: dict[str, Module], targets: list[str]) -> None:
    below = [other for other in targets if other == path or other.startswith(path + ".")]
    expect(not below, ConfigError, f"{path} is in modules_to_save and {below[:1]} is a target of LoRA",
           expected="one of the two for each module",
           fix="Name it in one of target_modules and modules_to_save, or in exclude_modules.")  # fmt: skip
    taken = [(other, _names_at(module)) for other, module in layers.items()
             if (isinstance(module, LoraLayer) and other == path)
             or (isinstance(module, AdapterLayer) and other.startswith(path + "."))]  # fmt: skip
    expect(not taken, ConfigError, f"{path} is to be trained as it is, and {taken[:1]} adapt it already",
           expected="one kind of adapter per module", fix="Delete that adapter first.")  # fmt: skip


def _expect_patterns_used(name: str, table: dict[str, Any], paths: list[str]) -> None:
    """The first key that matches wins, so a later one may never be asked: that is an error, not a surprise."""
    first = {path: next((key for key in table if pattern_matches(key, path)), None) for path in paths}
    for key in table:
        if key in first.values():
            continue
        hits = [path for path in paths if pattern_matches(key, path)]
        expect(hits, ConfigError, f"{name} key {key!r} matches none of the {len(paths)} adapted layers",
               expected=f"a path or its last components, such as {_last_names(paths)}")  # fmt: skip
        raise ConfigError(
            f"{name} key {key!r} is never used: {first[hits[0]]!r} comes first and matches {hits[0]} too; expected the "
            "special keys before the general ones. Put it first."
        )
