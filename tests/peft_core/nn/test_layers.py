import math

import numpy as np
import pytest

from peft_core import Generator, Tensor, manual_seed, nn, random, tensor
from peft_core.errors import ConfigError

F = nn.functional


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_value_and_gradients(bias):
    layer, x = nn.Linear(5, 3, bias=bias), Tensor(draw(2, 4, 5), requires_grad=True)
    y = layer(x)
    w = layer.weight.data.astype(np.float64)
    reference = x.data @ w.T + (layer.bias.data if bias else 0)
    np.testing.assert_allclose(y.data, reference, rtol=1e-5, atol=1e-6)
    gy = draw(2, 4, 3)
    y.backward(gy)
    np.testing.assert_allclose(layer.weight.grad.data, np.einsum("abo,abi->oi", gy, x.data), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(x.grad.data, gy @ w, rtol=1e-4, atol=1e-5)
    assert [n for n, _ in layer.named_parameters()] == (["weight", "bias"] if bias else ["weight"])
    if bias:
        np.testing.assert_allclose(layer.bias.grad.data, gy.sum((0, 1)), rtol=1e-4, atol=1e-5)


def test_linear_starts_uniform_within_one_over_root_in():
    layer = nn.Linear(400, 300, generator=Generator(1))
    for values in (layer.weight.data, layer.bias.data):
        assert np.abs(values).max() <= 1 / 20 and np.abs(values).max() > 0.049
        assert abs(values.std() * 20 * math.sqrt(3) - 1) < 0.1  # U(-b, b) has std b / sqrt(3)
        assert abs(values.mean()) < 0.01


def test_layers_are_seeded_by_the_generator_or_the_default_one():
    for make in (lambda g=None: nn.Linear(3, 2, generator=g), lambda g=None: nn.Embedding(3, 2, generator=g)):
        first, second = make(Generator(5)).weight.data, make(Generator(5)).weight.data
        np.testing.assert_array_equal(first, second)
        assert not np.array_equal(first, make(Generator(6)).weight.data)
        manual_seed(3)
        first, other = make().weight.data, make().weight.data
        manual_seed(3)
        np.testing.assert_array_equal(first, make().weight.data)
        assert not np.array_equal(first, other)


def test_embedding():
    layer = nn.Embedding(50, 40, generator=Generator(0))
    assert abs(layer.weight.data.std() - 1) < 0.05
    ids = np.array([[3, 0], [3, 49]])
    np.testing.assert_array_equal(layer(ids).data, layer.weight.data[ids])
    np.testing.assert_array_equal(layer(tensor(ids)).data, layer.weight.data[ids])


def test_norms():
    x = draw(6, 8) * 3 + 1
    rms, layer, plain = nn.RMSNorm(8, eps=0.1), nn.LayerNorm(8, eps=0.2), nn.LayerNorm(8, bias=False)
    for module in (rms, layer, plain):
        module.weight.data[...] = draw(8)
    layer.bias.data[...] = draw(8) + 1
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.1) * draw(8)
    np.testing.assert_allclose(rms(Tensor(x)).data, expected, rtol=1e-4, atol=1e-5)
    for module, eps in ((layer, 0.2), (plain, 1e-5)):
        centred = wide - wide.mean(-1, keepdims=True)
        expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * draw(8)
        expected = expected + (draw(8) + 1 if module.bias is not None else 0)
        np.testing.assert_allclose(module(Tensor(x)).data, expected, rtol=1e-4, atol=1e-5)


def test_norms_start_at_the_identity_scale():
    assert (nn.RMSNorm(3).weight.data == 1).all() and (nn.LayerNorm(3).weight.data == 1).all()
    assert (nn.LayerNorm(3).bias.data == 0).all() and nn.LayerNorm(3, bias=False).bias is None


def test_dropout_acts_in_training_only_and_takes_one_key_a_call():
    layer, x = nn.Dropout(0.25), Tensor(np.ones((100, 100), np.float32))
    manual_seed(0)
    y = layer(x).data
    assert random.get_state()["counter"] == 1
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.02
    assert not np.array_equal(y, layer(x).data)
    manual_seed(0)
    np.testing.assert_array_equal(y, layer(x).data)
    assert layer.eval()(x) is x and nn.Dropout(0)(x) is x
    assert random.get_state()["counter"] == 1


@pytest.mark.parametrize("p", [-0.1, 1.0, math.nan])
def test_dropout_probability(p):
    with pytest.raises(ConfigError, match=rf"dropout probability is {p}; expected a number in \[0, 1\)\."):
        nn.Dropout(p)


def test_sequential():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    x = Tensor(draw(5, 3))
    np.testing.assert_array_equal(model(x).data, model[1](model[0](x)).data)
    assert len(model) == 2 and list(model) == [model[0], model[-1]]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight"]
    new = nn.Linear(4, 6)
    model.set_submodule("1", new)
    assert model[1] is new and model(x).shape == (5, 6)
    with pytest.raises(TypeError, match="Sequential argument 1 is a function; expected a Module"):
        nn.Sequential(new, lambda x: x)


def test_project_equals_separate_calls():
    x, linears = Tensor(draw(5, 3)), [nn.Linear(3, n) for n in (2, 4, 4)]
    y = nn.project(x, *linears).data
    for part, linear in zip(np.split(y, [2, 6], axis=1), linears, strict=True):
        np.testing.assert_array_equal(part, linear(x).data)


