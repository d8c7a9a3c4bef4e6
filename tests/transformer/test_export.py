"""Saving: the base's names, set, config and files, whole or not at all."""

import json
import warnings

import numpy as np
import pytest

from peft_core.checkpoint import Checkpoint
from peft_core.errors import ConfigError, ExportError
from peft_core.nn import Linear, Module
from peft_core.safetensors_io import load_file
from support.tiny_models import LLAMA3, ragged_rows, tiny_config, tiny_tensors, write_tiny, write_weights
from transformer import from_pretrained, save_pretrained


def _names(directory):
    return sorted(p.name for p in directory.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_and_config_come_back(tmp_path, dtype):
    base = write_tiny(tmp_path / "base", dtype=dtype, rope_scaling=LLAMA3, some_unknown_key=[1])
    save_pretrained(from_pretrained(base), tmp_path / "saved")
    assert _names(tmp_path / "saved") == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "saved/config.json").read_text()) == json.loads((base / "config.json").read_text())
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "saved/model.safetensors")
    assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in before.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in after.items()}  # fmt: skip


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_the_dtype_keys_say_what_was_written(tmp_path, key):
    base = write_tiny(tmp_path / "base")
    raw = tiny_config() | ({key: "float32"} if key else {})
    (base / "config.json").write_text(json.dumps(raw))
    save_pretrained(from_pretrained(base, dtype="bfloat16"), tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text()) == raw | {key or "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("size", [20_000, "20KB", "0.02 MB"])
def test_shards(tmp_path, size):
    base = write_tiny(tmp_path / "base")
    save_pretrained(from_pretrained(base), tmp_path / "saved", max_shard_size=size)
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(sum(a.nbytes for a in load_file(f).values()) <= 20_000 for f in files)
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tiny_tensors(tiny_config()).values())
    ids = ragged_rows(lengths=(9,))
    logits = from_pretrained(base)(ids).logits.data
    assert np.array_equal(from_pretrained(tmp_path / "saved")(ids).logits.data, logits)


def test_companions_are_copied_and_others_stay(tmp_path):
    base = write_tiny(tmp_path / "base")
    (base / "tokenizer.json").write_bytes(b'{"a":\r\n 1}')
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    (base / "notes.txt").write_text("not the model's")
    model = from_pretrained(base)
    target = tmp_path / "saved"
    target.mkdir()
    (target / "tokenizer.json").write_text("already there")
    (target / "mine.txt").write_text("keep")
    save_pretrained(model, target)
    written = {"config.json", "generation_config.json", "model.safetensors"}
    assert set(_names(target)) == written | {"mine.txt", "tokenizer.json"}
    assert (target / "tokenizer.json").read_text() == "already there" and (target / "mine.txt").read_text() == "keep"
    model.save_pretrained(tmp_path / "new")
    assert (tmp_path / "new/tokenizer.json").read_bytes() == b'{"a":\r\n 1}'


def test_old_weights_do_not_stay_beside_new_ones(tmp_path):
    model = from_pretrained(write_tiny(tmp_path / "base"))
    target = tmp_path / "saved"
    save_pretrained(model, target, max_shard_size="20KB")
    save_pretrained(model, target)
    assert _names(target) == ["config.json", "model.safetensors"]
    save_pretrained(model, target, max_shard_size="40KB")
    assert len(Checkpoint(target)) == len(tiny_tensors(tiny_config())) and "model.safetensors" not in _names(target)


def test_saving_over_its_own_source(tmp_path):
    base = write_tiny(tmp_path / "base", shards=2)
    model = from_pretrained(base)
    ids = ragged_rows(lengths=(9,))
    logits = model(ids).logits.data
    save_pretrained(model, base)
    for same in (model, from_pretrained(base)):
        assert np.array_equal(same(ids).logits.data, logits)


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    model = from_pretrained(write_tiny(tmp_path / "base"))
    save_pretrained(model, tmp_path / "old")
    before = {p.name: p.read_bytes() for p in (tmp_path / "old").iterdir()}

    def fails(*_):
        raise OSError("no room")

    monkeypatch.setattr("transformer.export._config", fails)
    for target in ("old", "new"):
        with pytest.raises(OSError, match="no room"):
            save_pretrained(model, tmp_path / target)
    assert {p.name: p.read_bytes() for p in (tmp_path / "old").iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "old"]


def test_the_same_set_of_names(tmp_path):
    """A tied head that the base spells out, and old rotary buffers, are written back."""
    base = write_tiny(tmp_path / "base", tie_word_embeddings=True)
    tensors = tiny_tensors(tiny_config(tie_word_embeddings=True))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(4, dtype=np.float32)
    write_weights(base, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_pretrained(from_pretrained(base), tmp_path / "saved")
    after = load_file(tmp_path / "saved/model.safetensors")
    assert set(after) == set(tensors)
    assert all(np.array_equal(after[name], tensors[name]) for name in tensors)


def test_an_untied_head_is_saved_as_untied(tmp_path):
    base = write_tiny(tmp_path / "base", tie_word_embeddings=True)
    tensors = tiny_tensors(tiny_config(tie_word_embeddings=True))
    write_weights(base, {**tensors, "lm_head.weight": 2 * tensors["model.embed_tokens.weight"]})
    with pytest.warns(UserWarning, match="ties"):
        save_pretrained(from_pretrained(base), tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    assert np.array_equal(again.lm_head.weight.data, 2 * again.model.embed_tokens.weight.data)


class _Wrapped(Module):
    def __init__(self, inner: Linear) -> None:
        self.base_layer = inner


def test_an_adapted_model_is_refused(tmp_path):
    model = from_pretrained(write_tiny(tmp_path / "base"))
    model.set_submodule("lm_head", _Wrapped(model.lm_head))
    text = r"other parameters than LlamaForCausalLM \(lm_head.base_layer.weight, lm_head.weight, 2 in all\).*Merge the"
    with pytest.raises(ExportError, match=text):
        save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_size_that_is_not_understood(tmp_path):
    with pytest.raises(ConfigError, match="max_shard_size is '5 parsecs'"):
        save_pretrained(from_pretrained(write_tiny(tmp_path / "base")), tmp_path / "saved", max_shard_size="5 parsecs")
    assert not (tmp_path / "saved").exists()
