import gc
import weakref

import numpy as np
import pytest

from peft_core import Tensor, amp, autocast, enable_grad, manual_seed, nn, no_grad, op, ops, random
from peft_core.errors import GraphError
from peft_core.recompute import recompute


def draw(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


class Block(nn.Module):
    """x + dropout(low-rank of a frozen linear): what a LoRA layer does; x is read three times."""

    forward_state = ("training", "active")

    def __init__(self, width=6, inner=None):
        self.norm = nn.RMSNorm(width)
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 3, bias=False), nn.Linear(3, width, bias=False)
        self.dropout = nn.Dropout(0.4)
        self.active = ["a"]
        self.inner = inner

    def forward(self, x):
        h = self.norm(x)
        y = self.base(h) + self.b(self.a(self.dropout(h))) * (1.0 if self.active == ["a"] else 3.0)
        if self.inner is not None:
            y = recompute(self.inner, y) if self.inner_recompute else self.inner(y)
        return x * 0.5 + y + x

    inner_recompute = False


def gradients(blocks, use, x, requires_grad=True, passes=1):
    """Gradients of everything after ``passes`` forwards and backwards, one after the other."""
    manual_seed(11)
    x = Tensor(x, requires_grad)
    for block in blocks:
        block.zero_grad()
    for _ in range(passes):
        h = x * 1.5 if requires_grad else x
        for block in blocks:
            h = recompute(block, h) if use else block(h)
        ops.sum(h * h).backward()
    found = {f"{i}.{name}": p.grad for i, b in enumerate(blocks) for name, p in b.named_parameters()}
    found["x"] = x.grad
    return {name: None if g is None else g.data.copy() for name, g in found.items()}, random.get_state()


def assert_equal(left, right):
    (left, left_state), (right, right_state) = left, right
    assert left.keys() == right.keys() and left_state == right_state
    for name, value in left.items():
        assert (value is None) == (right[name] is None), name
        if value is not None:
            assert np.abs(value).max() > 0, name
            np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_gradients_are_bit_equal(requires_grad):
    blocks = [Block(), Block()]
    plain, again = (gradients(blocks, use, draw(7, 6), requires_grad) for use in (False, True))
    assert_equal(plain, again)
    assert again[0]["0.a.weight"] is not None  # trains over inputs that need no gradient
    assert again[0]["0.base.weight"] is None and (again[0]["x"] is None) == (not requires_grad)


def test_a_second_use_of_the_block_and_gradients_that_are_there_already():
    block = Block()
    assert_equal(*(gradients([block, block, block], use, draw(7, 6), passes=3) for use in (False, True)))


def test_sums_form_in_the_order_they_have_without_recompute():
    """(g1 + g2) + g3 differs from g1 + (g2 + g3): a parameter used twice, over a gradient that is there already."""
    layer, found = nn.Linear(6, 6, bias=False), []
    for use in (False, True):
        layer.weight.grad = draw(6, 6)
        x = Tensor(draw(50, 6), requires_grad=True)
        block = lambda t: layer(layer(t)) * t + t * t  # noqa: E731
        (recompute(block, x, parameters=layer.parameters()) if use else block(x)).backward(draw(50, 6, seed=1))
        found.append((layer.weight.grad.data, x.grad.data))
    for plain, again in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, again)


def test_nested():
    outer = Block(inner=Block())
    plain = gradients([outer], False, draw(5, 6))
    outer.inner_recompute = True
    assert_equal(plain, gradients([outer], True, draw(5, 6)))
    assert_equal(plain, gradients([outer], False, draw(5, 6)))


def test_dropout_really_acts_in_these_tests():
    manual_seed(0)
    block, x = Block(), Tensor(draw(7, 6))
    assert not np.array_equal(block(x).data, block(x).data)


def test_restores_what_the_forward_saw_and_then_what_is_now():
    block, x = Block(), draw(7, 6)
    block.active = names = ["a"]
    expected, _ = gradients([block], False, x)
    manual_seed(11)
    block.zero_grad()
    leaf = Tensor(x, requires_grad=True)
    h = recompute(block, leaf * 1.5)
    loss = ops.sum(h * h)
    block.eval()  # all of this comes between forward and backward
    names.append("b")
    manual_seed(99)
    block.a.requires_grad_(False)
    block.base.requires_grad_(True)
    with autocast("float16"):
        loss.backward()
        assert amp.compute_dtype() == np.float16
    assert not block.dropout.training and block.active is names and names == ["a", "b"]
    assert random.get_state() == {"seed": 99, "counter": 0}
    assert not block.a.weight.requires_grad and block.base.weight.requires_grad
    for name, p in block.named_parameters():
        if expected[f"0.{name}"] is not None:
            np.testing.assert_array_equal(p.grad.data, expected[f"0.{name}"], err_msg=name)
    assert block.base.weight.grad is None
    np.testing.assert_array_equal(leaf.grad.data, expected["x"])


def test_the_compute_dtype_of_the_forward_is_used():
    seen = []
    layer = nn.Linear(4, 4)

    def block(x):
        seen.append(amp.compute_dtype())
        return layer(x)

    with autocast("bfloat16"):
        y = recompute(block, Tensor(draw(3, 4), requires_grad=True), parameters=layer.parameters())
    y.backward(np.ones(y.shape, y.dtype))
    assert seen == [np.dtype("bfloat16")] * 2 and amp.compute_dtype() is None


