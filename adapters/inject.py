"""Put adapters into a model: freeze it, wrap the chosen layers, say what was done; which act and which train."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adapters import init
from adapters.config import LoraConfig
from adapters.init import Start
from adapters.layer import AdapterLayer, TrainedCopy, copied
from adapters.lora import LoraEmbedding, LoraLayer, LowRank, wrapper_of
from adapters.match import Match, match_modules, model_name
from peft_core.backend import Array
from peft_core.errors import ConfigError, expect
from peft_core.kept import seal
from peft_core.nn import Module
from peft_core.random import Generator, default_generator


@dataclass(frozen=True)
class InjectReport:
    """What an injection did; ``trainable`` and ``total`` count numbers (a shared parameter once)."""

    adapter_name: str
    config: LoraConfig
    paths: list[str]
    counts: dict[str, int] = field(repr=False)
    trainable: int = 0
    total: int = 0
    whole: list[str] = field(default_factory=list)  # the base's parameters that train as they are


@dataclass(frozen=True)
class Values:
    """Where an adapter's numbers start.  ``start(path, rank, layer)``: A (R, I) and B (O, R) of a layer.

    ``lora_bias``: path -> (O,), zeros for a path that is not there.  ``whole``: the base's name of a parameter that
    trains as it is -> its value, the base's own for a name that is not there.
    """

    start: Callable[[str, int, Any], Start]
    lora_bias: Mapping[str, Array] = field(default_factory=dict)
    whole: Mapping[str, Array] = field(default_factory=dict)


def inject(
    model: Module,
    config: LoraConfig,
    adapter_name: str = "default",
    generator: Generator | None = None,
    *,
    active: bool = True,
) -> InjectReport:
    """Freeze ``model`` and add a trainable adapter to every layer that ``config`` means (frozen: inference_mode).

    At step 0 the outputs stay those of the base, bit for bit (unless init_lora_weights is False). Adapters that are
    there already keep their activity and their trainability. Raises ConfigError for an entry that matches nothing
    (see match_modules) and for a name that is taken; the model is then unchanged.
    """
    generator = generator or default_generator
    match = match_modules(model, config)
    if config.bias != "none" and not any(name.endswith(".bias") for name in match.whole()):
        warnings.warn(f"bias is {config.bias!r}, but {model_name(model)} has no such bias", stacklevel=2)

    def start(path: str, rank: int, layer: LoraLayer) -> Start:
        if isinstance(layer, LoraEmbedding):
            return init.table(config.init_lora_weights, rank, layer.in_features, layer.out_features, generator)
        return init.starting_values(config.init_lora_weights, rank, layer.in_features, layer.out_features, generator)

    trainable = not config.inference_mode
    return add_adapter(model, config, match, Values(start), adapter_name, active=active, trainable=trainable)


def add_adapter(
    model: Module,
    config: LoraConfig,
    match: Match,
    values: Values,
    adapter_name: str,
    *,
    active: bool = True,
    trainable: bool = True,
) -> InjectReport:
    """Wrap the layers of ``match`` and give them the adapter that ``values`` starts."""
    good = isinstance(adapter_name, str) and adapter_name and not set(adapter_name) & set("./\\\0")
    expect(good and adapter_name != BASE, ConfigError, f"adapter name {adapter_name!r} cannot be used",
           expected=f"a text without a dot or a slash, other than {BASE!r}")  # fmt: skip
    expect(adapter_name not in adapter_names(model), ConfigError, f"adapter {adapter_name!r} exists already",
           expected=f"a name besides {adapter_names(model)}",
           fix="Delete it first, or choose another name.")  # fmt: skip
    _expect_one_copy(model, match.copies if active else [])
    freeze_base(model)
    for path, (rank, alpha) in match.targets.items():
        layer = _wrapped(model, path, wrapper_of(model.get_submodule(path)))
        layer.adapters[adapter_name] = _low_rank(path, layer, config, match, values, rank, alpha)
    for path, names in match.copies.items():
        layer = _wrapped(model, path, TrainedCopy)
        own = dict(layer.base_layer.named_parameters())
        arrays = {name: values.whole.get(f"{path}.{name}", own[name].data) for name in names}
        layer.adapters[adapter_name] = copied(layer.base_layer, arrays)
    layers = adapter_layers(model)
    for layer in (layers[path] for path in [*match.targets, *match.copies]):
        layer.adapters[adapter_name].train(layer.training)
        for parameter in layer.own_parameters(adapter_name):
            parameter.requires_grad = trainable
            if not trainable and isinstance(parameter.data, np.ndarray):
                parameter.data.flags.writeable = False  # what cannot change is kept ready for the kernels
        if active:
            layer.active = (*layer.active, adapter_name)
    trainable_count, total = count_parameters(model)
    paths = list(match.targets)
    return InjectReport(adapter_name, config, paths, match.counts, trainable_count, total, match.whole())


def _wrapped(model: Module, path: str, kind: type[AdapterLayer] | None) -> Any:
    """The AdapterLayer at ``path``, made now if there is none."""
    layer = model.get_submodule(path)
    if isinstance(layer, AdapterLayer):
        return layer
    assert kind is not None
    wrapped = kind(layer, active=())
    wrapped.training = layer.training
    model.set_submodule(path, wrapped)
    return wrapped


def _low_rank(
    path: str, layer: LoraLayer, config: LoraConfig, match: Match, values: Values, rank: int, alpha: float
) -> LowRank:
    a, b = values.start(path, rank, layer)
    lora_bias = values.lora_bias.get(path, np.zeros(len(b), np.float32)) if config.lora_bias else None
    bias = values.whole.get(f"{path}.bias", layer.base_layer.bias.data) if path in match.biases else None
    scaling = config.scaling(a.shape[0], alpha)
    made = layer.kind(a, b, scaling, config.lora_dropout, lora_bias=lora_bias, bias=bias)
    return made.to_device_of(layer.weight.data)


# ------------------------------------------------------------------------------------------------ what is there


def adapter_layers(model: Module) -> dict[str, AdapterLayer]:
    """Every wrapped module of ``model`` by path, in model order."""
    return {path: m for path, m in model.named_modules() if isinstance(m, AdapterLayer)}


def lora_layers(model: Module) -> dict[str, LoraLayer]:
    """The layers of ``model`` that have LoRA, by path, in model order."""
    return {path: m for path, m in adapter_layers(model).items() if isinstance(m, LoraLayer)}


def adapter_names(model: Module) -> list[str]:
    """The names of the adapters in ``model``, in the order they came."""
    return list(dict.fromkeys(name for layer in adapter_layers(model).values() for name in layer.adapters))


def active_adapters(model: Module) -> list[str]:
    """The names of the adapters that are applied somewhere in ``model``."""
    return list(dict.fromkeys(name for layer in adapter_layers(model).values() for name in layer.active))


def freeze_base(model: Module) -> None:
    """requires_grad False on every parameter that is not an adapter's (by type, not by name).

    Memory that nobody else holds becomes read-only: the kernels pack what cannot change, and are twice as fast with it.
    """
    layers = adapter_layers(model).values()
    own = {id(p) for layer in layers for name in layer.adapters for p in layer.own_parameters(name)}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.requires_grad = False
            seal(parameter)


# ------------------------------------------------------------------------------------------------ which act

BASE = "__base__"  # in a choice per row: no adapter


def set_active(model: Module, names: Sequence[str]) -> None:
    """Apply exactly the adapters ``names``; what trains does not change.

    A name said twice is applied once. Raises ConfigError for an unknown name, and for two adapters that both replace
    the same module.
    """
    known, names = adapter_names(model), list(dict.fromkeys(names))
    unknown = [name for name in names if name not in known]
    expect(not unknown, ConfigError, f"adapter {unknown} is not in the model", expected=f"names among {known}")
    layers = adapter_layers(model)
    for path, layer in layers.items():
        if isinstance(layer, TrainedCopy):
            both = [name for name in names if name in layer.adapters]
            expect(len(both) <= 1, ConfigError, f"adapters {both} both train a copy of {path}",
                   expected="one of them active at a time")  # fmt: skip
    for layer in layers.values():
        layer.active = tuple(name for name in names if name in layer.adapters)


def _expect_one_copy(model: Module, paths: Any) -> None:
    layers = adapter_layers(model)
    for path in paths:
        taken = layers[path].active if path in layers else ()
        expect(not taken, ConfigError, f"adapter {taken[:1]} is active and trains a copy of {path} already",
               expected="one of them active at a time", fix="Deactivate it first: set_adapter([]).")  # fmt: skip


def set_trainable(model: Module, names: Sequence[str], trainable: bool) -> None:
    """Train the adapters ``names``, or freeze them; which act does not change.  Raises ConfigError: unknown name."""
    known = adapter_names(model)
    unknown = [name for name in names if name not in known]
    expect(not unknown, ConfigError, f"adapter {unknown} is not in the model", expected=f"names among {known}")
    for layer in adapter_layers(model).values():
        for name in set(names) & set(layer.adapters):
            for parameter in layer.own_parameters(name):
                parameter.requires_grad = trainable
                if not trainable:
                    seal(parameter)


@contextlib.contextmanager
def only_active(model: Module, names: Sequence[str]) -> Iterator[None]:
    """Inside, exactly the adapters ``names`` are applied; afterwards those of before that are still there."""
    before = {layer: layer.active for layer in adapter_layers(model).values()}
    try:
        set_active(model, names)
        yield
    finally:
        for layer in adapter_layers(model).values():  # some may be new, some have lost an adapter
            layer.active = tuple(name for name in before.get(layer, ()) if name in layer.adapters)


def delete_adapter(model: Module, adapter_name: str) -> None:
    """Remove an adapter; layers without any become plain again.  Raises ConfigError for an unknown name.

    If it was the only active one, the first of the others becomes active, as in PEFT, with a warning.
    """
    known, active = adapter_names(model), active_adapters(model)
    expect(adapter_name in known, ConfigError, f"adapter {adapter_name!r} is not in the model",
           expected=f"one of {known}")  # fmt: skip
    for path, layer in adapter_layers(model).items():
        layer.active = tuple(name for name in layer.active if name != adapter_name)
        layer.adapters.pop(adapter_name, None)
        if not layer.adapters:
            model.set_submodule(path, layer.base_layer)
    left = [name for name in known if name != adapter_name]
    if active == [adapter_name] and left:
        set_active(model, left[:1])
        warnings.warn(f"adapter {adapter_name!r} was the active one; {left[0]!r} is active now", stacklevel=3)


def count_parameters(model: Module) -> tuple[int, int]:
    """(trainable, all) numbers in ``model``, a shared parameter counted once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, needed in sizes if needed), sum(n for n, _ in sizes)
