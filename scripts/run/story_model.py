"""The quick start's base model before it is trained: its tokenizer, its shape, its random start, and its batches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from peft_core.files import atomic_write
from peft_core.random import Generator
from run.stories import Messages, document
from transformer.batch import Batch
from transformer.config import ModelConfig
from transformer.model import CausalLM

SPECIAL = ("<pad>", "<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS, END = SPECIAL.index("<s>"), SPECIAL.index("<|end|>")
VOCABULARY, TEXT_SEED, TOKENIZER_SEED = 2048, 1, 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": END,
    "pad_token_id": SPECIAL.index("<pad>"),
    "torch_dtype": "bfloat16",
}


# ------------------------------------------------------------------------------------------------ tokenizer


def train_tokenizer(n_documents: int = 20_000, vocabulary: int = VOCABULARY) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of generated text; ids 0 to 5 are the special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))  # fmt: skip
    backend.train_from_iterator(plain_texts(TOKENIZER_SEED, n_documents), trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return backend


def plain_texts(seed: int, n: int) -> Iterator[str]:
    """The texts and messages of the first ``n`` documents of a seed."""
    for i in range(n):
        made = document(seed, i)
        yield from [made] if isinstance(made, str) else (message["content"] for message in made)


def write_tokenizer(directory: Path, backend: tokenizers.Tokenizer) -> None:
    """tokenizer.json and tokenizer_config.json with the chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write(directory / "tokenizer.json", backend.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>",
              "pad_token": "<pad>", "model_max_length": SHAPE["max_position_embeddings"],
              "chat_template": CHAT_TEMPLATE}  # fmt: skip
    atomic_write(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def markup(made: str | Messages) -> str:
    """A document with its special tokens: a chat as the template writes it, a story between ``<s>`` and ``<|end|>``."""
    if isinstance(made, str):
        return f"<s>{made}<|end|>"
    return "<s>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in made)


# ------------------------------------------------------------------------------------------------ model and batches


def random_model(seed: int, shape: dict[str, Any] = SHAPE) -> CausalLM:
    """A model with random float32 weights, all of them trainable.

    Matrices have standard deviation 1/sqrt(I), those that write into the residual stream 1/sqrt(2 L) of that.
    """
    model, generator = CausalLM(ModelConfig.from_dict(shape)), Generator(seed)
    depth = 1 / math.sqrt(2 * shape["num_hidden_layers"])
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data = np.ones(parameter.shape, np.float32)
        else:
            scale = 0.05 if "embed" in name else parameter.shape[1] ** -0.5
            scale *= depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.data = generator.normal(parameter.shape, 0.0, scale)
        parameter.requires_grad = True
    return model


class StorySteps(Sequence[list[Batch]]):
    """Step i trains on documents i n ... (i + 1) n of the text, a row each; all tokens are trained."""

    def __init__(self, backend: tokenizers.Tokenizer, n_steps: int, n_documents: int, seed: int = TEXT_SEED) -> None:
        self.backend, self.n_steps, self.n_documents, self.seed = backend, n_steps, n_documents, seed

    def __len__(self) -> int:
        return self.n_steps

    def __getitem__(self, step: Any) -> list[Batch]:
        if not 0 <= step < self.n_steps:  # or a loop over the steps would never end
            raise IndexError(f"step {step} of {self.n_steps}; expected one from 0 to {self.n_steps - 1}.")
        first = step * self.n_documents
        texts = [markup(document(self.seed, first + i)) for i in range(self.n_documents)]
        rows = [encoding.ids for encoding in self.backend.encode_batch(texts, add_special_tokens=False)]
        return [Batch.from_rows([(ids, ids) for ids in rows])]
