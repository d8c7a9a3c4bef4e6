"""A small byte-level tokenizer directory made on the spot, with a ChatML-like template and nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>", "<pad>")
CORPUS = (
    "What is two plus two? Two plus two is four. Hello, how are you today? I am fine, thank you.",
    "system user assistant tool\nThe quick brown fox jumps over the lazy dog. Answer the question in one word.",
)


def write_tokenizer(
    directory: Path,
    *,
    template: Any = CHATML,
    adds_bos: bool = False,
    trim_offsets: bool = False,
    extra_tokens: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """Write tokenizer.json and tokenizer_config.json; ``config`` overrides keys of the latter (None removes one)."""
    directory.mkdir(parents=True, exist_ok=True)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_tokens(list(extra_tokens))
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    elif trim_offsets:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.save(str(directory / "tokenizer.json"))
    keys: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "chat_template": template,
        **config,
    }
    kept = {key: value for key, value in keys.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")
    return directory
