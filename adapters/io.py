"""Adapter directories, exactly as PEFT writes them; strict when read, atomic when written."""

from __future__ import annotations

import dataclasses
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters.config import LoraConfig
from adapters.init import Start
from adapters.inject import InjectReport, Values, adapter_layers, add_adapter
from adapters.lora import LoraEmbedding, LoraLayer, LowRank, wrapper_of
from adapters.match import Match, base_of, in_layers, match_modules, model_name, named_layers, pattern_value, selects
from adapters.stored import (
    PREFIX,
    WEIGHTS_NAME,
    StoredAdapter,
    other_copies,
    read_adapter,
    shape_problems,
    whole_key,
)
from peft_core.backend import to_numpy
from peft_core.errors import AdapterError, ConfigError, expect
from peft_core.nn import Conv1D, Module
from peft_core.safetensors_io import atomic_dir, save_file

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.model",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model",
)  # fmt: skip

# ---------------------------------------------------------------------- reading


def load_adapter(
    model: Module,
    directory: str | Path,
    adapter_name: str = "default",
    *,
    trainable: bool = False,
    active: bool = True,
    strict: bool = True,
) -> InjectReport:
    """Add the adapter in ``directory`` to ``model``: float32, ranks from the tensors, scales from the config.

    Raises AdapterError, one text with every extra key, missing key and wrong shape, and leaves the model as it was;
    ``strict=False`` warns about extra and missing keys instead. A prefix that all names lack, or have too many, is
    mapped with a warning.
    """
    layers = {path: base_of(module) for path, module in named_layers(model) if wrapper_of(module) is not None}
    stored = read_adapter(directory).renamed(layers)
    try:
        match = match_modules(model, stored.config, strict=False)
    except ConfigError as error:
        raise AdapterError(f"{directory} does not fit {model_name(model)}: {error}") from error
    names, shapes = _compare(stored, match, model)
    shapes += other_copies(stored, lambda path: to_numpy(_weight(layers[path])) if path in layers else None)
    if names and not strict:
        warnings.warn(f"{directory}: ignored because strict=False:\n" + "\n".join(names), stacklevel=2)
    refuse(stored, [*(names if strict else []), *shapes], model_name(model))
    expect(stored.pairs, AdapterError, f"{directory} has no LoRA tensors for {model_name(model)}", expected="some")
    _warn_ranks(stored, match)

    def start(path: str, rank: int, layer: Any) -> Start:
        return stored.pairs[path]

    kept = dataclasses.replace(match, targets={p: value for p, value in match.targets.items() if p in stored.pairs})
    values = Values(start, stored.lora_bias, stored.whole)
    return add_adapter(model, stored.config, kept, values, adapter_name, active=active, trainable=trainable)


def _weight(layer: Any) -> Any:
    return layer.weight.data


def _compare(stored: StoredAdapter, match: Match, model: Module) -> tuple[list[str], list[str]]:
    """(problems with names, problems with shapes): one line each."""
    shapes = [line for line in stored.problems if not line.startswith(("extra", "missing"))]
    names = [line for line in stored.problems if line.startswith(("extra", "missing"))]
    layers = dict(named_layers(model))
    for path, pair in stored.pairs.items():
        kind = wrapper_of(layers[path]) if path in layers else None
        fits = kind is not None and issubclass(kind, LoraEmbedding) == (path in stored.tables)
        if path not in match.targets or not fits:
            names += [f"extra key {stored.key(path, half)} {array.shape}"
                      + ("" if fits else " (the model has no such linear layer or embedding)")
                      for half, array in zip("AB", pair, strict=True)]  # fmt: skip
        if fits:
            base: Any = base_of(layers[path])
            size = base.weight.shape[::-1] if path in stored.tables else (base.out_features, base.in_features)
            shapes += shape_problems(stored, path, tuple(size))
    half = {line.split()[2] for line in names if line.startswith("missing key")}
    for path in match.targets:
        if path not in stored.pairs:
            keys = [f"{PREFIX}{path}.lora_{half}" for half in ("A.weight", "B.weight")]
            if issubclass(wrapper_of(layers[path]) or LoraLayer, LoraEmbedding):
                keys = [f"{PREFIX}{path}.lora_embedding_{half}" for half in "AB"]
            names += [f"missing key {key}" for key in keys if not half.intersection(keys)]
        elif stored.config.lora_bias and path not in stored.lora_bias:
            names.append(f"missing key {PREFIX}{path}.lora_B.bias")
    wanted = {f"{path}.{name}": parameter.shape for path in [*match.copies, *match.biases]
              for name, parameter in base_of(layers[path]).named_parameters()}  # fmt: skip
    lines = whole_problems(stored, {name: wanted[name] for name in match.whole()}, list(match.targets))
    return names + lines[0], shapes + lines[1]


