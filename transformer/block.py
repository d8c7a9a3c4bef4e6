"""One decoder layer."""

from __future__ import annotations

from peft_core.nn import Module
from peft_core.tensor import Tensor
from transformer.attention import Attention, Place
from transformer.config import ModelConfig
from transformer.layers import shaped_norm
from transformer.mlp import MLP


class DecoderLayer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).   x (N, D), the residual stream, float32 -> (N, D)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.stack = stack = config.family.stack
        setattr(self, stack.attention_norm, shaped_norm(config.hidden_size, config.norm_eps, stack.layer_norm))
        setattr(self, stack.attention, Attention(config, layer))
        setattr(self, stack.mlp_norm, shaped_norm(config.hidden_size, config.norm_eps, stack.layer_norm))
        setattr(self, stack.mlp, MLP(config))

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """x (N, D) -> (N, D)."""
        attention_norm, attention, mlp_norm, mlp = (getattr(self, name) for name in self.stack.parts)
        return mlp(attention(x, attention_norm, place), mlp_norm)
