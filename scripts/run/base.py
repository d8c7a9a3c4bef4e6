"""The base model as the pages use it: where it is, its tokenizer, what ends an answer, how a prompt becomes ids."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from adapters import LoraConfig
from peft_core import dtypes
from peft_core.backend import Device, all_finite, as_device, to_device
from peft_core.checkpoint import Checkpoint, read_json
from peft_core.errors import ConfigError
from peft_core.kernels import tiles_supported
from run.config import LoraSection
from transformer.config import end_ids
from transformer.hub import resolve_directory
from transformer.tokenizer import AutoTokenizer, Tokenizer


def find_base(path: str) -> Path:
    """The directory of a model: a directory as it is, a hub id in the local cache.  Raises ModelError."""
    return resolve_directory(path)


def load_tokenizer(directory: Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer in ``directory``, with the chat template of a file instead of its own if one is given."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"model.chat_template {chat_template!r} cannot be read ({error}); expected the path of a jinja file."
            ) from error
    return tokenizer


def stop_ids(directory: Path, tokenizer: Tokenizer) -> list[int]:
    """The ids that end an answer: generation_config.json, config.json and the tokenizer may each name some."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        found += end_ids(read_json(directory / name, {}), str(directory / name))
    return list(dict.fromkeys([*found, *(i for i in [tokenizer.eos_token_id] if i is not None)]))


def damaged_tensors(directory: Path) -> list[str]:
    """The tensors of a model directory that hold NaN or infinity: "NAME of FILE"."""
    checkpoint = Checkpoint(directory)
    return [f"{name} of {checkpoint.file(name)}" for name in checkpoint if not all_finite(checkpoint[name])]


def open_device(name: str) -> Device:
    """The device meant by ``--device``, tried once.  Raises ConfigError if there is none."""
    import numpy as np

    try:
        device = as_device(name)
        to_device(np.zeros(1, np.float32), device)
    except Exception as error:  # CuPy and the driver have many classes for "there is no GPU"
        raise ConfigError(f"--device {name}: {error}") from error
    return device


def compute_dtype(name: str, device: Device, stored: Iterable[str]) -> Any:
    """What products are computed in; None is float32.  ``stored``: the dtypes in which the weights are kept.

    "auto": bfloat16 on a GPU, and on a CPU if the weights have no more digits themselves: it halves the memory of
    the weights, whether the CPU has an instruction for it or not. Formulas alone, without tiles, are slower in it.
    """
    if name == "auto":
        half = device.type != "cpu" or (set(stored) == {"bfloat16"} and tiles_supported(dtypes.bfloat16))
        name = "bfloat16" if half else "float32"
    return dtypes.bfloat16 if name == "bfloat16" else None


def lora_config(section: LoraSection, base: str) -> LoraConfig:
    """The adapter's config as PEFT writes it: a whole alpha as an integer, because Ollama reads nothing else."""
    values = section.model_dump()
    alpha = values["lora_alpha"]
    values["lora_alpha"] = int(alpha) if float(alpha).is_integer() else alpha
    return LoraConfig(**values, task_type="CAUSAL_LM", base_model_name_or_path=base)


def prompt_ids(tokenizer: Tokenizer, text: str, *, raw: bool = False) -> list[int]:
    """The ids of a prompt: a user's message if the tokenizer has a chat template, else (or ``raw``) plain text."""
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return chat_ids(tokenizer, [{"role": "user", "content": text}])


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """The ids of a conversation with the opening of the next answer."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return [int(i) for i in ids]
