"""Several adapters of several kinds in one model: which act, which train, which row gets which."""

import copy
import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from adapters import LoraConfig, PeftModel, TrainedCopy, adapter_layers, get_peft_model, set_active
from peft_core import Tensor, no_grad, ops, recompute
from peft_core.errors import AdapterError, ConfigError
from peft_core.nn import Module, Parameter
from peft_core.optim import AdamW
from support.adapter_models import TinyModel, logits, randomize, snapshot

Q = LoraConfig(r=2, target_modules=["q_proj"])
K = LoraConfig(r=3, target_modules=["k_proj"])
HEAD = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
KINDS = {
    "plain": {}, "head": {"modules_to_save": ["lm_head"]}, "biases": {"bias": "all"}, "own": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True}, "table": {"target_modules": ["embed_tokens"]},
    "half": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_rslora": True},
}  # fmt: skip


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Rows(Module):
    """TinyModel on rectangles, with an output such as a causal LM's and a greedy generate()."""

    def __init__(self):
        self.inner = TinyModel()

    def forward(self, input_ids, scale=None):
        y = ops.reshape(self.inner(np.asarray(input_ids).reshape(-1)), shape=(*np.shape(input_ids), -1))
        return Output(None, y)

    def generate(self, input_ids, max_new_tokens=2, row_numbers=None, on_token=None, do_sample=False):
        ids = np.asarray(input_ids)
        for _ in range(max_new_tokens):
            with no_grad():
                new = self(ids).logits.data[:, -1].argmax(-1)
            for row, token in enumerate(new):
                if on_token:
                    on_token(row, int(token))
            ids = np.concatenate([ids, new[:, None]], 1)
        if do_sample:  # a stand-in for streams: what a row draws depends on its number
            ids = np.concatenate([ids, np.asarray(row_numbers)[:, None]], 1)
        return ids


def adapted(**configs):
    model = PeftModel(TinyModel())
    for name, config in configs.items():
        model.add_adapter(name, config)
    return randomize(model)


def trainable(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_starts_as_the_base_and_trains_alone(name, dtype):
    base = TinyModel(dtype)
    before, was = logits(base), snapshot(base)
    model = get_peft_model(base, LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **KINDS[name]}))
    assert np.array_equal(logits(model), before)
    assert all(p.dtype == np.float32 for p in model.parameters() if p.requires_grad)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        loss = ops.cross_entropy(model(np.array([1, 2, 3])), np.array([2, 3, 4]))
        loss.backward()
        optimizer.step()
    assert np.abs(logits(model) - before).max() > 1e-3
    with model.disable_adapter():
        assert np.array_equal(logits(model), before)
    assert np.array_equal(logits(model.unload()), before)
    assert all(np.array_equal(array, was[key]) for key, array in snapshot(base).items())


@pytest.mark.parametrize("name", KINDS)
def test_merged_is_the_adapted_model(name):
    model = randomize(get_peft_model(TinyModel(), LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **KINDS[name]})))
    want = logits(model)
    merged = model.merge_and_unload()
    assert not adapter_layers(merged) and model.peft_config == {} and not trainable(merged)
    assert np.abs(logits(merged) - want).max() <= 1e-5 * np.abs(want).max()


def test_gradients_of_an_embeddings_adapter_are_the_formulas():
    model = adapted(a=LoraConfig(r=2, lora_alpha=6, target_modules=["embed_tokens"]))
    layer = model.base_model.model.embed_tokens
    low_rank, ids = layer.adapters["a"], np.array([3, 3, 5])
    y = layer(ids)
    gy = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    y.backward(gy)
    a, b = low_rank.A.data, low_rank.B.data
    want_a = np.zeros_like(a)
    for n, i in enumerate(ids):
        want_a[:, i] += 3.0 * b.T @ gy[n]
    assert np.abs(y.data - (layer.weight.data[ids] + 3.0 * a[:, ids].T @ b.T)).max() < 1e-5
    assert np.abs(low_rank.A.grad.data - want_a).max() < 1e-4
    assert np.abs(low_rank.B.grad.data - 3.0 * gy.T @ a[:, ids].T).max() < 1e-4


