"""save_pretrained: a model directory under the names, the config and the files of the one it came from."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft_core.backend import Array
from peft_core.checkpoint import INDEX, SINGLE, parse_size, write_checkpoint
from peft_core.dtypes import dtype_name
from peft_core.errors import ExportError, expect
from peft_core.files import atomic_dir
from transformer.families import HEAD
from transformer.model import CausalLM

_WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def save_pretrained(model: CausalLM, path: str | os.PathLike, max_shard_size: int | str = "5GB") -> None:
    """Write config.json, weights, and the generation and tokenizer files of the model's source to ``path``.

    A new directory appears whole or not at all.  In one that exists the weight files are replaced, other files stay,
    and an interruption leaves no weights rather than mixed ones.  ``max_shard_size``: bytes, or a text such as "5GB";
    above it the weights are split and an index is written.  Raises ExportError for a module that is no part of the
    base's checkpoint (an adapter: merge first), ConfigError for a size that is not understood, FileError where the
    system refuses.
    """
    limit = parse_size(max_shard_size)
    tensors = _tensors(model)
    sizes = {name: array.nbytes for name, array in tensors.items()}
    with _target(Path(path)) as directory:
        write_checkpoint(directory, sizes, tensors.__getitem__, limit)
        config = json.dumps(_config(model, tensors), indent=2, ensure_ascii=False) + "\n"
        (directory / "config.json").write_text(config, encoding="utf-8")
        if model.source.directory is not None:
            _copy_companions(model.source.directory, directory, Path(path))


def _copy_companions(source: Path, directory: Path, target: Path) -> None:
    """Generation and tokenizer files, byte for byte, except those that ``target`` already has."""
    from transformer.tokenizer_files import SAVED_FILES  # late: it imports the tokenizers package

    for name in ("generation_config.json", *SAVED_FILES):
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, directory / name)


def _tensors(model: CausalLM) -> dict[str, Array]:
    """The arrays under the base's names, its carried buffers and its spelled-out tied head included."""
    own = dict(model.named_parameters())
    expected = {name for name, _ in CausalLM(model.config).named_parameters()}
    strange = sorted(set(own) ^ expected)
    expect(not strange, ExportError,
           f"the model has other parameters than {model.config.architectures[0]} ({', '.join(strange[:4])}, "
           f"{len(strange)} in all)", expected="the base's own",
           fix="Merge the adapters first, or save them alone.")  # fmt: skip
    tensors = {name.removeprefix(model.source.cut): p.data for name, p in own.items()}
    if model.source.tied_head and model.config.tie_word_embeddings:
        tensors[HEAD] = model.get_input_embeddings().weight.data
    return {**tensors, **model.source.extra}


def _config(model: CausalLM, tensors: dict[str, Array]) -> dict[str, Any]:
    """The base's own config.json, its dtype keys set to the dtype that most of the weights have."""
    sizes: dict[str, int] = {}
    for array in tensors.values():
        sizes[dtype_name(array.dtype)] = sizes.get(dtype_name(array.dtype), 0) + array.size
    dtype = max(sizes, key=lambda name: sizes[name])
    raw = model.config.to_dict()
    keys = [key for key in ("dtype", "torch_dtype") if key in raw] or ["torch_dtype"]
    return {**raw, **dict.fromkeys(keys, dtype)}


@contextmanager
def _target(path: Path) -> Iterator[Path]:
    """A directory to fill: it becomes ``path``, or its files move into ``path`` where that already holds something."""
    if not path.is_dir() or not any(path.iterdir()):
        with atomic_dir(path) as directory:
            yield directory
        return
    with atomic_dir(path / ".saving", replace=True) as staged:  # the same file system: files move by renaming
        yield staged
    ready = path / ".saving"
    for file in sorted(path.iterdir(), key=lambda p: p.name not in (INDEX, SINGLE)):  # what names the shards goes first
        if _WEIGHT_FILES.fullmatch(file.name):
            file.unlink()
    for file in sorted(ready.iterdir(), key=lambda p: p.name in (INDEX, SINGLE)):  # and arrives last
        os.replace(file, path / file.name)
    ready.rmdir()
