"""The feed-forward part of a decoder layer."""

from __future__ import annotations

from peft_core.nn import Module, project
from peft_core.tensor import Tensor
from transformer.config import ModelConfig
from transformer.layers import shaped_linear


class MLP(Module):
    """x + down(silu(gate(h)) * up(h)), h = norm(x).   x (N, D) -> (N, D).   (Shazeer, arXiv:2002.05202, equation 6.)"""

    def __init__(self, config: ModelConfig) -> None:
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = shaped_linear(width, inner, bias)
        self.up_proj = shaped_linear(width, inner, bias)
        self.down_proj = shaped_linear(inner, width, bias)

    def forward(self, x: Tensor, norm: Module) -> Tensor:
        """x (N, D), the residual stream -> x + mlp(norm(x))."""
        gate_up = project(x, self.gate_proj, self.up_proj, norm=norm)  # (N, 2 F)
        return project(gate_up, self.down_proj, gated=True, residual=x)
