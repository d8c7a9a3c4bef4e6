"""One decoder layer."""

from __future__ import annotations

from peft_core.nn import Module
from peft_core.tensor import Tensor
from transformer.attention import Attention, Place
from transformer.config import ModelConfig
from transformer.layers import shaped_rms_norm
from transformer.mlp import MLP


class DecoderLayer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).   x (N, D), the residual stream, float32 -> (N, D)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.input_layernorm = shaped_rms_norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = shaped_rms_norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """x (N, D) -> (N, D)."""
        x = self.self_attn(x, self.input_layernorm, place)
        return self.mlp(x, self.post_attention_layernorm)
