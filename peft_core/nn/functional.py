"""The ops under the names and signatures of ``torch.nn.functional``: a face over peft_core.ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import creation, ops, random
from ..amp import compute_dtype
from ..dtypes import accumulate_dtype, finfo
from ..functions import _spelled, sigmoid, tanh
from ..ops import linear, swiglu
from ..reductions import log_softmax, softmax
from ..tensor import Tensor
from ..unsupported import unsupported

__all__ = [
    "conv2d", "cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "linear", "log_softmax", "max_pool2d",
    "mse_loss", "nll_loss", "one_hot", "relu", "rms_norm", "scaled_dot_product_attention", "sigmoid", "silu",
    "softmax", "swiglu", "tanh",
]  # fmt: skip


@_spelled
def relu(x: Any, inplace: bool = False) -> Tensor:
    """max(x, 0); ``inplace`` changes nothing."""
    return ops.relu(x)


@_spelled
def silu(x: Any, inplace: bool = False) -> Tensor:
    """x / (1 + e^-x); ``inplace`` changes nothing."""
    return ops.silu(x)


@_spelled
def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x Phi(x), or its approximation by a hyperbolic tangent for "tanh"."""
    return ops.gelu(x, approximate=approximate)


@_spelled
def embedding(x: Any, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows ``x`` (integers) of ``weight``; row ``padding_idx`` gets no gradient."""
    return ops.embedding(x, weight, padding=padding_idx)


@_spelled
def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zero with probability ``p`` and divide the rest by 1 - p, with the next key of the default generator."""
    return ops.dropout(x, p=p, key=random.default_generator.key()) if training and p > 0 else x


@_spelled
def layer_norm(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

    Raises UnsupportedError for a ``normalized_shape`` of several dimensions, ValueError for one that does not fit x.
    """
    width = _last(x, normalized_shape, "layer_norm")
    return ops.layer_norm(x, creation.ones(width, dtype=x.dtype, device=x.device) if weight is None else weight, bias,
                          eps=eps)  # fmt: skip


@_spelled
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
    input: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log softmax(input)[target] over dimension 1: the mean over targets other than ``ignore_index``, sum, or all.

    input (N, C, ...), target (N, ...) integers; or (C,) and a scalar.  dtype of the loss: that of the input, but
    at least float32 under autocast.
    Raises UnsupportedError for class probabilities, weights and smoothing.
    """
    expect_plain_classes(weight, label_smoothing)
    logits = _classes_last("cross_entropy", input, target)
    loss = ops.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    return loss if compute_dtype() is not None else loss.to(logits.dtype)


def _classes_last(name: str, input: Any, target: Any) -> Any:
    if target.dtype.kind not in "iu":
        unsupported(f"{name} with targets of dtype {target.dtype}", "expected class ids, as integers")
    return ops.permute(input, axes=(0, *range(2, input.ndim), 1)) if input.ndim > 2 else input  # (N, ..., C)


def nll_loss(input: Any, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """-input[target] of log-probabilities over dimension 1, as cross_entropy takes logits.

    Raises UnsupportedError for weights, ValueError for another reduction.
    """
    expect_plain_classes(weight, 0.0)
    _expect_reduction("nll_loss", reduction)
    log_p = _at_least_float32(_classes_last("nll_loss", input, target))
    taken = ops.ne(target, ignore_index)
    ids = ops.where(taken, target, 0)
    losses = ops.neg(ops.squeeze(ops.gather(log_p, ops.unsqueeze(ids, -1), axis=-1), -1))
    losses = ops.masked_fill(losses, ops.bitwise_not(taken), value=0.0)
    if reduction == "none":
        return losses
    total = ops.sum(losses)
    return total if reduction == "sum" else ops.div(total, ops.astype(ops.sum(taken), dtype=total.dtype))


def _expect_reduction(name: str, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name} with reduction={reduction!r}; expected 'mean', 'sum' or 'none'.")


def mse_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """(input - target)^2: its mean, its sum, or as it is for "none"; at least float32 under autocast.

    Raises ValueError for shapes that differ or another name.
    """
    _expect_reduction("mse_loss", reduction)
    if input.shape != target.shape:
        raise ValueError(f"mse_loss of {input.shape} and {target.shape}; expected one shape.")
    difference = _at_least_float32(ops.sub(input, target))
    squares = ops.mul(difference, difference)
    return squares if reduction == "none" else getattr(ops, reduction)(squares)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(accumulate_dtype(x.dtype)) if compute_dtype() is not None else x


@_spelled
def one_hot(x: Any, num_classes: int = -1) -> Tensor:
    """1 at the place of the id, 0 elsewhere, int64, in a new last dimension of ``num_classes`` (-1: largest + 1)."""
    n = int(ops.max(x).item()) + 1 if num_classes == -1 else num_classes
    classes = creation.arange(n, device=x.device)
    return ops.astype(ops.eq(ops.unsqueeze(x, -1), classes), dtype="int64")


@_spelled
def conv2d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Cross-correlation of x (N, C, Y, X), or one image (C, Y, X), with weight (O, C / groups, i, j)."""
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _of_images(x, lambda images: ops.conv2d(images, weight, bias, **settings))


def _of_images(x: Any, function: Callable) -> Tensor:
    return ops.squeeze(function(ops.unsqueeze(x, 0)), 0) if x.ndim == 3 else function(x)


@_spelled
def max_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:  # fmt: skip
    """The largest element of each window of x (N, C, Y, X), or of one image (C, Y, X).

    Raises UnsupportedError for ceil_mode and return_indices.
    """
    if return_indices or ceil_mode:
        unsupported("max_pool2d with return_indices or ceil_mode", "expected neither")
    settings = {"kernel": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    return _of_images(x, lambda images: ops.max_pool2d(images, **settings))


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(q k^T scale + mask) v.   q (..., T, K), k (..., S, K), v (..., S, K) -> (..., T, K).

    ``scale``: 1/sqrt(K) by default.  ``attn_mask``: bool, True where a key is seen, or numbers that are added.  The
    whole (..., T, S) matrix is held: the transformer's own attention is ops.attention.
    Raises UnsupportedError for enable_gqa.
    """
    if enable_gqa:
        unsupported("scaled_dot_product_attention(enable_gqa=True)", "expected key.repeat_interleave(heads, dim=-3)")
    q, k, v = query, key, value
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
