"""torch.nn.functional's names, against float64 formulas; losses as functions and as modules."""

import math
from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, UnsupportedError, autocast, manual_seed, nn, ones, tensor

F = nn.functional
RNG = np.random.default_rng(0)
X, LOGITS = RNG.standard_normal((3, 4)), RNG.standard_normal((5, 4))
TARGETS = np.array([0, 3, -100, 1, 1])
LOG_P = LOGITS - np.log(np.exp(LOGITS).sum(1, keepdims=True))
LOSSES = np.where(TARGETS < 0, 0, -LOG_P[np.arange(5), TARGETS % 4])


def close(t: Tensor, wanted: Any) -> None:
    np.testing.assert_allclose(t.detach().numpy(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("loss", "given"), [("cross_entropy", LOGITS), ("nll_loss", LOG_P)])
def test_likelihoods(loss: str, given: np.ndarray) -> None:
    function, module = getattr(F, loss), {"cross_entropy": nn.CrossEntropyLoss, "nll_loss": nn.NLLLoss}[loss]
    x, y = Tensor(given), Tensor(TARGETS)
    for reduction, wanted in [("mean", LOSSES.sum() / 4), ("sum", LOSSES.sum()), ("none", LOSSES)]:
        close(function(x, y, reduction=reduction), wanted)
        close(module(reduction=reduction)(x, y), wanted)
    close(function(input=x, target=y), LOSSES.sum() / 4)
    close(function(x[:2], y[:2], ignore_index=3), LOSSES[0])
    images = Tensor(np.stack([given.T, given.T]))  # (2, C, 5)
    close(function(images, Tensor(np.stack([TARGETS, TARGETS])), reduction="none"), np.stack([LOSSES, LOSSES]))
    x = Tensor(given, True)
    function(x, y).backward()
    p = np.exp(LOG_P) if loss == "cross_entropy" else 0
    assert x.grad is not None
    close(x.grad, (p - np.eye(4)[TARGETS % 4]) * (TARGETS >= 0)[:, None] / 4)


def test_the_dtype_of_a_loss() -> None:
    x, y = Tensor(LOGITS.astype(np.float16)), Tensor(TARGETS)
    for loss in (F.cross_entropy, F.nll_loss):
        assert str(loss(Tensor(LOGITS.astype(np.float32)), y).dtype) == "float32"
    assert str(F.cross_entropy(x, y).dtype) == str(F.nll_loss(x, y).dtype) == str(F.mse_loss(x, x).dtype) == "float16"
    with autocast("float16"):
        assert (
            str(F.cross_entropy(x, y).dtype) == str(F.nll_loss(x, y).dtype) == str(F.mse_loss(x, x).dtype) == "float32"
        )


def test_mse_loss() -> None:
    a, b = Tensor(X), Tensor(X[::-1].copy())
    squares = (X - X[::-1]) ** 2
    for reduction, wanted in [("mean", squares.mean()), ("sum", squares.sum()), ("none", squares)]:
        close(F.mse_loss(a, b, reduction=reduction), wanted)
        close(nn.MSELoss(reduction)(a, b), wanted)


def test_norms_and_one_hot() -> None:
    w, b = RNG.standard_normal((2, 4))
    mean, var = X.mean(-1, keepdims=True), X.var(-1, keepdims=True)
    close(F.layer_norm(Tensor(X), (4,)), (X - mean) / np.sqrt(var + 1e-5))
    close(F.layer_norm(Tensor(X), 4, Tensor(w), Tensor(b), eps=1e-3), (X - mean) / np.sqrt(var + 1e-3) * w + b)
    close(F.rms_norm(Tensor(X), [4], Tensor(w), eps=1e-2), X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-2) * w)
    close(F.rms_norm(Tensor(X), 4), X / np.sqrt((X**2).mean(-1, keepdims=True) + np.finfo(np.float64).eps))
    ids = tensor([[0, 2], [1, 1]])
    assert F.one_hot(ids).tolist() == np.eye(3, dtype=int)[ids.numpy()].tolist()
    assert F.one_hot(ids, num_classes=5).shape == (2, 2, 5) and F.one_hot(ids).dtype == np.int64
    close(F.embedding(ids, Tensor(X)), X[ids.numpy()])
    close(F.relu(input=Tensor(X), inplace=True), np.maximum(X, 0))


