"""Small modules for the tests of adapters: a decoder's names without a decoder, any dtype, an optional tied head."""

import numpy as np

from peft_core import ops
from peft_core.nn import Embedding, Linear, Module, Parameter
from peft_core.random import Generator

D, F, V = 16, 24, 20  # model width, feed-forward width, vocabulary


class Attention(Module):
    def __init__(self, dtype, g):
        self.q_proj = Linear(D, D, bias=True, dtype=dtype, generator=g)
        self.k_proj = Linear(D, D // 2, bias=False, dtype=dtype, generator=g)

    def forward(self, x):
        return ops.concatenate([self.q_proj(x), self.k_proj(x)], axis=-1)


class Block(Module):
    def __init__(self, dtype, g):
        self.self_attn = Attention(dtype, g)
        self.down_proj = Linear(D + D // 2, D, bias=False, dtype=dtype, generator=g)

    def forward(self, x):
        return ops.add(x, self.down_proj(self.self_attn(x)))


class Inner(Module):
    def __init__(self, dtype, g):
        self.embed_tokens = Embedding(V, D, dtype=dtype, generator=g)
        self.layers = [Block(dtype, g) for _ in range(2)]

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x)
        return x


class TinyModel(Module):
    """model.embed_tokens, model.layers.{0,1}.{self_attn.{q,k}_proj, down_proj}, lm_head."""

    def __init__(self, dtype="float32", tied=False, seed=0):
        g = Generator(seed)
        self.model = Inner(dtype, g)
        self.lm_head = Linear(D, V, bias=False, dtype=dtype, generator=g)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids):
        return self.lm_head(self.model(ids))


IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6])


def logits(model, ids=IDS):
    """The logits as a float32 array."""
    from peft_core import no_grad

    with no_grad():
        return np.asarray(model(ids).data.astype(np.float32))


def randomize(model, seed=1, scale=0.3):
    """Random numbers in every adapter, A and B: with B = 0 nothing that goes wrong would show."""
    from adapters import adapter_layers

    g = Generator(seed)
    for layer in adapter_layers(model).values():
        for name in layer.adapters:
            for p in layer.own_parameters(name):
                assert isinstance(p, Parameter)
                p.data = g.normal(p.shape, 0.0, scale)
    return model


def snapshot(model):
    """A copy of every parameter by path."""
    return {name: np.array(p.data, copy=True) for name, p in model.named_parameters()}
