import json

import ml_dtypes
import numpy as np
import pytest

from peft_core import Tensor, kernels, no_grad
from peft_core.errors import ConfigError
from peft_core.nn import Parameter
from peft_core.optim import SGD, Adam, AdamW, Optimizer


def parameters(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = [(3, 5), (7,), (), (2, 3, 4)]
    return [Parameter(rng.standard_normal(shape).astype(dtype).reshape(shape)) for shape in shapes]


def gradients(step, params):
    rng = np.random.default_rng(100 + step)
    return [np.asarray(rng.standard_normal(p.shape) * 10.0 ** (-2 * i)) for i, p in enumerate(params)]


def train(optimizer, params, steps=range(20)):
    for step in steps:
        for p, g in zip(params, gradients(step, params), strict=True):
            p.grad = g.astype(p.dtype)
        optimizer.step()


def adamw_reference(values, steps, lr, betas, eps, decay):
    """Algorithm 2 of the paper with its bias-corrected moments written out, in float64."""
    moments = [(np.zeros_like(p), np.zeros_like(p)) for p in values]
    for step in range(steps):
        t = step + 1
        for i, g in enumerate(gradients(step, [Parameter(v) for v in values])):
            m, v = moments[i]
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            moments[i] = m, v
            corrected = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
            values[i] = values[i] - lr * corrected - lr * decay * values[i]
    return values


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("settings", [{}, {"lr": 0.05, "betas": (0.6, 0.9), "eps": 1e-3, "weight_decay": 0.3}])
def test_adamw_follows_the_formula(dtype, fused, settings):
    params = parameters(dtype)
    full = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, **settings}
    expected = adamw_reference([p.data.astype(np.float64) for p in params], 20, full["lr"], full["betas"], full["eps"],
                               full["weight_decay"])  # fmt: skip
    memory = [p.data for p in params]
    with kernels.use_kernels(fused):
        train(AdamW(params, **settings), params)
    for p, value, array in zip(params, expected, memory, strict=True):
        assert p.data is array and p.dtype == dtype
        np.testing.assert_allclose(p.data, value, rtol=2e-6 if dtype == np.float32 else 1e-13, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam_pulls_by_the_gradient(dtype, fused, decay):
    """Algorithm 1 of the paper in float64, on g + decay p."""
    params = parameters(dtype)
    values = [p.data.astype(np.float64) for p in params]
    moments = [(np.zeros_like(v), np.zeros_like(v)) for v in values]
    for t in range(1, 21):
        for i, g in enumerate(gradients(t - 1, params)):
            g = g + decay * values[i]
            m, v = 0.8 * moments[i][0] + 0.2 * g, 0.95 * moments[i][1] + 0.05 * g**2
            moments[i] = m, v
            values[i] = values[i] - 0.05 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
    with kernels.use_kernels(fused):
        train(Adam(params, lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=decay), params)
    for p, value in zip(params, values, strict=True):
        np.testing.assert_allclose(p.data, value, rtol=2e-6 if dtype == np.float32 else 1e-13, atol=1e-6)


def test_step_runs_a_closure_with_gradients():
    p = Parameter(np.ones(1, np.float32))
    optimizer = SGD([p], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with no_grad():
        assert optimizer.step(closure).item() == 1
    assert p.item() == 0 and optimizer.step() is None


def test_adamw_uses_its_kernel_and_its_kernel_is_compiled():
    from peft_core.optim.adam import _adam

    params = parameters()
    with kernels.use_kernels(True):
        train(AdamW(params), params)
    assert not _adam.kernel.broken and _adam.kernel._known


@pytest.mark.parametrize("fused", [True, False])
def test_nan_and_inf_come_out(fused):
    for bad in (np.nan, np.inf, -np.inf):
        p = Parameter(np.ones(1000, np.float32))
        g = np.ones(1000, np.float32)
        g[517] = bad
        p.grad = g
        with kernels.use_kernels(fused):
            AdamW([p]).step()
        assert not np.isfinite(p.data[517]) and np.isfinite(np.delete(p.data, 517)).all()


def sgd_reference(values, steps, lr, momentum, dampening, decay, nesterov):
    velocity = [None] * len(values)
    for step in range(steps):
        for i, g in enumerate(gradients(step, [Parameter(v) for v in values])):
            g = g + decay * values[i]
            velocity[i] = g if step == 0 else momentum * velocity[i] + (1 - dampening) * g
            values[i] = values[i] - lr * (g + momentum * velocity[i] if nesterov else velocity[i] if momentum else g)
    return values


@pytest.mark.parametrize("settings", [
    {},
    {"weight_decay": 0.3},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
])  # fmt: skip
def test_sgd_follows_the_formula(settings):
    params = parameters()
    full = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, **settings}
    values = [p.data.astype(np.float64) for p in params]
    order = ("momentum", "dampening", "weight_decay", "nesterov")
    expected = sgd_reference(values, 20, 0.05, *(full[name] for name in order))
    train(SGD(params, lr=0.05, **settings), params)
    for p, value in zip(params, expected, strict=True):
        np.testing.assert_allclose(p.data, value, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("make", [AdamW, lambda p: SGD(p, momentum=0.9, weight_decay=0.1, nesterov=True)])
def test_gradients_are_read_only_and_a_parameter_without_one_is_skipped(make):
    first, second = Parameter(np.ones(3, np.float32)), Parameter(np.ones(3, np.float32))
    g = np.array([1, 2, 3], np.float32)
    g.flags.writeable = False
    first.grad = g
    optimizer = make([first, second])
    optimizer.step()
    optimizer.step()
    assert (second.data == 1).all() and second not in optimizer.state and (first.data < 1).all()


@pytest.mark.parametrize("fused", [True, False])
def test_layouts_other_than_flat_memory(fused):
    value, g = np.arange(12, dtype=np.float32).reshape(3, 4) + 1, np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    plain, strided, mapped = Parameter(value.copy()), Parameter(np.asfortranarray(value)), Parameter(value.copy())
    mapped.data.flags.writeable = False
    plain.grad, strided.grad, mapped.grad = g, g, np.asfortranarray(g)
    with kernels.use_kernels(fused):
        AdamW([plain, strided, mapped], lr=0.1).step()
    assert not np.allclose(plain.data, value)
    np.testing.assert_allclose(strided.data, plain.data, rtol=1e-6)
    np.testing.assert_allclose(mapped.data, plain.data, rtol=1e-6)


def test_groups_have_their_own_settings_and_lr_may_be_changed():
    a, b = Parameter(np.ones(1, np.float32)), Parameter(np.ones(1, np.float32))
    optimizer = SGD([{"params": [a], "lr": 0.5}, {"params": b, "weight_decay": 1.0}], lr=0.25)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25]
    a.grad = b.grad = np.ones(1, np.float32)
    optimizer.step()
    assert a.item() == 0.5 and b.item() == 0.5
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert a.item() == 0.5


def test_zero_grad():
    p = Parameter(np.ones(2, np.float32))
    p.grad = np.ones(2, np.float32)
    optimizer = SGD([p])
    optimizer.zero_grad(set_to_none=False)
    assert (p.grad.data == 0).all()
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is None


@pytest.mark.parametrize("make", [
    lambda p, lr=0.1: AdamW([{"params": p[:2], "weight_decay": 0.5}, {"params": p[2:]}], lr=lr),
    lambda p, lr=0.1: SGD([{"params": p[:2], "weight_decay": 0.5}, {"params": p[2:]}], lr=lr, momentum=0.9),
])  # fmt: skip
def test_state_continues_bit_for_bit(make):
    whole, first, second = parameters(), parameters(), parameters()
    train(make(whole), whole, range(10))
    before = make(first)
    train(before, first, range(4))
    saved = before.state_dict()
    for p, q in zip(second, first, strict=True):
        p.data[...] = q.data
    after = make(second, lr=0.7)
    after.load_state_dict(saved)
    train(before, first, range(4, 6))  # what was loaded is a copy: this changes nothing in it
    assert after.param_groups[0]["lr"] == 0.1
    train(after, second, range(4, 10))
    for p, q in zip(whole, second, strict=True):
        np.testing.assert_array_equal(p.data, q.data)


def test_state_dict_layout():
    params = parameters()
    optimizer = AdamW([{"params": params[:1]}, {"params": params[1:]}])
    train(optimizer, params, range(3))
    assert "initial_lr" not in optimizer.param_groups[0]
    state = optimizer.state_dict()
    assert list(state) == ["state", "param_groups"] and list(state["state"]) == [0, 1, 2, 3]
    assert list(state["state"][0]) == ["step", "exp_avg", "exp_avg_sq"] and state["state"][3]["step"] == 3
    assert state["state"][3]["exp_avg"].shape == (2, 3, 4) and state["state"][0]["exp_avg"].dtype == np.float32
    assert [g["params"] for g in state["param_groups"]] == [[0], [1, 2, 3]]
    json.dumps(state["param_groups"])
    sgd = SGD(params, momentum=0.5)
    train(sgd, params, range(1))
    assert list(sgd.state_dict()["state"][0]) == ["momentum_buffer"]


def test_load_takes_torch_shaped_state():
    p = Parameter(np.ones(2, np.float32))
    optimizer = AdamW([p])
    group = {**optimizer.state_dict()["param_groups"][0], "foreach": None, "lr": 0.5}
    moments = {"step": np.array(3.0, np.float32), "exp_avg": np.ones(2), "exp_avg_sq": Tensor(np.ones(2, np.float32))}
    optimizer.load_state_dict({"state": {0: moments}, "param_groups": [group]})
    assert optimizer.state[p]["step"] == 3 and optimizer.state[p]["exp_avg"].dtype == np.float32
    assert optimizer.param_groups[0]["lr"] == 0.5 and "foreach" not in optimizer.param_groups[0]


def test_load_errors():
    params = parameters()
    optimizer = AdamW(params)
    train(optimizer, params, range(1))
    state = optimizer.state_dict()
    with pytest.raises(ConfigError, match=r"groups of \[4\] parameters; expected groups of \[1, 3\]. Build the"):
        AdamW([{"params": params[:1]}, {"params": params[1:]}]).load_state_dict(state)
    bad = {**state, "state": {0: {"exp_avg": np.ones(3)}, 1: {"exp_avg_sq": np.ones(4)}}}
    with pytest.raises(ConfigError) as info:
        optimizer.load_state_dict(bad)
    assert str(info.value) == (
        "the saved optimizer does not fit: exp_avg of parameter 0 has shape (3,), the parameter (3, 5); exp_avg_sq of "
        "parameter 1 has shape (4,), the parameter (7,); expected equal shapes. Load the state that was saved with "
        "these parameters."
    )
    with pytest.raises(ConfigError, match=r"saved state has entries \[\"'0'\"\]; expected some of .*\[0, 1, 2, 3\]"):
        optimizer.load_state_dict({**state, "state": {"0": state["state"][0]}})
    assert optimizer.state[params[0]]["step"] == 1


P = Parameter(np.ones(2, np.float32))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: AdamW([]), "the optimizer got no parameters; expected at least one. Is everything frozen?"),
    (lambda: AdamW([P, P]), "parameter 1 of a group, shape (2,), was given before; expected every parameter once."),
    (lambda: AdamW([{"params": [P], "learning_rate": 1}]),
     "AdamW has no setting 'learning_rate'; expected some of lr, betas, eps, weight_decay."),
    (lambda: AdamW([P * 2]), "parameter 0 of a group was computed by <mul backward>; expected a leaf."),
    (lambda: AdamW([P], lr=-1), "lr is -1; expected a finite number of at least 0."),
    (lambda: AdamW([P], lr=float("nan")), "lr is nan; expected a finite number"),
    (lambda: AdamW([P], lr="1e-3"), "lr is '1e-3'; expected a finite number"),
    (lambda: AdamW([P], weight_decay=-0.1), "weight_decay is -0.1; expected a finite number of at least 0."),
    (lambda: AdamW([P], betas=(0.9, 1.0)), "betas are (0.9, 1.0); expected two numbers in [0, 1)."),
    (lambda: Adam([P], amsgrad=True), "Adam(amsgrad=True) is not supported; expected amsgrad=False."),
    (lambda: AdamW([P], maximize=True, foreach=True), "AdamW(maximize=True) is not supported; expected maximize"),
    (lambda: SGD([P], fused=True, differentiable=True), "SGD(differentiable=True) is not supported"),
    (lambda: AdamW([P], eps=-1e-8), "eps is -1e-08; expected a finite number of at least 0."),
    (lambda: SGD([P], momentum=-1), "momentum is -1; expected a finite number of at least 0."),
    (lambda: SGD([P], nesterov=True),
     "nesterov with momentum 0.0 and dampening 0.0; expected a momentum above 0 and no dampening."),
    (lambda: SGD([P], nesterov=True, momentum=0.9, dampening=0.5), "nesterov with momentum 0.9 and dampening 0.5"),
])  # fmt: skip
def test_wrong_settings(make, text):
    with pytest.raises(ConfigError) as info:
        make()
    assert str(info.value).startswith(text)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: AdamW(P), "params is a single Tensor; expected a list of Tensors or of groups. Write [tensor]."),
    (lambda: Adam([P], beta=1), "Adam got an option 'beta'; expected torch's names for its settings."),
    (lambda: AdamW([P, 3]), "parameter 1 of a group is a int; expected a Tensor."),
    (lambda: AdamW([{"lr": 1}]), 'a group is dict without "params"; expected {"params": Tensors, ...}.'),
])  # fmt: skip
def test_wrong_types(make, text):
    with pytest.raises(TypeError) as info:
        make()
    assert str(info.value) == text


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_refused_where_it_trains(dtype):
    name = np.dtype(dtype).name
    text = (f"(shape (2,)) is {name}; expected float32: in half precision small updates are rounded away. "
            'Keep what trains in float32, as in model.to("float32"), and compute under autocast().')  # fmt: skip
    with pytest.raises(ConfigError) as info:
        AdamW([P, Parameter(np.ones(2, dtype))])
    assert str(info.value) == "trainable parameter 1 of a group " + text
    frozen = Parameter(np.ones(2, dtype), requires_grad=False)
    optimizer = AdamW([frozen])
    optimizer.step()  # frozen: nothing to update
    frozen.grad = np.ones(2, dtype)
    with pytest.raises(ConfigError) as info:
        optimizer.step()
    assert str(info.value) == "parameter 0 of a group " + text


def test_the_base_class_does_nothing():
    p = Parameter(np.ones(1, np.float32))
    p.grad = np.ones(1, np.float32)
    with pytest.raises(NotImplementedError, match=r"Optimizer defines no update\(\); expected one, as SGD has"):
        Optimizer([p], {"lr": 1.0, "weight_decay": 0.0}).step()
