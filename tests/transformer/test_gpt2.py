"""The gpt2 family without torch: config, files, numbers against a float64 formula, positions, generation."""

import json
import re
import warnings

import numpy as np
import pytest

from peft_core import no_grad
from peft_core.errors import DataError, ModelError
from peft_core.nn import Conv1D
from peft_core.safetensors_io import load_file, save_file
from support.gpt2_models import as_on_the_hub, gpt2_config, gpt2_tensors, write_gpt2
from support.tiny_models import ragged_rows
from transformer import from_pretrained, generate, save_pretrained
from transformer.batch import Batch
from transformer.config import ModelConfig


def _logits(model, rows):
    batch = Batch.from_rows([(row, row) for row in rows])
    with no_grad():
        return np.split(model.lm_head(model.hidden(batch)).data, batch.cu_seqlens[1:-1])


# ------------------------------------------------------------------------------------------------ config


def test_sizes_and_defaults():
    config = ModelConfig.from_dict(gpt2_config())
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 3, 4)
    assert (config.intermediate_size, config.head_dim, config.num_key_value_heads) == (128, 8, 4)
    assert config.max_position_embeddings == 64 and config.norm_eps == 1e-5 and config.hidden_act == "gelu_new"
    assert config.rope is None and config.rope_theta is None and config.sliding_window is None
    assert config.attention_bias and config.mlp_bias and config.tie_word_embeddings
    assert config.to_dict() == gpt2_config() == config.raw
    least = gpt2_config(activation_function=..., layer_norm_epsilon=..., n_inner=..., n_ctx=..., attn_pdrop=0)
    assert ModelConfig.from_dict(least).hidden_act == "gelu_new"
    assert ModelConfig.from_dict(gpt2_config(n_inner=40)).intermediate_size == 40


@pytest.mark.parametrize(("root", "by_layer", "expected"), [
    (True, False, [8**-0.5] * 3), (True, True, [8**-0.5 / (i + 1) for i in range(3)]),
    (False, False, [1.0] * 3), (False, True, [1, 1 / 2, 1 / 3]),
])  # fmt: skip
def test_scales(root, by_layer, expected):
    config = ModelConfig.from_dict(gpt2_config(scale_attn_weights=root, scale_attn_by_inverse_layer_idx=by_layer))
    assert [config.attention_scale(i) for i in range(3)] == pytest.approx(expected, rel=1e-12)


def test_llama_does_not_read_these_switches():
    from support.tiny_models import tiny_config

    config = ModelConfig.from_dict(tiny_config(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True))
    assert config.attention_scale(1) == pytest.approx(8**-0.5)


def test_the_common_names_are_read_too():
    raw = gpt2_config(n_embd=..., hidden_size=32, n_head=..., num_attention_heads=4)
    assert ModelConfig.from_dict(raw).hidden_size == 32
    with pytest.raises(ModelError, match="has n_embd and hidden_size, which differ; expected n_embd alone"):
        ModelConfig.from_dict(gpt2_config(hidden_size=48))


@pytest.mark.parametrize(("changes", "text"), [
    ({"n_embd": ...}, "config.json has no n_embd"),
    ({"n_positions": ...}, "config.json has no n_positions"),
    ({"n_layer": 0}, "n_layer is 0; expected a positive integer."),
    ({"n_inner": 2.5}, "n_inner is 2.5; expected a positive integer."),
    ({"n_embd": 30}, "n_embd 30 over 4 n_head; expected a multiple."),
    ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0; expected a positive number."),
    ({"activation_function": "tanh"}, "activation_function is 'tanh'; expected 'gelu_new' or 'gelu_pytorch_tanh' or"),
    ({"scale_attn_weights": 1}, "scale_attn_weights is 1; expected true or false."),
    ({"reorder_and_upcast_attn": "yes"}, "reorder_and_upcast_attn is 'yes'; expected no such option"),
    ({"add_cross_attention": True}, "add_cross_attention is True; expected no such option for model_type 'gpt2'."),
    ({"architectures": ["GPT2DoubleHeadsModel"]}, "expected ['GPT2LMHeadModel']. Only causal"),
])  # fmt: skip
def test_refused(changes, text):
    with pytest.raises(ModelError, match=re.escape(text)):
        ModelConfig.from_dict(gpt2_config(**changes))


def test_what_is_not_applied_is_said():
    with pytest.warns(UserWarning, match=r"attn_pdrop 0\.1, embd_pdrop 0\.2 are not applied; training runs without"):
        ModelConfig.from_dict(gpt2_config(attn_pdrop=..., embd_pdrop=0.2))
    with pytest.warns(UserWarning, match="n_ctx 32 is not used; n_positions 64 counts"):
        ModelConfig.from_dict(gpt2_config(n_ctx=32))


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_names_and_config_come_back(tmp_path, hub, dtype):
    base = write_gpt2(tmp_path / "base", dtype=dtype, hub=hub)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if hub else "error")
        model = from_pretrained(base)
    for name, parameter in model.named_parameters():
        assert not parameter.data.flags.writeable and not parameter.data.flags.owndata, name  # mapped, not copied
    block = model.transformer.h[0]
    assert type(block.attn.c_attn) is Conv1D and block.attn.c_attn.weight.shape == (32, 96)
    assert block.mlp.c_fc.weight.shape == (32, 128) and model.lm_head.weight is model.transformer.wte.weight
    save_pretrained(model, tmp_path / "saved")
    before, after = (load_file(d / "model.safetensors") for d in (base, tmp_path / "saved"))
    assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in before.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in after.items()}  # fmt: skip
    assert json.loads((tmp_path / "saved/config.json").read_text()) == json.loads((base / "config.json").read_text())