class Opaque(nn.Module):
    """A layer that does not say what it is made of."""

    def __init__(self, linear):
        self.inner = linear

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("before", ["plain", "norm", "layer norm", "swiglu", "gelu_tanh"])
@pytest.mark.parametrize("residual", [False, True])
def test_project_calls_what_it_cannot_fuse_one_by_one(before, residual):
    x = Tensor(draw(5, 8 if before == "swiglu" else 4), True)
    norm = {"norm": nn.RMSNorm(4), "layer norm": nn.LayerNorm(4)}.get(before)
    linears, r = [nn.Linear(4, n) for n in (2, 3)], Tensor(draw(5, 5)) if residual else None
    options = {"norm": norm, "activation": before if before in ("swiglu", "gelu_tanh") else None, "residual": r}
    fused = nn.project(x, *linears, **options)
    composed = nn.project(x, linears[0], Opaque(linears[1]), **options)
    assert fused.grad_fn.name == "project" and composed.grad_fn.name != "project"
    np.testing.assert_allclose(fused.data, composed.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtype_in_is_dtype_out(dtype):
    x = tensor(draw(4, 6), dtype=dtype)
    for layer in (nn.Linear(6, 3, dtype=dtype), nn.RMSNorm(6, dtype=dtype), nn.LayerNorm(6, dtype=dtype)):
        assert nn.Dropout(0.5)(layer(x)).dtype == x.dtype
    assert nn.Embedding(4, 3, dtype=dtype)(np.array([0, 1])).dtype == x.dtype


def test_init_functions():
    t = Tensor(np.empty((200, 300), np.float32))
    assert nn.init.uniform_(t, -2, 6, Generator(0)) is t
    assert t.data.min() >= -2 and t.data.max() <= 6 and abs(t.data.mean() - 2) < 0.05
    nn.init.normal_(t, 3, 0.5, Generator(0))
    assert abs(t.data.mean() - 3) < 0.01 and abs(t.data.std() - 0.5) < 0.01
    nn.init.kaiming_uniform_(t, generator=Generator(0))
    assert abs(np.abs(t.data).max() / math.sqrt(6 / 300) - 1) < 1e-3
    assert (nn.init.zeros_(t).data == 0).all() and (nn.init.ones_(t).data == 1).all()
    assert (nn.init.constant_(t, 2.5).data == 2.5).all()
    with pytest.raises(ValueError, match=r"kaiming_uniform_ on shape \(3,\); expected at least two dimensions"):
        nn.init.kaiming_uniform_(Tensor(np.ones(3, np.float32)))


def test_skip_init_draws_nothing():
    manual_seed(0)
    with nn.init.skip_init():
        assert nn.Linear(3, 2).weight.shape == (2, 3)
    assert nn.init.ones_(Tensor(np.zeros(2))).data.sum() == 2
    x = Tensor(np.full(2, 5.0))
    with nn.init.skip_init():
        nn.init.ones_(x), nn.init.uniform_(x)
    assert (x.data == 5).all() and random.get_state()["counter"] == 0


def test_repr_of_layers():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.RMSNorm(4), nn.LayerNorm(4), nn.Embedding(2, 3))
    assert repr(model) == (
        "Sequential(\n"
        "  (0): Linear(in_features=3, out_features=4, bias=True)\n"
        "  (1): Dropout(p=0.1)\n"
        "  (2): RMSNorm(4, eps=1e-06)\n"
        "  (3): LayerNorm(4, eps=1e-05, bias=True)\n"
        "  (4): Embedding(2, 3)\n"
        ")"
    )


def test_functional_is_a_face():
    x = Tensor(draw(3, 4))
    wide = np.exp(x.data.astype(np.float64))
    np.testing.assert_allclose(F.softmax(x, dim=0).data, wide / wide.sum(0), rtol=1e-5)
    np.testing.assert_allclose(F.log_softmax(x, dim=1).data, np.log(wide / wide.sum(1, keepdims=True)), rtol=1e-5)
    np.testing.assert_array_equal(F.embedding(np.array([2]), x).data, x.data[[2]])
    assert F.dropout(x, 0.5, training=False) is x and F.dropout(x, 0.0) is x
    assert (F.dropout(Tensor(np.ones(99, np.float32)), 0.5).data == 0).any()
    for name in F.__all__:
        assert callable(getattr(F, name))


def test_embedding_with_a_padding_row_and_from_a_table():
    layer = nn.Embedding(5, 3, padding_idx=-1)
    assert layer.weight[4].tolist() == [0, 0, 0] and np.abs(layer.weight.data[:4]).min() > 0
    layer(tensor([4, 0, 4])).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0] * 3] + [[0.0] * 3] * 4
    table = tensor([[1.0, 2.0], [3.0, 4.0]])
    layer = nn.Embedding.from_pretrained(table)
    assert layer.weight.data is table.data and not layer.weight.requires_grad and layer.num_embeddings == 2
    assert (
        layer(tensor([1])).tolist() == [[3, 4]]
        and nn.Embedding.from_pretrained(table, freeze=False).weight.requires_grad
    )
