"""LoRA on Conv1D: A (R, I) and B (O, R) as on a Linear, the delta in the weight's own orientation (I, O)."""

import json

import numpy as np
import pytest

from adapters import LoraConfig, PeftModel, get_peft_model, lora_layers, merge_directory
from adapters.merge import merge
from peft_core import Tensor, no_grad
from peft_core.nn import Conv1D, Linear, Module
from peft_core.random import Generator
from peft_core.safetensors_io import load_file, save_file
from support.adapter_models import randomize

CONFIG = {"r": 3, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj"]}


class Tiny(Module):
    """transformer.h.0.{c_attn, c_proj} (Conv1D, the second square), out (Linear)."""

    def __init__(self):
        g = Generator(0)
        block, inner = Module(), Module()
        block.c_attn, block.c_proj = Conv1D(8, 12, generator=g), Conv1D(12, 12, generator=g)
        inner.h = [block]
        self.transformer = inner
        self.out = Linear(12, 5, generator=g)
        for layer in (block.c_attn, block.c_proj):
            layer.weight.data = g.normal(layer.weight.shape, 0.0, 0.5)

    def forward(self, x):
        return self.out(self.transformer.h[0].c_proj(self.transformer.h[0].c_attn(x)))


X = Generator(5).normal((7, 8), 0.0, 1.0)


def outputs(model):
    with no_grad():
        return np.array(model(Tensor(X)).data)


def written(tmp_path, model, prefix="transformer."):
    base = tmp_path / "base"
    base.mkdir()
    tensors = {name.removeprefix(prefix): t.data for name, t in model.state_dict().items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    (base / "config.json").write_text('{"model_type": "gpt2"}')
    return base


def test_shapes_values_and_step_zero():
    before = outputs(Tiny())
    model = get_peft_model(Tiny(), LoraConfig(**CONFIG))
    layers = lora_layers(model.base_model)
    assert [(m.adapters["default"].A.shape, m.adapters["default"].B.shape) for m in layers.values()] == [
        ((3, 8), (12, 3)), ((3, 12), (12, 3))]  # fmt: skip
    assert [(m.in_features, m.out_features) for m in layers.values()] == [(8, 12), (12, 12)]
    assert np.array_equal(outputs(model), before)
    randomize(model)
    layer = layers["transformer.h.0.c_attn"]
    a, b = (p.data.astype(np.float64) for p in (layer.adapters["default"].A, layer.adapters["default"].B))
    expected = X @ (layer.weight.data + 2 * (b @ a).T) + layer.bias.data
    np.testing.assert_allclose(layer(Tensor(X)).data, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer.delta(), 2 * (b @ a).T, rtol=1e-5, atol=1e-6)


def test_all_linear_means_conv1d_too():
    model = get_peft_model(Tiny(), LoraConfig(r=2, target_modules="all-linear"))
    assert len(lora_layers(model.base_model)) == 3


def test_merging_in_memory():
    model = randomize(get_peft_model(Tiny(), LoraConfig(**CONFIG)))
    want = outputs(model)
    merged = model.merge_and_unload()
    assert type(merged.transformer.h[0].c_attn) is Conv1D
    np.testing.assert_allclose(outputs(merged), want, rtol=1e-5, atol=1e-5)
    assert np.abs(outputs(Tiny()) - want).max() > 0.1


@pytest.mark.parametrize(("targets", "says"), [(["c_attn"], True), (["c_attn", "out"], True), (["out"], False)])
@pytest.mark.parametrize("given", [True, False])
def test_the_saved_config_says_how_the_weights_are_stored(tmp_path, targets, says, given):
    model = randomize(get_peft_model(Tiny(), LoraConfig(r=2, target_modules=targets, fan_in_fan_out=given)))
    model.save_pretrained(tmp_path / "a")
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["fan_in_fan_out"] is says
    again = PeftModel.from_pretrained(Tiny(), tmp_path / "a")
    assert np.array_equal(outputs(again), outputs(model))


PATTERNS = {
    "rank_pattern": {"transformer.h.0.c_attn": 2}, "alpha_pattern": {r"transformer\.h\.0\.c_attn": 9},
}  # fmt: skip


@pytest.mark.parametrize(("prefix", "values"), [
    ("", {}), ("", {"target_modules": ["c_proj"]}), ("", {"target_modules": ["c_attn", "out"]}), ("", PATTERNS),
    ("transformer.", {}), ("transformer.", PATTERNS),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*differ from the model's by a prefix")
def test_merging_directories(tmp_path, prefix, values):
    """Also beside a Linear, and where the base's file lacks a prefix that the adapter's names and patterns have."""
    model = randomize(get_peft_model(Tiny(), LoraConfig(**{**CONFIG, **values})))
    model.save_pretrained(tmp_path / "a")
    base = written(tmp_path, Tiny(), prefix)
    report = merge_directory(base, tmp_path / "a", tmp_path / "out")
    assert report.n_changed == len(lora_layers(model.base_model))
    merge(model)
    got = load_file(tmp_path / "out/model.safetensors")
    want = {name.removeprefix(prefix): t.data for name, t in model.base_model.state_dict().items()}
    assert set(got) == set(want) and all(np.array_equal(got[name], want[name]) for name in want)