def test_state_is_put_back_when_the_rerun_fails():
    block = Block()
    y = recompute(block, Tensor(draw(3, 6)))
    block.eval()
    before = random.get_state()
    block.base.weight.data = np.zeros((2, 2), np.float32)
    with pytest.raises(Exception):  # noqa: B017  the op's own error, whatever it is
        y.backward(np.ones(y.shape, np.float32))
    assert not block.dropout.training and random.get_state() == before


def test_keeps_the_inputs_and_no_activation():
    alive = []

    @op
    def watched(x):
        y = x + 1
        alive.append(weakref.ref(y))
        return y * 2, (lambda gy: gy * y * 0 + gy * 2,)

    x = Tensor(np.ones(5), requires_grad=True)
    kept = watched(x)
    gc.collect()
    assert alive.pop()() is not None
    y = recompute(lambda t: watched(watched(t)), x)
    gc.collect()
    assert [r() for r in alive] == [None, None]
    y.backward(np.ones(5))
    np.testing.assert_array_equal(x.grad.data, np.full(5, 4.0))
    assert kept is not None


def test_an_intermediate_input_does_not_stay_alive_as_a_tensor():
    x = Tensor(np.ones(5), requires_grad=True)
    h = x * 2.0
    ref = weakref.ref(h)
    y = recompute(lambda t: t * 3.0, h)
    del h
    gc.collect()
    assert ref() is None
    y.backward(np.ones(5))
    np.testing.assert_array_equal(x.grad.data, np.full(5, 6.0))


def test_several_inputs_one_twice_and_things_that_are_no_tensors():
    def block(a, b, scale, c, mask=None):
        return a * b * scale["by"] + c

    values = [draw(4), draw(4, seed=1)]
    found = []
    for use in (False, True):
        a, b = (Tensor(v, requires_grad=True) for v in values)
        frozen = Tensor(values[0])
        arguments = (a, b, {"by": 2.0}, a)
        y = recompute(block, *arguments) if use else block(*arguments)
        y = y + recompute(block, frozen, frozen, {"by": 1}, frozen)
        y.backward(np.ones(4, np.float32))
        found.append((a.grad.data, b.grad.data))
        assert frozen.grad is None
    np.testing.assert_allclose(found[0][0], 2 * values[1] + 1, rtol=1e-6)
    for left, right in zip(*found, strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_input_itself_a_detached_result_and_a_parameter_as_input():
    x = Tensor(draw(4), requires_grad=True)
    y = recompute(lambda t: t, x)
    assert y is not x
    (y + x).backward(np.ones(4, np.float32))
    np.testing.assert_array_equal(x.grad.data, np.full(4, 2.0))
    recompute(lambda t: t, x).backward(np.ones(4, np.float32))
    np.testing.assert_array_equal(x.grad.data, np.full(4, 3.0))
    recompute(lambda t: t.detach(), x).backward(np.ones(4, np.float32))
    np.testing.assert_array_equal(x.grad.data, np.full(4, 3.0))
    layer = nn.Linear(4, 4)
    layer(layer.weight).backward(draw(4, 4))
    expected = layer.weight.grad.data
    for passes in (1, 2):  # the second adds to what is there
        layer.zero_grad()
        for _ in range(passes):
            recompute(layer, layer.weight).backward(draw(4, 4))
        np.testing.assert_allclose(layer.weight.grad.data, passes * expected, rtol=1e-6, atol=1e-6)


def test_gradients_of_parameters_are_owned_and_not_shared():
    x, layer = Tensor(draw(3), requires_grad=True), nn.LayerNorm(3)
    gy = np.ones(3, np.float32)
    recompute(layer, x).backward(gy)
    assert all(p.grad.data is not gy and not np.shares_memory(p.grad.data, gy) for p in layer.parameters())


def test_nothing_is_recorded_where_nothing_trains_or_under_no_grad():
    block = Block()
    with no_grad():
        assert recompute(block, Tensor(draw(2, 6), requires_grad=True)).grad_fn is None
        with enable_grad():
            assert recompute(block, Tensor(draw(2, 6))).grad_fn.name == "recompute"
    assert recompute(block.requires_grad_(False), Tensor(draw(2, 6))).grad_fn is None


def test_a_method_of_a_module_knows_its_parameters():
    block = Block()
    recompute(block.forward, Tensor(draw(2, 6))).backward(draw(2, 6))
    assert block.a.weight.grad is not None


def test_errors():
    layer, x = nn.Linear(4, 4), Tensor(draw(2, 4), requires_grad=True)
    with pytest.raises(GraphError, match=r"the block returned a tuple; expected one Tensor\. Let the block return"):
        recompute(lambda t: (t, t), x)
    y = recompute(lambda t: layer(t), x)
    text = (r"depends on a Tensor of shape \(4, 4\) that requires grad but is neither an input nor a parameter of the "
            r"block; expected all .* Pass it as an input, or in parameters=\.")  # fmt: skip
    with pytest.raises(GraphError, match=text):
        y.backward(np.ones((2, 4), np.float32))
    assert layer.weight.grad is None and x.grad is None
    y = recompute(lambda t: t * 2.0, x)
    y.backward(np.ones((2, 4), np.float32))
    with pytest.raises(GraphError, match="backward reached 'recompute' a second time"):
        y.backward(np.ones((2, 4), np.float32))
