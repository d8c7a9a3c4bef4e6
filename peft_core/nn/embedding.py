"""Embedding: rows of a table."""

from __future__ import annotations

from typing import Any

from .. import creation, ops
from ..random import Generator
from ..tensor import Tensor
from . import init
from .module import Module, Parameter


class Embedding(Module):
    """y[n] = weight[ids[n]].   ids (...) integers, weight (V, D) -> (..., D).  The table starts from N(0, 1).

    Row ``padding_idx`` starts at zero and gets no gradient.  Raises ValueError for one outside the table.
    """

    weight: Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: Any = "float32",
        generator: Generator | None = None,
        device: Any = None,
    ) -> None:
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = Parameter(creation.empty(num_embeddings, embedding_dim, dtype=dtype, device=device))  # (V, D)
        init.normal_(self.weight, generator=generator)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"Embedding of {num_embeddings} rows with padding_idx={padding_idx}; expected one of them."
            )
        self.padding_idx = padding_idx
        if padding_idx is not None:
            self.weight.data[padding_idx] = 0

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None) -> Embedding:
        """The table ``embeddings`` (V, D), which is shared, and frozen unless told otherwise."""
        layer = cls(0, embeddings.shape[1])
        layer.num_embeddings, layer.padding_idx = embeddings.shape[0], padding_idx
        layer.weight = Parameter(embeddings, requires_grad=not freeze)
        return layer

    def forward(self, ids: Any) -> Tensor:
        """ids (...) -> (..., D)."""
        return ops.embedding(ids, self.weight, padding=self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
