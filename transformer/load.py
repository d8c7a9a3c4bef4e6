"""from_pretrained: a Hugging Face model directory becomes a CausalLM; the weights stay in the file's pages."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np

from peft_core.backend import as_device, to_device
from peft_core.checkpoint import Checkpoint, read_json
from peft_core.dtypes import as_dtype, dtype_name, float16, is_float
from peft_core.errors import ModelError, expect
from transformer.config import ModelConfig, end_ids
from transformer.families import HEAD
from transformer.hub import resolve_directory
from transformer.model import CausalLM, Source

_COMPARE_BYTES = 1 << 24


def from_pretrained(path: str | os.PathLike, dtype: Any = "auto", device: Any = "cpu") -> CausalLM:
    """The model in a directory (or a Hub id in the local cache), in eval mode, its weights frozen.

    ``dtype``: "auto" keeps the file's, memory-mapped and read-only; a name or dtype converts, which copies.
    ``device``: "cpu", "cuda", "cuda:1".  Everything that does not fit (shards, names, shapes, dtypes) is reported in
    one ModelError before any memory is allocated.
    """
    directory = resolve_directory(path)
    config = ModelConfig.from_pretrained(directory)
    config.name_or_path = os.fspath(path)
    checkpoint = Checkpoint(directory)
    wanted = None if dtype is None or dtype == "auto" else as_dtype(dtype)
    expect(wanted is None or is_float(wanted), ModelError, f"dtype {dtype!r} was asked for",
           expected="'auto', float32, bfloat16, float16 or float64")  # fmt: skip
    place = as_device(device)
    cut = _lacking(config, checkpoint)
    tied_head = _settle_head(config, checkpoint, config.family.stack.table_weight.removeprefix(cut))
    _expect_layers(config, checkpoint)
    generation = read_json(directory / "generation_config.json", {})
    end_ids(generation, str(directory / "generation_config.json"))
    model = CausalLM(config)
    own = {name.removeprefix(cut): p for name, p in model.named_parameters()}  # under the names of the file
    _check(checkpoint, {name: p.shape for name, p in own.items()}, config, tied_head)
    for name, parameter in own.items():
        parameter.data = to_device(_converted(checkpoint[name], wanted, name), place)
    extra = {name: checkpoint[name] for name in checkpoint if config.family.is_extra_buffer(name)}
    if extra:
        _notice(f"{directory}: {len(extra)} buffers that follow from the config are not used ({next(iter(extra))})")
    model.source = Source(directory, extra, tied_head, cut)
    model.generation_config = generation
    return model.eval()  # type: ignore[return-value]


class AutoModelForCausalLM:
    """The name transformers users know for ``from_pretrained``."""

    @staticmethod
    def from_pretrained(
        path: str | os.PathLike,
        dtype: Any = "auto",
        device: Any = "cpu",
        torch_dtype: Any = None,
        device_map: Any = None,
    ) -> CausalLM:
        """See ``transformer.from_pretrained``; torch_dtype and device_map (one device) are other names for the two."""
        chosen = dtype if torch_dtype is None else str(torch_dtype)
        return from_pretrained(path, dtype=chosen, device=device if device_map is None else device_map)


# ------------------------------------------------------------------------------------------------ config and weights


def _notice(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _expect_layers(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """A layer is modules before it has weights: a count far beyond the file's would take all memory by itself."""
    count, known = config.num_hidden_layers, len(checkpoint) + len(checkpoint.problems)
    expect(count <= known, ModelError,
           f"{checkpoint.directory}: config.json has {count} layers ({config.family.key('num_hidden_layers')}) and the "
           f"weights are {known} tensors",
           expected="several tensors for each layer",
           fix="Get config.json and weights from one source, completely.")  # fmt: skip


def _lacking(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """The prefix that no name in the file has, where a decoder was saved without its head; else ""."""
    prefix, table = config.family.stack.prefix, config.family.stack.table_weight
    bare = table.removeprefix(prefix) in checkpoint and not any(name.startswith(prefix) for name in checkpoint)
    return prefix if bare else ""


def _settle_head(config: ModelConfig, checkpoint: Checkpoint, table: str) -> bool:
    """True if the file spells out a tied head; a tied head that differs from the embedding is untied, with a notice."""
    if not (config.tie_word_embeddings and HEAD in checkpoint and table in checkpoint):
        return False
    if _same(checkpoint, HEAD, table):
        return True
    _notice(f"{checkpoint.directory}: config.json ties {HEAD} to {table}, but the file holds another {HEAD}; "
            "the two are used as they are, and tie_word_embeddings is false from here on")  # fmt: skip
    config.tie_word_embeddings = False
    return False


def _same(checkpoint: Checkpoint, a: str, b: str) -> bool:
    if checkpoint.shape(a) != checkpoint.shape(b) or checkpoint.dtype(a) != checkpoint.dtype(b):
        return False
    x, y = (checkpoint[name].reshape(-1).view(np.uint8) for name in (a, b))
    return all(np.array_equal(x[i : i + _COMPARE_BYTES], y[i : i + _COMPARE_BYTES])
               for i in range(0, len(x), _COMPARE_BYTES))  # fmt: skip


def _check(checkpoint: Checkpoint, own: dict[str, tuple[int, ...]], config: ModelConfig, tied_head: bool) -> None:
    """Raise one ModelError with every name, shape and dtype that does not fit."""
    told = {line.split()[1].rstrip(":") for line in checkpoint.problems}
    lines = list(checkpoint.problems)
    missing = [name for name in own if name not in checkpoint and name not in told]
    lines += [f"missing     {name} {own[name]}" for name in missing]
    for name in checkpoint:
        shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        if name not in own:
            if not config.family.is_extra_buffer(name) and not (tied_head and name == HEAD):
                lines.append(f"unexpected  {name} {shape} {dtype_name(dtype)}")
        elif shape != own[name] or not is_float(dtype):
            lines.append(f"does not fit  {name}: {shape} {dtype_name(dtype)}, expected {own[name]} of a float dtype")
    if not lines:
        return
    shown = lines if len(lines) <= 40 else [*lines[:40], f"... {len(lines) - 40} more"]
    hint = ""
    if HEAD in own and HEAD not in checkpoint and not config.tie_word_embeddings:
        hint = f" Without {HEAD} the head may be tied: check tie_word_embeddings in config.json."
    raise ModelError(
        f"{checkpoint.directory}: config.json and weights disagree in {len(lines)} places; nothing was loaded:\n  "
        + "\n  ".join(shown)
        + f"\nexpected the tensors of {config.architectures[0]} with the sizes of config.json. "
        f"Get config.json and weights from one source, completely.{hint}"
    )


def _converted(array: np.ndarray, wanted: np.dtype | None, name: str) -> np.ndarray:
    if wanted is None or array.dtype == wanted:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(wanted)
    if wanted == float16 and np.isfinite(array).all() and not np.isfinite(result).all():
        largest = float(np.abs(array).max())
        raise ModelError(f"{name} has values up to {largest:.4g}; expected at most 65504, the largest float16. "
                         "Load it as bfloat16 or float32.")  # fmt: skip
    result.flags.writeable = False  # as the mapped ones: frozen weights may be packed
    return result
