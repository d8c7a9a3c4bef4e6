"""The ops under the names and signatures of ``torch.nn.functional``: a face over peft_core.ops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import creation, ops, random
from ..amp import compute_dtype
from ..dtypes import accumulate_dtype, finfo
from ..functions import log_softmax, relu, sigmoid, softmax, tanh
from ..ops import linear, swiglu
from ..tensor import Tensor
from ..unsupported import unsupported

__all__ = [
    "conv2d", "cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "linear", "log_softmax", "max_pool2d",
    "mse_loss", "one_hot", "relu", "rms_norm", "scaled_dot_product_attention", "sigmoid", "silu", "softmax", "swiglu",
    "tanh",
]  # fmt: skip


def silu(x: Any, inplace: bool = False) -> Tensor:
    """x / (1 + e^-x); ``inplace`` changes nothing."""
    return ops.silu(x)


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x Phi(x), or its approximation by a hyperbolic tangent for "tanh"."""
    return ops.gelu(x, approximate=approximate)


def embedding(ids: Any, weight: Tensor) -> Tensor:
    """Rows ``ids`` of ``weight``."""
    return ops.embedding(ids, weight)


def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zero with probability ``p`` and divide the rest by 1 - p, with the next key of the default generator."""
    return ops.dropout(x, p=p, key=random.default_generator.key()) if training and p > 0 else x


def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

    Raises UnsupportedError for a ``normalized_shape`` of several dimensions, ValueError for one that does not fit x.
    """
    width = _last(x, normalized_shape, "layer_norm")
    return ops.layer_norm(x, creation.ones(width, dtype=x.dtype, device=x.device) if weight is None else weight, bias,
                          eps=eps)  # fmt: skip


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; ``eps``: by default that of x's dtype.

    Raises UnsupportedError for a ``normalized_shape`` of several dimensions, ValueError for one that does not fit x.
    """
    width = _last(x, normalized_shape, "rms_norm")
    weight = creation.ones(width, dtype=x.dtype, device=x.device) if weight is None else weight
    return ops.rms_norm(x, weight, eps=finfo(x.dtype).eps if eps is None else eps)


def _last(x: Any, normalized_shape: Any, name: str) -> int:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) != 1:
        unsupported(f"{name} over {len(shape)} dimensions", "expected the last one; flatten those before")
    if x.shape[-1:] != shape:
        raise ValueError(
            f"{name} of x {x.shape} with normalized_shape {shape}; expected the size of x's last dimension."
        )
    return shape[0]


def expect_plain_classes(weight: Any, label_smoothing: float) -> None:
    """Raise UnsupportedError for weighted classes and smoothed labels."""
    if weight is not None or label_smoothing:
        unsupported("cross_entropy with weight or label_smoothing", "expected neither; use log_softmax and a product")


def cross_entropy(
    logits: Any,
    targets: Any,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log softmax(logits)[target] over dimension 1: the mean over targets other than ``ignore_index``, sum, or all.

    logits (N, C, ...), targets (N, ...) integers; or (C,) and a scalar.  dtype of the loss: that of the logits, but
    at least float32 under autocast.
    Raises UnsupportedError for class probabilities, weights and smoothing.
    """
    expect_plain_classes(weight, label_smoothing)
    if targets.dtype.kind not in "iu":
        unsupported(f"cross_entropy with targets of dtype {targets.dtype}", "expected class ids, as integers")
    if logits.ndim > 2:
        logits = ops.permute(logits, axes=(0, *range(2, logits.ndim), 1))  # (N, ..., C)
    loss = ops.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)
    return loss if compute_dtype() is not None else loss.to(logits.dtype)


def mse_loss(x: Any, y: Any, reduction: str = "mean") -> Tensor:
    """(x - y)^2: its mean, its sum, or as it is for "none"; at least float32 under autocast.

    Raises ValueError for shapes that differ or another name.
    """
    if x.shape != y.shape or reduction not in ("mean", "sum", "none"):
        raise ValueError(f"mse_loss of {x.shape} and {y.shape} with reduction={reduction!r}; expected one shape and "
                         "'mean', 'sum' or 'none'.")  # fmt: skip
    difference = _at_least_float32(ops.sub(x, y))
    squares = ops.mul(difference, difference)
    return squares if reduction == "none" else getattr(ops, reduction)(squares)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(accumulate_dtype(x.dtype)) if compute_dtype() is not None else x


def one_hot(ids: Any, num_classes: int = -1) -> Tensor:
    """1 at the place of the id, 0 elsewhere, int64, in a new last dimension of ``num_classes`` (-1: largest + 1)."""
    n = int(ops.max(ids).item()) + 1 if num_classes == -1 else num_classes
    classes = creation.arange(n, device=ids.device)
    return ops.astype(ops.eq(ops.unsqueeze(ids, -1), classes), dtype="int64")


def conv2d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Cross-correlation of x (N, C, Y, X) with weight (O, C / groups, i, j)."""
    return ops.conv2d(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


def max_pool2d(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1) -> Tensor:
    """The largest element of each window of x (N, C, Y, X)."""
    return ops.max_pool2d(x, kernel=kernel_size, stride=stride, padding=padding, dilation=dilation)


def scaled_dot_product_attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T scale + mask) v.   q (..., T, K), k (..., S, K), v (..., S, K) -> (..., T, K).

    ``scale``: 1/sqrt(K) by default.  ``attn_mask``: bool, True where a key is seen, or numbers that are added.  The
    whole (..., T, S) matrix is held: the transformer's own attention is ops.attention.
    """
    scores = ops.mul(ops.matmul(q, ops.transpose(k)), 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = creation.ones(q.shape[-2], k.shape[-2], dtype="bool", device=scores.device).tril()  # (T, S)
        scores = scores.masked_fill(ops.bitwise_not(seen), -np.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype.kind == "b"
        scores = scores.masked_fill(ops.bitwise_not(attn_mask), -np.inf) if boolean else ops.add(scores, attn_mask)
    return ops.matmul(dropout(ops.softmax(scores), dropout_p, dropout_p > 0), v)


if not TYPE_CHECKING:

    def __getattr__(name):
        from ..unsupported import missing

        raise missing("peft_core.nn.functional", name, __all__)
