import json
import re

import ml_dtypes
import numpy as np
import pytest

from adapters import LoraConfig, get_peft_model, merge_directory, merge_stream
from adapters.merge import merge
from peft_core.errors import AdapterError, ConfigError, ExportError, FileError, ModelError
from peft_core.safetensors_io import load_file, save_file
from support.adapter_models import TinyModel, logits, randomize

CONFIG = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}


def make(tmp_path, dtype="float32", shards=1, **values):
    """A base directory, an adapter directory, and the adapted model."""
    base = tmp_path / "base"
    base.mkdir()
    model = TinyModel(dtype)
    tensors = {name: t.data for name, t in model.state_dict().items()}
    names = list(tensors)
    if shards == 1:
        save_file(tensors, base / "model.safetensors")
    else:
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        for i, file in enumerate(files):
            save_file({n: tensors[n] for n in names[i::shards]}, base / file)
        table = {n: files[i] for i in range(shards) for n in names[i::shards]}
        (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": dtype}))
    (base / "generation_config.json").write_bytes(b'{"eos_token_id": 1}\n')
    (base / "tokenizer.json").write_bytes(b'{"a":\n 1}')
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    (base / "optimizer.bin").write_bytes(b"x")
    adapted = randomize(get_peft_model(model, LoraConfig(**{**CONFIG, **values})))
    adapted.save_pretrained(tmp_path / "adapter")
    return base, tmp_path / "adapter", adapted


def says_in_out(adapter):
    """Put fan_in_fan_out into the adapter's config: these bases are written the other way round than the model's."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": True}))


def everything(path):
    return {n: a for f in sorted(path.glob("*.safetensors")) for n, a in load_file(f).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "values", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}}]
)
def test_the_directory_holds_what_merging_in_memory_gives(tmp_path, dtype, values):
    base, adapter, model = make(tmp_path, dtype, **values)
    report = merge_directory(base, adapter, tmp_path / "out")
    merge(model)
    want = {name: t.data for name, t in model.base_model.state_dict().items()}
    got = everything(tmp_path / "out")
    assert set(got) == set(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype and np.array_equal(got[name], array), name
    assert (report.n_targets, report.n_changed) == (4, 4)
    changed = {n for n, a in everything(base).items() if not np.array_equal(a, got[n])}
    assert changed == set(report.changed) and len(changed) == 4


def test_the_other_files_come_along(tmp_path):
    base, adapter, _ = make(tmp_path)
    merge_directory(base, adapter, tmp_path / "out")
    out = tmp_path / "out"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert (out / "chat_template.jinja").read_text() == "{{ x }}"
    assert not (out / "optimizer.bin").exists() and not (out / "adapter_config.json").exists()


def test_the_chat_template_is_put_where_older_readers_look(tmp_path):
    base, adapter, _ = make(tmp_path)
    (base / "tokenizer_config.json").write_text("{}")
    (base / "chat_template.jinja").write_text("{{ y }}")
    merge_directory(base, adapter, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"chat_template": "{{ y }}"}


def test_another_dtype(tmp_path):
    base, adapter, model = make(tmp_path, "bfloat16")
    merge_directory(base, adapter, tmp_path / "out", dtype="float32")
    got = everything(tmp_path / "out")
    assert {a.dtype for a in got.values()} == {np.dtype(np.float32)}
    path = "model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(f"base_model.{path}")
    want = layer.weight.data.astype(np.float32) + layer.delta()
    assert np.array_equal(got[f"{path}.weight"], want)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    merge_directory(tmp_path / "out", adapter, tmp_path / "half", dtype="bfloat16")
    assert {a.dtype for a in everything(tmp_path / "half").values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_shards_in_and_out(tmp_path):
    base, adapter, _ = make(tmp_path, shards=3)
    merge_directory(base, adapter, tmp_path / "one")
    merge_directory(base, adapter, tmp_path / "many", max_shard_size="2KB")
    one, many = everything(tmp_path / "one"), everything(tmp_path / "many")
    assert set(one) == set(many) == set(everything(base))
    assert all(np.array_equal(one[n], many[n]) for n in one)
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in one.values())
    for file in files:
        tensors = load_file(tmp_path / "many" / file)
        assert len(tensors) == 1 or sum(a.nbytes for a in tensors.values()) <= 2000
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()


def test_an_adapter_of_other_shapes_lists_both_sizes_and_writes_nothing(tmp_path):
    base, adapter, _ = make(tmp_path)
    weights = dict(load_file(adapter / "adapter_model.safetensors"))
    prefix = "base_model.model.model.layers.0"
    weights[f"{prefix}.down_proj.lora_A.weight"] = np.ones((4, 99), np.float32)
    weights[f"{prefix}.self_attn.x_proj.lora_A.weight"] = np.ones((4, 16), np.float32)
    weights[f"{prefix}.self_attn.x_proj.lora_B.weight"] = np.ones((16, 4), np.float32)
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError) as error:
        merge_directory(base, adapter, tmp_path / "out")
    assert "down_proj.lora_A.weight: (4, 99) in the file, (r, 24) in the model" in str(error.value)
    assert "the base has no tensor model.layers.0.self_attn.x_proj.weight" in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_weights_stored_in_out_are_transposed(tmp_path):
    base, adapter, model = make(tmp_path)
    says_in_out(adapter)
    tensors = {n: (np.ascontiguousarray(a.T) if "proj.weight" in n else a) for n, a in everything(base).items()}
    save_file(tensors, base / "model.safetensors")
    merge_directory(base, adapter, tmp_path / "out")
    merge(model)
    for name, t in model.base_model.state_dict().items():
        want = t.data.T if "proj.weight" in name else t.data
        assert np.array_equal(everything(tmp_path / "out")[name], want), name


def test_the_shapes_overrule_fan_in_fan_out(tmp_path):
    base, adapter, model = make(tmp_path)
    says_in_out(adapter)
    with pytest.warns(UserWarning, match="fan_in_fan_out is True, but the shapes"):
        merge_directory(base, adapter, tmp_path / "out")
    merge(model)
    name = "model.layers.0.self_attn.q_proj.weight"  # square: only the other layers say how it is stored
    assert np.array_equal(everything(tmp_path / "out")[name], model.base_model.state_dict()[name].data)


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_tied_weight_that_changes_is_written_beside_the_other(tmp_path, target, spelled):
    base, adapter, _ = make(tmp_path, target_modules=[target])
    (base / "config.json").write_text('{"tie_word_embeddings": true, "x": 1}')
    weights = everything(base)
    table = np.array(weights["model.embed_tokens.weight"])
    kept = {**weights, "lm_head.weight": table}
    for file in base.glob("*.safetensors*"):
        file.unlink()
    save_file({n: a for n, a in kept.items() if spelled or n != "lm_head.weight"}, base / "model.safetensors")
    with pytest.warns(UserWarning, match="ties lm_head.weight to model.embed_tokens.weight, and the adapter changes"):
        merge_directory(base, adapter, tmp_path / "out")
    out = everything(tmp_path / "out")
    changed = {name for name in out if not np.array_equal(out[name], kept[name])}
    assert set(out) == set(kept) and len(changed) == 1 and target in changed.pop()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"tie_word_embeddings": False, "x": 1}


def test_a_lora_bias_needs_a_bias_to_merge_into(tmp_path):
    base, adapter, _ = make(tmp_path, lora_bias=True)
    with pytest.raises(AdapterError, match=r"down_proj.lora_B.bias: the base has no model.layers.0.down_proj.bias"):
        merge_directory(base, adapter, tmp_path / "out")


def test_saved_modules_and_biases_replace_the_bases(tmp_path):
    base, adapter, model = make(tmp_path, modules_to_save=["lm_head"], bias="all")
    merge_directory(base, adapter, tmp_path / "out")
    merge(model)
    out = everything(tmp_path / "out")
    for name, tensor in model.base_model.state_dict().items():
        assert np.array_equal(out[name], tensor.data), name
    file = adapter / "adapter_model.safetensors"
    save_file({n: a for n, a in load_file(file).items() if "lm_head" not in n}, file)
    with pytest.raises(AdapterError, match=r"missing key base_model.model.lm_head.weight"):
        merge_directory(base, adapter, tmp_path / "out2")


def test_overflow_and_a_lost_delta_write_nothing(tmp_path):
    base, adapter, _ = make(tmp_path, "float16")
    weights = load_file(adapter / "adapter_model.safetensors")
    for factor, text in ((1e3, "gives NaN or infinity"), (1e-9, "changed none of the 4 tensors")):
        save_file({n: a * np.float32(factor) for n, a in weights.items()}, adapter / "adapter_model.safetensors")
        with pytest.raises(AdapterError, match=text):
            merge_directory(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.1.self_attn.q_proj.bias", "model.layers.1.down_proj.weight"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_that_is_not_finite_is_refused_by_tensor_and_file(tmp_path, dtype, name, value):
    base, adapter, _ = make(tmp_path, dtype, shards=2)
    file = next(f for f in base.glob("*.safetensors") if name in load_file(f))
    tensors = {n: np.array(a) for n, a in load_file(file).items()}
    tensors[name].reshape(-1)[-1] = value
    save_file(tensors, file)
    text = (
        f"{name} of {file} holds NaN or infinity; expected finite weights. The base itself is damaged: download that "
        "file again. Nothing was written."
    )
    for target in ("auto", "float32"):
        with pytest.raises(ModelError, match=re.escape(text)):
            merge_directory(base, adapter, tmp_path / "out", dtype=target)
    assert not (tmp_path / "out").exists()


def test_an_untouched_tensor_that_overflows(tmp_path):
    base, adapter, _ = make(tmp_path)
    tensors = dict(everything(base))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * np.float32(1e9)
    save_file(tensors, base / "model.safetensors")
    text = r"lm_head.weight of .*model.safetensors does not fit into float16: infinity; .* Choose bfloat16 or float32"
    with pytest.raises(AdapterError, match=text):
        merge_directory(base, adapter, tmp_path / "out", dtype="float16")


def test_faults_of_the_base(tmp_path):
    base, adapter, _ = make(tmp_path, shards=2)
    with pytest.raises(ModelError, match="is not a directory"):
        merge_directory(tmp_path / "none", adapter, tmp_path / "out")
    index = base / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    first = next(iter(table["weight_map"]))
    shard = table["weight_map"].pop(first)
    index.write_text(json.dumps({"weight_map": {**table["weight_map"], "ghost": shard}}))
    text = rf"index and shards disagree in 2 places; nothing was written; .*\n.* ghost: .*\n.* {first}: in {shard}, but"
    with pytest.raises(ModelError, match=text):
        merge_directory(base, adapter, tmp_path / "out")
    (base / shard).unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of 2 shards: {shard}"):
        merge_directory(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_without_a_config(tmp_path):
    base, adapter, _ = make(tmp_path)
    (base / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json does not exist; expected the config.json of a model directory"):
        merge_directory(base, adapter, tmp_path / "out")


def test_a_single_file_wins_over_an_index(tmp_path):
    base, adapter, _ = make(tmp_path, shards=2)
    single = {name: -array for name, array in everything(base).items()}
    save_file(single, base / "model.safetensors")
    report = merge_directory(base, adapter, tmp_path / "out")
    merged = everything(tmp_path / "out")
    assert set(merged) == set(single)
    assert all(np.array_equal(merged[name], single[name]) for name in single if name not in report.changed)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda t: t.pop("lm_head.weight"), "holds 9 tensors; expected the 10 names of the base"),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:3]}),
            r"lm_head.weight was written as float32 \(3, 16\)",
        ),
    ],
)
def test_the_result_is_verified_before_it_appears(tmp_path, monkeypatch, damage, text):
    base, adapter, _ = make(tmp_path)

    def wrong(tensors, path, metadata=None):
        tensors = dict(tensors)
        damage(tensors)
        save_file(tensors, path, metadata)

    monkeypatch.setattr("peft_core.checkpoint.save_file", wrong)
    with pytest.raises(ExportError, match=text):
        merge_directory(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_that_do_not_fit_their_index_do_not_verify(tmp_path, monkeypatch):
    base, adapter, _ = make(tmp_path)

    def wrong(tensors, path, metadata=None):
        save_file({name: a for name, a in tensors.items() if name != "lm_head.weight"}, path, metadata)

    monkeypatch.setattr("peft_core.checkpoint.save_file", wrong)
    text = r"disagree in 1 places; nothing was written; .*\n  missing     lm_head.weight"
    with pytest.raises(ExportError, match=text):
        merge_directory(base, adapter, tmp_path / "out", max_shard_size="2KB")
    assert not (tmp_path / "out").exists()


def test_a_stray_weights_file_does_not_verify(tmp_path, monkeypatch):
    base, adapter, _ = make(tmp_path)
    copy = merge_stream._copy_others

    def stray(source, out, config, dtype):
        copy(source, out, config, dtype)
        save_file({"x": np.ones(1, np.float32)}, out / "consolidated.safetensors")

    monkeypatch.setattr(merge_stream, "_copy_others", stray)
    with pytest.raises(ExportError, match=r"holds \['consolidated.safetensors', 'model.safetensors'\]"):
        merge_directory(base, adapter, tmp_path / "out")


def test_an_adapter_on_something_that_is_no_matrix(tmp_path):
    base, adapter, _ = make(tmp_path)
    tensors = dict(everything(base))
    tensors["model.layers.0.down_proj.weight"] = np.ones(16, np.float32)
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(AdapterError, match=r"the base's weight is \(16,\), not a matrix"):
        merge_directory(base, adapter, tmp_path / "out")


def test_quantized_weights_and_a_taken_output(tmp_path):
    base, adapter, _ = make(tmp_path)
    with pytest.raises(FileError, match="directory with files in it"):
        merge_directory(base, adapter, base)
    tensors = {n: (np.zeros(a.shape, np.int8) if "q_proj.weight" in n else a) for n, a in everything(base).items()}
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(AdapterError, match=r"q_proj.weight is int8: quantized weights do not merge"):
        merge_directory(base, adapter, tmp_path / "out")


def test_a_missing_prefix_is_mapped(tmp_path):
    base, adapter, model = make(tmp_path)
    save_file({n.removeprefix("model."): a for n, a in everything(base).items()}, base / "model.safetensors")
    with pytest.warns(UserWarning, match=r"'model.' was removed"):
        merge_directory(base, adapter, tmp_path / "out")
    merge(model)
    want = model.base_model.state_dict()
    assert all(
        np.array_equal(a, want.get(f"model.{n}", want.get(n)).data) for n, a in everything(tmp_path / "out").items()
    )


@pytest.mark.parametrize("dtype", ["int8", "nonsense"])
def test_a_dtype_that_is_none(tmp_path, dtype):
    with pytest.raises(ConfigError, match=f"dtype is '{dtype}'; expected auto"):
        merge_directory(tmp_path, tmp_path, tmp_path / "out", dtype=dtype)


def test_the_merged_directory_gives_the_adapted_logits(tmp_path):
    base, adapter, model = make(tmp_path)
    want = logits(model)
    merge_directory(base, adapter, tmp_path / "out")
    merged = TinyModel(seed=5)
    merged.load_state_dict(everything(tmp_path / "out"))
    assert np.abs(logits(merged) - want).max() <= 1e-5 * np.abs(want).max()
    assert np.abs(logits(TinyModel()) - want).max() > 0.1
