"""What a Tensor is and what it refuses."""

import numpy as np
import pytest

import peft_core
from peft_core import Tensor, no_grad, op, tensor
from peft_core.errors import GraphError

double = op(lambda x: (x * np.float32(2), (lambda gy: gy * np.float32(2),)))


def test_tensor_takes_float32_for_python_floats_and_copies():
    source = np.ones(3, np.float32)
    t = tensor(source)
    t.data[0] = 5
    assert source[0] == 1
    assert tensor([1.0, 2.0]).dtype == peft_core.float32 and tensor([1, 2]).dtype == peft_core.int64
    assert tensor([1, 2], dtype="bfloat16").dtype == peft_core.bfloat16
    assert tensor(np.ones(2)).dtype == peft_core.float64


def test_sizes_strides_and_device():
    t = Tensor(np.zeros((2, 3, 4), np.float32))
    assert t.shape == t.size() == (2, 3, 4) and t.size(1) == 3 and t.numel() == 24 and t.ndim == t.dim() == 3
    assert t.stride() == (12, 4, 1) and t.stride(0) == 12 and t.is_contiguous() and len(t) == 2
    assert str(t.device) == "cpu"
    assert not Tensor(t.data.T).is_contiguous()


def test_detach_and_numpy_share_storage():
    t = Tensor(np.zeros(3, np.float32), True)
    assert np.shares_memory(t.detach().numpy(), t.data)
    with pytest.raises(GraphError, match=r"numpy\(\) was called on a Tensor that requires grad.*detach"):
        t.numpy()


def test_item_wants_one_element():
    assert tensor([3]).item() == 3 and float(tensor(2.5)) == 2.5 and int(tensor(2)) == 2 and bool(tensor(1))
    with pytest.raises(ValueError, match=r"item\(\) on shape \(2,\); expected one element"):
        tensor([1, 2]).item()


def test_repr_shows_values_dtype_and_graph():
    assert repr(tensor([1.0, 2.0])) == "tensor([1., 2.])"
    assert repr(tensor([1.0], dtype="float16")) == "tensor([1.], dtype=float16)"
    assert repr(tensor([1.0], requires_grad=True)) == "tensor([1.], requires_grad=True)"
    assert "grad_fn=<<lambda> backward>" in repr(double(tensor([1.0], requires_grad=True)))


def test_backward_refusals():
    with pytest.raises(GraphError, match="backward\\(\\) on a Tensor without grad_fn"):
        tensor([1.0]).backward()
    y = double(tensor([1.0, 2.0], requires_grad=True))
    with pytest.raises(GraphError, match=r"without a gradient on shape \(2,\)"):
        y.backward()
    with pytest.raises(GraphError, match=r"got a gradient of shape \(3,\); expected \(2,\)"):
        y.backward(np.ones(3))


def test_requires_grad_is_for_floating_leaves():
    with pytest.raises(ValueError, match="requires_grad on dtype int64; expected a floating dtype"):
        tensor([1], requires_grad=True)
    y = double(tensor([1.0], requires_grad=True))
    with pytest.raises(GraphError, match="expected a leaf"):
        y.requires_grad = False
    assert not y.is_leaf and tensor([1.0]).requires_grad_().is_leaf


def test_grad_takes_arrays_of_its_own_shape():
    t = tensor([1.0, 2.0], requires_grad=True)
    t.grad = np.ones(2, np.float32)
    assert t.grad.tolist() == [1, 1]
    t.grad = None
    assert t.grad is None
    with pytest.raises(ValueError, match=r"grad of shape \(3,\) was set on a Tensor of shape \(2,\)"):
        t.grad = np.ones(3)


@pytest.mark.parametrize("write", ["+=", "-=", "*=", "/=", "[]"])
def test_writing_works_on_leaves_under_no_grad_and_nowhere_else(write):
    def apply(t):
        if write == "[]":
            t[0] = 4
        else:
            t = {"+=": t.__iadd__, "-=": t.__isub__, "*=": t.__imul__, "/=": t.__itruediv__}[write](2)
        return t

    p = tensor([1.0, 2.0], requires_grad=True)
    memory = p.data
    with no_grad():
        assert apply(p) is p
    assert p.data is memory and p.dtype == np.float32 and memory[0] != 1
    with pytest.raises(GraphError, match="expected a leaf under no_grad"):
        apply(p)
    y = double(p)
    with no_grad(), pytest.raises(GraphError, match="expected a leaf under no_grad"):
        apply(y)


def test_what_trains_owns_memory_that_can_be_written_to():
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    x = Tensor(array)
    assert x.data is array
    x.requires_grad = True
    assert x.data.flags.writeable and (x.data == array).all()
    own = np.ones(3, np.float32)
    assert Tensor(own, requires_grad=True).data is own
