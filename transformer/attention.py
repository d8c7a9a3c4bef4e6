"""Self-attention with grouped heads and, where the family has them, rotary positions, over a flat stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft_core import ops
from peft_core.backend import Array
from peft_core.nn import Module, project
from peft_core.ops.decode import attend_next
from peft_core.tensor import Tensor
from transformer.cache import KVCache
from transformer.config import ModelConfig
from transformer.layers import shaped_linear


@dataclass(frozen=True)
class Place:
    """Where the tokens of a stream stand: what attention and positions need to know, the same for all layers.

    cu_seqlens (B+1,).  Rotary positions: cos, sin (N, K/2) float32; learned ones: positions (N,).  With a cache also
    the slots (N,) of the tokens and the keys' lengths, and, where no row has more than one token, how many keys each
    token sees.
    """

    cu_seqlens: Any
    cos: Array | None = None
    sin: Array | None = None
    positions: Array | None = None
    cache: KVCache | None = None
    slots: Any = None
    k_lengths: Any = None
    seen: Any = None


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
        qkv = project(x, *(getattr(self, name) for name in self.stack.qkv), norm=norm)  # (N, (H + 2 G) K)
        if place.cache is None:
            o = ops.rotary_attention(qkv, cos=place.cos, sin=place.sin, cu_seqlens=place.cu_seqlens,
                                     n_heads=self.n_heads, n_kv_heads=self.n_groups, head_dim=self.head_dim,
                                     scale=self.scale, window=self.window)  # (N, H K)  # fmt: skip
        else:
            o = self._attend_to_cache(qkv, place, place.cache)
        return project(o, getattr(self, self.stack.attention_out), residual=x)

    def _attend_to_cache(self, qkv: Tensor, place: Place, cache: KVCache) -> Tensor:
        n = qkv.shape[0]
        if place.seen is not None:
            keys, values = cache.room(self.layer, qkv.data, (self.n_groups, self.head_dim))
            o = attend_next(qkv.data, keys, values, cos=place.cos, sin=place.sin, slots=place.slots, seen=place.seen,
                            n_heads=self.n_heads, scale=self.scale, window=self.window)  # (N, H K)  # fmt: skip
            if o is not None:
                return Tensor(o)
        heads = ops.reshape(qkv, shape=(n, -1, self.head_dim))  # (N, H + 2 G, K)
        q, k, v = heads[:, : self.n_heads], heads[:, self.n_heads : -self.n_groups], heads[:, -self.n_groups :]
        if place.cos is not None:
            q, k = ops.rope(q, place.cos, place.sin), ops.rope(k, place.cos, place.sin)
        keys, values = cache.put(self.layer, place.slots, k, v)  # (S, G, K)
        o = ops.attention(q, keys, values, cu_q=place.cu_seqlens, cu_k=cache.starts, k_lengths=place.k_lengths,
                          scale=self.scale, window=self.window)  # (N, H, K)  # fmt: skip
        return ops.reshape(o, shape=(n, -1))  # (N, H K)