def test_only_b_trains_where_a_was_loaded_frozen_and_b_trainable(tmp_path):
    adapted(default=HEAD).save_pretrained(tmp_path / "a")
    model = PeftModel.from_pretrained(TinyModel(), tmp_path / "a", "A")
    model.load_adapter(tmp_path / "a", "B", is_trainable=True)
    names = trainable(model)
    assert len(names) == 5 and all(".adapters.B." in name for name in names)
    for active in ("A", "B", []):
        model.set_adapter(active)
        assert trainable(model) == names
    assert [name for name, c in model.peft_config.items() if not c.inference_mode] == ["B"]


def test_inference_mode_injects_frozen():
    model = get_peft_model(TinyModel(), LoraConfig(r=2, target_modules=["q_proj"], inference_mode=True))
    assert trainable(model) == []


def test_two_copies_of_one_module_are_never_active_together():
    model = adapted(a=HEAD, b=HEAD, c=K)
    assert model.active_adapters == ["a"]
    with pytest.raises(ConfigError, match=r"adapters \['a', 'b'\] both train a copy of lm_head; expected one of them"):
        model.set_adapter(["a", "b"])
    assert model.active_adapters == ["a"]
    model.set_adapter(["b", "c"])
    both = logits(model)
    model.set_adapter("b")
    assert np.abs(logits(model) - both).max() > 1e-3
    with pytest.raises(ConfigError, match="both train a copy of lm_head"):
        model.merge_and_unload(adapter_names=["a", "b"])
    with pytest.raises(ConfigError, match="adapter_names is 'a'; expected a list of adapter names"):
        model.merge_and_unload(adapter_names="a")
    with pytest.raises(ConfigError, match=r"adapter .* is active and trains a copy of lm_head already"):
        model.load_adapter(_saved(model), "d", active=True)


def _saved(model):
    import tempfile

    directory = tempfile.mkdtemp()
    model.save_pretrained(directory, selected_adapters=["a"])
    return f"{directory}/a"


def test_merging_one_active_adapter_leaves_the_other_active():
    model = adapted(a=HEAD, b=K)
    model.set_adapter(["a", "b"])
    want = logits(model)
    base = model.merge_and_unload(adapter_names=["a"])
    assert model.active_adapters == ["b"] == list(model.peft_config)
    assert np.abs(logits(base) - want).max() <= 1e-5 * np.abs(want).max()
    with model.disable_adapter():
        assert np.abs(logits(model) - want).max() > 1e-2


def test_a_copy_that_is_active_is_not_merged_away_under_another():
    model = adapted(a=HEAD, b=HEAD)
    with pytest.raises(ConfigError, match=r"adapter \['a'\] is active and trains a copy of lm_head, as \['b'\] do"):
        model.merge_and_unload(adapter_names=["b"])


def test_delete_adapter_takes_every_kind_away():
    model = adapted(a=HEAD, b=LoraConfig(r=2, target_modules=["embed_tokens"]))
    for name in ("b", "a"):
        model.delete_adapter(name)
    assert not adapter_layers(model) and np.array_equal(logits(model), logits(TinyModel()))


def test_a_name_said_twice_is_applied_once():
    model = adapted(a=HEAD)
    want = logits(model)
    model.set_adapter(["a", "a"])
    assert np.array_equal(logits(model), want)
    merged = model.merge_and_unload(adapter_names=["a", "a"])
    assert np.abs(logits(merged) - want).max() <= 1e-5 * np.abs(want).max()


def test_an_adapter_that_comes_while_the_others_are_disabled_is_not_half_active():
    model = adapted(a=Q)
    want = logits(model)
    with model.disable_adapter():
        model.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    assert model.active_adapters == ["a"] and np.array_equal(logits(model), want)


def test_an_adapter_deleted_while_disabled_is_gone():
    model = adapted(a=Q, b=K)
    model.set_adapter(["a", "b"])
    with model.disable_adapter():
        model.delete_adapter("a")
    assert model.active_adapters == ["b"]
    both = logits(model)
    model.set_adapter("b")
    assert np.array_equal(logits(model), both)


