"""KVCache: keys and values of the tokens that a row has already seen, in slots reserved from the start."""

from __future__ import annotations

from typing import Any

import numpy as np

from peft_core.backend import Array, xp_of
from peft_core.errors import GraphError, expect
from peft_core.tape import is_grad_enabled
from peft_core.tensor import Tensor
from transformer.config import ModelConfig


class KVCache:
    """Room for ``n_rows`` rows of ``max_length`` tokens in every layer.

    Each layer's keys and values are flat arrays (B * max_length, G, K); row b fills its slots from b * max_length.
    ``lengths`` (B,): tokens in each row so far.  The arrays are made on first use, where the keys live, in ``dtype``
    (default: that of the keys, the compute dtype).
    """

    def __init__(self, config: ModelConfig, n_rows: int, max_length: int, dtype: Any = None) -> None:
        self.n_rows, self.max_length, self.dtype = n_rows, max_length, dtype
        self.lengths = np.zeros(n_rows, np.int64)
        self.starts = np.arange(n_rows + 1, dtype=np.int64) * max_length  # (B+1,)
        self._keys: list[Array] = [None] * config.num_hidden_layers
        self._values: list[Array] = [None] * config.num_hidden_layers

    def reserve(self, cu_seqlens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lengthen each row by its part of the stream: the slots (N,) of the new tokens, and key lengths (B,).

        A row without new tokens gets length 0: nobody asks for its keys.  Raises ValueError where a row does not fit.
        """
        expect(not is_grad_enabled(), GraphError, "a KVCache is used while gradients are recorded",
               expected="no_grad()", fix="Wrap the call in `with no_grad():`.")  # fmt: skip
        new = np.diff(cu_seqlens)  # (B,)
        if len(new) != self.n_rows or (self.lengths + new > self.max_length).any():
            raise ValueError(
                f"KVCache of {self.n_rows} rows x {self.max_length} tokens, filled to {self.lengths.tolist()}, got "
                f"{new.tolist()} more; expected as many rows and room for all."
            )
        first = self.starts[:-1] + self.lengths - cu_seqlens[:-1]  # (B,)
        slots = np.arange(cu_seqlens[-1]) + np.repeat(first, new)  # (N,)
        self.lengths = self.lengths + new
        return slots, np.where(new > 0, self.lengths, 0)

    def put(self, layer: int, slots: Array, k: Tensor, v: Tensor) -> tuple[Array, Array]:
        """Store k and v (N, G, K) of one layer; returns all its keys and values (B * max_length, G, K)."""
        room = self.room(layer, k.data, k.shape[1:])
        for store, new in zip(room, (k.data, v.data), strict=True):
            store[slots] = new
        return room

    def room(self, layer: int, like: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """The keys and values of one layer, (B * max_length, G, K) for ``shape`` (G, K), made on first use."""
        if self._keys[layer] is None:
            for store in (self._keys, self._values):
                size = (self.n_rows * self.max_length, *shape)
                store[layer] = xp_of(like).zeros(size, self.dtype or like.dtype)
        return self._keys[layer], self._values[layer]
