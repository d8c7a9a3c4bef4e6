"""ModelConfig: config.json of a Hugging Face model directory, read strictly and written back as it was."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from peft_core.checkpoint import read_json
from peft_core.errors import ModelError, expect, short
from transformer.families import Family, family_of

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPE_KEYS = {  # what each type of scaling reads besides the theta
    "default": (),
    "linear": ("factor",),
    "llama3": _LLAMA3_KEYS,
}
_SWITCHES = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}  # not all families have them
_ROPE_INERT = {"partial_rotary_factor": (None, 1, 1.0), "attention_factor": (None, 1, 1.0)}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: base ``theta`` and how frequencies are stretched for longer rows than were pretrained on."""

    theta: float
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Angle per position of each pair of channels: theta^(-2k/K), stretched.   Returns (K/2,) float32.

        llama3: wavelengths above original/low_freq_factor are divided by ``factor``, those below
        original/high_freq_factor stay, between the two the frequencies are interpolated linearly.
        Source: Su et al., arXiv:2104.09864, section 3.3; Llama 3: arXiv:2407.21783, section 3.2.
        """
        f = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)  # (K/2,)
        if self.type == "linear":
            f = f / self.factor
        elif self.type == "llama3":
            turns = self.original_max_position_embeddings * f / (2 * np.pi)  # in the pretraining length
            share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            share = np.clip(share, 0, 1)  # 1: keep the frequency, 0: stretch it
            f = share * f + (1 - share) * f / self.factor
        return f.astype(np.float32)


@dataclass
class ModelConfig:
    """The sizes and switches of a model under the names that Llama has for them; ``raw`` is the JSON object as read.

    ``norm_eps``: of RMSNorm or LayerNorm.  ``rope``: None where positions are learned.
    """

    model_type: str
    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig | None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    name_or_path: str = ""
    raw: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def rope_theta(self) -> float | None:
        """The base of the rotary frequencies, if there are any."""
        return None if self.rope is None else self.rope.theta

    @property
    def family(self) -> Family:
        """The family that ``model_type`` names."""
        return family_of(self.model_type)

    def attention_scale(self, layer: int) -> float:
        """What the products of queries and keys are multiplied by in a layer."""
        scale = 1 / math.sqrt(self.head_dim) if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @staticmethod
    def from_dict(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """The config in a JSON object.

        Raises ModelError, naming the key, for an unknown model_type, activation, rope type or option, a missing size or
        rope_theta, and sizes that do not fit together.  ``where`` names the source in errors.
        """
        family = family_of(raw.get("model_type"), where)
        _refuse_options(raw, family, where)
        get = _settled(raw, family, where)
        sizes = {key: _size(get, family.key(key), where) for key in (*_REQUIRED, "max_position_embeddings")}
        groups = sizes["num_attention_heads"] if get["num_key_value_heads"] is None else _size(
            get, "num_key_value_heads", where)  # fmt: skip
        head_dim = _head_dim(get, sizes, groups, family, where)
        _warn_unused(get, family, where)
        end_ids(get, where)
        return ModelConfig(
            model_type=family.model_type,
            architectures=_architectures(raw, family, where),
            num_key_value_heads=groups,
            head_dim=head_dim,
            norm_eps=_number(get, family.key("rms_norm_eps"), where),
            rope=None if family.stack.positions else _rope(raw, sizes["max_position_embeddings"], where),
            hidden_act=_activation(get, family, where),
            attention_bias=_flag(get, "attention_bias", where),
            mlp_bias=_flag(get, "mlp_bias", where),
            scale_attn_weights=_flag(get, "scale_attn_weights", where),
            scale_attn_by_inverse_layer_idx=_flag(get, "scale_attn_by_inverse_layer_idx", where),
            tie_word_embeddings=_flag(get, "tie_word_embeddings", where),
            sliding_window=None if get["sliding_window"] is None else _size(get, "sliding_window", where),
            bos_token_id=get["bos_token_id"],
            eos_token_id=get["eos_token_id"],
            pad_token_id=get["pad_token_id"],
            raw=dict(raw),
            **sizes,  # type: ignore[arg-type]
        )

    @staticmethod
    def from_pretrained(directory: str | os.PathLike) -> ModelConfig:
        """The config.json of a model directory.  Raises ModelError if it is missing, not JSON, or not understood."""
        path = Path(directory) / "config.json"
        config = ModelConfig.from_dict(read_json(path), str(path))
        config.name_or_path = str(directory)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The JSON object: as read, except that tie_word_embeddings is what it is now."""
        if self.tie_word_embeddings == self.raw.get("tie_word_embeddings", self.family.defaults["tie_word_embeddings"]):
            return dict(self.raw)
        return {**self.raw, "tie_word_embeddings": self.tie_word_embeddings}