def test_what_trains_is_set_apart_from_what_acts():
    model = adapted(a=HEAD, b=K)
    model.set_requires_grad("a", False)
    assert model.active_adapters == ["a"] and all(".adapters.b." in name for name in trainable(model))
    model.set_requires_grad(["a", "b"])
    assert len(trainable(model)) == 9 and "lm_head.base_layer.weight" not in "".join(trainable(model))
    with pytest.raises(ConfigError, match=r"adapter \['x'\] is not in the model; expected names among \['a', 'b'\]"):
        model.set_requires_grad("x")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"target_modules": ["q_proj"]}, r"target_modules 'q_proj' matches model.layers.0.self_attn.q_proj inside"),
        ({"target_modules": "all-linear"}, r"target_modules 'all-linear' matches model.layers.0.self_attn.q_proj in"),
        (
            {"target_modules": ["lm_head"], "modules_to_save": ["q_proj"]},
            r"modules_to_save 'q_proj' matches .*0.*q_proj",
        ),
        (
            {"target_modules": ["lm_head"], "bias": "all"},
            r"bias 'all' matches model.layers.0.self_attn.q_proj.bias ins",
        ),
    ],
)
def test_nothing_is_dropped_inside_a_module_that_another_adapter_trains(values, text):
    model = adapted(a=LoraConfig(r=2, target_modules=["embed_tokens"], modules_to_save=["layers.0"]))
    with pytest.raises(ConfigError, match=text + r".* which adapters \['a'\] train as a whole"):
        model.add_adapter("b", LoraConfig(r=2, **values))
    model.add_adapter("c", LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[1]))
    model.add_adapter("d", LoraConfig(r=2, target_modules=["q_proj"], exclude_modules=[
        "layers.0.self_attn.q_proj"]))  # fmt: skip
    for name in "cd":
        model.delete_adapter(name)
    model.add_adapter("e", LoraConfig(r=2, target_modules=["lm_head"], modules_to_save=["layers.0"], bias="all"))


