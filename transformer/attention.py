"""Self-attention with grouped heads and rotary positions, over a flat stream of tokens."""

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
    """Where the tokens of a stream stand: what attention and RoPE need to know, the same for all layers.

    cos, sin (N, K/2) float32; cu_seqlens (B+1,).  With a cache also the slots (N,) of the tokens and the keys' lengths.
    """

    cos: Array
    sin: Array
    cu_seqlens: Any
    cache: KVCache | None = None
    slots: Any = None
    k_lengths: Any = None


class Attention(Module):
    """x + o_proj(softmax(q k^T / sqrt(K)) v), h = norm(x), q and k rotated.   x (N, D) -> (N, D).

    Grouped heads: Ainslie et al., arXiv:2305.13245, section 2.2; sliding window: Jiang et al., arXiv:2310.06825.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        width, wide = config.hidden_size, config.num_attention_heads * config.head_dim
        narrow, bias = config.num_key_value_heads * config.head_dim, config.attention_bias
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.sliding_window
        self.n_heads, self.n_groups = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = shaped_linear(width, wide, bias)
        self.k_proj = shaped_linear(width, narrow, bias)
        self.v_proj = shaped_linear(width, narrow, bias)
        self.o_proj = shaped_linear(wide, width, bias)

    def forward(self, x: Tensor, norm: Module, place: Place) -> Tensor:
        """x (N, D), the residual stream -> x + attention(norm(x))."""
        n = x.shape[0]
        qkv = project(x, self.q_proj, self.k_proj, self.v_proj, norm=norm)  # (N, (H + 2 G) K)
        heads = ops.reshape(qkv, shape=(n, -1, self.head_dim))  # (N, H + 2 G, K)
        q, k, v = heads[:, : self.n_heads], heads[:, self.n_heads : -self.n_groups], heads[:, -self.n_groups :]
        q, k = ops.rope(q, place.cos, place.sin), ops.rope(k, place.cos, place.sin)
        if place.cache is None:
            o = ops.attention(q, k, v, cu_q=place.cu_seqlens, window=self.window)  # (N, H, K)
        else:
            keys, values = place.cache.put(self.layer, place.slots, k, v)  # (S, G, K)
            o = ops.attention(q, keys, values, cu_q=place.cu_seqlens, cu_k=place.cache.starts,
                              k_lengths=place.k_lengths, window=self.window)  # fmt: skip
        return project(ops.reshape(o, shape=(n, -1)), self.o_proj, residual=x)
