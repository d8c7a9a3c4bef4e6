"""Loading: what fits is mapped, what does not is named, all of it at once."""

import json
import re

import numpy as np
import pytest

from peft_core.dtypes import as_dtype, bfloat16
from peft_core.errors import ModelError
from support.tiny_models import ragged_rows, tiny_config, tiny_tensors, write_tiny, write_weights
from transformer import AutoModelForCausalLM, from_pretrained


def test_half_weights_stay_in_the_file(tmp_path):
    model = from_pretrained(write_tiny(tmp_path, dtype="bfloat16"))
    for name, array in tiny_tensors(model.config.raw, dtype="bfloat16").items():
        held = dict(model.named_parameters())[name].data
        assert held.dtype == bfloat16 and not held.flags.writeable and not held.flags.owndata, name
        assert held.tobytes() == array.tobytes(), name
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_dtype_converts(tmp_path, dtype):
    directory = write_tiny(tmp_path, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {as_dtype(dtype)}
    wide = from_pretrained(directory).lm_head.weight.data.astype(dtype)
    assert np.array_equal(model.lm_head.weight.data, wide)


def test_float16_overflow_is_named(tmp_path):
    directory = write_tiny(tmp_path)
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"][3] = 1e6
    write_weights(directory, tensors)
    with pytest.raises(ModelError, match=r"model.norm.weight has values up to 1e\+06; expected at most 65504"):
        from_pretrained(directory, dtype="float16")


def test_shards_equal_one_file(tmp_path):
    one, many = write_tiny(tmp_path / "one"), write_tiny(tmp_path / "many", shards=3)
    (many / "other.safetensors").write_text("not named by the index: nobody looks at it")
    ids = ragged_rows(lengths=(9,))
    assert np.array_equal(from_pretrained(one)(ids).logits.data, from_pretrained(many)(ids).logits.data)


def test_a_single_file_wins_over_an_index(tmp_path):
    directory = write_tiny(tmp_path, shards=2)
    other = tiny_tensors(tiny_config(), seed=1)
    write_weights(directory, other)
    for name, parameter in from_pretrained(directory).named_parameters():
        assert np.array_equal(parameter.data, other[name]), name


def test_everything_that_does_not_fit_is_one_error(tmp_path):
    directory = write_tiny(tmp_path)
    tensors = tiny_tensors(tiny_config())
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.int8)
    write_weights(directory, tensors)
    with pytest.raises(ModelError) as raised:
        from_pretrained(directory)
    text = str(raised.value)
    for part in (
        "disagree in 5 places; nothing was loaded:",
        "missing     model.norm.weight (32,)\n",
        "missing     model.layers.1.mlp.up_proj.weight (56, 32)\n",
        "unexpected  model.layers.2.mlp.up_proj.weight (2, 2) float32\n",
        "does not fit  lm_head.weight: (96, 32) float32, expected (97, 32) of a float dtype\n",
        "does not fit  model.embed_tokens.weight: (97, 32) int8, expected (97, 32)",
        "expected the tensors of LlamaForCausalLM",
    ):
        assert part in text, part


def test_sizes_are_checked_before_memory_is_allocated(tmp_path):
    directory = write_tiny(tmp_path)
    (directory / "config.json").write_text(json.dumps(tiny_config(vocab_size=10**15)))
    with pytest.raises(ModelError, match=r"lm_head.weight: \(97, 32\) float32, expected \(1000000000000000, 32\)"):
        from_pretrained(directory)


def test_a_count_of_layers_beyond_the_file_is_refused_before_a_layer_is_built(tmp_path, monkeypatch):
    directory = write_tiny(tmp_path, num_hidden_layers=2)
    config = json.loads((directory / "config.json").read_text())
    monkeypatch.setattr("transformer.load.CausalLM", lambda config: pytest.fail("modules were built"))
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**7}))
    text = (
        r"has 10000000 layers \(num_hidden_layers\) and the weights are 21 tensors; expected several tensors for each "
    )
    with pytest.raises(ModelError, match=text + r"layer\. Get config.json and weights from one source, completely"):
        from_pretrained(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["x", ["a"], 1.5, True, {"a": 1}])
