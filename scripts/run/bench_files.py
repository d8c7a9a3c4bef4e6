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
from run.bench_work import SHAPES, Shape, Spec
from transformer.families import HEAD

LOGITS_STD = 1.5  # at least 1, or a model without attention would pass for one with


def write_files(spec: Spec) -> dict[str, Any]:
    """Write the base model and the adapter of ``spec`` unless they are there."""
    shape, path = SHAPES[spec.shape], spec.base / "config.json"
    config = json.dumps(_config(shape, spec.dtype, spec.positions), indent=2) + "\n"
    if not path.is_file() or path.read_text(encoding="utf-8") != config:
        spec.base.mkdir(parents=True, exist_ok=True)
        save_file(_weights(shape, as_dtype(spec.dtype), spec.positions), spec.base / "model.safetensors")
        atomic_write(path, config)
    if not spec.adapter.is_dir():
        targets = sorted({name.split(".")[-1] for name in shape.linears()})
        adapter = LoraConfig(r=spec.rank, lora_alpha=2 * spec.rank, target_modules=targets, task_type="CAUSAL_LM",
                             fan_in_fan_out=shape.layout.stack.conv1d)  # fmt: skip
        write_adapter(spec.adapter, adapter, _pairs(shape, spec.rank, Generator(1)))
    return {"base_mb": round((spec.base / "model.safetensors").stat().st_size / 1e6)}


def _config(shape: Shape, dtype: str, positions: int) -> dict[str, Any]:
    """config.json, by the family's names of the keys; dropout is 0."""
    family = shape.layout
    values = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_dim,
        "hidden_act": family.defaults[family.key("hidden_act")],
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "attention_bias": family.defaults["attention_bias"],
        "mlp_bias": family.defaults["mlp_bias"],
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
    rotary = {} if family.stack.positions else {"rope_theta": 10000.0}
    named = {family.key(name): value for name, value in values.items() if name not in family.ignored}
    kind = {"architectures": [family.architecture], "model_type": family.model_type}
    return kind | named | rotary | dict.fromkeys(family.dropouts, 0.0)


def _weights(shape: Shape, dtype: np.dtype, positions: int) -> dict[str, np.ndarray]:
    """Every linear keeps the size of what it reads; what a layer adds to the stream shrinks with the depth."""
    family, generator, tensors = shape.layout, Generator(0), {}
    stack, shrunk = family.stack, (2 * shape.layers) ** -0.5

    def put(name: str, size: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        tensors[name] = generator.normal(size, mean, std).astype(dtype)

    def put_norm(path: str) -> None:
        put(f"{path}.weight", (shape.width,), 0.1, 1.0)
        if stack.layer_norm:
            put(f"{path}.bias", (shape.width,), 0.1)

    head = LOGITS_STD * shape.width**-0.5
    put(stack.table_weight, (shape.vocab, shape.width), head if shape.tied else 1.0)
    put_norm(f"{stack.decoder}.{stack.norm}")
    if not shape.tied:
        put(HEAD, (shape.vocab, shape.width), head)
    for i in range(shape.layers):
        layer = shape.layer_path(i)
        for name in (stack.attention_norm, stack.mlp_norm):
            put_norm(layer + name)
        for name, (n_out, n_in) in shape.linears().items():
            scale = shrunk if name.endswith((stack.attention_out, stack.mlp_out)) else 1.0
            put(f"{layer}{name}.weight", (n_in, n_out) if stack.conv1d else (n_out, n_in), scale * n_in**-0.5)
            if family.defaults["attention_bias" if name.startswith(stack.attention) else "mlp_bias"]:
                put(f"{layer}{name}.bias", (n_out,), 0.1 * scale, 0.1 * scale)  # a mean that LayerNorm has to take away
    if stack.positions:  # as large as the embedding beside them
        put(f"{stack.decoder}.{stack.positions}.weight", (positions, shape.width), head)
    return tensors


def _pairs(shape: Shape, rank: int, generator: Generator) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of each adapted layer, B not zero: a gradient of zero would compare as equal to anything."""
    return {
        f"{shape.layer_path(i)}{name}": (
            generator.normal((rank, n_in), 0.0, n_in**-0.5),
            generator.normal((n_out, rank), 0.0, 0.1 * rank**-0.5),
        )
        for i in range(shape.layers)
        for name, (n_out, n_in) in shape.linears().items()
    }
