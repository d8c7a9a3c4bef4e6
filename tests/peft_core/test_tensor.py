"""What a Tensor is and what it refuses."""

import numpy as np
import pytest

import peft_core
from peft_core import Tensor, UnsupportedError, no_grad, op, tensor
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


@pytest.mark.parametrize("wrap", [np.asarray, Tensor])
def test_a_gradient_that_is_set_is_a_copy(wrap):
    mine = np.ones(2, np.float32)
    t, u = tensor([1.0, 2.0], requires_grad=True), tensor([1.0, 2.0], requires_grad=True)
    t.grad = u.grad = wrap(mine)
    mine[:] = 7
    t.grad.data[:] = 3  # the getter does share: an optimiser scales a gradient in place
    assert t.grad.tolist() == [3, 3] and u.grad.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (np.ones(3, np.float32), ValueError, r"grad of shape \(3,\), dtype float32 on cpu .* Tensor of shape \(2,\)"),
        (np.ones(2), ValueError, "dtype float64 on cpu was set on .*, dtype float32 on cpu; expected the same of each"),
        (tensor([1, 2]), ValueError, "dtype int64 on cpu was set"),
        ([1.0, 1.0], TypeError, "grad was set to a list; expected a Tensor, an array or None"),
        (1.0, TypeError, "grad was set to a float"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(value, error, text):
    t = tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(error, match=text):
        t.grad = value
    assert t.grad is None


def test_data_is_an_array_whatever_is_assigned():
    t = tensor([1.0, 2.0])
    t.data = t.data - tensor([0.5, 0.5])  # array - Tensor is a Tensor
    assert isinstance(t.data, np.ndarray) and t.tolist() == [0.5, 1.5]
    with pytest.raises(TypeError, match=r"a Tensor of a list; expected an array. Use tensor\(...\) for numbers"):
        Tensor([1, 2])


def test_comparison_with_what_is_no_number():
    t = tensor([1.0, 2.0])
    assert (t == None) is False and (t != None) is True  # noqa: E711
    assert (t == "text") is False and t not in [None, "text"]
    assert (t == 1).tolist() == (t == np.float32(1)).tolist() == [True, False]


def test_operators_with_the_number_in_front():
    n, x = tensor(3), tensor([0.5, 2.0])
    assert (
        (7 // n).item() == 2
        and (7 % n).item() == 1
        and (2**n).item() == 8
        and (x**x).tolist() == [np.sqrt(np.float32(0.5)), 4]
    )
    assert (2**x).tolist() == [np.float32(2) ** np.float32(0.5), 4] and abs(-x).tolist() == [0.5, 2]
    assert [10, 20, 30, 40][n] == 40 and list(range(n)) == [0, 1, 2] and f"{x.sum():.2f}" == "2.50"
    assert [row.item() for row in x] == [0.5, 2]
    with pytest.raises(TypeError, match="iteration over a Tensor without dimensions; expected at least one"):
        iter(n)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"create_graph": True}, r"backward\(create_graph=True\) is not supported: gradients are plain arrays"),
        ({"retain_graph": True}, r"backward\(retain_graph=True\) is not supported: saved values are freed"),
        ({"inputs": []}, r"backward\(inputs=...\) is not supported: set requires_grad to False"),
    ],
)
def test_what_backward_leaves_out(settings, text):
    with pytest.raises(UnsupportedError, match=text):
        double(tensor([1.0], requires_grad=True)).backward(**settings)


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