def test_an_end_that_is_no_id_is_refused_by_name(tmp_path, name, value):
    file = write_tiny(tmp_path) / name
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**config, "eos_token_id": value}))
    text = (
        rf"{name}: eos_token_id is {re.escape(repr(value))}; expected a token id, a list of them, or null\. Correct it"
    )
    with pytest.raises(ModelError, match=text):
        from_pretrained(tmp_path)


def test_no_end_at_all_pads_with_zeros(tmp_path):
    file = write_tiny(tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [], "pad_token_id": None}))
    assert from_pretrained(tmp_path).padding_id == 0


def test_a_config_nested_too_deeply_is_an_error_of_the_model(tmp_path):
    (write_tiny(tmp_path) / "config.json").write_text("[" * 100_000)
    with pytest.raises(
        ModelError, match=r"config.json is not valid JSON \(.*\); expected an object\. Download it again"
    ):
        from_pretrained(tmp_path)


def test_a_missing_head_hints_at_tying(tmp_path):
    directory = write_tiny(tmp_path, tie_word_embeddings=True)
    (directory / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(ModelError, match="the head may be tied: check tie_word_embeddings"):
        from_pretrained(directory)


def test_a_stale_index(tmp_path):
    directory = write_tiny(tmp_path, shards=2)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["model.ghost"] = shard
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError) as raised:
        from_pretrained(directory)
    assert f"missing     model.ghost: model.safetensors.index.json places it in {shard}" in str(raised.value)
    assert f"unexpected  model.norm.weight: in {shard}, but not in model.safetensors.index.json" in str(raised.value)


def test_a_tied_head_that_is_spelled_out(tmp_path):
    directory = write_tiny(tmp_path, tie_word_embeddings=True)
    tensors = tiny_tensors(tiny_config(tie_word_embeddings=True))
    table = tensors["model.embed_tokens.weight"]
    write_weights(directory, {**tensors, "lm_head.weight": table})
    model = from_pretrained(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.source.tied_head
    write_weights(directory, {**tensors, "lm_head.weight": 2 * table})
    with pytest.warns(UserWarning, match="config.json ties lm_head.weight to model.embed_tokens.weight, but the file"):
        model = from_pretrained(directory)
    assert np.array_equal(model.lm_head.weight.data, 2 * table)
    assert not model.config.tie_word_embeddings and model.config.to_dict()["tie_word_embeddings"] is False


def test_known_buffers_are_reported(tmp_path):
    directory = write_tiny(tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_weights(directory, {**tiny_tensors(tiny_config()), **extra})
    with pytest.warns(UserWarning, match="1 buffers that follow from the config are not used"):
        model = from_pretrained(directory)
    assert list(model.source.extra) == list(extra)


def _cached(cache, name="org/tiny"):
    stored = cache / ("models--" + name.replace("/", "--"))
    write_tiny(stored / "snapshots" / "abc")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "HOME"])
def test_hub_ids_come_from_the_local_cache(tmp_path, monkeypatch, variable):
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    _cached(tmp_path / {"HF_HUB_CACHE": "", "HF_HOME": "hub", "HOME": ".cache/huggingface/hub"}[variable])
    model = from_pretrained("org/tiny")
    assert model.config.name_or_path == "org/tiny"
    with pytest.raises(ModelError, match=r"expected a model directory, or a Hub id .* Run: hf download org/other"):
        from_pretrained("org/other")


def test_paths_that_are_no_directory(tmp_path):
    with pytest.raises(ModelError, match="does not exist; expected a model directory or a Hub id org/name"):
        from_pretrained(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="file is a file; expected a model directory"):
        from_pretrained(tmp_path / "file")


def test_an_integer_dtype_is_refused(tmp_path):
    with pytest.raises(ModelError, match="dtype 'int8' was asked for; expected 'auto', float32"):
        from_pretrained(write_tiny(tmp_path), dtype="int8")
