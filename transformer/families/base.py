"""What a family of models is made of: data that says how its files and its stack differ from the others'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Stack:
    """The kinds of parts that the shared stack takes in a family, and their names in its checkpoints.

    ``positions``: the table of learned positions; None: rotary positions.  ``qkv``: linears whose outputs side by side
    are the queries, keys and values.  ``mlp_in``: [gate, up] of a gated MLP, or the one linear before the activation.
    ``layer_norm``: LayerNorm with a bias instead of RMSNorm.  ``conv1d``: weights are stored (I, O).
    """

    decoder: str = "model"
    table: str = "embed_tokens"
    positions: str | None = None
    layers: str = "layers"
    norm: str = "norm"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    attention_out: str = "o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    mlp_in: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_out: str = "down_proj"
    layer_norm: bool = False
    conv1d: bool = False

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """The names of a layer's parts, in the order in which they run."""
        return self.attention_norm, self.attention, self.mlp_norm, self.mlp

    @property
    def prefix(self) -> str:
        """What the names of a decoder saved without its head lack."""
        return self.decoder + "."

    @property
    def table_weight(self) -> str:
        """The name of the token embedding's weight."""
        return f"{self.decoder}.{self.table}.weight"


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    ``architecture``: the class name people see where config.json gives none.  ``defaults``: the value of a config key
    that a file may leave out, as in transformers.  ``ignored``: keys of the stack that this family does not have.
    ``refused``: keys that would change the computation, with the values that do not.  ``extra_buffers``: full-match
    patterns of tensors that its checkpoints may carry and that follow from the config.  ``keys``: Llama's name of a
    config key -> its name in this family.  ``activations``: what hidden_act may be.  ``dropouts``: keys of dropout in
    the base, which is not applied.  ``inner_ratio``: F / D where config.json gives no F.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    ignored: tuple[str, ...] = ()
    refused: Mapping[str, tuple] = field(default_factory=dict)
    extra_buffers: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    activations: tuple[str, ...] = ("silu",)
    dropouts: tuple[str, ...] = ("attention_dropout",)
    inner_ratio: int | None = None
    stack: Stack = Stack()

    def is_extra_buffer(self, name: str) -> bool:
        """True for a checkpoint tensor that is known and not needed."""
        return any(re.fullmatch(pattern, name) for pattern in self.extra_buffers)

    def key(self, name: str) -> str:
        """The config key that Llama calls ``name``."""
        return self.keys.get(name, name)
