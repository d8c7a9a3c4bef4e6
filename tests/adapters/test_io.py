import json
import warnings

import ml_dtypes
import numpy as np
import pytest

from adapters import LoraConfig, export_canonical, load_adapter, lora_layers, read_adapter, save_adapter
from adapters.inject import inject
from adapters.io import write_adapter
from adapters.stored import uniform_prefix
from peft_core.errors import AdapterError
from peft_core.safetensors_io import SafeFile, load_file, save_file
from support.adapter_models import TinyModel, logits, randomize

WEIGHTS = "adapter_model.safetensors"


def saved(path, **values):
    """An adapter with random A and B saved at ``path``, and the model that has it."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], **values})
    model = TinyModel()
    inject(model, config)
    randomize(model)
    save_adapter(model, path, config)
    return model, config


def rewrite(path, change):
    """Apply ``change`` to the dict of tensors in the file."""
    tensors = {name: np.array(a) for name, a in load_file(path / WEIGHTS).items()}
    save_file(change(tensors) or tensors, path / WEIGHTS, metadata={"format": "pt"})


def test_the_file_is_pefts(tmp_path):
    model, _ = saved(tmp_path / "a")
    file = SafeFile(tmp_path / "a" / WEIGHTS)
    want = {
        f"base_model.model.model.layers.{i}.{m}.lora_{h}.weight"
        for i in range(2) for m in ("self_attn.q_proj", "down_proj") for h in "AB"
    }  # fmt: skip
    assert set(file.keys()) == want and file.metadata == {"format": "pt"}
    assert file.shape("base_model.model.model.layers.0.down_proj.lora_A.weight") == (4, 24)
    assert file.shape("base_model.model.model.layers.0.down_proj.lora_B.weight") == (16, 4)
    assert {file.dtype(k) for k in file} == {np.dtype(np.float32)}
    layer = lora_layers(model)["model.layers.1.self_attn.q_proj"].adapters["default"]
    assert np.array_equal(file.get("base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"), layer.B.data)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["adapter_config.json", WEIGHTS]


@pytest.mark.parametrize(
    "values",
    [
        {}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.down_proj": 7}},
        {"target_modules": "all-linear"}, {"target_modules": r".*\.1\..*"}, {"target_modules": ["lm_head", "q_proj"]},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"lora_alpha": 2.5, "exclude_modules": "nothing|.*0.*"},
        {"target_modules": "all-linear", "layers_to_transform": 0},
    ],
)  # fmt: skip
def test_save_and_load_give_the_same_logits(tmp_path, values):
    model, _ = saved(tmp_path / "a", **values)
    again = TinyModel()
    report = load_adapter(again, tmp_path / "a")
    assert np.array_equal(logits(again), logits(model))
    assert np.abs(logits(again) - logits(TinyModel())).max() > 1e-2
    assert report.paths == list(lora_layers(model)) and report.trainable == 0
    written = save_adapter(again, tmp_path / "b", report.config)
    assert written == report.config == LoraConfig.from_pretrained(tmp_path / "b")
    for name, array in load_file(tmp_path / "a" / WEIGHTS).items():
        assert np.array_equal(load_file(tmp_path / "b" / WEIGHTS)[name], array)


def test_targets_are_saved_resolved(tmp_path):
    def targets(**values):
        saved(tmp_path / "t", **values)
        return LoraConfig.from_pretrained(tmp_path / "t").target_modules

    assert targets(target_modules=["q_proj", "down_proj"]) == ["down_proj", "q_proj"]
    assert targets(target_modules="all-linear") == ["down_proj", "k_proj", "q_proj"]
    assert targets(target_modules=r".*1\.self_attn\.q_proj") == ["model.layers.1.self_attn.q_proj"]
    assert targets(target_modules=["q_proj"], layers_to_transform=[1]) == ["q_proj"]
    assert targets(target_modules=["layers.0.down_proj", "q_proj"]) == [
        "model.layers.0.down_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]  # fmt: skip


def test_the_config_is_kept_otherwise(tmp_path):
    config = LoraConfig(r=4, lora_alpha=2.5, target_modules=["q_proj"], lora_dropout=0.1, use_rslora=True,
                        task_type="CAUSAL_LM", init_lora_weights="gaussian", revision="main")  # fmt: skip
    model = TinyModel()
    inject(model, config)
    save_adapter(model, tmp_path / "a", config, base_model_name_or_path="base")
    config.base_model_name_or_path = "base"
    assert LoraConfig.from_pretrained(tmp_path / "a") == config
    keys = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert "use_dora" not in keys and keys["peft_type"] == "LORA"


def test_saving_again_keeps_the_other_files(tmp_path):
    model, config = saved(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    save_adapter(model, tmp_path / "a", config)
    assert (tmp_path / "a" / "tokenizer.json").exists()


def test_loading_is_strict_and_lists_everything_at_once(tmp_path):
    saved(tmp_path / "a")
    q = "base_model.model.model.layers.0.self_attn.q_proj"

    def break_it(t):
        t["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = t[f"{q}.lora_A.weight"]
        t["base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight"] = t.pop(f"{q}.lora_B.weight")
        t["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"] = np.zeros((4, 16), np.float32)
        t["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"] = np.zeros((8, 4), np.float32)
        t["base_model.model.model.layers.1.down_proj.lora_A.weight"] = np.zeros((4, 23), np.float32)
        t["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"] = np.zeros((16, 5), np.float32)
        t["base_model.model.lm_head.weight"] = np.zeros((20, 16), np.float32)
        t[f"{q}.lora_magnitude_vector"] = np.zeros(16, np.float32)

    rewrite(tmp_path / "a", break_it)
    model = TinyModel()
    with pytest.raises(AdapterError) as error:
        load_adapter(model, tmp_path / "a")
    text = str(error.value)
    for line in (
        "extra key base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight (4, 16) (the model has no such",
        f"missing key {q}.lora_B.weight",
        "extra key base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight (8, 4)",
        "wrong shape base_model.model.model.layers.1.down_proj.lora_A.weight: (4, 23) in the file, (r, 24) in",
        "wrong shape base_model.model.model.layers.1.self_attn.q_proj: rank 4 in lora_A, 5 in lora_B",
        "extra key base_model.model.lm_head.weight (20, 16)",
        f"{q}.lora_magnitude_vector (16,) (DoRA: not supported yet)",
    ):
        assert line in text
    assert not lora_layers(model) and "TinyModel; nothing was loaded" in text


def test_a_missing_layer_alone_is_an_error_and_strict_false_says_what_it_ignores(tmp_path):
    saved(tmp_path / "a")

    def drop(t):
        for half in "AB":
            del t[f"base_model.model.model.layers.0.down_proj.lora_{half}.weight"]
        t["extra"] = np.zeros(3, np.float32)

    rewrite(tmp_path / "a", drop)
    with pytest.raises(AdapterError, match=r"missing key base_model.model.model.layers.0.down_proj.lora_A.weight"):
        load_adapter(TinyModel(), tmp_path / "a")
    model = TinyModel()
    with pytest.warns(UserWarning, match="ignored because strict=False"):
        load_adapter(model, tmp_path / "a", strict=False)
    assert len(lora_layers(model)) == 3


@pytest.mark.parametrize(
    ("cut", "add", "text"),
    [
        ("base_model.model.model.", "base_model.model.", "'model.' was added"),
        ("base_model.model.", "base_model.model.inner.", "'inner.' was removed"),
        ("base_model.model.", "", "lack the prefix 'base_model.model.'"),
    ],
)
@pytest.mark.parametrize("targets", [["q_proj"], r".*layers\.1\..*q_proj", ["model.layers.1.self_attn.q_proj"]])
def test_a_uniform_prefix_is_mapped_with_a_warning(tmp_path, cut, add, text, targets):
    model, _ = saved(tmp_path / "a", target_modules=targets)
    rewrite(tmp_path / "a", lambda t: {add + name.removeprefix(cut): a for name, a in t.items()})
    again = TinyModel()
    with pytest.warns(UserWarning, match=text):
        load_adapter(again, tmp_path / "a")
    assert np.array_equal(logits(again), logits(model))


def test_a_copy_of_the_bases_weight_is_accepted_if_it_is_one(tmp_path):
    """PEFT writes lm_head.base_layer.weight beside an adapter on lm_head."""
    model, _ = saved(tmp_path / "a", target_modules=["lm_head"])
    weight = model.lm_head.weight.data
    rewrite(tmp_path / "a", lambda t: t.update({"base_model.model.lm_head.base_layer.weight": weight}))
    again = TinyModel()
    load_adapter(again, tmp_path / "a")
    assert np.array_equal(logits(again), logits(model))
    rewrite(tmp_path / "a", lambda t: t.update({"base_model.model.lm_head.base_layer.weight": weight + 1}))
    with pytest.raises(AdapterError, match=r"lm_head.base_layer.weight .* \(differs from the base's weight\)"):
        load_adapter(TinyModel(), tmp_path / "a")


def test_uniform_prefix():
    have = {"model.a.q", "model.b.q"}
    assert uniform_prefix(["a.q", "b.q"], have) == ("", "model.")
    assert uniform_prefix(["x.model.a.q"], have) == ("x.", "")
    assert uniform_prefix(["model.a.q"], have) is None  # nothing to do
    assert uniform_prefix(["a.q", "c.q"], have) is None  # not uniform
    assert uniform_prefix(["q"], have) is None  # two ways


def test_ranks_come_from_the_tensors(tmp_path):
    model, config = saved(tmp_path / "a")
    wrong = LoraConfig(**{**config.to_dict(), "r": 3})
    wrong.save_pretrained(tmp_path / "a")
    again = TinyModel()
    with pytest.warns(UserWarning, match="the rank 3, its tensors have 4"):
        report = load_adapter(again, tmp_path / "a")
    assert np.array_equal(logits(again), logits(model))  # the scale too: alpha / 4
    save_adapter(again, tmp_path / "b", report.config)
    third = TinyModel()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_adapter(third, tmp_path / "b")  # what is saved describes itself
    assert np.array_equal(logits(third), logits(model))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_files_become_float32_parameters(tmp_path, dtype):
    saved(tmp_path / "a")
    rewrite(tmp_path / "a", lambda t: {n: a.astype(dtype) for n, a in t.items()})
    model = TinyModel()
    load_adapter(model, tmp_path / "a", trainable=True)
    adapters = [m.adapters["default"] for m in lora_layers(model).values()]
    assert all(p.dtype == np.float32 and p.requires_grad for m in adapters for p in (m.A, m.B))


@pytest.mark.parametrize(
    ("value", "text"),
    [(np.full((16, 4), np.nan, np.float32), "not finite"), (np.zeros((16, 4), np.int64), "wrong kind"),
     (np.zeros((16, 4, 1), np.float32), "wrong kind")],
)  # fmt: skip
def test_values_that_are_no_weights(tmp_path, value, text):
    saved(tmp_path / "a")
    rewrite(tmp_path / "a", lambda t: t.update({"base_model.model.model.layers.0.down_proj.lora_B.weight": value}))
    with pytest.raises(AdapterError, match=text):
        load_adapter(TinyModel(), tmp_path / "a")


def test_missing_files_and_an_empty_file(tmp_path):
    with pytest.raises(AdapterError, match=r"adapter_config.json does not exist"):
        load_adapter(TinyModel(), tmp_path)
    LoraConfig(target_modules=["FAKE"]).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors does not exist"):
        load_adapter(TinyModel(), tmp_path)
    save_file({}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(AdapterError, match="has no LoRA tensors"):
        load_adapter(TinyModel(), tmp_path)


KINDS = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "rank_pattern": {"embed_tokens": 2}},
    "tables": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "biases": {"bias": "all", "target_modules": ["k_proj"]},
    "lora_only": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_saved_and_loaded_whole(tmp_path, name):
    model, _ = saved(tmp_path / "a", **KINDS[name])
    again = TinyModel()
    report = load_adapter(again, tmp_path / "a")
    assert np.array_equal(logits(again), logits(model))
    save_adapter(again, tmp_path / "b", report.config)
    first, second = load_file(tmp_path / "a" / WEIGHTS), load_file(tmp_path / "b" / WEIGHTS)
    assert set(first) == set(second) and all(np.array_equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_strict_about_each_of_its_keys(tmp_path, name):
    saved(tmp_path / "a", **KINDS[name])
    file = tmp_path / "a" / WEIGHTS
    tensors = {key: np.array(a) for key, a in load_file(file).items()}
    for key, array in tensors.items():
        save_file({k: a for k, a in tensors.items() if k != key}, file, metadata={"format": "pt"})
        with pytest.raises(AdapterError, match=f"missing key {key}"):
            load_adapter(TinyModel(), tmp_path / "a")
        for extra in (key.replace("layers.0", "layers.7"), key.replace("lm_head", "ml_head")):
            if extra not in tensors:
                save_file({**tensors, extra: array}, file, metadata={"format": "pt"})
                with pytest.raises(AdapterError, match=r"extra key|missing key"):
                    load_adapter(TinyModel(), tmp_path / "a")
        bad = np.concatenate([array] * 3, axis=-1 if key.endswith(("_A", "A.weight", "bias")) else 0)
        save_file({**tensors, key: bad}, file, metadata={"format": "pt"})
        with pytest.raises(AdapterError, match=r"wrong shape .* in the (file|model)"):
            load_adapter(TinyModel(), tmp_path / "a")


def test_a_key_of_another_kind_than_the_config_says_is_extra(tmp_path):
    saved(tmp_path / "a", target_modules=["q_proj"])
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    extra = {f"{q}.lora_B.bias": 16, f"{q}.base_layer.bias": 16, "base_model.model.lm_head.weight": 20}
    for key, n in extra.items():
        model, path = TinyModel(), tmp_path / "a"
        before = (path / WEIGHTS).read_bytes()
        rewrite(path, lambda t, key=key, n=n: t.update({key: np.zeros(n, np.float32)}))
        with pytest.raises(AdapterError, match=f"extra key {key}"):
            load_adapter(model, path)
        (path / WEIGHTS).write_bytes(before)


def test_canonical_export_refuses_what_servers_cannot_add_up(tmp_path):
    saved(tmp_path / "a", modules_to_save=["lm_head"])
    with pytest.raises(AdapterError, match=r"lm_head.weight cannot be part of it: it is no product"):
        export_canonical(tmp_path / "a", tmp_path / "out")


def test_a_vocabulary_of_another_size_is_an_error_with_both_numbers(tmp_path):
    saved(tmp_path / "a", modules_to_save=["embed_tokens"])
    key = "base_model.model.model.embed_tokens.weight"
    rewrite(tmp_path / "a", lambda t: t.update({key: np.zeros((18, 16), np.float32)}))
    with pytest.raises(AdapterError, match=r"embed_tokens.weight: \(18, 16\) in the file, \(20, 16\) in the model"):
        load_adapter(TinyModel(), tmp_path / "a")


def test_saving_an_adapter_that_is_not_there(tmp_path):
    with pytest.raises(AdapterError, match="the model has no adapter 'x'"):
        save_adapter(TinyModel(), tmp_path, LoraConfig(), "x")


@pytest.mark.parametrize(
    "values",
    [
        {}, {"use_rslora": True}, {"lora_alpha": 2.5}, {"lora_alpha": 0.1}, {"alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {"q_proj": 2}, "use_rslora": True}, {"target_modules": r".*1\..*"},
    ],
)  # fmt: skip
def test_canonical_export_means_the_same_adapter(tmp_path, values):
    model, _ = saved(tmp_path / "a", **values)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    (tmp_path / "a" / "added_tokens.json").write_text("{}")
    config = export_canonical(tmp_path / "a", tmp_path / "out")
    assert type(config.lora_alpha) is int and not config.use_rslora
    assert config.rank_pattern == {} == config.alpha_pattern and isinstance(config.target_modules, list)
    again = TinyModel()
    load_adapter(again, tmp_path / "out")
    assert np.abs(logits(again) - logits(model)).max() <= 1e-5 * np.abs(logits(model)).max()
    assert (tmp_path / "out" / "tokenizer.json").exists() and not (tmp_path / "out" / "added_tokens.json").exists()
    # readers that know only r, lora_alpha and the tensors
    a, b = read_adapter(tmp_path / "out").pairs["model.layers.1.self_attn.q_proj"]
    m = lora_layers(model)["model.layers.1.self_attn.q_proj"].adapters["default"]
    assert a.shape[0] == config.r
    assert np.abs(config.lora_alpha / config.r * b @ a - m.delta()).max() <= 1e-5 * np.abs(m.delta()).max()


def test_canonical_export_of_a_plain_adapter_keeps_the_bits(tmp_path):
    saved(tmp_path / "a")
    export_canonical(tmp_path / "a", tmp_path / "out")
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()


def test_canonical_export_refuses_what_it_cannot_read_in_full(tmp_path):
    saved(tmp_path / "a")
    rewrite(tmp_path / "a", lambda t: t.update({"surprise": np.zeros(1, np.float32)}))
    with pytest.raises(AdapterError, match="extra key surprise"):
        export_canonical(tmp_path / "a", tmp_path / "out")
    write_adapter(tmp_path / "b", LoraConfig(target_modules=["q_proj"]), {})
    with pytest.raises(AdapterError, match="has no LoRA tensors"):
        export_canonical(tmp_path / "b", tmp_path / "out")
    assert not (tmp_path / "out").exists()
