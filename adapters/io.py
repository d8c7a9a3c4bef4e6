"""Adapter directories, exactly as PEFT writes them; strict when read, atomic when written."""

from __future__ import annotations

import dataclasses
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapters.config import CONFIG_NAME, LoraConfig
from adapters.init import Start
from adapters.inject import InjectReport, add_adapter, lora_layers
from adapters.lora import LoraLinear, LowRank
from adapters.match import (
    Match,
    base_linear,
    in_layers,
    match_modules,
    model_name,
    named_layers,
    pattern_value,
    selects,
)
from peft_core.backend import to_numpy
from peft_core.dtypes import dtype_name, is_float
from peft_core.errors import AdapterError, ConfigError, expect
from peft_core.nn import Conv1D, Linear, Module
from peft_core.safetensors_io import SafeFile, atomic_dir, save_file

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.model",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model",
)  # fmt: skip
_LORA_KEY = re.compile(r"(.+)\.lora_([AB])\.weight")
_BASE_KEY = re.compile(r"(.+)\.base_layer\.weight")  # PEFT adds the base's own weight of an adapted head or embedding
_OTHER_METHODS = {
    "lora_magnitude_vector": "DoRA", "lora_B.bias": "lora_bias", "lora_embedding_": "an adapted embedding",
    "token_adapter": "trainable_token_indices",
}  # fmt: skip


@dataclass
class StoredAdapter:
    """An adapter directory as read: path -> (A (R, I), B (O, R)) in the file's dtype, and what else was in it."""

    directory: Path
    config: LoraConfig
    pairs: dict[str, Start]
    problems: list[str]  # one line each: keys that are no LoRA tensor, an A without its B, values that are no weights
    copies: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # path -> the base's weight, a copy

    def renamed(self, wanted: Iterable[str]) -> StoredAdapter:
        """The adapter under the names ``wanted`` if only a uniform prefix differs (with a warning), else itself."""
        change = uniform_prefix(list(self.pairs), set(wanted))
        if change is None:
            return self
        cut, add = change
        warnings.warn(
            f"{self.directory}: the names in the file differ from the model's by a prefix; "
            + (f"{cut!r} was removed" if cut else f"{add!r} was added"), stacklevel=3,
        )  # fmt: skip
        pairs = {add + path[len(cut) :]: pair for path, pair in self.pairs.items()}
        names = self.config.target_modules
        if isinstance(names, list):
            names = [name.removeprefix(cut) for name in names]
        elif names != "all-linear":
            names = sorted(pairs)  # an expression over the file's paths says nothing about the model's
        patterns: dict[str, Any] = {}
        for key in ("rank_pattern", "alpha_pattern"):  # theirs may name what is cut: each layer gets its own
            found = {path: pattern_value(getattr(self.config, key), path, None) for path in self.pairs}
            patterns[key] = {re.escape(add + path[len(cut) :]): v for path, v in found.items() if v is not None}
        config = dataclasses.replace(self.config, target_modules=names, **patterns)
        copies = {add + path[len(cut) :]: array for path, array in self.copies.items()}
        return dataclasses.replace(self, config=config, pairs=pairs, copies=copies)

    def scaling(self, path: str) -> float:
        """The scale of one layer, its rank taken from the tensors."""
        alpha = pattern_value(self.config.alpha_pattern, path, self.config.lora_alpha)
        return self.config.scaling(self.pairs[path][0].shape[0], alpha)


def other_copies(stored: StoredAdapter, base: Callable[[str], np.ndarray | None]) -> list[str]:
    """One line for each copy of a base weight in the file that is not the weight ``base(path)``."""
    lines = []
    for path, copy in stored.copies.items():
        own = base(path)
        if own is None or own.shape != copy.shape or not np.array_equal(copy.astype(own.dtype), own):
            lines.append(f"extra key {PREFIX}{path}.base_layer.weight {copy.shape} (differs from the base's weight)")
    return lines


