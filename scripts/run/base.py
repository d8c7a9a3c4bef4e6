"""The base model as the pages use it: where it is, its tokenizer, what ends an answer, how a prompt becomes ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapters import LoraConfig
from peft_core import dtypes
from peft_core.backend import Device, as_device, to_device
from peft_core.checkpoint import read_json
from peft_core.errors import ConfigError
from run.config import LoraSection, ModelSection
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
        value = read_json(directory / name, {}).get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return list(dict.fromkeys(int(i) for i in [*found, tokenizer.eos_token_id] if i is not None))


def open_device(name: str) -> Device:
    """The device meant by ``--device``, tried once.  Raises ConfigError if there is none."""
    import numpy as np

    try:
        device = as_device(name)
        to_device(np.zeros(1, np.float32), device)
    except Exception as error:  # CuPy and the driver have many classes for "there is no GPU"
        raise ConfigError(f"--device {name}: {error}") from error
    return device


def compute_dtype(section: ModelSection, device: Device) -> Any:
    """What fit() computes products in; None is float32.  "auto": float32 on the CPU, bfloat16 on a GPU."""
    name = section.compute_dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
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
