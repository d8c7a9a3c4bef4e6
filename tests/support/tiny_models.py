"""Random tiny Llama and Mistral directories, large enough in their numbers that a comparison can fail.

Default initialisations give logits of standard deviation 0.08, and then a wrong rope_theta hides below any bound. Here
queries and keys are scaled so that attention is peaked, and the head so that logits have a deviation of 2.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from peft_core.dtypes import as_dtype
from peft_core.safetensors_io import save_file

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json; keys set to ``...`` are left out."""
    config = {**TINY, **changes}
    if config["model_type"] == "mistral":
        config["architectures"] = ["MistralForCausalLM"]
    return {key: value for key, value in config.items() if value is not ...}


def tiny_tensors(config: dict[str, Any], seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random weights under the checkpoint's names."""
    rng = np.random.default_rng(seed)
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    wide = config["num_attention_heads"] * config["head_dim"]
    narrow = config["num_key_value_heads"] * config["head_dim"]
    tied = config.get("tie_word_embeddings", False)
    tensors = {"model.embed_tokens.weight": rng.normal(0, 2 / np.sqrt(width) if tied else 1, (size, width))}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes = {
            "self_attn.q_proj": (wide, width, 2.0), "self_attn.k_proj": (narrow, width, 2.0),
            "self_attn.v_proj": (narrow, width, 1.0), "self_attn.o_proj": (width, wide, 1.0),
            "mlp.gate_proj": (inner, width, 1.5), "mlp.up_proj": (inner, width, 1.0),
            "mlp.down_proj": (width, inner, 1.0),
        }  # fmt: skip
        for name, (n_out, n_in, gain) in shapes.items():
            tensors[f"{at}{name}.weight"] = rng.normal(0, gain / np.sqrt(n_in), (n_out, n_in))
            if config.get("attention_bias" if "attn" in name else "mlp_bias"):
                tensors[f"{at}{name}.bias"] = rng.normal(0, 0.5, n_out)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = rng.uniform(0.5, 1.5, width)
    tensors["model.norm.weight"] = rng.uniform(0.5, 1.5, width)
    if not tied:
        tensors["lm_head.weight"] = rng.normal(0, 2 / np.sqrt(width), (size, width))
    return {name: array.astype(np.float32).astype(as_dtype(dtype)) for name, array in tensors.items()}


def write_tiny(directory: Path, seed: int = 0, dtype: str = "float32", shards: int = 1, **changes: Any) -> Path:
    """Write a model directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(torch_dtype=dtype, **changes)
    (directory / "config.json").write_text(json.dumps(config))
    write_weights(directory, tiny_tensors(config, seed, dtype), shards)
    return directory


def write_weights(directory: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """One model.safetensors, or so many shards and their index."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def ragged_rows(seed: int = 0, lengths: tuple[int, ...] = (40, 1, 23), vocab_size: int = 97) -> list[list[int]]:
    """Rows of random ids, of different lengths, some longer than every window and original length used here."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, n).tolist() for n in lengths]


def padded(rows: list[list[int]], side: str = "right", fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask), both (B, T)."""
    longest = max(map(len, rows))
    ids, mask = np.full((len(rows), longest), fill, np.int64), np.zeros((len(rows), longest), np.int64)
    for b, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[b, at], mask[b, at] = row, 1
    return ids, mask
