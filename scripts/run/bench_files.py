"""The base model and the adapters that every program measured loads: random numbers, but the same for all."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from adapters import LoraConfig
from adapters.io import write_adapter
from peft_core.dtypes import as_dtype
from peft_core.random import Generator
from peft_core.safetensors_io import atomic_write, save_file
from run.bench_work import SHAPES, TARGETS, Shape, Spec

LOGITS_STD = 1.5  # at least 1, or a model without attention would pass for one with


def write_files(spec: Spec) -> dict[str, Any]:
    """Write the base model and the adapter of ``spec`` unless they are there."""
    shape = SHAPES[spec.shape]
    if not (spec.base / "config.json").is_file():
        spec.base.mkdir(parents=True, exist_ok=True)
        save_file(_weights(shape, as_dtype(spec.dtype), Generator(0)), spec.base / "model.safetensors")
        atomic_write(spec.base / "config.json", json.dumps(_config(shape, spec.dtype), indent=2) + "\n")
    if not spec.adapter.is_dir():
        config = LoraConfig(r=spec.rank, lora_alpha=2 * spec.rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
        write_adapter(spec.adapter, config, _pairs(shape, spec.rank, Generator(1)))
    return {"base_mb": round((spec.base / "model.safetensors").stat().st_size / 1e6)}


def _config(shape: Shape, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }


def _weights(shape: Shape, dtype: np.dtype, generator: Generator) -> dict[str, np.ndarray]:
    """Every linear keeps the size of what it reads; what a layer adds to the stream shrinks with the depth."""

    def normal(size: tuple[int, ...], std: float, mean: float = 0.0) -> np.ndarray:
        return generator.normal(size, mean, std).astype(dtype)

    head = LOGITS_STD * shape.width**-0.5
    tensors = {
        "model.embed_tokens.weight": normal((shape.vocab, shape.width), head if shape.tied else 1.0),
        "model.norm.weight": normal((shape.width,), 0.1, 1.0),
    }
    if not shape.tied:
        tensors["lm_head.weight"] = normal((shape.vocab, shape.width), head)
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = normal((shape.width,), 0.1, 1.0)
        for name, (n_out, n_in) in shape.linears().items():
            writes = name.endswith(("o_proj", "down_proj"))
            tensors[f"{layer}{name}.weight"] = normal(
                (n_out, n_in), n_in**-0.5 * ((2 * shape.layers) ** -0.5 if writes else 1.0)
            )
    return tensors


def _pairs(shape: Shape, rank: int, generator: Generator) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of each adapted layer, B not zero: a gradient of zero would compare as equal to anything."""
    return {
        f"model.layers.{i}.{name}": (
            generator.normal((rank, n_in), 0.0, n_in**-0.5),
            generator.normal((n_out, rank), 0.0, 0.1 * rank**-0.5),
        )
        for i in range(shape.layers)
        for name, (n_out, n_in) in shape.linears().items()
    }