def test_dropout() -> None:
    x = ones(200, 50)
    manual_seed(0)
    y = F.dropout(x, p=0.25)
    assert set(np.unique(y.numpy())) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(float((y == 0).float().mean()) - 0.25) < 5 * math.sqrt(0.19 / 10_000)
    assert F.dropout(x, 0.25, training=False) is x and F.dropout(x, p=0.0) is x
    manual_seed(0)
    assert F.dropout(x, 0.25).tolist() == y.tolist() != F.dropout(x, 0.25).tolist()


def test_attention() -> None:
    q, k, v = RNG.standard_normal((3, 2, 5, 4))
    causal, bias = np.tri(5, dtype=bool), RNG.standard_normal((5, 5))

    def wanted(mask: Any = None, added: Any = 0.0, scale: float = 0.5) -> np.ndarray:
        scores = np.exp((q @ k.swapaxes(1, 2)) * scale + added) * (1 if mask is None else mask)
        return scores / scores.sum(-1, keepdims=True) @ v

    given = [Tensor(a) for a in (q, k, v)]
    close(F.scaled_dot_product_attention(*given), wanted())
    close(F.scaled_dot_product_attention(*given, is_causal=True), wanted(causal))
    close(F.scaled_dot_product_attention(*given, attn_mask=Tensor(causal)), wanted(causal))
    close(F.scaled_dot_product_attention(*given, attn_mask=Tensor(bias), scale=0.1), wanted(None, bias, 0.1))
    close(F.scaled_dot_product_attention(query=given[0], key=given[1], value=given[2]), wanted())


LABELS = Tensor(TARGETS)


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (lambda x: F.cross_entropy(x, LABELS, weight=ones(4)), UnsupportedError, "weight or label_smoothing is not"),
        (lambda x: nn.CrossEntropyLoss(label_smoothing=0.1), UnsupportedError, "label_smoothing is not supported"),
        (lambda x: F.cross_entropy(x, x), UnsupportedError, "with targets of dtype float64 is not"),
        (lambda x: F.nll_loss(x, x), UnsupportedError, "nll_loss with targets of dtype float64 is not supported"),
        (lambda x: F.nll_loss(x, LABELS, reduction="all"), ValueError, "nll_loss with reduction='all'"),
        (lambda x: F.mse_loss(x, x[:2]), ValueError, r"mse_loss of \(5, 4\) and \(2, 4\); expected one shape"),
        (lambda x: F.mse_loss(x, x, reduction="all"), ValueError, "mse_loss with reduction='all'"),
        (lambda x: F.layer_norm(x, (5, 4)), UnsupportedError, "layer_norm over 2 dimensions is not supported"),
        (lambda x: F.layer_norm(x, 5), ValueError, r"of x \(5, 4\) with normalized_shape \(5,\)"),
        (lambda x: nn.LayerNorm((5, 4)), UnsupportedError, "a norm over 2 dimensions is not supported"),
        (lambda x: nn.LayerNorm(4, elementwise_affine=False), UnsupportedError, "LayerNorm.elementwise_affine=False"),
        (lambda x: nn.RMSNorm(4, elementwise_affine=False), UnsupportedError, "RMSNorm"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, enable_gqa=True), UnsupportedError, "enable_gqa=True"),
        (lambda x: nn.Embedding(3, 2, padding_idx=3), ValueError, "of 3 rows with padding_idx=3; expected"),
    ],
)  # fmt: skip
def test_refusals(use: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        use(Tensor(LOGITS))