def uniform_prefix(stored: list[str], wanted: set[str]) -> tuple[str, str] | None:
    """(cut, add): add + path[len(cut):] is wanted for every stored path; None if names fit or differ otherwise."""
    if not stored or any(path in wanted for path in stored):
        return None
    first = stored[0]
    changes = [("", want[: -len(first)]) for want in wanted if want.endswith("." + first)]
    changes += [(first[: -len(want)], "") for want in wanted if first.endswith("." + want)]
    good = [(cut, add) for cut, add in changes
            if all(path.startswith(cut) and add + path[len(cut):] in wanted for path in stored)]  # fmt: skip
    return good[0] if len(good) == 1 else None


# ---------------------------------------------------------------------- reading


def read_adapter(directory: str | Path) -> StoredAdapter:
    """The config and the tensors of an adapter directory.  Raises AdapterError if a file is missing or damaged."""
    path = Path(directory)
    config = LoraConfig.from_pretrained(path)
    expect((path / WEIGHTS_NAME).is_file(), AdapterError, f"{path / WEIGHTS_NAME} does not exist",
           expected=f"it beside {CONFIG_NAME}", fix="Convert other weight files with PEFT first.")  # fmt: skip
    file = SafeFile(path / WEIGHTS_NAME)
    halves: dict[str, dict[str, np.ndarray]] = {}
    copies: dict[str, np.ndarray] = {}
    problems: list[str] = []
    keys = list(file.keys())
    bare = not any(key.startswith(PREFIX) for key in keys)  # a file without the prefix anywhere: mapped with a warning
    for key in keys:
        found = _LORA_KEY.fullmatch(key)
        copied = _BASE_KEY.fullmatch(key)
        if copied is not None:
            copies[copied[1].removeprefix(PREFIX)] = file.get(key)
            continue
        if found is None or not (bare or key.startswith(PREFIX)):
            problems.append(f"extra key {key} {tuple(file.shape(key))}{_reason(key)}")
            continue
        array = file.get(key)
        halves.setdefault(found[1].removeprefix(PREFIX), {})[found[2]] = array
        if array.ndim != 2 or not is_float(array.dtype):
            problems.append(f"wrong kind {key}: {dtype_name(array.dtype)} {array.shape}, expected a float matrix")
        elif not np.isfinite(array.astype(np.float32)).all():
            problems.append(f"not finite {key}: it holds NaN or infinity")
    if bare and keys and not problems:
        warnings.warn(f"{path}: the names in the file lack the prefix {PREFIX!r}; it was added", stacklevel=2)
    pairs: dict[str, Start] = {}
    for name, pair in halves.items():
        for half in "AB":
            if half not in pair:
                problems.append(f"missing key {PREFIX}{name}.lora_{half}.weight (the file has the other half)")
        if len(pair) == 2:
            pairs[name] = (pair["A"], pair["B"])
    return StoredAdapter(path, config, pairs, problems, copies)


def _reason(key: str) -> str:
    found = [method for part, method in _OTHER_METHODS.items() if part in key]
    return f" ({found[0]}: not supported yet)" if found else ""


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
    layers = {path: linear for path, module in named_layers(model) if (linear := base_linear(module)) is not None}
    stored = read_adapter(directory).renamed(layers)
    try:
        match = match_modules(model, stored.config, strict=False)
    except ConfigError as error:
        raise AdapterError(f"{directory} does not fit {model_name(model)}: {error}") from error
    sizes: dict[str, tuple[int, ...]] = {p: (m.out_features, m.in_features) for p, m in layers.items()}
    names, shapes = _compare(stored, list(match.targets), sizes)
    shapes += other_copies(stored, lambda path: to_numpy(layers[path].weight.data) if path in layers else None)
    if names and not strict:
        warnings.warn(f"{directory}: ignored because strict=False:\n" + "\n".join(names), stacklevel=2)
    _refuse(stored, [*(names if strict else []), *shapes], model_name(model))
    expect(stored.pairs, AdapterError, f"{directory} has no LoRA tensors for {model_name(model)}", expected="some")
    _warn_ranks(stored, match)

    def start(path: str, rank: int, layer: Linear | LoraLinear) -> Start:
        return stored.pairs[path]

    kept = Match({path: value for path, value in match.targets.items() if path in stored.pairs}, match.counts)
    return add_adapter(model, stored.config, kept, start, adapter_name, active=active, trainable=trainable)


