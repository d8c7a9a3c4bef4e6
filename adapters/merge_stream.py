"""Merge an adapter directory into a base directory on disk, one shard of the result in memory at a time."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from adapters.io import TOKENIZER_FILES, whole_problems
from adapters.lora import LowRank, add_delta
from adapters.merge import MergeReport, wider
from adapters.merge_tied import Base, WithHead, is_tied, touches_tie, wanted_whole
from adapters.stored import StoredAdapter, other_copies, read_adapter, shape_problems
from peft_core.backend import all_finite
from peft_core.checkpoint import Checkpoint, parse_size, read_json, write_checkpoint
from peft_core.dtypes import as_dtype, dtype_name, is_float
from peft_core.errors import AdapterError, ConfigError, ExportError, ModelError, PeftCoreError, expect
from peft_core.files import atomic_dir, atomic_write

COPIED = (*TOKENIZER_FILES, "generation_config.json", "added_tokens.json", "preprocessor_config.json", "LICENSE")


def merge_directory(
    base_dir: str | Path,
    adapter_dir: str | Path,
    out_dir: str | Path,
    dtype: Any = "auto",
    max_shard_size: int | str = "5GB",
) -> MergeReport:
    """Write ``out_dir``: the base's files with W + scaling * B A in the adapted weights, under the same names.

    The delta is formed in float32 and rounded once. Where head and embedding are tied and the adapter changes one of
    them, both are written and the config says so. ``dtype`` "auto" keeps each tensor's dtype, another one converts
    all floating tensors. Config, tokenizer and generation files come along. The directory appears complete or not at
    all. Raises AdapterError (both sizes listed) if the adapter does not fit, ModelError for a damaged base (NaN or
    infinity in any tensor included), ExportError if the result does not verify, ConfigError for a dtype or size that is
    none.
    """
    target_dtype = _wanted_dtype(dtype)
    opened, limit = _opened(Path(base_dir)), parse_size(max_shard_size)
    stored = read_adapter(adapter_dir)
    base, config = _untied(opened, stored, read_json(opened.directory / "config.json"))
    stored = _fitted(stored, base)
    report = MergeReport()
    with atomic_dir(out_dir) as building:
        sizes = {name: _n_bytes(base, name, target_dtype) for name in base}
        files = write_checkpoint(building, sizes, lambda name: _output(base, stored, name, target_dtype, report), limit)
        report.finish()
        _copy_others(base.directory, building, config, target_dtype)
        _verify(base, building, files, target_dtype)
    return report


# ---------------------------------------------------------------------- the base


def _opened(directory: Path, error: type[PeftCoreError] = ModelError) -> Checkpoint:
    """The tensors of a directory whose index and shards agree.  Raises ``error`` with every disagreement."""
    opened = Checkpoint(directory)
    if opened.problems:
        raise error(
            f"{directory}: index and shards disagree in {len(opened.problems)} places; nothing was written; "
            "expected an index that fits its files:\n  " + "\n  ".join(opened.problems[:40])
        )
    return opened


def _untied(base: Checkpoint, stored: StoredAdapter, config: dict[str, Any]) -> tuple[Base, dict[str, Any]]:
    """Base and config with a head of its own, if the adapter changes one of two tied weights."""
    tie = touches_tie(stored, list(base)) if is_tied(stored, list(base), config) else None
    if tie is None:
        return base, config
    head, table = tie
    warnings.warn(f"{base.directory} ties {head} to {table}, and the adapter changes one of the two; the merged model "
                  "has two weights, and its config says tie_word_embeddings = false", stacklevel=3)  # fmt: skip
    return (base if head in base else WithHead(base, head, table)), {**config, "tie_word_embeddings": False}


def _fitted(stored: StoredAdapter, base: Base) -> StoredAdapter:
    """The adapter under the base's names, after every check that needs no numbers."""
    matrices = {name.removesuffix(".weight") for name in base if name.endswith(".weight")}
    stored = stored.renamed(matrices)
    problems = list(stored.problems)
    transposed = any(_is_transposed(stored, base, path) for path in stored.pairs)
    for path in stored.pairs:
        if path not in matrices:
            problems.append(f"extra key {path}.lora_A/B.weight: the base has no tensor {path}.weight")
            continue
        size = base.shape(f"{path}.weight")
        swapped = path in stored.tables or _is_transposed(stored, base, path)
        problems += shape_problems(stored, path, size[::-1] if swapped else size) if len(size) == 2 else [
            f"wrong shape {path}: the base's weight is {size}, not a matrix"]  # fmt: skip
        own = base.dtype(f"{path}.weight")
        if not is_float(own):
            problems.append(f"{path}.weight is {dtype_name(own)}: quantized weights do not merge")
        if path in stored.lora_bias and f"{path}.bias" not in base:
            problems.append(f"{path}.lora_B.bias: the base has no {path}.bias to merge it into")
    wanted = {name: base.shape(name) for name in wanted_whole(stored, list(base)) if base.shape(name)}
    wanted = {name: shape for name, shape in wanted.items() if name in stored.whole or len(shape) == 1
              or not name.endswith(".bias")}  # fmt: skip
    problems += [line for lines in whole_problems(stored, wanted, list(stored.pairs)) for line in lines]
    problems += other_copies(stored, lambda path: base[f"{path}.weight"] if path in matrices else None)
    expect(stored.pairs or problems, AdapterError, f"{stored.directory} has no LoRA tensors", expected="some")
    if problems:
        raise AdapterError(
            f"{stored.directory} does not fit {base.directory}; nothing was written; "
            "expected an adapter of this base:\n  " + "\n  ".join(problems[:40])
        )
    if transposed != stored.config.fan_in_fan_out:
        warnings.warn(f"{stored.directory}: fan_in_fan_out is {stored.config.fan_in_fan_out}, but the shapes of the "
                      f"base's weights say {transposed}; the shapes count", stacklevel=3)  # fmt: skip
    return stored


