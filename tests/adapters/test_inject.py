import numpy as np
import pytest

from adapters import LoraConfig, LoraLinear, set_active
from adapters.inject import active_adapters, adapter_names, inject, lora_layers, set_trainable
from adapters.merge import merge
from peft_core.errors import ConfigError
from peft_core.optim import AdamW
from peft_core.random import Generator
from support.adapter_models import TinyModel, logits, randomize, snapshot

CONFIG = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def trainable(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("init", [True, "gaussian"])
def test_injected_equals_base_bit_for_bit(dtype, init):
    model = TinyModel(dtype)
    before = logits(model)
    inject(model, LoraConfig(init_lora_weights=init, **CONFIG))
    assert np.array_equal(logits(model), before)


def test_random_b_does_change_the_output():
    model = TinyModel()
    before = logits(model)
    inject(model, LoraConfig(init_lora_weights=False, **CONFIG))
    assert np.abs(logits(model) - before).max() > 1e-2


def test_only_the_adapter_trains_and_the_report_says_so():
    model = TinyModel()
    total = sum(p.numel() for p in model.parameters())
    report = inject(model, LoraConfig(**CONFIG))
    assert trainable(model) == [f"{path}.adapters.default.{half}" for path in report.paths for half in "AB"]
    added = 2 * (4 * (16 + 16) + 4 * (24 + 16))
    assert (report.trainable, report.total) == (added, total + added)
    assert report.counts == {"q_proj": 2, "down_proj": 2} and report.adapter_name == "default"


def test_training_leaves_the_base_unchanged():
    model = TinyModel()
    inject(model, LoraConfig(**CONFIG))
    randomize(model)
    before = snapshot(model)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        y = model(np.array([1, 2, 3]))
        y.backward(np.ones(y.shape, np.float32))
        optimizer.step()
    for name, array in snapshot(model).items():
        assert np.array_equal(array, before[name]) == (".adapters." not in name), name


def test_ranks_alphas_and_rslora():
    model = TinyModel()
    config = LoraConfig(lora_alpha=6, use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"down_proj": 5}, r=9,
                        target_modules=["q_proj", "down_proj"])  # fmt: skip
    inject(model, config)
    for path, layer in lora_layers(model).items():
        m = layer.adapters["default"]
        assert (m.A.shape[0], m.scaling) == ((4, 3.0) if "q_proj" in path else (9, 5 / 3))


def test_seeded_by_the_generator():
    def first(seed):
        model = TinyModel()
        inject(model, LoraConfig(**CONFIG), generator=Generator(seed))
        return next(iter(lora_layers(model).values())).adapters["default"].A.data

    assert np.array_equal(first(1), first(1)) and not np.array_equal(first(1), first(2))


def test_several_adapters_by_name():
    model = TinyModel()
    inject(model, LoraConfig(**CONFIG), "one")
    inject(model, LoraConfig(r=2, target_modules=["q_proj", "k_proj"]), "two")
    assert adapter_names(model) == ["one", "two"] == active_adapters(model)
    randomize(model)
    both = logits(model)
    set_active(model, ["two"])
    two = logits(model)
    set_active(model, [])
    base = logits(model)
    assert np.array_equal(base, logits(TinyModel()))
    assert np.abs(both - two).max() > 1e-3 and np.abs(two - base).max() > 1e-3
    assert sum("two" in name for name in trainable(model)) == 8  # activity says nothing about trainability
    inside = [m for m in model.modules() if isinstance(m, LoraLinear) and isinstance(m.base_layer, LoraLinear)]
    assert not inside


@pytest.mark.parametrize("name", ["", "a.b", None])
def test_a_name_that_cannot_be_a_path_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be used"):
        inject(TinyModel(), LoraConfig(**CONFIG), name)


def test_a_taken_name_and_an_unknown_name():
    model = TinyModel()
    inject(model, LoraConfig(**CONFIG))
    with pytest.raises(ConfigError, match="adapter 'default' exists already"):
        inject(model, LoraConfig(**CONFIG))
    with pytest.raises(ConfigError, match=r"adapter \['x'\] is not in the model; expected names among \['default'\]"):
        set_active(model, ["x"])


def test_a_failed_injection_changes_nothing():
    model = TinyModel()
    with pytest.raises(ConfigError):
        inject(model, LoraConfig(target_modules=["q_proj", "FAKE"]))
    assert not lora_layers(model) and len(trainable(model)) == len(list(model.parameters()))


def test_eval_mode_is_taken_over():
    model = TinyModel().eval()
    inject(model, LoraConfig(lora_dropout=0.5, **CONFIG))
    randomize(model)
    assert np.array_equal(logits(model), logits(model))


def test_the_base_is_read_only_where_nobody_else_holds_it():
    model = TinyModel()
    held = model.lm_head.weight.data
    inject(model, LoraConfig(**CONFIG))
    for name, parameter in model.named_parameters():
        alone = not parameter.requires_grad and name != "lm_head.weight"
        assert parameter.data.flags.writeable != alone, name
    assert held.flags.writeable and held is model.lm_head.weight.data


def test_a_frozen_adapter_is_read_only_until_it_trains_again():
    model = TinyModel()
    inject(model, LoraConfig(**CONFIG))
    own = [p for name, p in model.named_parameters() if "default" in name]
    for trains in (False, True, False):
        set_trainable(model, ["default"], trains)
        assert len(own) == 8 and all(p.data.flags.writeable == trains for p in own)


def test_a_merged_copy_is_read_only():
    model = TinyModel()
    inject(model, LoraConfig(modules_to_save=["lm_head"], **CONFIG))
    merge(model)
    assert not model.lm_head.weight.data.flags.writeable
