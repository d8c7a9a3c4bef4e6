import numpy as np
import pytest

import peft_core
from peft_core import GradScaler, Tensor, amp, autocast, compute_dtype, ops
from peft_core.errors import ConfigError, GraphError
from peft_core.nn import Parameter
from peft_core.optim import SGD


def made(**settings):
    p = Parameter(np.ones(3, np.float32))
    return p, SGD([p], lr=1.0), GradScaler("cpu", **settings)


def backward(scaler, p, bad=None):
    weight = np.array([1, 2, 3], np.float32)
    if bad is not None:
        weight[1] = bad
    scaler.scale(ops.sum(p * Tensor(weight))).backward()


def test_a_step_is_the_step_without_a_scale():
    p, optimizer, scaler = made(init_scale=1024.0)
    backward(scaler, p)
    np.testing.assert_array_equal(p.grad.data, [1024, 2048, 3072])
    scaler.step(optimizer)
    np.testing.assert_array_equal(p.data, [0, -1, -2])
    scaler.update()
    assert scaler.get_scale() == 1024


def test_scales_and_skipped_steps_follow_the_rule():
    p, optimizer, scaler = made(init_scale=64.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
    bad = {3: np.inf, 4: np.nan, 9: -np.inf}
    scale, good, scales = 64.0, 0, []
    for step in range(14):
        optimizer.zero_grad()
        before = p.data.copy()
        backward(scaler, p, bad.get(step))
        assert scaler.step(optimizer) is None
        assert np.array_equal(before, p.data) == (step in bad)
        scaler.update()
        good = 0 if step in bad else good + 1
        scale *= 0.25 if step in bad else 3.0 if good == 2 else 1.0
        good %= 2
        scales.append(scale)
        assert scaler.get_scale() == scale and scaler.state_dict()["_growth_tracker"] == good
    assert len(set(scales)) > 5


def test_the_scale_never_grows_to_infinity():
    p, optimizer, scaler = made(init_scale=2.0**127, growth_interval=1)
    p.grad = np.ones(3, np.float32)
    scaler.scale(Tensor(np.float32([1])))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_unscale_gives_gradients_to_clip_and_step_does_not_divide_again():
    p, optimizer, scaler = made(init_scale=16.0)
    backward(scaler, p)
    scaler.unscale_(optimizer)
    np.testing.assert_array_equal(p.grad.data, [1, 2, 3])
    scaler.step(optimizer)
    np.testing.assert_array_equal(p.data, [0, -1, -2])


def test_gradients_that_cannot_be_written_to_and_several_optimizers():
    p, optimizer, scaler = made(init_scale=4.0)
    q = Parameter(np.ones((), np.float32))
    other = SGD([q], lr=1.0)
    scaler.scale(Tensor(np.ones(1, np.float32)))
    g = np.full(3, 4, np.float32)
    g.flags.writeable = False
    p.grad, q.grad = g, np.float32(np.inf)
    scaler.step(optimizer)
    scaler.step(other)
    assert (g == 4).all() and (p.data == 0).all() and q.item() == 1
    scaler.update()
    assert scaler.get_scale() == 2


def test_scaled_outputs():
    _, _, scaler = made(init_scale=2.0**17)
    half = Tensor(np.float16(1.5) * np.ones((), np.float16))
    assert scaler.scale(half).dtype == np.float32 and scaler.scale(half).item() == 1.5 * 2**17
    assert scaler.scale(Tensor(np.ones(2, np.float16))).dtype == np.float16
    one = Tensor(np.ones(1, np.float32))
    assert isinstance(scaler.scale((one, one)), tuple) and len(scaler.scale([one])) == 1
    with pytest.raises(TypeError, match=r"scale\(\) got a int; expected a Tensor or an iterable of Tensors"):
        scaler.scale(3)


def test_not_enabled_everything_passes_through():
    p, optimizer, _ = made()
    scaler = GradScaler(enabled=False)
    loss = ops.sum(p)
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1 and scaler.state_dict() == {}
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert (p.data == 0).all() and not scaler.is_enabled()


def test_state_and_setters():
    _, _, first = made(init_scale=8.0, growth_factor=4.0, backoff_factor=0.1, growth_interval=7)
    _, _, second = made()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == {"scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.1, "growth_interval": 7,
                                   "_growth_tracker": 0}  # fmt: skip
    second.set_growth_factor(5.0)
    second.set_backoff_factor(0.3)
    second.set_growth_interval(9)
    assert (second.get_growth_factor(), second.get_backoff_factor(), second.get_growth_interval()) == (5.0, 0.3, 9)
    second.load_state_dict(first.state_dict())
    second.update(32.0)
    assert second.get_scale() == 32 and second.get_growth_factor() == 4
    with pytest.raises(ConfigError, match="the saved GradScaler state is empty; expected one of an enabled GradScaler"):
        second.load_state_dict({})


def test_calls_out_of_order():
    p, optimizer, scaler = made()
    p.grad = np.ones(3, np.float32)
    with pytest.raises(GraphError, match=r"unscale_\(\) was called before scale\(\); expected scaler.scale\(loss\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(GraphError, match=r"update\(\) without a step since the last one; expected scaler.step"):
        scaler.update()
    backward(scaler, p)
    scaler.unscale_(optimizer)
    with pytest.raises(GraphError, match=r"unscale_\(\) was called twice on one optimizer since the last update\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(GraphError, match=r"step\(\) of a GradScaler got a closure; expected none"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.step(optimizer)
    with pytest.raises(GraphError, match=r"step\(\) was called twice on one optimizer since the last update\(\)"):
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with pytest.raises(GraphError, match=r"step\(\) found no gradient in the optimizer's parameters; expected scaler"):
        scaler.step(optimizer)
    scaler = GradScaler("cpu")
    backward(scaler, p)
    scaler.step(optimizer)
    scaler._rounds[id(optimizer)].unscaled = False
    with pytest.raises(GraphError, match=r"unscale_\(\) was called after step\(\); expected it before step"):
        scaler.unscale_(optimizer)


def test_wrong_settings_and_half_gradients():
    for settings, text in [({"growth_factor": 1.0}, "growth_factor is 1.0; expected a number above 1"),
                           ({"backoff_factor": 1.0}, "backoff_factor is 1.0; expected between 0 and 1"),
                           ({"device": "mps"}, "GradScaler device is 'mps'; expected 'cuda' or 'cpu'")]:  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            GradScaler(**{"device": "cpu", **settings})
    _, _, scaler = made()
    p = Parameter(np.ones(3, np.float16), requires_grad=False)
    optimizer = SGD([p])
    p.grad = np.ones(3, np.float16)
    scaler.scale(Tensor(np.ones(1, np.float32)))
    with pytest.raises(ValueError, match=r"unscale_\(\) met a float16 gradient of shape \(3,\); expected float32"):
        scaler.unscale_(optimizer)


# ---------------------------------------------------------------------- autocast in torch's signature


def dtype_inside(context):
    with context:
        return compute_dtype()


def test_autocast_in_both_signatures(monkeypatch):
    f16, b16 = peft_core.float16, peft_core.bfloat16
    assert dtype_inside(autocast()) == b16 and dtype_inside(autocast(None)) is None
    assert dtype_inside(autocast("float16")) == f16 and dtype_inside(autocast(dtype=f16)) == f16
    assert dtype_inside(autocast("cpu")) == b16 and dtype_inside(autocast("cpu", dtype=None)) == b16
    assert dtype_inside(autocast(device_type="cpu", dtype=f16)) == f16
    assert dtype_inside(autocast(peft_core.as_device("cpu"), "float16")) == f16
    assert (
        dtype_inside(autocast("cpu", enabled=False)) is None
        and dtype_inside(autocast("float16", enabled=False)) is None
    )
    monkeypatch.setattr(amp, "cuda_device_count", lambda: 1)
    assert dtype_inside(autocast("cuda")) == f16 and dtype_inside(autocast("cuda", b16)) == b16
    assert dtype_inside(peft_core.cuda.amp.autocast()) == f16
    assert peft_core.cuda.amp.GradScaler(8.0).get_scale() == 8 and amp.GradScaler is GradScaler


def test_cuda_without_a_device_is_off(monkeypatch):
    monkeypatch.setattr(amp, "cuda_device_count", lambda: 0)
    with pytest.warns(UserWarning, match=r"autocast\('cuda'\) without a CUDA device is switched off"):
        assert dtype_inside(autocast("cuda")) is None
    with pytest.warns(UserWarning, match=r"GradScaler\('cuda'\) without a CUDA device is switched off"):
        assert not GradScaler().is_enabled()


def test_autocast_decorates_and_nests():
    @autocast("cpu", dtype="float16")
    def inside():
        with autocast("cpu", enabled=False):
            off = compute_dtype()
        return compute_dtype(), off

    assert inside() == (peft_core.float16, None) == inside() and compute_dtype() is None


def test_autocast_errors():
    with pytest.raises(ValueError, match=r"autocast\('cpu'\) got dtype float32; expected float16 or bfloat16. To comp"):
        autocast("cpu", dtype="float32")
    with pytest.raises(ValueError, match="autocast device_type is 'mps'; expected 'cuda' or 'cpu'"):
        autocast("mps", dtype="float16")
    with pytest.raises(AttributeError, match=r"module 'peft_core\.amp' has no attribute 'Scaler'"):
        _ = amp.Scaler