def whole_problems(
    stored: StoredAdapter, wanted: Mapping[str, tuple[int, ...]], targets: Iterable[str]
) -> tuple[list[str], list[str]]:
    """(problems with names, with shapes) of the parameters stored as they are; ``wanted``: name -> shape."""
    names = [f"missing key {whole_key(name, targets)}" for name in wanted if name not in stored.whole]
    shapes = []
    for name, array in stored.whole.items():
        key = whole_key(name, targets)
        if name not in wanted:
            names.append(f"extra key {key} {array.shape}")
        elif array.shape != wanted[name]:
            shapes.append(f"wrong shape {key}: {array.shape} in the file, {wanted[name]} in the model")
    lost = [path for path in stored.lora_bias if path not in stored.pairs]
    names += [f"extra key {PREFIX}{path}.lora_B.bias (the file has no lora_A and lora_B there)" for path in lost]
    return names, shapes


def refuse(stored: StoredAdapter, problems: list[str], model: str) -> None:
    """Raise one AdapterError with all ``problems``, if there are any."""
    if not problems:
        return
    shown = problems[:40] + ([f"... and {len(problems) - 40} more"] if len(problems) > 40 else [])
    raise AdapterError(
        f"{stored.directory} does not fit {model}; nothing was loaded; expected exactly the tensors of the adapted "
        "layers. Is it an adapter of another base model?\n  " + "\n  ".join(shown)
    )


def _warn_ranks(stored: StoredAdapter, match: Match) -> None:
    other = {path: (rank, stored.pairs[path][0].shape[0]) for path, (rank, _) in match.targets.items()
             if path in stored.pairs and stored.pairs[path][0].shape[0] != rank}  # fmt: skip
    if other:
        path, (said, found) = next(iter(other.items()))
        warnings.warn(
            f"{stored.directory}: the config gives {path} the rank {said}, its tensors have {found} "
            f"({len(other)} such layers); the tensors count", stacklevel=3,
        )  # fmt: skip


# ---------------------------------------------------------------------- writing


def save_adapter(
    model: Module,
    directory: str | Path,
    config: LoraConfig,
    adapter_name: str = "default",
    *,
    base_model_name_or_path: str | None = None,
) -> LoraConfig:
    """Write the adapter in PEFT's format and return the config as written.

    The config is kept, except that target_modules is resolved and sorted, fan_in_fan_out is true just for Conv1D, and a
    missing base_model_name_or_path is filled in. A new directory appears as a whole; in an existing one the two files
    are replaced, others stay.
    Raises AdapterError if the model has no such adapter.
    """
    all_layers = {path: m for path, m in adapter_layers(model).items() if adapter_name in m.adapters}
    layers = {path: m.adapters[adapter_name] for path, m in all_layers.items() if isinstance(m, LoraLayer)}
    expect(layers, AdapterError, f"the model has no adapter {adapter_name!r}", expected="an injected or loaded one")
    written = dataclasses.replace(
        described(config, layers),
        target_modules=resolved_targets(model, config, list(layers)),
        base_model_name_or_path=config.base_model_name_or_path or base_model_name_or_path,
        fan_in_fan_out=any(isinstance(all_layers[path].base_layer, Conv1D) for path in layers),
    )
    content = StoredAdapter(
        Path(directory), written, {path: (to_numpy(m.A.data), to_numpy(m.B.data)) for path, m in layers.items()},
        tables={path for path, m in all_layers.items() if isinstance(m, LoraEmbedding)},
        lora_bias={p: to_numpy(m.lora_bias.data) for p, m in layers.items() if m.lora_bias is not None},
        whole={f"{path}.{name}": to_numpy(parameter.data) for path, layer in all_layers.items()
               for name, parameter in layer.trained(adapter_name)},
    )  # fmt: skip
    _write(directory, written, content.everything())
    return written


def write_adapter(directory: str | Path, config: LoraConfig, pairs: Mapping[str, Start]) -> None:
    """Write plain LoRA, path -> A (R, I), B (O, R), and ``config`` as an adapter directory."""
    _write(directory, config, StoredAdapter(Path(directory), config, dict(pairs)).everything())


