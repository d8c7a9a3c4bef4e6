"""Self-attention with grouped heads and, where the family has them, rotary positions, over a flat stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft_core import ops
from peft_core.backend import Array
from peft_core.nn import Module, project
from peft_core.tensor import Tensor
from transformer.cache import KVCache
from transformer.config import ModelConfig
from transformer.layers import shaped_linear


@dataclass(frozen=True)
class Place:
    """Where the tokens of a stream stand: what attention and positions need to know, the same for all layers.

    cu_seqlens (B+1,).  Rotary positions: cos, sin (N, K/2) float32; learned ones: positions (N,).  With a cache also
    the slots (N,) of the tokens and the keys' lengths.
    """

    cu_seqlens: Any
    cos: Array | None = None
    sin: Array | None = None
    positions: Array | None = None
    cache: KVCache | None = None
    slots: Any = None
    k_lengths: Any = None


class Attention(Module):
    """x + out(softmax(scale q k^T) v), [q, k, v] = qkv(norm(x)), q and k rotated.   x (N, D) -> (N, D).

    Grouped heads: Ainslie et al., arXiv:2305.13245, section 2.2; sliding window: Jiang et al., arXiv:2310.06825.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        width, wide = config.hidden_size, config.num_attention_heads * config.head_dim
        narrow, bias = config.num_key_value_heads * config.head_dim, config.attention_bias
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.sliding_window
        self.scale, self.stack = config.attention_scale(layer), config.family.stack
        self.n_heads, self.n_groups = config.num_attention_heads, config.num_key_value_heads
        sizes = (wide, narrow, narrow) if len(self.stack.qkv) == 3 else (wide + 2 * narrow,)
        for name, size in zip(self.stack.qkv, sizes, strict=True):
            setattr(self, name, shaped_linear(width, size, bias, self.stack.conv1d))
        setattr(self, self.stack.attention_out, shaped_linear(wide, width, bias, self.stack.conv1d))

    def forward(self, x: Tensor, norm: Module, place: Place) -> Tensor:
        """x (N, D), the residual stream -> x + attention(norm(x))."""
        n = x.shape[0]
        qkv = project(x, *(getattr(self, name) for name in self.stack.qkv), norm=norm)  # (N, (H + 2 G) K)
        rotary = place.cos is not None
        if place.cache is None and rotary:
            o = ops.rotary_attention(qkv, cos=place.cos, sin=place.sin, cu_seqlens=place.cu_seqlens,
                                     n_heads=self.n_heads, n_kv_heads=self.n_groups, head_dim=self.head_dim,
                                     scale=self.scale, window=self.window)  # (N, H K)  # fmt: skip
        else:
            heads = ops.reshape(qkv, shape=(n, -1, self.head_dim))  # (N, H + 2 G, K)
            q, k, v = heads[:, : self.n_heads], heads[:, self.n_heads : -self.n_groups], heads[:, -self.n_groups :]
            if rotary:
                q, k = ops.rope(q, place.cos, place.sin), ops.rope(k, place.cos, place.sin)
            o = self._attend(q, k, v, place)  # (N, H, K)
            o = ops.reshape(o, shape=(n, -1))
        return project(o, getattr(self, self.stack.attention_out), residual=x)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place) -> Tensor:
        if place.cache is None:
            return ops.attention(q, k, v, cu_q=place.cu_seqlens, scale=self.scale, window=self.window)
        keys, values = place.cache.put(self.layer, place.slots, k, v)  # (S, G, K)
        return ops.attention(q, keys, values, cu_q=place.cu_seqlens, cu_k=place.cache.starts,
                             k_lengths=place.k_lengths, scale=self.scale, window=self.window)  # fmt: skip
