"""Conv1D against a float64 formula, and its protocol with project and with what a frozen weight promises."""

import copy

import ml_dtypes
import numpy as np
import pytest

from peft_core import Tensor, amp, manual_seed, nn, no_grad, ops


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(0, 1, shape).astype(np.float32)


def make(n_in=6, n_out=4, bias=True):
    layer = nn.Conv1D(n_in, n_out, bias=bias)
    layer.weight.data[...] = draw(n_in, n_out)
    if bias:
        layer.bias.data[...] = draw(n_out)
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(bias):
    layer, x, gy = make(bias=bias), Tensor(draw(3, 5, 6), requires_grad=True), draw(3, 5, 4)
    y = layer(x)
    wide = [a.astype(np.float64) for a in (x.data, layer.weight.data, gy)]
    expected = wide[0] @ wide[1] + (layer.bias.data if bias else 0)
    np.testing.assert_allclose(y.data, expected, rtol=1e-5, atol=1e-5)
    (y * Tensor(gy)).sum().backward()
    np.testing.assert_allclose(layer.weight.grad.data, np.einsum("bti,bto->io", wide[0], wide[2]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x.grad.data, wide[2] @ wide[1].T, rtol=1e-5, atol=1e-5)
    if bias:
        np.testing.assert_allclose(layer.bias.grad.data, wide[2].sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_starting_values_and_names():
    manual_seed(0)
    layer = nn.Conv1D(200, 300, dtype="bfloat16")
    assert layer.weight.shape == (200, 300) and layer.weight.dtype == ml_dtypes.bfloat16
    assert abs(float(layer.weight.data.astype(np.float64).std()) - 0.02) < 1e-3 and not layer.bias.data.any()
    assert (layer.in_features, layer.out_features) == (200, 300)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert repr(layer) == "Conv1D(in_features=200, out_features=300, bias=True)"


def test_the_view_of_a_frozen_weight_is_one_array_and_follows_the_weight():
    layer = make().requires_grad_(False)
    view = layer.matrix().data
    assert view is layer.matrix().data and np.shares_memory(view, layer.weight.data)
    assert list(layer.state_dict()) == ["weight", "bias"]
    layer.weight.data = 2 * layer.weight.data
    assert np.array_equal(layer.matrix().data, layer.weight.data.T)
    other = copy.copy(layer)
    other.weight = nn.Parameter(-layer.weight.data, requires_grad=False)
    assert np.array_equal(other.matrix().data, -layer.matrix().data)
    deep = copy.deepcopy(layer)
    assert np.array_equal(deep.matrix().data, deep.weight.data.T)
    assert not np.shares_memory(deep.matrix().data, layer.weight.data)


@pytest.mark.parametrize("trained", [False, True])
def test_project_takes_it_as_it_takes_a_linear(trained):
    layer = make(8, 4).requires_grad_(trained)
    plain = nn.Linear(8, 4)
    plain.weight.data, plain.bias.data = np.ascontiguousarray(layer.weight.data.T), layer.bias.data
    plain.requires_grad_(trained)
    x, under, norm = draw(5, 8), draw(5, 4), nn.LayerNorm(8)
    norm.weight.data[...] = draw(8)
    results = []
    for linear in (layer, plain):
        t = Tensor(x, requires_grad=True)
        y = nn.project(t, linear, norm=norm, residual=Tensor(under))
        y.sum().backward()
        results.append((y.data, t.grad.data, linear.weight.grad))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)
    by_hand = ops.add(ops.linear(norm(Tensor(x)), plain.weight, plain.bias), Tensor(under))
    np.testing.assert_allclose(results[0][0], by_hand.data, rtol=1e-5, atol=1e-6)
    if trained:
        np.testing.assert_allclose(results[0][2].data, results[1][2].data.T, rtol=1e-5, atol=1e-6)


def test_a_mapped_bfloat16_weight_on_every_path():
    """Read-only weights may be packed by kernels: of the transposed view the same numbers must come out."""
    x = Tensor(draw(40, 64))
    weight = draw(64, 96).astype(ml_dtypes.bfloat16)
    weight.flags.writeable = False
    layer, plain = nn.Conv1D(64, 96, bias=False), nn.Linear(64, 96, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    straight = np.ascontiguousarray(weight.T)
    straight.flags.writeable = False
    plain.weight = nn.Parameter(straight, requires_grad=False)
    with no_grad(), amp.autocast("bfloat16"):
        half = ops.astype(x, dtype=ml_dtypes.bfloat16)
        for _ in range(2):
            y, want = (nn.project(half, m).data.astype(np.float32) for m in (layer, plain))
            assert np.array_equal(y, want)