def _is_transposed(stored: StoredAdapter, base: Base, path: str) -> bool:
    """Whether the base stores the weight of the linear ``path`` (I, O).

    Its shape says so; a square one is as the others are, and the config decides where all are square.
    """
    if path in stored.tables:
        return False
    for other in (path, *(other for other in stored.pairs if other not in stored.tables)):
        name, (a, b) = f"{other}.weight", stored.pairs[other]
        out_in = (b.shape[0], a.shape[-1])
        if name in base and out_in[0] != out_in[1] and base.shape(name) in (out_in, out_in[::-1]):
            return base.shape(name) != out_in
    return stored.config.fan_in_fan_out


# ---------------------------------------------------------------------- the result


def _output(base: Base, stored: StoredAdapter, name: str, dtype: np.dtype | None, report: MergeReport) -> np.ndarray:
    """One tensor of the result."""
    old = base[name]
    to = dtype if dtype is not None and is_float(old.dtype) else old.dtype
    expect(all_finite(old), ModelError, f"{name} of {base.file(name)} holds NaN or infinity", expected="finite weights",
           fix="The base itself is damaged: download that file again. Nothing was written.")  # fmt: skip
    delta = _delta(base, stored, name, old)
    if delta is None:
        with np.errstate(over="ignore"):
            new = old if to == old.dtype else old.astype(to)
        expect(to == old.dtype or all_finite(new), AdapterError,
               f"{name} of {base.file(name)} does not fit into {dtype_name(to)}: infinity", expected="finite weights",
               fix=f"Choose {wider(to)}; nothing was written.")  # fmt: skip
        return new
    wide = old.astype(np.float64 if old.dtype == np.float64 else np.float32)
    with np.errstate(over="ignore"):
        if name in stored.whole and name.rpartition(".")[0] not in stored.lora_bias:
            new = stored.whole[name].astype(to)
        else:
            new = add_delta(old, delta) if to == old.dtype else add_delta(wide, delta).astype(to)
    report.add(name, wide, new, delta, f" of {base.file(name)}")
    return new


def _delta(base: Base, stored: StoredAdapter, name: str, old: np.ndarray) -> np.ndarray | None:
    """What the adapter adds to the tensor ``name``, float32 in its shape; None for nothing."""
    path, _, last = name.rpartition(".")
    delta = None
    if name in stored.whole:
        delta = stored.whole[name].astype(np.float32) - old.astype(np.float32)
    if last == "bias" and path in stored.lora_bias:
        more = stored.lora_bias[path].astype(np.float32) * np.float32(stored.scaling(path))  # (O,)
        delta = more if delta is None else delta + more
    if last == "weight" and path in stored.pairs:
        delta = LowRank(*stored.pairs[path], stored.scaling(path)).delta()  # (O, I)
        delta = delta.T if path in stored.tables or _is_transposed(stored, base, path) else delta
    return delta


def _n_bytes(base: Base, name: str, dtype: np.dtype | None) -> int:
    own = base.dtype(name)
    to = dtype if dtype is not None and is_float(own) else own
    return int(np.prod(base.shape(name), dtype=np.int64)) * to.itemsize


def _copy_others(source: Path, out: Path, config: dict[str, Any], dtype: np.dtype | None) -> None:
    """Config (dtype keys updated), tokenizer and generation files; the chat template in both places readers look at."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    if dtype is None and config == read_json(source / "config.json"):
        shutil.copyfile(source / "config.json", out / "config.json")
    else:
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        config = {**config, **(dict.fromkeys(keys, dtype_name(dtype)) if dtype is not None else {})}
        atomic_write(out / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    described, template = out / "tokenizer_config.json", out / "chat_template.jinja"
    if not described.is_file():
        return
    settings = read_json(described)
    if template.is_file() and "chat_template" not in settings:
        settings["chat_template"] = template.read_text(encoding="utf-8")
        atomic_write(described, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    elif isinstance(settings.get("chat_template"), str) and not template.is_file():
        atomic_write(template, settings["chat_template"])


def _verify(base: Base, out: Path, files: list[str], dtype: np.dtype | None) -> None:
    """What was written is what was meant: same names and shapes as the base, the dtypes asked for, no stray file."""
    written = _opened(out, ExportError)
    expect(set(written) == set(base), ExportError, f"{out} holds {len(written)} tensors",
           expected=f"the {len(base)} names of the base")  # fmt: skip
    for name in base:
        own = base.dtype(name)
        to = dtype if dtype is not None and is_float(own) else own
        same = written.shape(name) == base.shape(name) and written.dtype(name) == to
        expect(same, ExportError, f"{name} was written as {dtype_name(written.dtype(name))} {written.shape(name)}",
               expected=f"{dtype_name(to)} {base.shape(name)}")  # fmt: skip
    found = sorted(path.name for path in out.glob("*.safetensors"))
    expect(found == sorted(files), ExportError, f"{out} holds {found}", expected=f"{sorted(files)}")


def _wanted_dtype(dtype: Any) -> np.dtype | None:
    if isinstance(dtype, str) and dtype == "auto":
        return None
    try:
        wanted = as_dtype(dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"dtype is {dtype!r}; expected auto, bfloat16, float16 or float32.") from error
    expect(is_float(wanted), ConfigError, f"dtype is {dtype!r}", expected="auto, bfloat16, float16 or float32")
    return wanted
