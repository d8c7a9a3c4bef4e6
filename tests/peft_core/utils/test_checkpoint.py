import numpy as np
import pytest

from peft_core import Tensor, manual_seed, nn, ops
from peft_core.errors import ConfigError, GraphError
from peft_core.utils.checkpoint import checkpoint, checkpoint_sequential


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def model():
    manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 6))


def gradients(call, net, requires_grad):
    manual_seed(3)
    net.zero_grad()
    x = Tensor(draw(8, 6), requires_grad)
    y = call(net, x * 2.0)
    ops.sum(y * y).backward()
    return [y.data, *[p.grad.data for p in net.parameters()], *([x.grad.data] if requires_grad else [])]


WAYS = {
    "module": lambda net, x: checkpoint(net, x, use_reentrant=False),
    "method": lambda net, x: checkpoint(net.forward, x, use_reentrant=True),
    "closure": lambda net, x: checkpoint(lambda t: net(t), x, use_reentrant=False, preserve_rng_state=False),
    "keyword": lambda net, x: checkpoint(lambda *, t: net(t), t=x, use_reentrant=False),
    "sequential": lambda net, x: checkpoint_sequential(net, 2, x),
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_bit_equal_with_dropout(way, requires_grad):
    net = model()
    plain = gradients(lambda n, x: n(x), net, requires_grad)
    again = gradients(WAYS[way], net, requires_grad)
    assert len(plain) == len(again) and all(np.abs(g).max() > 0 for g in plain)
    for a, b in zip(plain, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_that_trains_and_a_value_handed_through():
    x = Tensor(draw(2, 3))
    assert not checkpoint(lambda t: t * 2.0, x).requires_grad
    leaf = Tensor(draw(2, 3), requires_grad=True)
    checkpoint(lambda t: t, leaf).sum().backward()
    assert (leaf.grad.data == 1).all()


def test_only_the_inputs_are_kept_of_a_closure():
    import gc
    import weakref

    held = []

    def function(t):
        h = ops.exp(t)
        held.append(weakref.ref(h.data))
        return ops.exp(h)

    y = checkpoint(function, Tensor(draw(4, 4), requires_grad=True))
    gc.collect()
    assert held[0]() is None
    y.sum().backward()
    assert len(held) == 2


def test_what_is_not_supported_says_so():
    x = Tensor(draw(2, 3), requires_grad=True)
    for option, value, text in [("context_fn", lambda: None, r"checkpoint\(context_fn=...\) is not supported"),
                                ("debug", True, r"checkpoint\(debug=...\) is not supported; expected no debug"),
                                ("determinism_check", "own", r"check='own'\) is not supported")]:  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            checkpoint(lambda t: t, x, **{option: value})
    with pytest.raises(GraphError, match="the block returned a tuple; expected one Tensor"):
        checkpoint(lambda t: (t, t), x)
    with pytest.raises(ConfigError, match="checkpoint_sequential of 3 functions in 4; expected between 1 and 3 seg"):
        checkpoint_sequential(model(), 4, x)
