"""Llama, and Mistral, which is Llama with a sliding window (arXiv:2302.13971, arXiv:2310.06825)."""

from __future__ import annotations

from .base import Family

# Keys of related models that change what is computed. Their neutral values may stand in a config.
_REFUSED: dict[str, tuple] = {
    "quantization_config": (None, {}),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "use_qk_norm": (None, False),
    "clip_qkv": (None,),
    "layer_types": (None, []),
}
_DEFAULTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "head_dim": None,
    "num_key_value_heads": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")

LLAMA = Family("llama", "LlamaForCausalLM", _DEFAULTS, ("sliding_window",), _REFUSED, _BUFFERS)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    {**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    ("attention_bias", "mlp_bias"),
    _REFUSED,
    _BUFFERS,
)