# ------------------------------------------------------------------------------------------------ parts of the JSON


def _refuse_options(raw: dict[str, Any], family: Family, where: str) -> None:
    for key, neutral in family.refused.items():
        value = raw.get(key)
        expect(any(value is n or (value == n and type(value) is type(n)) for n in neutral), ModelError,
               f"{where}: {key} is {value!r}", expected=f"no such option for model_type {family.model_type!r}",
               fix="It changes what the model computes and is not implemented.")  # fmt: skip


def _settled(raw: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """The JSON object under the family's own names of keys, what may be left out filled in."""
    get = {**_SWITCHES, **family.defaults, **raw}
    for key in (*family.ignored, *(key for key in _SWITCHES if key not in family.defaults)):
        get[key] = {**_SWITCHES, **family.defaults}[key]
    for common, own in family.keys.items():
        if common in raw:
            expect(raw.get(own, raw[common]) == raw[common], ModelError,
                   f"{where} has {own} and {common}, which differ", expected=f"{own} alone",
                   fix=f"They are two names of one thing: remove {common}.")  # fmt: skip
            get[own] = raw[common]
    inner, width = family.key("intermediate_size"), family.key("hidden_size")
    if get.get(inner) is None and family.inner_ratio is not None:
        get[inner] = family.inner_ratio * _size(get, width, where)
    return get


def _warn_unused(get: dict[str, Any], family: Family, where: str) -> None:
    dropouts = [f"{key} {get[key]}" for key in family.dropouts if get.get(key)]
    if dropouts:
        verb = "is" if len(dropouts) == 1 else "are"
        warnings.warn(f"{where}: {', '.join(dropouts)} {verb} not applied; training runs without dropout in the base.",
                      stacklevel=4)  # fmt: skip
    longest = family.key("max_position_embeddings")
    if get.get("n_ctx") not in (None, get[longest]):
        warnings.warn(f"{where}: n_ctx {get['n_ctx']} is not used; {longest} {get[longest]} counts.", stacklevel=4)


def _activation(get: dict[str, Any], family: Family, where: str) -> str:
    key = family.key("hidden_act")
    expect(get[key] in family.activations, ModelError, f"{where}: {key} is {get[key]!r}",
           expected=" or ".join(map(repr, family.activations)),
           fix="Other activations are not implemented for this family.")  # fmt: skip
    return str(get[key])


def _missing(where: str, key: str) -> NoReturn:
    raise ModelError(f"{where} has no {key}; expected it to be given. Get the model's own config.json.")


def _size(raw: dict[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if value is None:
        _missing(where, key)
    expect(type(value) is int and value > 0, ModelError, f"{where}: {key} is {value!r}", expected="a positive integer")
    return int(value)


def end_ids(raw: Mapping[str, Any], where: str) -> list[int]:
    """The ids under eos_token_id of a config.json or generation_config.json, if any.  Raises ModelError."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    expect(all(type(i) is int for i in ids), ModelError, f"{where}: eos_token_id is {short(value)}",
           expected="a token id, a list of them, or null",
           fix="Correct it, or get the file from the model's source again.")  # fmt: skip
    return list(ids)


def _number(raw: dict[str, Any], key: str, where: str) -> float:
    value = raw.get(key)
    if value is None:
        _missing(where, key)
    good = type(value) in (int, float) and 0 < value < float("inf")
    expect(good, ModelError, f"{where}: {key} is {value!r}", expected="a positive number")
    return float(value)


def _flag(raw: dict[str, Any], key: str, where: str) -> bool:
    value = raw[key]
    expect(isinstance(value, bool), ModelError, f"{where}: {key} is {value!r}", expected="true or false")
    return bool(value)


def _architectures(raw: dict[str, Any], family: Family, where: str) -> list[str]:
    names = raw.get("architectures") or [family.architecture]
    expect(names == [family.architecture], ModelError, f"{where}: architectures is {names!r}",
           expected=f"['{family.architecture}']", fix="Only causal language models can be read.")  # fmt: skip
    return list(names)


def _head_dim(raw: dict[str, Any], sizes: dict[str, int], groups: int, family: Family, where: str) -> int:
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    n_heads, d = family.key("num_attention_heads"), family.key("hidden_size")
    expect(heads % groups == 0, ModelError, f"{where}: {heads} num_attention_heads over {groups} num_key_value_heads",
           expected="a multiple")  # fmt: skip
    if raw["head_dim"] is None:
        other = "" if "head_dim" in family.ignored else ", or an explicit head_dim"
        expect(width % heads == 0, ModelError, f"{where}: {d} {width} over {heads} {n_heads}",
               expected="a multiple" + other)  # fmt: skip
        head_dim = width // heads
    else:
        head_dim = _size(raw, "head_dim", where)
    expect(head_dim % 2 == 0 or family.stack.positions, ModelError, f"{where}: head_dim is {head_dim}",
           expected="an even number")  # fmt: skip
    return head_dim


def _rope(raw: dict[str, Any], longest: int, where: str) -> RopeConfig:
    """transformers 4 wrote rope_theta and rope_scaling, transformers 5 writes both into rope_parameters."""
    places = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    for key, value in places.items():
        expect(isinstance(value, dict), ModelError, f"{where}: {key} is {value!r}", expected="a JSON object or null")
    expect(len(places) < 2 or places["rope_parameters"] == places["rope_scaling"], ModelError,
           f"{where} has both rope_parameters and rope_scaling, and they differ", expected="one of them",
           fix="Remove the one that does not belong to the model.")  # fmt: skip
    key = next(iter(places), "rope_parameters")
    given = dict(places.get(key, {}))
    thetas = {float(v) for v in (raw.get("rope_theta"), given.get("rope_theta")) if isinstance(v, int | float)}
    expect(len(thetas) < 2, ModelError, f"{where} has two values of rope_theta: {sorted(thetas)}", expected="one")
    given["rope_theta"] = given.get("rope_theta", raw.get("rope_theta"))
    theta = _number(given, "rope_theta", where)
    kind = str(given.get("rope_type", given.get("type", "default")))
    expect(kind in _ROPE_KEYS, ModelError, f"{where}: {key} has rope_type {kind!r}",
           expected=f"one of {', '.join(_ROPE_KEYS)}", fix="Other types are not implemented.")  # fmt: skip
    if kind == "llama3":
        given.setdefault("original_max_position_embeddings", raw.get("original_max_position_embeddings", longest))
    for name, value in given.items():
        neutral = _ROPE_INERT.get(name, (None,))
        known = name in (*_ROPE_KEYS[kind], "rope_theta", "rope_type", "type") or value in neutral
        expect(known, ModelError, f"{where}: {key} has {name} = {value!r}",
               expected=f"only what rope_type {kind!r} reads ({', '.join(_ROPE_KEYS[kind]) or 'rope_theta'})",
               fix="The option is not implemented for this type.")  # fmt: skip
    numbers = {name: _number(given, name, f"{where}: {key}") for name in _ROPE_KEYS[kind]}
    if kind == "llama3":
        expect(numbers["high_freq_factor"] > numbers["low_freq_factor"], ModelError,
               f"{where}: high_freq_factor {numbers['high_freq_factor']} and low_freq_factor "
               f"{numbers['low_freq_factor']}", expected="the first above the second")  # fmt: skip
        numbers["original_max_position_embeddings"] = int(numbers["original_max_position_embeddings"])
    return RopeConfig(theta, kind, **numbers)  # type: ignore[arg-type]
