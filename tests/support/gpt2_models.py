"""Random tiny GPT-2 directories whose numbers are large enough that a comparison can fail."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from peft_core.dtypes import as_dtype
from peft_core.safetensors_io import save_file

TINY: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_inner": None,
    "n_ctx": 64,
    "n_positions": 64,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2_config(**changes: Any) -> dict[str, Any]:
    """A config.json; keys set to ``...`` are left out."""
    return {key: value for key, value in {**TINY, **changes}.items() if value is not ...}


def gpt2_tensors(config: dict[str, Any], seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random weights under the checkpoint's names, Conv1D weights (in, out)."""
    rng = np.random.default_rng(seed)
    width, longest = config["n_embd"], config["n_positions"]
    inner = config.get("n_inner") or 4 * width
    tensors = {
        "transformer.wte.weight": rng.normal(0, 2 / np.sqrt(width), (config["vocab_size"], width)),
        "transformer.wpe.weight": rng.normal(0, 0.3, (longest, width)),
    }
    for i in range(config["n_layer"]):
        at = f"transformer.h.{i}."
        linears = {
            "attn.c_attn": (width, 3 * width, 1.5), "attn.c_proj": (width, width, 1.0),
            "mlp.c_fc": (width, inner, 1.5), "mlp.c_proj": (inner, width, 1.0),
        }  # fmt: skip
        for name, (n_in, n_out, gain) in linears.items():
            tensors[f"{at}{name}.weight"] = rng.normal(0, gain / np.sqrt(n_in), (n_in, n_out))
            tensors[f"{at}{name}.bias"] = rng.normal(0, 0.3, n_out)
        for name in ("ln_1", "ln_2"):
            tensors |= _norm(at + name, width, rng)
    tensors |= _norm("transformer.ln_f", width, rng)
    if not config.get("tie_word_embeddings", True):
        tensors["lm_head.weight"] = rng.normal(0, 2 / np.sqrt(width), (config["vocab_size"], width))
    return {name: array.astype(np.float32).astype(as_dtype(dtype)) for name, array in tensors.items()}


def _norm(name: str, width: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {f"{name}.weight": rng.uniform(0.5, 1.5, width), f"{name}.bias": rng.normal(0, 0.3, width)}


def as_on_the_hub(tensors: dict[str, np.ndarray], longest: int) -> dict[str, np.ndarray]:
    """The same weights as the first files had them: without the prefix, with each layer's causal mask."""
    bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    masks = {}
    for name in bare:
        if name.endswith("attn.c_attn.weight"):
            layer = name.removesuffix("c_attn.weight")
            masks[f"{layer}bias"] = np.tril(np.ones((1, 1, longest, longest), np.float32))
            masks[f"{layer}masked_bias"] = np.float32(-1e4)
    return {**bare, **{name: np.asarray(array) for name, array in masks.items()}}


def write_gpt2(directory: Path, seed: int = 0, dtype: str = "float32", hub: bool = False, **changes: Any) -> Path:
    """Write a model directory and return it; ``hub``: as the first files on the Hub are."""
    directory.mkdir(parents=True, exist_ok=True)
    config = gpt2_config(torch_dtype=dtype, **changes)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = gpt2_tensors(config, seed, dtype)
    save_file(as_on_the_hub(tensors, config["n_positions"]) if hub else tensors, directory / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    return directory
