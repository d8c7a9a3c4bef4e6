"""The feed-forward part of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable

from peft_core import ops
from peft_core.nn import Module, project
from peft_core.tensor import Tensor
from transformer.config import ModelConfig
from transformer.layers import shaped_linear

GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")  # project makes these itself
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": ops.gelu,
    "relu": ops.relu,
    "silu": ops.silu,
}


class MLP(Module):
    """x + down(h), h = silu(gate(n)) * up(n) or activation(up(n)), n = norm(x).   x (N, D) -> (N, D).

    The gate: Shazeer, arXiv:2002.05202, equation 6.
    """

    def __init__(self, config: ModelConfig) -> None:
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.stack, self.activation = config.family.stack, config.hidden_act
        for name in self.stack.mlp_in:
            setattr(self, name, shaped_linear(width, inner, bias, self.stack.conv1d))
        setattr(self, self.stack.mlp_out, shaped_linear(inner, width, bias, self.stack.conv1d))

    def forward(self, x: Tensor, norm: Module) -> Tensor:
        """x (N, D), the residual stream -> x + mlp(norm(x))."""
        up, down = [getattr(self, name) for name in self.stack.mlp_in], getattr(self, self.stack.mlp_out)
        h = project(x, *up, norm=norm)  # (N, F), gated (N, 2 F)
        if len(up) == 2 or self.activation in GELU_TANH:
            return project(h, down, activation="swiglu" if len(up) == 2 else "gelu_tanh", residual=x)
        return project(ACTIVATIONS[self.activation](h), down, residual=x)
