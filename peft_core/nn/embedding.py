"""Embedding: rows of a table."""

from __future__ import annotations

from typing import Any

from .. import creation, ops
from ..random import Generator
from ..tensor import Tensor
from . import init
from .module import Module, Parameter


class Embedding(Module):
    """y[n] = weight[ids[n]].   ids (...) integers, weight (V, D) -> (..., D).  The table starts from N(0, 1)."""

    weight: Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: Any = "float32",
        generator: Generator | None = None,
        device: Any = None,
    ) -> None:
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = Parameter(creation.empty(num_embeddings, embedding_dim, dtype=dtype, device=device))  # (V, D)
        init.normal_(self.weight, generator=generator)

    def forward(self, ids: Any) -> Tensor:
        """ids (...) -> (..., D)."""
        return ops.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
