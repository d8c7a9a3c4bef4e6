"""Differentiable functions of Tensors. Arrays and numbers are accepted in their place."""

from .activation import gelu, log_softmax, logsumexp, relu, sigmoid, silu, softmax, swiglu, tanh
from .attention import attention
from .dropout import dropout
from .elementwise import (
    abs,
    add,
    astype,
    clip,
    cos,
    div,
    eq,
    exp,
    ge,
    gt,
    le,
    log,
    lt,
    masked_fill,
    maximum,
    minimum,
    mul,
    ne,
    neg,
    pow,
    rsqrt,
    sin,
    sqrt,
    sub,
    to_device,
    where,
)
from .embedding import embedding
from .linear import linear, low_rank, matmul
from .loss import cross_entropy, head_loss
from .norm import layer_norm, rms_norm
from .projection import project
from .reduce import max, mean, min, sum, var
from .rope import rope
from .rotary import rotary_attention
from .shape import (
    concatenate,
    contiguous,
    expand,
    flatten,
    getitem,
    permute,
    reshape,
    split,
    squeeze,
    stack,
    transpose,
    unsqueeze,
)

__all__ = [
    "abs", "add", "astype", "attention", "clip", "concatenate", "contiguous", "cos", "cross_entropy", "div",
    "dropout", "embedding", "eq", "exp", "expand", "flatten", "ge", "gelu", "getitem", "gt", "head_loss",
    "layer_norm", "le", "linear", "log", "log_softmax", "logsumexp", "low_rank", "lt", "masked_fill", "matmul", "max",
    "maximum", "mean", "min", "minimum", "mul", "ne", "neg", "permute", "pow", "project", "relu", "reshape",
    "rms_norm", "rope", "rotary_attention", "rsqrt", "sigmoid", "silu", "sin", "softmax", "split", "sqrt", "squeeze",
    "stack", "sub", "sum", "swiglu", "tanh", "to_device", "transpose", "unsqueeze", "var", "where",
]  # fmt: skip
