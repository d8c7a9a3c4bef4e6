"""GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019).

Against Llama: learned positions, LayerNorm, biases everywhere, one linear for queries, keys and values, an MLP without
a gate, weights stored (in, out), and a head that is the embedding.  Real files come without the ``transformer.``
prefix, and with each layer's causal mask as a buffer.
"""

from __future__ import annotations

from .base import Family, Stack

_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
_DEFAULTS = {
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "pad_token_id": None,
    # keys of the stack that GPT-2 has no choice in
    "attention_bias": True,
    "mlp_bias": True,
    "num_key_value_heads": None,
    "head_dim": None,
    "sliding_window": None,
}
_REFUSED: dict[str, tuple] = {
    "quantization_config": (None, {}),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "reorder_and_upcast_attn": (None, False, True),  # scores are float32 here anyway: either way the same numbers
}

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _DEFAULTS,
    ignored=("attention_bias", "mlp_bias", "num_key_value_heads", "head_dim", "sliding_window"),
    refused=_REFUSED,
    extra_buffers=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
    keys=_KEYS,
    activations=("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu"),
    dropouts=("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    inner_ratio=4,
    stack=Stack(
        decoder="transformer",
        table="wte",
        positions="wpe",
        layers="h",
        norm="ln_f",
        attention_norm="ln_1",
        attention="attn",
        qkv=("c_attn",),
        attention_out="c_proj",
        mlp_norm="ln_2",
        mlp="mlp",
        mlp_in=("c_fc",),
        mlp_out="c_proj",
        layer_norm=True,
        conv1d=True,
    ),
)
