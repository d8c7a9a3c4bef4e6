"""An adapter directory as it is read: the tensors of the file by what they mean, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adapters.config import CONFIG_NAME, LoraConfig
from adapters.init import Start
from adapters.match import pattern_matches, pattern_value
from peft_core.dtypes import dtype_name, is_float
from peft_core.errors import AdapterError, expect
from peft_core.safetensors_io import SafeFile

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
HEADS = ("lm_head", "embed_out")  # they stand beside what a prefix names
_LORA_KEY = re.compile(r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))")
_LORA_BIAS_KEY = re.compile(r"(.+)\.lora_B\.bias")
_BASE_KEY = re.compile(r"(.+)\.base_layer\.weight")  # PEFT adds the base's own weight of an adapted head or embedding
_BIAS_KEY = re.compile(r"(.+)\.base_layer\.bias")
_OTHER_METHODS = {"lora_magnitude_vector": "DoRA", "token_adapter": "trainable_token_indices"}


def lora_key(path: str, half: str, table: bool) -> str:
    """The file's name of A or B of the layer at ``path``; ``table``: it is an embedding."""
    return f"{PREFIX}{path}.lora_embedding_{half}" if table else f"{PREFIX}{path}.lora_{half}.weight"


def whole_key(name: str, targets: Iterable[str]) -> str:
    """The file's name of a parameter of the base that trains as it is: the bias of a target stands in its base."""
    path = name.removesuffix(".bias")
    inside = name.endswith(".bias") and path in targets
    return f"{PREFIX}{path}.base_layer.bias" if inside else PREFIX + name


@dataclass
class StoredAdapter:
    """An adapter directory as read, arrays in the file's dtype."""

    directory: Path
    config: LoraConfig
    pairs: dict[str, Start] = field(default_factory=dict)  # path -> A (R, I), B (O, R)
    problems: list[str] = field(default_factory=list)  # a line each: keys of no meaning, half a pair, no weights
    copies: dict[str, np.ndarray] = field(default_factory=dict)  # path -> the base's weight, a copy
    tables: set[str] = field(default_factory=set)  # the paths of pairs that belong to embeddings
    lora_bias: dict[str, np.ndarray] = field(default_factory=dict)  # path -> (O,), added to B A x before scaling
    whole: dict[str, np.ndarray] = field(default_factory=dict)  # the base's name of a trained parameter -> its value

    def renamed(self, wanted: Iterable[str]) -> StoredAdapter:
        """The adapter under the names ``wanted`` if only a uniform prefix differs (with a warning), else itself."""
        here = set(wanted)
        kept = {path for path in HEADS if path in here}
        change = uniform_prefix([path for path in self.pairs if path not in kept], here)
        if change is None:
            return self
        cut, add = change
        warnings.warn(
            f"{self.directory}: the names in the file differ from the model's by a prefix; "
            + (f"{cut!r} was removed" if cut else f"{add!r} was added"), stacklevel=3,
        )  # fmt: skip

        def moved(table: dict[str, Any]) -> dict[str, Any]:
            return {new(path): value for path, value in table.items()}

        def new(name: str) -> str:
            return name if name.removesuffix(".weight") in kept else add + name.removeprefix(cut)

        pairs = moved(self.pairs)
        config = _renamed_config(self.config, {path: new(path) for path in self.pairs}, cut)
        return dataclasses.replace(
            self, config=config, pairs=pairs, copies=moved(self.copies), lora_bias=moved(self.lora_bias),
            whole=moved(self.whole), tables=set(moved(dict.fromkeys(self.tables))),
        )  # fmt: skip

    def scaling(self, path: str) -> float:
        """The scale of one layer, its rank taken from the tensors."""
        alpha = pattern_value(self.config.alpha_pattern, path, self.config.lora_alpha)
        return self.config.scaling(self.pairs[path][0].shape[0], alpha)

    def key(self, path: str, half: str) -> str:
        """The name in the file of A or B of the layer at ``path``."""
        return lora_key(path, half, path in self.tables)

    def everything(self) -> dict[str, np.ndarray]:
        """All tensors that the adapter consists of, under their names in the file."""
        tensors = {}
        for path, (a, b) in self.pairs.items():
            tensors[self.key(path, "A")], tensors[self.key(path, "B")] = a, b
        tensors.update({f"{PREFIX}{path}.lora_B.bias": bias for path, bias in self.lora_bias.items()})
        return {**tensors, **{whole_key(name, self.pairs): array for name, array in self.whole.items()}}


def _renamed_config(config: LoraConfig, names: Mapping[str, str], cut: str) -> LoraConfig:
    """``config`` for layers that have new names (old -> new): each keeps the rank and the alpha it had."""
    targets, excluded = config.target_modules, config.exclude_modules
    if isinstance(excluded, str) or (isinstance(targets, str) and targets != "all-linear"):
        targets, excluded = sorted(names.values()), None  # an expression over old paths says nothing about the new ones
    if isinstance(targets, list):
        targets = [name.removeprefix(cut) for name in targets]
    if isinstance(excluded, list):
        excluded = [name.removeprefix(cut) for name in excluded]

    def table(old: dict[str, Any]) -> dict[str, Any]:
        used = {key: value for key, value in old.items() if any(pattern_matches(key, new) for new in names.values())}
        want = {new: pattern_value(old, path, None) for path, new in names.items()}
        exact = {re.escape(new): value for new, value in want.items()
                 if value is not None and pattern_value(used, new, None) != value}  # fmt: skip
        return {**exact, **used}

    return dataclasses.replace(
        config, target_modules=targets, exclude_modules=excluded, rank_pattern=table(config.rank_pattern),
        alpha_pattern=table(config.alpha_pattern),
    )  # fmt: skip


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