def test_the_prefix_makes_no_difference(tmp_path):
    full, bare = write_gpt2(tmp_path / "full"), write_gpt2(tmp_path / "bare", hub=True)
    with pytest.warns(UserWarning, match=r"6 buffers that follow from the config are not used \(h\.0\.attn\.bias\)"):
        model = from_pretrained(bare)
    rows = ragged_rows(vocab_size=64)
    for a, b in zip(_logits(model, rows), _logits(from_pretrained(full), rows), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("hub", [True, False])
def test_a_head_that_is_spelled_out(tmp_path, hub, same):
    directory = write_gpt2(tmp_path / "base")
    tensors = gpt2_tensors(gpt2_config())
    head = tensors["transformer.wte.weight"] * (1 if same else 2)
    tensors = (as_on_the_hub(tensors, 64) if hub else tensors) | {"lm_head.weight": head}
    save_file(tensors, directory / "model.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = from_pretrained(directory)
    assert any("ties lm_head.weight to " in str(w.message) for w in caught) is not same
    assert np.array_equal(model.lm_head.weight.data, head) and model.config.tie_word_embeddings is same
    save_pretrained(model, tmp_path / "saved")
    assert set(load_file(tmp_path / "saved/model.safetensors")) == set(tensors)
    assert json.loads((tmp_path / "saved/config.json").read_text()).get("tie_word_embeddings", True) is same


@pytest.mark.parametrize("hub", [True, False])
def test_what_does_not_fit_is_named_as_in_the_file(tmp_path, hub):
    directory = write_gpt2(tmp_path)
    tensors = gpt2_tensors(gpt2_config())
    del tensors["transformer.ln_f.bias"]
    tensors["transformer.h.0.mlp.c_fc.weight"] = np.ascontiguousarray(tensors["transformer.h.0.mlp.c_fc.weight"].T)
    save_file(as_on_the_hub(tensors, 64) if hub else tensors, directory / "model.safetensors")
    lead = "" if hub else "transformer."
    with pytest.raises(ModelError) as raised:
        from_pretrained(directory)
    assert "disagree in 2 places" in str(raised.value) and f"missing     {lead}ln_f.bias (32,)\n" in str(raised.value)
    assert f"does not fit  {lead}h.0.mlp.c_fc.weight: (128, 32) float32, expected (32, 128)" in str(raised.value)


# ------------------------------------------------------------------------------------------------ numbers


def _norm(x, w, name):
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return normal * w[f"{name}.weight"] + w[f"{name}.bias"]


def _formula(config, w, ids):
    """Logits (T, V) of one row in float64, one head after the other."""
    w = {name.removeprefix("transformer."): a.astype(np.float64) for name, a in w.items()}
    n, width, size = len(ids), config.hidden_size, config.head_dim
    x = w["wte.weight"][ids] + w["wpe.weight"][:n]
    for i in range(config.num_hidden_layers):
        at = f"h.{i}."
        qkv = _norm(x, w, at + "ln_1") @ w[at + "attn.c_attn.weight"] + w[at + "attn.c_attn.bias"]
        heads = []
        for j in range(config.num_attention_heads):
            q, k, v = (qkv[:, part * width + j * size : part * width + (j + 1) * size] for part in range(3))
            scores = np.where(np.tri(n, dtype=bool), q @ k.T / np.sqrt(size), -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(heads, -1) @ w[at + "attn.c_proj.weight"] + w[at + "attn.c_proj.bias"]
        z = _norm(x, w, at + "ln_2") @ w[at + "mlp.c_fc.weight"] + w[at + "mlp.c_fc.bias"]
        z = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        x = x + z @ w[at + "mlp.c_proj.weight"] + w[at + "mlp.c_proj.bias"]
    return _norm(x, w, "ln_f") @ w["wte.weight"].T


def test_logits_are_those_of_the_formula(tmp_path):
    model, rows = from_pretrained(write_gpt2(tmp_path)), ragged_rows(vocab_size=64)
    weights = gpt2_tensors(gpt2_config())
    for row, found in zip(rows, _logits(model, rows), strict=True):
        expected = _formula(model.config, weights, row)
        assert expected.std() > 1 and np.abs(found - expected).max() < 1e-4


def test_a_position_that_was_not_learned(tmp_path):
    model = from_pretrained(write_gpt2(tmp_path, n_positions=16, n_ctx=16))
    _logits(model, [[3] * 16])
    text = r"a token stands at position 16 of its row; expected rows of at most 16 tokens \(n_positions\): GPT2LMHead"
    with pytest.raises(DataError, match=text):
        _logits(model, [[3], [3] * 17])
    with pytest.raises(DataError, match=text):
        generate(model, [[3] * 10], max_new_tokens=8, eos_token_id=())


@pytest.mark.parametrize("changes", [{}, {"scale_attn_by_inverse_layer_idx": True}])
def test_the_cache_changes_no_token(tmp_path, changes):
    """With a head of its own: a tied one mostly says the last token again, and then a fault in positions hides."""
    model = from_pretrained(write_gpt2(tmp_path, seed=5, tie_word_embeddings=False, **changes))
    prompts = ragged_rows(lengths=(9, 1, 14), vocab_size=64)
    kept, again = (generate(model, prompts, max_new_tokens=20, use_cache=c, eos_token_id=()) for c in (True, False))
    assert kept == again and min(len(set(row)) for row in kept) > 4
    by_hand = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(20):
            ids.append(int(_logits(model, [ids])[0][-1].argmax()))
        by_hand.append(ids[len(prompt) :])
    assert kept == by_hand
