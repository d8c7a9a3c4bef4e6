"""Differentiable functions of Tensors. Arrays and numbers are accepted in their place."""

from .activation import gelu, log_softmax, logsumexp, relu, sigmoid, silu, softmax, swiglu, tanh
from .attention import attention
from .conv import conv2d, max_pool2d
from .dropout import dropout
from .einsum import einsum
from .elementwise import (
    abs,
    add,
    astype,
    clip,
    clone,
    cos,
    div,
    eq,
    exp,
    ge,
    gt,
    le,
    log,
    log1p,
    lt,
    masked_fill,
    maximum,
    minimum,
    mul,
    ne,
    neg,
    pow,
    power,
    rsqrt,
    sin,
    sqrt,
    sub,
    to_device,
    where,
)
from .embedding import embedding
from .linear import linear, low_rank, matmul
from .logic import (
    all,
    any,
    argmax,
    argmin,
    argsort,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    ceil,
    floor,
    floor_divide,
    isfinite,
    isinf,
    isnan,
    nonzero,
    remainder,
    round,
    sign,
)
from .loss import cross_entropy, head_loss
from .norm import layer_norm, rms_norm
from .projection import project
from .reduce import max, mean, min, sum, var
from .rope import rope
from .rotary import rotary_attention
from .select import cumsum, gather, repeat, tril, triu
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
    "abs", "add", "all", "any", "argmax", "argmin", "argsort", "astype", "attention", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "ceil", "clip", "clone", "concatenate", "contiguous", "conv2d", "cos", "cross_entropy",
    "cumsum", "div", "dropout", "einsum", "embedding", "eq", "exp", "expand", "flatten", "floor", "floor_divide",
    "gather", "ge", "gelu", "getitem", "gt", "head_loss", "isfinite", "isinf", "isnan", "layer_norm", "le", "linear",
    "log", "log1p", "log_softmax", "logsumexp", "low_rank", "lt", "masked_fill", "matmul", "max", "max_pool2d",
    "maximum", "mean", "min", "minimum", "mul", "ne", "neg", "nonzero", "permute", "pow", "power", "project", "relu",
    "remainder", "repeat", "reshape", "rms_norm", "rope", "rotary_attention", "round", "rsqrt", "sigmoid", "sign",
    "silu", "sin", "softmax", "split", "sqrt", "squeeze", "stack", "sub", "sum", "swiglu", "tanh", "to_device",
    "transpose", "tril", "triu", "unsqueeze", "var", "where",
]  # fmt: skip
