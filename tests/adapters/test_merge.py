import numpy as np
import pytest

from adapters import LoraConfig, LoraLinear, set_active
from adapters.inject import inject, lora_layers
from adapters.merge import merge
from peft_core.errors import AdapterError, ConfigError, ModelError
from support.adapter_models import TinyModel, logits, randomize, snapshot

CONFIG = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])


def adapted(dtype="float32", names=("default",), scale=0.3, seed=0):
    model = TinyModel(dtype, seed=seed)
    for name in names:
        inject(model, CONFIG, name)
    return randomize(model, scale=scale)


def by_hand(model, names):
    """W + scaling * B A in float64, per path: the reference that no merge code touches."""
    weights = {}
    for path, layer in lora_layers(model).items():
        w = layer.base_layer.weight.data.astype(np.float64)
        for m in (layer.adapters[n] for n in names):
            w = w + 16 / 4 * m.B.data.astype(np.float64) @ m.A.data.astype(np.float64)
        weights[path] = w
    return weights


def test_merged_is_the_base_with_the_delta_by_hand():
    model = adapted()
    want, before = by_hand(model, ["default"]), logits(model)
    report = merge(model)
    assert not lora_layers(model) and (report.n_targets, report.n_changed) == (4, 4)
    for path, w in want.items():
        assert np.abs(model.get_submodule(path).weight.data - w).max() <= 1e-6 * np.abs(w).max()
    after = logits(model)
    assert np.abs(after - before).max() <= 1e-5 * np.abs(before).max()
    assert np.abs(after - logits(TinyModel())).max() > 0.1  # and it is not the base
    assert report.lost < 1e-5


def test_merging_twice_is_merging_once():
    model = adapted()
    merge(model)
    once = snapshot(model)
    report = merge(model)
    assert report.n_targets == 0 and all(np.array_equal(a, once[n]) for n, a in snapshot(model).items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_weights_are_rounded_once(dtype):
    model = adapted(dtype)
    want = by_hand(model, ["default"])
    report = merge(model)
    for path, w in want.items():
        got = model.get_submodule(path).weight.data
        assert got.dtype.name == dtype
        once = w.astype(np.float32).astype(got.dtype)
        assert (got != once).mean() < 0.01  # float32 and float64 deltas round to the same half number
    assert 0 < report.lost < 0.05


def test_references_to_old_arrays_stay_valid():
    model = adapted()
    held = {path: layer.weight.data for path, layer in lora_layers(model).items()}
    copies = {path: array.copy() for path, array in held.items()}
    merge(model)
    for path, array in held.items():
        assert np.array_equal(array, copies[path])
        assert not np.shares_memory(array, model.get_submodule(path).weight.data)


def test_all_active_adapters_are_merged():
    model = adapted(names=("a", "b"))
    want, before = by_hand(model, ["a", "b"]), logits(model)
    merge(model)
    for path, w in want.items():
        assert np.abs(model.get_submodule(path).weight.data - w).max() <= 1e-6 * np.abs(w).max()
    assert np.abs(logits(model) - before).max() <= 1e-5 * np.abs(before).max()


def test_an_inactive_adapter_is_not_lost_unasked():
    model = adapted(names=("a", "b"))
    set_active(model, ["a"])
    want = by_hand(model, ["a"])
    with pytest.raises(AdapterError, match=r"adapters \['b'\] are not active and would be lost by merging"):
        merge(model)
    assert len(lora_layers(model)) == 4
    merge(model, ["a"])
    assert not lora_layers(model)
    for path, w in want.items():
        assert np.abs(model.get_submodule(path).weight.data - w).max() <= 1e-6 * np.abs(w).max()


def test_merging_one_of_two_active_adapters_leaves_the_output():
    model = adapted(names=("a", "b"))
    before = logits(model)
    merge(model, ["a"])
    assert all(isinstance(m, LoraLinear) and list(m.adapters) == ["b"] for m in lora_layers(model).values())
    assert len(lora_layers(model)) == 4
    assert np.abs(logits(model) - before).max() <= 1e-5 * np.abs(before).max()


@pytest.mark.parametrize("names", [["x"], []])
def test_an_unknown_choice(names):
    with pytest.raises(ConfigError, match="adapter_names is"):
        merge(adapted(), names)


def test_float16_overflow_is_an_error_and_changes_nothing():
    model = adapted("float16", scale=200.0)
    before = snapshot(model)
    with pytest.raises(AdapterError, match=r"gives NaN or infinity .* dtype float16"):
        merge(model)
    assert len(lora_layers(model)) == 4 and all(np.array_equal(a, before[n]) for n, a in snapshot(model).items())


def test_nan_in_the_adapter_is_an_error():
    model = adapted()
    next(iter(lora_layers(model).values())).adapters["default"].B.data[0, 0] = np.nan
    with pytest.raises(AdapterError, match=r"merging model.layers.0.self_attn.q_proj gives NaN"):
        merge(model)


@pytest.mark.parametrize(
    ("dtype", "delta", "fix"),
    [("float16", 1e5, "Merge into bfloat16 or float32, or look"), ("bfloat16", 3.4e38, "Merge into float32, or look"),
     ("float32", np.inf, "Look at the adapter: did its training diverge")],
)  # fmt: skip
def test_the_advice_names_a_wider_dtype_only_where_there_is_one(dtype, delta, fix):
    model = adapted(dtype)
    for layer in lora_layers(model).values():
        one = layer.adapters["default"]
        one.A.data[...] = 1
        one.B.data[...] = delta / one.scaling / len(one.A.data)
    with pytest.raises(AdapterError, match=fix):
        merge(model)


def test_nan_in_the_base_is_the_fault_of_the_base():
    model = adapted()
    weight = next(iter(lora_layers(model).values())).base_layer.weight
    weight.data = weight.data.copy()
    weight.data[1, 1] = np.nan
    text = (
        r"merging model.layers.0.self_attn.q_proj: the base's own weight holds NaN or infinity; "
        r"expected finite weights; nothing was changed. Download the base again."
    )
    with pytest.raises(ModelError, match=text):
        merge(model)


def test_nothing_changed_although_b_is_not_zero():
    with pytest.raises(AdapterError, match="merging changed none of the 4 tensors, although the adapter is not zero"):
        merge(adapted("bfloat16", scale=1e-9))


def test_a_zero_adapter_merges_into_the_base():
    model = TinyModel()
    inject(model, CONFIG)
    report = merge(model)
    assert report.n_changed == 0 and report.lost == 0
    assert np.array_equal(logits(model), logits(TinyModel()))


def test_a_mostly_lost_delta_is_said():
    model = TinyModel("bfloat16")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data[...] = 1.0
    inject(model, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"]))
    randomize(model, scale=0.015)  # delta about 2e-3 beside weights of 1, whose neighbours are 4e-3 and 8e-3 away
    with pytest.warns(UserWarning, match="rounding to the weights' dtype lost"):
        report = merge(model)
    assert 0.5 < report.lost < 1.0
