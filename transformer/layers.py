"""Layers that know their shapes and hold no memory yet: load.py gives them the arrays of a file.

A stand-in is one zero seen through a shape: checking a checkpoint against a model then costs nothing, however large
the config says it is.
"""

from __future__ import annotations

import numpy as np

from peft_core.nn import Conv1D, Embedding, LayerNorm, Linear, Module, Parameter, RMSNorm
from peft_core.nn.init import skip_init


def _stand_in(*shape: int) -> Parameter:
    return Parameter(np.broadcast_to(np.float32(0), shape), requires_grad=False)


def shaped_linear(n_in: int, n_out: int, bias: bool, conv1d: bool = False) -> Linear:
    """A Linear with stand-ins for weight (O, I) and bias (O,), or a Conv1D, with a weight (I, O)."""
    with skip_init():
        layer = (Conv1D if conv1d else Linear)(0, 0, bias=bias)
    layer.in_features, layer.out_features = n_in, n_out
    layer.weight = _stand_in(n_in, n_out) if conv1d else _stand_in(n_out, n_in)
    layer.bias = _stand_in(n_out) if bias else None
    return layer


def shaped_embedding(n_rows: int, width: int) -> Embedding:
    """An Embedding with a stand-in for its table (V, D)."""
    with skip_init():
        layer = Embedding(0, 0)
    layer.num_embeddings, layer.embedding_dim = n_rows, width
    layer.weight = _stand_in(n_rows, width)
    return layer


def shaped_norm(width: int, eps: float, layer_norm: bool = False) -> Module:
    """An RMSNorm, or a LayerNorm with a bias, with stand-ins for its parameters (D,)."""
    with skip_init():
        layer = LayerNorm(0, eps) if layer_norm else RMSNorm(0, eps)
    layer.weight = _stand_in(width)
    if isinstance(layer, LayerNorm):
        layer.bias = _stand_in(width)
    return layer