def read_adapter(directory: str | Path) -> StoredAdapter:
    """The config and the tensors of an adapter directory.  Raises AdapterError if a file is missing or damaged."""
    path = Path(directory)
    config = LoraConfig.from_pretrained(path)
    expect((path / WEIGHTS_NAME).is_file(), AdapterError, f"{path / WEIGHTS_NAME} does not exist",
           expected=f"it beside {CONFIG_NAME}", fix="Convert other weight files with PEFT first.")  # fmt: skip
    file = SafeFile(path / WEIGHTS_NAME)
    stored = StoredAdapter(path, config)
    halves: dict[str, dict[str, np.ndarray]] = {}
    keys = list(file.keys())
    bare = not any(key.startswith(PREFIX) for key in keys)  # a file without the prefix anywhere: mapped with a warning
    for key in keys:
        if bare or key.startswith(PREFIX):
            _take(stored, halves, key, file)
        else:
            stored.problems.append(_extra(key, file))
    if bare and keys and not stored.problems:
        warnings.warn(f"{path}: the names in the file lack the prefix {PREFIX!r}; it was added", stacklevel=2)
    for name, pair in halves.items():
        for half in "AB":
            if half not in pair:
                stored.problems.append(f"missing key {stored.key(name, half)} (the file has the other half)")
        if len(pair) == 2:
            stored.pairs[name] = (pair["A"], pair["B"])
    return stored


def _take(stored: StoredAdapter, halves: dict[str, dict[str, np.ndarray]], key: str, file: SafeFile) -> None:
    """Put one tensor of the file where it belongs, or say why it belongs nowhere."""
    name, config, array = key.removeprefix(PREFIX), stored.config, file.get(key)
    n_dims: int | None = None
    if (found := _LORA_KEY.fullmatch(name)) and (found[2] or found[3]) not in halves.get(found[1], {}):
        halves.setdefault(found[1], {})[found[2] or found[3]] = array
        n_dims = 2
        if found[3]:
            stored.tables.add(found[1])
    elif found := _BASE_KEY.fullmatch(name):
        stored.copies[found[1]] = array
        return
    elif (found := _LORA_BIAS_KEY.fullmatch(name)) and config.lora_bias:
        stored.lora_bias[found[1]] = array
        n_dims = 1
    elif (found := _BIAS_KEY.fullmatch(name)) and config.bias != "none" and f"{found[1]}.bias" not in stored.whole:
        stored.whole[f"{found[1]}.bias"] = array
        n_dims = 1
    elif name not in stored.whole and _is_whole(name, config):
        stored.whole[name] = array
    else:
        stored.problems.append(_extra(key, file))
        return
    if not is_float(array.dtype) or n_dims not in (None, array.ndim):
        kind = {1: "vector", 2: "matrix", None: "array"}[n_dims]
        stored.problems.append(f"wrong kind {key}: {dtype_name(array.dtype)} {array.shape}, expected a float {kind}")
    elif not np.isfinite(array.astype(np.float32)).all():
        stored.problems.append(f"not finite {key}: it holds NaN or infinity")


def _is_whole(name: str, config: LoraConfig) -> bool:
    """Whether ``name`` can be a parameter of the base: no other key has its form."""
    special = _reason(name) or any(form.fullmatch(name) for form in (_LORA_KEY, _LORA_BIAS_KEY, _BIAS_KEY))
    return not special and bool(config.modules_to_save or config.bias == "all")


def _extra(key: str, file: SafeFile) -> str:
    return f"extra key {key} {tuple(file.shape(key))}{_reason(key)}"


def _reason(key: str) -> str:
    found = [method for part, method in _OTHER_METHODS.items() if part in key]
    if found:
        return f" ({found[0]}: not supported yet)"
    return " (the config does not say lora_bias)" if key.endswith("lora_B.bias") else ""


def shape_problems(stored: StoredAdapter, path: str, size: tuple[int, ...]) -> list[str]:
    """What is wrong with the tensors of ``path`` for a layer of ``size`` (O, I): one line each, with both sizes."""
    (a, b), (n_out, n_in) = stored.pairs[path], size
    lines = []
    for half, array, axis, want in (("A", a, 1, f"(r, {n_in})"), ("B", b, 0, f"({n_out}, r)")):
        if array.ndim == 2 and array.shape[axis] != (n_in if half == "A" else n_out):
            lines.append(f"wrong shape {stored.key(path, half)}: {array.shape} in the file, {want} in the model")
    if a.ndim == b.ndim == 2 and (a.shape[0] != b.shape[1] or a.shape[0] == 0):
        lines.append(f"wrong shape {PREFIX}{path}: rank {a.shape[0]} in lora_A, {b.shape[1]} in lora_B")
    bias = stored.lora_bias.get(path)
    if bias is not None and bias.shape != (n_out,):
        lines.append(f"wrong shape {PREFIX}{path}.lora_B.bias: {bias.shape} in the file, ({n_out},) in the model")
    return lines
