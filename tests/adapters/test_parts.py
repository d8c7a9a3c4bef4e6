"""Adapted layers in ``nn.project``: what an adapted layer says it is made of, and that the fused op agrees with it."""

import numpy as np
import pytest

from adapters import LoraConfig, PeftModel, adapter_layers
from adapters.inject import freeze_base, only_active
from peft_core import Tensor, no_grad, ops
from peft_core.amp import autocast
from peft_core.nn import Conv1D, Linear, Module, RMSNorm, project
from peft_core.random import Generator, manual_seed
from support.adapter_models import randomize

N, D = 5, 16
FOUR = {"r": 4, "lora_alpha": 12, "target_modules": ["q", "k", "v"]}
TWO = {"r": 2, "use_rslora": True, "target_modules": ["v", "q"], "rank_pattern": {"v": 3}}
STATES = {  # name -> (adapters, active, training, are all three fused?)
    "none": ({}, [], True, True),
    "one": ({"a": FOUR}, ["a"], True, True),
    "two of different ranks": ({"a": FOUR, "b": TWO}, ["a", "b"], True, True),
    "the other order": ({"a": FOUR, "b": TWO}, ["b", "a"], True, True),
    "the second of two": ({"a": FOUR, "b": TWO}, ["b"], True, True),
    "disabled": ({"a": FOUR, "b": TWO}, [], True, True),
    "dropout, evaluated": ({"a": {**FOUR, "lora_dropout": 0.5}}, ["a"], False, True),
    "dropout, training": ({"a": {**FOUR, "lora_dropout": 0.5}}, ["a"], True, False),
    "lora_bias": ({"a": {**FOUR, "lora_bias": True}}, ["a"], True, False),
    "lora_bias, disabled": ({"a": {**FOUR, "lora_bias": True}}, [], True, True),
    "lora_bias of the other": ({"a": {**FOUR, "lora_bias": True}, "b": TWO}, ["b"], True, True),
    "own bias": ({"a": {**FOUR, "bias": "lora_only"}}, ["a"], True, False),
    "biases": ({"a": {**FOUR, "target_modules": ["k"], "bias": "all"}}, ["a"], True, False),
    "a copy": ({"a": {**FOUR, "target_modules": ["k"], "modules_to_save": ["q"]}}, ["a"], True, False),
    "a copy, disabled": ({"a": {**FOUR, "target_modules": ["k"], "modules_to_save": ["q"]}}, [], True, True),
    "a copied norm": ({"a": {**FOUR, "modules_to_save": ["norm"]}}, ["a"], True, True),
}
KINDS = {"Linear": (Linear, "float32"), "Conv1D": (Conv1D, "float32"), "bfloat16": (Linear, "bfloat16")}


class Group(Module):
    """Three linears over one input, computed as a group or one after the other."""

    def __init__(self, kind, dtype):
        g = Generator(0)
        self.q, self.k, self.v = (kind(D, n, bias=n != 8, dtype=dtype, generator=g) for n in (16, 8, 12))
        self.norm = RMSNorm(D, eps=1e-5)
        for layer in (self.q, self.k, self.v):
            layer.weight.data = g.normal(layer.weight.shape, 0.0, 0.3).astype(layer.weight.dtype)
            layer.weight.data.flags.writeable = False  # as mapped from a file: bfloat16 is packed for tiles

    def forward(self, x, residual, together=True):
        linears = (self.q, self.k, self.v)
        if together:
            return project(x, *linears, norm=self.norm, residual=residual)
        h = self.norm(x)
        return ops.add(residual, ops.concatenate([linear(h) for linear in linears], axis=-1))


def made(state, kind):
    adapters, active, training, fused = STATES[state]
    model = PeftModel(Group(*KINDS[kind]))
    freeze_base(model)
    for name, values in adapters.items():
        model.add_adapter(name, LoraConfig(**values))
    randomize(model)
    model.set_adapter(active)
    return model.train(training), fused


def run(model, together, scale=1.0):
    """The output and every gradient by name, x's included."""
    g = Generator(7)
    x, residual = (Tensor(g.normal((N, n), 0.0, 1.0), requires_grad=True) for n in (D, 36))
    model.zero_grad()
    manual_seed(3)  # the same dropout
    y = model(x, residual, together=together)
    y.backward(g.normal(y.shape, 0.0, 1.0))
    gradients = {name: np.array(p.grad.data) for name, p in model.named_parameters() if p.grad is not None}
    return np.array(y.data), {**gradients, "x": np.array(x.grad.data), "residual": np.array(residual.grad.data)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
def test_together_is_one_after_the_other(state, kind):
    model, fused = made(state, kind)
    layers = [model.base_model.get_submodule(name) for name in "qkv"]
    assert all(layer.parts() is not None for layer in layers) is fused
    got, want = run(model, True), run(model, False)
    assert np.abs(got[0] - want[0]).max() <= 1e-5 * np.abs(want[0]).max()
    assert set(got[1]) == set(want[1])
    for name, gradient in want[1].items():
        assert np.abs(got[1][name] - gradient).max() <= 1e-5 * np.abs(gradient).max(), name
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    active = tuple(f".adapters.{name}." for name in STATES[state][1])
    assert set(want[1]) - {"x", "residual"} == {name for name in trained if any(part in name for part in active)}


@pytest.mark.parametrize("state", STATES)
def test_together_under_autocast(state):
    model, _ = made(state, "bfloat16")
    with autocast(dtype="bfloat16"):
        got, want = run(model, True), run(model, False)
    assert np.abs(got[0] - want[0]).max() <= 0.02 * np.abs(want[0]).max()
    for name, gradient in want[1].items():
        assert np.abs(got[1][name] - gradient).max() <= 0.04 * np.abs(gradient).max(), name


def test_the_group_follows_what_is_active():
    model, _ = made("two of different ranks", "Linear")
    x, residual = Tensor(np.ones((N, D), np.float32)), Tensor(np.zeros((N, 36), np.float32))
    seen = []
    with no_grad():
        for names in (["a", "b"], ["a"], ["b"], []):
            with only_active(model, names):
                seen.append(model(x, residual).data)
                assert np.abs(seen[-1] - model(x, residual, together=False).data).max() < 1e-5
        plain = Group(*KINDS["Linear"])
        assert np.array_equal(seen[-1], plain(x, residual).data)
    assert len({float(np.round(y.sum(), 3)) for y in seen}) == 4


def test_a_choice_per_row_runs_in_the_group():
    model, _ = made("two of different ranks", "Linear")
    model.eval()
    g = Generator(1)
    x, residual = (Tensor(g.normal((4, n), 0.0, 1.0)) for n in (D, 36))
    names = ["b", "__base__", "a", "b"]
    with no_grad():
        got = model(x, residual, adapter_names=names).data
        for row, name in enumerate(names):
            model.set_adapter([] if name == "__base__" else name)
            want = model(x, residual, together=False).data[row]
            assert np.abs(got[row] - want).max() < 1e-5


def test_a_base_that_is_no_plain_linear_is_called_as_it_is():
    class Doubled(Linear):
        def forward(self, x):
            return ops.mul(super().forward(x), 2.0)

    model, _ = made("one", "Linear")
    layer = adapter_layers(model.base_model)["q"]
    layer.base_layer.__class__ = Doubled
    assert layer.parts() is None
    got, want = run(model, True), run(model, False)
    assert np.abs(got[0] - want[0]).max() <= 1e-5 * np.abs(want[0]).max()
