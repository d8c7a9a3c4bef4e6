"""Put adapters into a model: freeze it, wrap the chosen Linears, say what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from adapters.config import LoraConfig
from adapters.init import Start, starting_values
from adapters.lora import LoraLinear, LowRank
from adapters.match import Match, match_modules
from peft_core.errors import ConfigError, expect
from peft_core.nn import Linear, Module
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


def inject(
    model: Module, config: LoraConfig, adapter_name: str = "default", generator: Generator | None = None
) -> InjectReport:
    """Freeze ``model`` and add a trainable, active adapter to every Linear that ``config`` means.

    At step 0 the outputs stay those of the base, bit for bit (B = 0, unless init_lora_weights is False). Adapters that
    are there already keep their activity and their trainability. Raises ConfigError for an entry that matches nothing
    (see match_modules) and for a name that is taken; the model is then unchanged.
    """
    generator = generator or default_generator
    match = match_modules(model, config)

    def start(path: str, rank: int, layer: Linear | LoraLinear) -> Start:
        return starting_values(config.init_lora_weights, rank, layer.in_features, layer.out_features, generator)

    return add_adapter(model, config, match, start, adapter_name)


def add_adapter(
    model: Module,
    config: LoraConfig,
    match: Match,
    start: Callable[[str, int, Linear | LoraLinear], Start],
    adapter_name: str,
    *,
    active: bool = True,
    trainable: bool = True,
) -> InjectReport:
    """Wrap the layers of ``match``; ``start(path, rank, layer)`` gives A (R, I) and B (O, R) of each."""
    good = isinstance(adapter_name, str) and adapter_name and "." not in adapter_name
    expect(good, ConfigError, f"adapter name {adapter_name!r} cannot be used", expected="a text without a dot")
    expect(adapter_name not in adapter_names(model), ConfigError, f"adapter {adapter_name!r} exists already",
           expected=f"a name besides {adapter_names(model)}",
           fix="Delete it first, or choose another name.")  # fmt: skip
    freeze_base(model)
    for path, (rank, alpha) in match.targets.items():
        layer = model.get_submodule(path)
        assert isinstance(layer, (Linear, LoraLinear))
        a, b = start(path, rank, layer)
        low_rank = LowRank(a, b, config.scaling(a.shape[0], alpha), config.lora_dropout).to_device_of(layer.weight.data)
        low_rank.requires_grad_(trainable)
        low_rank.train(layer.training)
        if isinstance(layer, Linear):
            wrapped = LoraLinear(layer, active=())
            wrapped.training = layer.training
            model.set_submodule(path, wrapped)
            layer = wrapped
        layer.adapters[adapter_name] = low_rank
        if active:
            layer.active = (*layer.active, adapter_name)
    trainable_count, total = count_parameters(model)
    return InjectReport(adapter_name, config, list(match.targets), match.counts, trainable_count, total)


def lora_layers(model: Module) -> dict[str, LoraLinear]:
    """The wrapped layers of ``model`` by path, in model order."""
    return {path: m for path, m in model.named_modules() if isinstance(m, LoraLinear)}


def adapter_names(model: Module) -> list[str]:
    """The names of the adapters in ``model``, in the order they came."""
    return list(dict.fromkeys(name for layer in lora_layers(model).values() for name in layer.adapters))


def active_adapters(model: Module) -> list[str]:
    """The names of the adapters that are applied somewhere in ``model``."""
    return list(dict.fromkeys(name for layer in lora_layers(model).values() for name in layer.active))


def freeze_base(model: Module) -> None:
    """requires_grad False on every parameter that is not an adapter's (by type, not by name)."""
    own = {id(p) for m in model.modules() if isinstance(m, LowRank) for p in m.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.requires_grad = False


def set_active(model: Module, names: list[str]) -> None:
    """Apply exactly the adapters ``names``; what trains does not change.  Raises ConfigError for an unknown name."""
    known = adapter_names(model)
    unknown = [name for name in names if name not in known]
    expect(not unknown, ConfigError, f"adapter {unknown} is not in the model", expected=f"names among {known}")
    for layer in lora_layers(model).values():
        layer.active = tuple(name for name in names if name in layer.adapters)


def count_parameters(model: Module) -> tuple[int, int]:
    """(trainable, all) numbers in ``model``, a shared parameter counted once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, needed in sizes if needed), sum(n for n, _ in sizes)
