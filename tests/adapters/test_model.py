import numpy as np
import pytest

from adapters import LoraConfig, PeftModel, get_peft_model
from peft_core.errors import AdapterError, ConfigError
from support.adapter_models import TinyModel, logits, randomize

CONFIG = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])


def trainable(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_a_tutorial_runs(tmp_path, capsys):
    model = get_peft_model(TinyModel(), CONFIG)
    model.print_trainable_parameters()
    n, total = model.get_nb_trainable_parameters()
    assert n == 576
    assert capsys.readouterr().out == (
        f"trainable params: {n:,d} || all params: {total:,d} || trainable%: {100 * n / total:.4f}\n"
    )
    randomize(model)
    want = logits(model)
    model.save_pretrained(tmp_path / "a")
    again = PeftModel.from_pretrained(TinyModel(), tmp_path / "a")
    assert np.array_equal(logits(again), want) and trainable(again) == []
    with again.disable_adapter():
        assert np.array_equal(logits(again), logits(TinyModel()))
    assert np.array_equal(logits(again), want)
    merged = again.merge_and_unload()
    assert isinstance(merged, TinyModel) and again.merge_report.n_changed == 4
    assert np.abs(logits(merged) - want).max() <= 1e-5 * np.abs(want).max()


def test_disable_adapter_restores_after_an_error():
    model = randomize(get_peft_model(TinyModel(), CONFIG))
    want = logits(model)
    with pytest.raises(KeyError), model.disable_adapter():
        raise KeyError
    assert np.array_equal(logits(model), want)


def test_attributes_of_the_base_are_forwarded():
    base = TinyModel()
    model = get_peft_model(base, CONFIG)
    assert model.lm_head is base.lm_head and model.get_base_model() is base
    assert model.get_output_embeddings() is base.lm_head
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing
    model.eval()
    assert not base.lm_head.training


def test_only_the_adapter_loaded_as_trainable_trains(tmp_path):
    randomize(get_peft_model(TinyModel(), CONFIG)).save_pretrained(tmp_path / "a")
    model = PeftModel.from_pretrained(TinyModel(), tmp_path / "a", "A")
    model.load_adapter(tmp_path / "a", "B", is_trainable=True)
    assert model.active_adapters == ["A"] and model.active_adapter == "A"
    names = trainable(model)
    assert names and all(".adapters.B." in name for name in names)
    model.set_adapter("B")
    assert trainable(model) == names and model.active_adapters == ["B"]
    model.set_adapter(["A", "B"])
    assert trainable(model) == names


def test_several_adapters_are_saved_in_their_own_folders(tmp_path):
    model = get_peft_model(TinyModel(), CONFIG)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"]))
    assert model.active_adapters == ["default"]
    randomize(model)
    model.save_pretrained(tmp_path / "m")
    again = PeftModel.from_pretrained(TinyModel(), tmp_path / "m" / "other")
    model.set_adapter("other")
    assert np.array_equal(logits(again), logits(model))
    with pytest.raises(ConfigError, match="adapter 'x' is not in the model"):
        model.save_pretrained(tmp_path / "m", selected_adapters=["x"])
    with pytest.raises(ConfigError, match="selected_adapters is 'other'; expected a list of adapter names"):
        model.save_pretrained(tmp_path / "m", selected_adapters="other")
    with pytest.raises(ConfigError, match="safe_serialization is False; expected True: adapters are written as safe"):
        model.save_pretrained(tmp_path / "m", safe_serialization=False)
    model.save_pretrained(tmp_path / "some", safe_serialization=True, selected_adapters=["other"])
    assert [p.name for p in (tmp_path / "some").iterdir()] == ["other"]


def test_an_adapter_loaded_under_another_name_is_the_same_file(tmp_path):
    randomize(get_peft_model(TinyModel(), CONFIG)).save_pretrained(tmp_path / "a")
    PeftModel.from_pretrained(TinyModel(), tmp_path / "a", "renamed").save_pretrained(tmp_path / "b")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "b" / "renamed" / name).read_bytes().replace(b"true", b"false") == (
            tmp_path / "a" / name).read_bytes().replace(b"true", b"false")  # fmt: skip


def test_a_vocabulary_that_cannot_grow_says_what_to_do():
    text = (
        r"resize_token_embeddings is not supported: expected the vocabulary of the checkpoint: resize it with transform"
    )
    for model in (TinyModel(), get_peft_model(TinyModel(), CONFIG)):
        assert not hasattr(model, "resize_token_embeddings")
        with pytest.raises(AttributeError, match=text):
            model.resize_token_embeddings(100)


@pytest.mark.parametrize("name", ["merge_adapter", "unmerge_adapter", "add_weighted_adapter"])
def test_a_name_of_pefts_that_is_not_here_is_refused_with_the_way(name):
    model = get_peft_model(TinyModel(), CONFIG)
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=rf"{name} is not supported; expected (merge_and_unload|unload|set_ad)"):
        getattr(model, name)


def test_a_model_with_adapters_is_not_wrapped_again(tmp_path):
    model = get_peft_model(TinyModel(), CONFIG)
    for again in (lambda: get_peft_model(model, CONFIG, "b"), lambda: PeftModel.from_pretrained(model, tmp_path)):
        with pytest.raises(
            ConfigError, match=r"is a PeftModel already; expected .*\. Call its add_adapter\(\) or load_"
        ):
            again()


def test_delete_adapter():
    model = randomize(get_peft_model(TinyModel(), CONFIG))
    model.add_adapter("other", CONFIG)
    randomize(model)
    model.set_adapter("other")
    want = logits(model)
    model.set_adapter("default")
    with pytest.warns(UserWarning, match="adapter 'default' was the active one; 'other' is active now"):
        model.delete_adapter("default")
    assert model.active_adapters == ["other"] == list(model.peft_config) and np.array_equal(logits(model), want)
    model.set_adapter([])
    with pytest.raises(ConfigError, match="no adapter is active"):
        _ = model.active_adapter
    assert np.array_equal(logits(model), logits(TinyModel()))
    model.delete_adapter("other")
    assert "adapters" not in str([name for name, _ in model.named_modules()])
    with pytest.raises(ConfigError, match="adapter 'other' is not in the model"):
        model.delete_adapter("other")


def test_unload_gives_the_base_back():
    model = randomize(get_peft_model(TinyModel(), CONFIG))
    assert np.array_equal(logits(model.unload()), logits(TinyModel()))


def test_a_config_alone_is_not_an_adapter(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors does not exist"):
        PeftModel.from_pretrained(TinyModel(), tmp_path)


def test_the_base_is_remembered(tmp_path):
    base = TinyModel()
    base.name_or_path = "some/base"
    model = get_peft_model(base, CONFIG)
    assert model.peft_config["default"].base_model_name_or_path == "some/base"
    assert CONFIG.base_model_name_or_path is None  # the caller's config is not written to
