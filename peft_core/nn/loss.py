"""Losses as modules."""

from __future__ import annotations

from typing import Any

from ..tensor import Tensor
from . import functional
from .module import Module


class CrossEntropyLoss(Module):
    """The negative log-likelihood of class ids under softmax(logits); see functional.cross_entropy."""

    def __init__(
        self, weight: Any = None, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
    ) -> None:
        functional.expect_plain_classes(weight, label_smoothing)
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, logits: Tensor, targets: Any) -> Tensor:
        """logits (N, C, ...), targets (N, ...) -> a scalar, or (N, ...) for reduction "none"."""
        return functional.cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction=self.reduction)


class NLLLoss(Module):
    """The negative log-likelihood of class ids under log-probabilities; see functional.nll_loss."""

    def __init__(self, weight: Any = None, ignore_index: int = -100, reduction: str = "mean") -> None:
        functional.expect_plain_classes(weight, 0.0)
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, log_p: Tensor, targets: Any) -> Tensor:
        """log_p (N, C, ...), targets (N, ...) -> a scalar, or (N, ...) for reduction "none"."""
        return functional.nll_loss(log_p, targets, ignore_index=self.ignore_index, reduction=self.reduction)


class MSELoss(Module):
    """The mean, sum or array of squared differences."""

    def __init__(self, reduction: str = "mean") -> None:
        self.reduction = reduction

    def forward(self, x: Tensor, y: Any) -> Tensor:
        """x and y of one shape -> a scalar, or that shape for reduction "none"."""
        return functional.mse_loss(x, y, self.reduction)