def test_a_model_with_adapters_can_be_copied_and_pickled():
    model = adapted(a=HEAD, b=LoraConfig(r=2, target_modules=["embed_tokens"]))
    want = logits(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert np.array_equal(logits(again), want) and again.active_adapters == ["a"]
        randomize(again, seed=9)
    assert np.array_equal(logits(model), want)


def test_the_original_stays_visible_behind_a_copy():
    model = adapted(a=HEAD)
    head = model.base_model.lm_head
    assert isinstance(head, TrainedCopy) and head.in_features == 16
    assert head.weight is head.adapters["a"].weight
    set_active(model, [])
    assert head.weight is head.base_layer.weight
    with pytest.raises(AttributeError, match="no_such"):
        _ = head.no_such


def test_recompute_sees_the_copy_of_the_forward():
    def gradient(again):
        model = adapted(a=HEAD, b=HEAD)
        head = model.base_model.lm_head
        x = Tensor(np.ones((2, 16), np.float32))
        y = recompute(head, x) if again else head(x)
        model.set_adapter("b")
        y.backward(np.ones(y.shape, np.float32))
        assert head.adapters["b"].weight.grad is None
        return head.adapters["a"].weight.grad.data

    assert np.array_equal(gradient(True), gradient(False))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("how", ["target_modules", "modules_to_save"])
def test_a_tied_weight_is_untied_by_merging_and_not_changed_twice(target, how):
    base = TinyModel(tied=True)
    base.config = type("Config", (), {"tie_word_embeddings": True})()
    base.get_input_embeddings = lambda: base.model.embed_tokens
    names = {"target_modules": ["q_proj"], **{how: [target]}}
    model = randomize(get_peft_model(base, LoraConfig(r=2, **names)))
    want = logits(model)
    with pytest.warns(UserWarning, match="the head and the embedding were tied; the merged model has two weights"):
        model.merge_and_unload()
    assert np.abs(logits(base) - want).max() <= 1e-5 * np.abs(want).max()
    assert base.config.tie_word_embeddings is False and isinstance(base.lm_head.weight, Parameter)


def test_a_bias_that_no_layer_has_is_said():
    with pytest.warns(UserWarning, match="bias is 'lora_only', but TinyModel has no such bias"):
        get_peft_model(TinyModel(), LoraConfig(r=2, target_modules=["k_proj"], bias="lora_only"))


@pytest.mark.parametrize("name", ["__base__", "/tmp", "a/b", "a\\b", ".."])
def test_a_name_that_is_reserved_or_leads_elsewhere_on_the_disk(name):
    with pytest.raises(ConfigError, match=r"adapter name .* cannot be used; expected a text without a dot or a slash"):
        get_peft_model(TinyModel(), Q, name)


# ------------------------------------------------------------------------------------------------ a choice per row

IDS = np.random.default_rng(3).integers(0, 20, (4, 6))
CHOICE = ["a", "__base__", "b", "a"]


def rows_model():
    model = PeftModel(Rows())
    model.add_adapter("a", HEAD)
    model.add_adapter("b", LoraConfig(r=2, target_modules=["k_proj", "embed_tokens"]))
    return randomize(model).eval()


def alone(model, name, ids):
    model.set_adapter([] if name == "__base__" else name)
    with no_grad():
        return model(ids).logits.data


def test_each_row_is_computed_with_its_own_adapter():
    model = rows_model()
    got = model(IDS, adapter_names=CHOICE)
    assert got.loss is None and model.active_adapters == ["a"]
    for row, name in enumerate(CHOICE):
        assert np.abs(got.logits.data[row] - alone(model, name, IDS[row : row + 1])[0]).max() < 1e-5
    assert len({np.round(alone(model, name, IDS[:1]).sum(), 3) for name in set(CHOICE)}) == 3


def test_each_row_is_continued_with_its_own_adapter():
    model, heard = rows_model(), []
    out = model.generate(IDS, adapter_names=CHOICE, max_new_tokens=3, on_token=lambda row, token: heard.append(row))
    assert out.shape == (4, 9) and sorted(heard) == sorted([*range(4)] * 3)
    drawn = model.generate(IDS, adapter_names=CHOICE, max_new_tokens=3, do_sample=True)
    assert drawn[:, -1].tolist() == [0, 1, 2, 3]
    for row, name in enumerate(CHOICE):
        model.set_adapter([] if name == "__base__" else name)
        assert np.array_equal(out[row], model.generate(IDS[row : row + 1], max_new_tokens=3)[0])


@pytest.mark.parametrize(
    ("names", "options", "text"),
    [
        (["a", "x", "b", "a"], {}, r"adapter_names holds \['x'\]; expected names among \[.*'__base__'\]"),
        (["a", "b"], {}, r"adapter_names has 2 entries and the inputs have \[4\] rows; expected"),
        ("a", {}, "adapter_names is 'a'; expected a list with one adapter, or '__base__', for each row"),
        (CHOICE, {"labels": IDS}, "adapter_names and labels were both given"),
    ],
)
def test_a_choice_that_makes_no_sense(names, options, text):
    with pytest.raises(ConfigError, match=text):
        rows_model()(IDS, adapter_names=names, **options)


@pytest.mark.parametrize("ids", [IDS[:1], IDS[:1].tolist(), IDS[0], IDS[:3]])
def test_rows_that_are_not_as_many_as_the_names(ids):
    with pytest.raises(ConfigError, match="adapter_names has 4 entries and the inputs have"):
        rows_model()(ids, adapter_names=CHOICE)
    with pytest.raises(ConfigError, match=r"adapter_names has 4 entries for .* rows; expected one for each row"):
        rows_model().generate(ids, adapter_names=CHOICE)


def test_a_choice_per_row_is_for_inference():
    with pytest.raises(ConfigError, match="adapter_names was given while the model is training"):
        rows_model().train()(IDS, adapter_names=CHOICE)


def test_a_frozen_copy_that_overflows_is_an_error():
    model = get_peft_model(TinyModel("float16"), HEAD)
    model.base_model.lm_head.adapters["default"].weight.data[0, 0] = 1e6
    with pytest.raises(AdapterError, match="merging lm_head gives NaN or infinity"):
        model.merge_and_unload()
