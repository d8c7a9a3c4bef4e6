"""The weights of a model directory: ``model.safetensors``, or shards and the index naming them; read and written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ConfigError, FileError, ModelError, expect
from .files import atomic_write
from .safetensors_io import SafeFile, save_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_json(path: Path, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file of a model directory; ``default``, if one is given, where there is no such file.

    Raises ModelError if the file is missing, not JSON, or not an object.
    """
    if default is not None and not path.is_file():
        return dict(default)
    expect(path.is_file(), ModelError, f"{path} does not exist", expected=f"the {path.name} of a model directory",
           fix="Check the path, or download the file too.")  # fmt: skip
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); expected an object. Download it again.") from error
    expect(isinstance(content, dict), ModelError, f"{path} holds a {type(content).__name__}", expected="a JSON object")
    return dict(content)


# ---------------------------------------------------------------------- reading


def checkpoint_files(path: str | os.PathLike) -> list[Path]:
    """The safetensors files that hold the weights of a model directory, in order: one, or the shards of the index.

    With both, the single file counts, as in transformers.  Raises ModelError if there are none, or naming every shard
    of the index that is missing.
    """
    return _files_and_index(Path(path))[0]


def _files_and_index(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files, and tensor name -> file name as the index has it (None: a single file)."""
    expect(directory.is_dir(), ModelError, f"{directory} is not a directory", expected="a model directory",
           fix="Check the path.")  # fmt: skip
    if (directory / SINGLE).exists():
        return [directory / SINGLE], None
    if not (directory / INDEX).exists():
        raise ModelError(_no_weights(directory))
    index = _weight_map(directory)
    files = [directory / name for name in dict.fromkeys(index.values())]
    missing = [file.name for file in files if not file.exists()]
    expect(not missing, ModelError, f"{directory} lacks {len(missing)} of {len(files)} shards: {', '.join(missing)}",
           expected=f"every file that {INDEX} names", fix="Download the missing files.")  # fmt: skip
    return files, index


def _no_weights(directory: Path) -> str:
    other = sorted(p.name for p in directory.glob("*.bin")) or sorted(p.name for p in directory.glob("*.safetensors"))
    text = f"{directory} has neither {SINGLE} nor {INDEX}; expected one of them."
    if any(name.endswith(".bin") for name in other):
        return (f"{text} It has {', '.join(other[:4])}, pickles that are not read here: convert them once with "
                "transformers, from_pretrained(...).save_pretrained(..., safe_serialization=True).")  # fmt: skip
    if other:
        return f"{text} It has {', '.join(other[:4])}: the index that names these files is missing; download it."
    return f"{text} Download the model's weights."


def _weight_map(directory: Path) -> dict[str, str]:
    names = read_json(directory / INDEX).get("weight_map")
    good = isinstance(names, dict) and names and all(isinstance(v, str) and Path(v).name == v for v in names.values())
    expect(good, ModelError, f"{directory / INDEX} has no usable weight_map",
           expected="an object: tensor name -> file name in the same directory", fix="Download it again.")  # fmt: skip
    return dict(names or {})


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of a model directory by name, mapped.  Only headers are read until a tensor is asked for.

    ``problems``: disagreements between the index and its shards, one line each: a loader has more to say in the same
    report.  Raises ModelError and FileError for files that are missing or are not safetensors.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.problems = directory, list[str]()
        files, index = _files_and_index(directory)
        opened = _opened(files)
        self._where = {name: file for file in opened for name in file}
        if index is None:
            return
        shards = {file.path.name: file for file in opened}
        for name, shard in index.items():
            if name not in shards[shard]:
                self.problems.append(f"missing     {name}: {INDEX} places it in {shard}, which does not hold it")
        unlisted = [name for file in opened for name in file if name not in index]
        for name in unlisted:
            self.problems.append(f"unexpected  {name}: in {self._where[name].path.name}, but not in {INDEX}")
        self._where = {name: shards[shard] for name, shard in index.items() if name in shards[shard]}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._where[name].get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def file(self, name: str) -> Path:
        """The file that a tensor stands in."""
        return self._where[name].path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return self._where[name].shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Element type of a tensor, from the header."""
        return self._where[name].dtype(name)


def _opened(files: list[Path]) -> list[SafeFile]:
    """All files, or one error with what is wrong in each of them."""
    opened, faults = [], []
    for file in files:
        try:
            opened.append(SafeFile(file))
        except FileError as error:
            faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ModelError(f"{len(faults)} of {len(files)} weight files cannot be read:\n" + "\n".join(map(str, faults)))
    return opened


# ---------------------------------------------------------------------- writing


def parse_size(size: int | str, name: str = "max_shard_size") -> int:
    """Bytes meant by 5000000 or "5GB" (KB, MB, GB decimal; KiB, MiB, GiB binary).  Raises ConfigError with ``name``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B)?\s*", str(size).upper())
    value = float(found[1]) * _UNITS.get(found[2] or "", 0) if found else 0
    expect(value >= 1, ConfigError, f"{name} is {size!r}", expected="bytes, or a text such as '5GB' or '500MB'")
    return int(value)


def plan_shards(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """File name -> tensor names, in the order of ``sizes`` (bytes); a file holds ``limit`` or a single tensor."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def write_checkpoint(directory: Path, sizes: Mapping[str, int], get: Callable[[str], Any], limit: int) -> list[str]:
    """Write the tensors ``get(name)`` of ``sizes[name]`` bytes, one shard in memory at a time; return the file names.

    Several files get an index, which is written last: before it nothing names them.  Raises FileError.
    """
    shards = plan_shards(sizes, limit)
    for file, names in shards.items():
        save_file({name: get(name) for name in names}, directory / file)
    if list(shards) != [SINGLE]:
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        atomic_write(directory / INDEX, json.dumps(index, indent=2) + "\n")
    return list(shards)
