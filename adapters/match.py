"""Which linear layers a LoraConfig means, with which rank and alpha; an entry that means nothing is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from adapters.config import LoraConfig
from adapters.lora import LoraLinear
from peft_core.errors import ConfigError, expect
from peft_core.nn import Linear, Module, Parameter

Entries = dict[str, Callable[[str], bool]]  # an entry of the config -> "do you mean this path?"


@dataclass(frozen=True)
class Match:
    """The chosen layers: ``targets`` is path -> (rank, alpha) in model order, ``counts`` entry -> number of layers."""

    targets: dict[str, tuple[int, float]]
    counts: dict[str, int]


def named_layers(model: Module) -> Iterator[tuple[str, Module]]:
    """Every module under the path it has without adapters: what a LoraLinear is made of stays hidden."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in inside):
            continue
        if isinstance(module, LoraLinear):
            inside.append(path + "." if path else "")
        yield path, module


def is_linear(module: Module) -> bool:
    """Whether LoRA can wrap ``module``: a Linear, with or without adapters."""
    return isinstance(module, (Linear, LoraLinear))


def base_linear(module: Module) -> Linear | None:
    """The Linear that ``module`` is, or is wrapped around; None for another kind."""
    inner = module.base_layer if isinstance(module, LoraLinear) else module
    return inner if isinstance(inner, Linear) else None


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
    shapes = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in listed] or [r".*?\.[^.]*\.(\d+)\."]
    for shape in shapes:
        found = re.match(shape, path)
        if found:
            return int(found.group(found.lastindex or 1))
    return None


def pattern_matches(key: str, path: str) -> bool:
    """PEFT's rule for a key of rank_pattern or alpha_pattern: a regular expression for the end of a path."""
    return re.match(rf"(.*\.)?({key})$", path) is not None


def pattern_value(table: dict[str, Any], path: str, default: Any) -> Any:
    """The value of the first key that matches ``path``, in the order of the table, else ``default``."""
    return next((value for key, value in table.items() if pattern_matches(key, path)), default)


def match_modules(model: Module, config: LoraConfig, *, strict: bool = True) -> Match:
    """The layers of ``model`` that ``config`` means; with ``strict=False`` an entry may mean nothing.

    Raises ConfigError, naming what the model has, for every entry of target_modules, exclude_modules,
    layers_to_transform, layers_pattern, rank_pattern and alpha_pattern that changes nothing, for a target that is no
    linear layer, and for one whose weight another layer shares.
    """
    layers = dict(named_layers(model))
    linear = [path for path, module in layers.items() if is_linear(module)]
    kept = _without_excluded(model, config, linear, list(layers) if strict else None)
    entries = _entries(model, config)
    _expect_linear(layers, entries)
    paths = [path for path in kept if any(chooses(path) for chooses in entries.values())]
    if strict:
        _expect_all_match(model, entries, paths, linear)
        _expect_layers(config, entries, paths)
    paths = [path for path in paths if in_layers(config, path)]
    _expect_untied(model, layers, paths)
    if strict:
        for name in ("rank_pattern", "alpha_pattern"):
            _expect_patterns_used(name, getattr(config, name), paths)
    targets = {
        path: (pattern_value(config.rank_pattern, path, config.r),
               pattern_value(config.alpha_pattern, path, config.lora_alpha))
        for path in paths
    }  # fmt: skip
    return Match(targets, {entry: sum(map(chooses, paths)) for entry, chooses in entries.items()})


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
    return {"all-linear": {path for path, module in named_layers(model) if module is not head}.__contains__}


def _choosers(names: list[str] | str) -> Entries:
    if isinstance(names, str):
        return {names: partial(selects, names)}
    return {name: partial(selects, [name]) for name in names}


def _last_names(paths: Iterable[str]) -> str:
    """The distinct last components, in model order."""
    return " ".join(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths)) or "(no linear layer)"


def _without_excluded(model: Module, config: LoraConfig, linear: list[str], every: list[str] | None) -> list[str]:
    names = config.exclude_modules
    if not names:
        return linear
    idle = [name for name, chooses in _choosers(names).items() if every and not any(map(chooses, every))]
    expect(not idle, ConfigError, f"exclude_modules {idle!r} matches no layer of {model_name(model)}",
           expected=f"names among: {_last_names(linear)}", fix="Remove or correct it.")  # fmt: skip
    return [path for path in linear if not selects(names, path)]


def _expect_linear(layers: dict[str, Module], entries: Entries) -> None:
    """A named embedding or norm is refused: dropping it silently would train less than was asked for."""
    for name, chooses in entries.items():
        for path, module in layers.items():
            holds = any(isinstance(value, Parameter) for value in vars(module).values())
            if name != "all-linear" and path and holds and not is_linear(module) and chooses(path):
                raise ConfigError(
                    f"target_modules {name!r} matches {path}, which is {_article(type(module).__name__)}; expected "
                    "linear layers only. Adapters on other layers are not supported yet: remove it."
                )


def _article(name: str) -> str:
    return ("an " if name[:1].lower() in "aeiou" else "a ") + name


def _expect_all_match(model: Module, entries: Entries, paths: list[str], linear: list[str]) -> None:
    """Every entry chooses something; what the model has instead goes into the message."""
    idle = [name for name, chooses in entries.items() if not any(map(chooses, paths))]
    if not idle:
        return
    excluded = any(entries[name](path) for name in idle for path in linear)
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


def _expect_untied(model: Module, layers: dict[str, Module], paths: list[str]) -> None:
    """Adapting a weight that the embedding shares would merge the adapter into both (huggingface/peft#2018)."""
    owners: dict[int, list[str]] = {}
    for path, module in layers.items():
        plain = module.base_layer if isinstance(module, LoraLinear) else module
        for value in vars(plain).values():
            if isinstance(value, Parameter):
                owners.setdefault(id(value.data), []).append(path)
    for path in paths:
        linear = base_linear(layers[path])
        shared = [other for other in owners.get(id(linear.weight.data) if linear else 0, []) if other != path]
        expect(not shared, ConfigError, f"target {path} of {model_name(model)} shares its weight with {shared[:1]}",
               expected="layers with a weight of their own (tied embeddings cannot be adapted yet)",
               fix=f"Remove {path.rsplit('.', 1)[-1]!r} from target_modules.")  # fmt: skip


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
