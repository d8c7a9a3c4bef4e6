"""config.json: what is read, from which place, and what is refused by name."""

import json
import re

import numpy as np
import pytest

from peft_core.errors import ModelError
from support.tiny_models import LLAMA3, tiny_config
from transformer.config import ModelConfig, RopeConfig


def test_sizes_and_defaults():
    raw = tiny_config(num_key_value_heads=..., head_dim=..., hidden_act=..., tie_word_embeddings=...)
    config = ModelConfig.from_dict(raw)
    assert (config.num_key_value_heads, config.head_dim, config.tie_word_embeddings) == (4, 8, False)
    assert config.architectures == ["LlamaForCausalLM"] and config.sliding_window is None
    assert config.to_dict() == raw and config.raw == raw


def test_mistral_defaults_are_those_of_transformers():
    config = ModelConfig.from_dict(tiny_config(model_type="mistral", num_key_value_heads=..., num_attention_heads=16))
    assert (config.num_key_value_heads, config.sliding_window) == (8, 4096)
    assert ModelConfig.from_dict(tiny_config(model_type="mistral", sliding_window=None)).sliding_window is None


def test_llama_has_no_window():
    assert ModelConfig.from_dict(tiny_config(sliding_window=5)).sliding_window is None


@pytest.mark.parametrize("changes", [
    {"rope_theta": 123.0},
    {"rope_theta": 123, "rope_scaling": None},
    {"rope_theta": ..., "rope_parameters": {"rope_theta": 123.0, "rope_type": "default"}},
    {"rope_theta": 123.0, "rope_parameters": {"rope_type": "default"}},
])  # fmt: skip
def test_theta_in_either_place(changes):
    assert ModelConfig.from_dict(tiny_config(**changes)).rope == RopeConfig(123.0)


@pytest.mark.parametrize("changes", [
    {"rope_scaling": LLAMA3},
    {"rope_theta": ..., "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
])  # fmt: skip
def test_llama3_in_either_place(changes):
    assert ModelConfig.from_dict(tiny_config(**changes)).rope == RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 16)


def test_original_length_defaults_to_the_longest():
    scaling = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    assert ModelConfig.from_dict(tiny_config(rope_scaling=scaling)).rope.original_max_position_embeddings == 128


def test_frequencies():
    plain = RopeConfig(100.0).inverse_frequencies(4)
    np.testing.assert_allclose(plain, [1.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(RopeConfig(100.0, "linear", 4.0).inverse_frequencies(4), plain / 4, rtol=1e-6)
    # 100 positions: 15.9 turns of the first pair (> 4: kept), 1.59 of the second (share (1.59 - 1) / (4 - 1))
    share = (100 * 0.1 / (2 * np.pi) - 1) / 3
    expected = [1.0, share * 0.1 + (1 - share) * 0.1 / 8]
    found = RopeConfig(100.0, "llama3", 8.0, 1.0, 4.0, 100).inverse_frequencies(4)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    found = RopeConfig(100.0, "llama3", 8.0, 1.0, 4.0, 4).inverse_frequencies(4)
    np.testing.assert_allclose(found, plain / 8, rtol=1e-6)


@pytest.mark.parametrize(("changes", "text"), [
    ({"model_type": "gpt9"}, "model_type is 'gpt9'; expected one of gpt2, llama, mistral."),
    ({"model_type": ...}, "model_type is None; expected one of gpt2, llama, mistral."),
    ({"rope_theta": ...}, "config.json has no rope_theta; expected it to be given."),
    ({"hidden_size": ...}, "config.json has no hidden_size"),
    ({"rms_norm_eps": ...}, "config.json has no rms_norm_eps"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; expected a positive number."),
    ({"vocab_size": -3}, "vocab_size is -3; expected a positive integer."),
    ({"hidden_size": 32.0}, "hidden_size is 32.0; expected a positive integer."),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'."),
    ({"mlp_bias": 1}, "mlp_bias is 1; expected true or false."),
    ({"num_key_value_heads": 3}, "4 num_attention_heads over 3 num_key_value_heads; expected a multiple."),
    ({"head_dim": ..., "hidden_size": 30}, "hidden_size 30 over 4 num_attention_heads; expected a multiple"),
    ({"head_dim": 7}, "head_dim is 7; expected an even number."),
    ({"architectures": ["LlamaForSequenceClassification"]}, "expected ['LlamaForCausalLM']. Only causal"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling has rope_type 'yarn'; expected one of default"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "two values of rope_theta: [1.0, 500.0]; expected one."),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected a JSON object or null."),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 3}}, "rope_scaling has beta = 3; expected only what"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor 1.0 and low_freq_factor 1.0; exp"),
    ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "both rope_parameters and rope_scaling"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}; expected no such option"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected no such option"),
])  # fmt: skip
def test_refused(changes, text):
    with pytest.raises(ModelError, match=re.escape(text)):
        ModelConfig.from_dict(tiny_config(**changes))


@pytest.mark.parametrize(("content", "text"), [
    (None, "config.json does not exist; expected the config.json of a model directory."),
    ("{", "is not valid JSON"),
    ("[]", "holds a list; expected a JSON object."),
])  # fmt: skip
def test_unreadable_files(tmp_path, content, text):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=re.escape(text)):
        ModelConfig.from_pretrained(tmp_path)


def test_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.rope_theta == 500.0 and config.name_or_path == str(tmp_path)


def test_dropout_in_attention_is_not_ignored_in_silence():
    with pytest.warns(UserWarning, match=r"attention_dropout 0\.1 is not applied; training runs without"):
        ModelConfig.from_dict(tiny_config(attention_dropout=0.1), "config.json")