def _compare(
    stored: StoredAdapter, targets: list[str], sizes: dict[str, tuple[int, ...]]
) -> tuple[list[str], list[str]]:
    """(problems with names, problems with shapes): one line each."""
    shapes = [line for line in stored.problems if not line.startswith(("extra", "missing"))]
    names = [line for line in stored.problems if line.startswith(("extra", "missing"))]
    for path, (a, b) in stored.pairs.items():
        if path not in targets:
            names += [f"extra key {PREFIX}{path}.lora_{half}.weight {array.shape}"
                      + ("" if path in sizes else " (the model has no such linear layer)")
                      for half, array in (("A", a), ("B", b))]  # fmt: skip
        if path in sizes:
            shapes += shape_problems(path, a, b, sizes[path])
    half = {line.split()[2] for line in names if line.startswith("missing key")}
    for path in targets:
        if path not in stored.pairs:
            keys = [f"{PREFIX}{path}.lora_{half}.weight" for half in "AB"]
            names += [f"missing key {key}" for key in keys if not half.intersection(keys)]
    return names, shapes


def shape_problems(path: str, a: np.ndarray, b: np.ndarray, size: tuple[int, ...]) -> list[str]:
    """What is wrong with A (R, I) and B (O, R) for a weight of ``size`` (O, I): one line each, with both sizes."""
    n_out, n_in = size
    lines = []
    if a.ndim == 2 and a.shape[1] != n_in:
        lines.append(f"wrong shape {PREFIX}{path}.lora_A.weight: {a.shape} in the file, (r, {n_in}) in the model")
    if b.ndim == 2 and b.shape[0] != n_out:
        lines.append(f"wrong shape {PREFIX}{path}.lora_B.weight: {b.shape} in the file, ({n_out}, r) in the model")
    if a.ndim == b.ndim == 2 and a.shape[0] != b.shape[1]:
        lines.append(f"wrong shape {PREFIX}{path}: rank {a.shape[0]} in lora_A, {b.shape[1]} in lora_B")
    return lines


def _refuse(stored: StoredAdapter, problems: list[str], model: str) -> None:
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
    adapted = {path: m for path, m in lora_layers(model).items() if adapter_name in m.adapters}
    layers = {path: m.adapters[adapter_name] for path, m in adapted.items()}
    expect(layers, AdapterError, f"the model has no adapter {adapter_name!r}", expected="an injected or loaded one")
    written = dataclasses.replace(
        described(config, layers),
        target_modules=resolved_targets(model, config, list(layers)),
        base_model_name_or_path=config.base_model_name_or_path or base_model_name_or_path,
        fan_in_fan_out=any(isinstance(m.base_layer, Conv1D) for m in adapted.values()),
    )
    write_adapter(directory, written, {path: (to_numpy(m.A.data), to_numpy(m.B.data)) for path, m in layers.items()})
    return written


def write_adapter(directory: str | Path, config: LoraConfig, pairs: dict[str, Start]) -> None:
    """Write path -> (A, B) and ``config`` as an adapter directory."""
    path = Path(directory)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_dir(path) as building:
            _write_into(Path(building), config, pairs)
    else:
        _write_into(path, config, pairs)


def _write_into(path: Path, config: LoraConfig, pairs: dict[str, Start]) -> None:
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b
    save_file(tensors, path / WEIGHTS_NAME, metadata={"format": "pt"})  # readers look for exactly this metadata
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
    _refuse(stored, [*stored.problems, *_inner_ranks(stored)], "plain LoRA")
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
        _write_into(Path(building), new, pairs)
        for name in TOKENIZER_FILES:
            if (stored.directory / name).is_file():
                shutil.copyfile(stored.directory / name, Path(building) / name)
    return new


def _inner_ranks(stored: StoredAdapter) -> list[str]:
    pairs = stored.pairs.items()
    return [line for path, (a, b) in pairs for line in shape_problems(path, a, b, (b.shape[0], a.shape[-1]))]
