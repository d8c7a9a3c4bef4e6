"""A base model with random weights, its tokenizer and rows with a rule, for the tests of the pages.

The task has a rule (count on, or back, from a number), so that falling loss means something although the frozen weights
are random: the adapters have to learn the whole rule.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from peft_core.random import Generator
from peft_core.safetensors_io import atomic_write, save_file

SPECIAL = ("<pad>", "<s>", "<|user|>", "<|assistant|>", "<|end|>")
WORDS = ("count", "on", "back", "from", "to", "please")
LIMIT = 60
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tiny_model(directory: Path, *, seed: int = 0, hidden: int = 128, layers: int = 2) -> None:
    """A Llama-shaped model directory with random float32 weights, tokenizer.json and a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = [*SPECIAL, *WORDS, *(str(n) for n in range(LIMIT))]
    _write_tokenizer(directory, vocabulary)
    heads, head_dim = 4, hidden // 4
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": SPECIAL.index("<|end|>"),
        "torch_dtype": "float32",
    }
    atomic_write(directory / "config.json", json.dumps(config, indent=2) + "\n")
    save_file(_weights(config, Generator(seed)), directory / "model.safetensors")


def _weights(config: dict, generator: Generator) -> dict[str, np.ndarray]:
    """Rows of unit length on average, so that every logit up to sqrt(D) can be reached by turning the hidden state."""
    d, f, k = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * k, config["num_key_value_heads"] * k

    def random(n_out: int, n_in: int, std: float | None = None) -> np.ndarray:
        return generator.normal((n_out, n_in), 0.0, std or n_in**-0.5)

    tensors = {"model.embed_tokens.weight": random(config["vocab_size"], d, 1.0)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": np.ones(d, np.float32),
            layer + "self_attn.q_proj.weight": random(q, d),
            layer + "self_attn.k_proj.weight": random(kv, d),
            layer + "self_attn.v_proj.weight": random(kv, d),
            layer + "self_attn.o_proj.weight": random(d, q),
            layer + "post_attention_layernorm.weight": np.ones(d, np.float32),
            layer + "mlp.gate_proj.weight": random(f, d),
            layer + "mlp.up_proj.weight": random(f, d),
            layer + "mlp.down_proj.weight": random(d, f),
        }
    return tensors | {"model.norm.weight": np.ones(d, np.float32), "lm_head.weight": random(config["vocab_size"], d)}


def _write_tokenizer(directory: Path, vocabulary: list[str]) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(list(SPECIAL))
    atomic_write(directory / "tokenizer.json", backend.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "pad_token": "<pad>",
        "add_bos_token": False,
        "add_eos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    atomic_write(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def tiny_rows(n: int, *, seed: int = 0) -> list[dict]:
    """``n`` chat rows such as: count on from 7 -> 8 9 10 11 12."""
    generator = Generator(seed)
    rows = []
    for start, back, length in zip(
        generator.integers(8, LIMIT - 8, n).tolist(),
        generator.integers(0, 2, n).tolist(),
        generator.integers(3, 8, n).tolist(),
        strict=True,
    ):
        step = -1 if back else 1
        answer = " ".join(str(start + step * i) for i in range(1, length + 1))
        question = f"count {'back' if back else 'on'} from {start} to {start + step * length} please"
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return rows
