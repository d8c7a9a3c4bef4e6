"""The ops under the names of ``torch.nn.functional``: a face over peft_core.ops, nothing is computed here."""

from __future__ import annotations

from typing import Any

from .. import ops, random
from ..ops import cross_entropy, gelu, layer_norm, linear, relu, rms_norm, sigmoid, silu, swiglu, tanh
from ..tensor import Tensor

__all__ = [
    "cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "linear", "log_softmax", "relu", "rms_norm",
    "sigmoid", "silu", "softmax", "swiglu", "tanh",
]  # fmt: skip


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) over ``dim``."""
    return ops.softmax(x, axis=dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """log(softmax(x)) over ``dim``."""
    return ops.log_softmax(x, axis=dim)


def embedding(ids: Any, weight: Tensor) -> Tensor:
    """Rows ``ids`` of ``weight``."""
    return ops.embedding(ids, weight)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zero with probability ``p`` and divide the rest by 1 - p, with the next key of the default generator."""
    return ops.dropout(x, p=p, key=random.default_generator.key()) if training and p > 0 else x