def _write(directory: str | Path, config: LoraConfig, tensors: Mapping[str, np.ndarray]) -> None:
    path = Path(directory)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_dir(path) as building:
            _write_into(Path(building), config, tensors)
    else:
        _write_into(path, config, tensors)


def _write_into(path: Path, config: LoraConfig, tensors: Mapping[str, np.ndarray]) -> None:
    save_file(dict(tensors), path / WEIGHTS_NAME, metadata={"format": "pt"})  # readers look for exactly this metadata
    config.save_pretrained(path)


def resolved_targets(model: Module, config: LoraConfig, paths: list[str]) -> list[str]:
    """The last components of ``paths`` if they mean exactly ``paths`` on this model, else the full paths; sorted."""
    lasts = sorted({path.rsplit(".", 1)[-1] for path in paths})
    meant = {path for path, _ in named_layers(model)
             if path and selects(lasts, path) and in_layers(config, path)
             and not (config.exclude_modules and selects(config.exclude_modules, path))}  # fmt: skip
    return lasts if meant == set(paths) else sorted(paths)


def described(config: LoraConfig, layers: dict[str, LowRank]) -> LoraConfig:
    """``config``, its patterns extended where they do not say what ``layers`` have (after a file whose tensors won)."""
    ranks, alphas = dict(config.rank_pattern), dict(config.alpha_pattern)
    for path, layer in layers.items():
        r = layer.A.shape[0]
        alpha = pattern_value(config.alpha_pattern, path, config.lora_alpha)
        if pattern_value(config.rank_pattern, path, config.r) != r:
            ranks = {re.escape(path): r, **ranks}
        if config.scaling(r, alpha) != layer.scaling:
            alphas = {re.escape(path): layer.scaling * (r**0.5 if config.use_rslora else r), **alphas}
    return dataclasses.replace(config, rank_pattern=ranks, alpha_pattern=alphas)


def export_canonical(adapter_dir: str | Path, out_dir: str | Path) -> LoraConfig:
    """Write the adapter in the form that every serving program reads, and return its config.

    Plain LoRA with one rank and one integer alpha: rsLoRA, alpha_pattern and a non-integer alpha go into B, smaller
    ranks are filled up with zeros; B A keeps its value up to one rounding. Tokenizer files are copied.
    Raises AdapterError for an adapter that cannot be read in full.
    """
    stored = read_adapter(adapter_dir)
    more = [f"{key} cannot be part of it: it is no product of two low-rank matrices"
            for key in [*stored.lora_bias, *stored.whole]]  # fmt: skip
    refuse(stored, [*stored.problems, *_inner_ranks(stored), *more], "plain LoRA")
    expect(stored.pairs, AdapterError, f"{adapter_dir} has no LoRA tensors", expected="some")
    old = stored.config
    r = max(a.shape[0] for a, _ in stored.pairs.values())
    alpha = max(1, round(old.scaling(r, old.lora_alpha) * r))
    pairs = {}
    for path, (a, b) in stored.pairs.items():
        ratio = stored.scaling(path) / (alpha / r)
        wide_a, wide_b = np.zeros((r, a.shape[1]), np.float32), np.zeros((b.shape[0], r), np.float32)
        wide_a[: a.shape[0]], wide_b[:, : a.shape[0]] = a, b
        pairs[path] = (wide_a, wide_b if ratio == 1 else (wide_b * np.float64(ratio)).astype(np.float32))
    names = old.target_modules
    new = LoraConfig(
        r=r, lora_alpha=alpha, target_modules=sorted(names) if isinstance(names, list) else sorted(pairs),
        exclude_modules=old.exclude_modules, layers_to_transform=old.layers_to_transform,
        layers_pattern=old.layers_pattern, fan_in_fan_out=old.fan_in_fan_out, task_type=old.task_type,
        base_model_name_or_path=old.base_model_name_or_path, revision=old.revision, inference_mode=True,
    )  # fmt: skip
    out = Path(out_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_dir(out) as building:
        _write_into(Path(building), new, dataclasses.replace(stored, pairs=pairs).everything())
        for name in TOKENIZER_FILES:
            if (stored.directory / name).is_file():
                shutil.copyfile(stored.directory / name, Path(building) / name)
    return new


def _inner_ranks(stored: StoredAdapter) -> list[str]:
    pairs = stored.pairs.items()
    return [line for path, (a, b) in pairs for line in shape_problems(stored, path, (b.shape[0], a.shape[-1]))]
