"""Conversions of a Tensor, new ones like it, and writing into it."""

from typing import Any

import numpy as np
import pytest

import peft_core as pc
from peft_core import Tensor, no_grad
from peft_core.errors import GraphError


def tensor(requires_grad: bool = False) -> Tensor:
    return Tensor(np.array([0.5, -1.25, 0.0], np.float32), requires_grad)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float", "float32"), ("half", "float16"), ("bfloat16", "bfloat16"), ("double", "float64"), ("long", "int64"),
     ("int", "int32"), ("bool", "bool")],
)  # fmt: skip
def test_other_dtypes(name: str, dtype: str) -> None:
    y = getattr(tensor(), name)()
    assert str(y.dtype) == dtype and y.tolist() == tensor().to(getattr(pc, name)).tolist()
    assert y.tolist() == (tensor().data != 0 if name == "bool" else tensor().data.astype(y.dtype)).tolist()
    assert y.data_ptr() == getattr(y, name)().data_ptr()


def test_to() -> None:
    x = tensor()
    assert x.to("cpu") is x.to(pc.device("cpu")) is x.to(torch_dtype := pc.float32) is x.to(device=None) is x
    assert x.to(dtype=torch_dtype, copy=True) is not x and not np.shares_memory(x.to(x, copy=True).data, x.data)
    assert str(x.to("cpu", pc.float64, non_blocking=True).dtype) == "float64"
    assert str(x.to(Tensor(np.arange(2))).dtype) == str(x.type_as(Tensor(np.arange(2))).dtype) == "int64"
    assert x.type() == "float32" and str(x.type("float16").dtype) == "float16" and x.cpu() is x
    with pytest.raises(TypeError, match=r"to\(\) got layout; expected dtype, device, copy or non_blocking"):
        x.to("cpu", layout=1)
    x = tensor(True)
    x.double().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 1] and x.grad.dtype == np.float32


def test_new_ones() -> None:
    x = tensor().half()
    assert x.new_zeros(2, 3).shape == (2, 3) and str(x.new_ones((2,)).dtype) == "float16"
    assert x.new_full((2,), 3).tolist() == [3, 3] and x.new_empty(0).shape == (0,)
    assert x.new_tensor([1, 2], dtype=pc.int64, requires_grad=False).tolist() == [1, 2]
    assert x.is_cuda is False and x.element_size() == x.itemsize == 2 and x.nbytes == 6


WRITES: dict[str, tuple[Any, list]] = {
    "add_": (lambda x: x.add_(tensor(), alpha=2), [1.5, -3.75, 0]),
    "sub_": (lambda x: x.sub_(1), [-0.5, -2.25, -1]),
    "mul_": (lambda x: x.mul_(tensor()), [0.25, 1.5625, 0]),
    "div_": (lambda x: x.div_(2), [0.25, -0.625, 0]),
    "addcmul_": (lambda x: x.addcmul_(tensor(), tensor(), value=2), [1, 1.875, 0]),
    "addcdiv_": (lambda x: x.addcdiv_(tensor(), 2 * pc.ones(3), value=4), [1.5, -3.75, 0]),
    "lerp_": (lambda x: x.lerp_(pc.zeros(3), 0.5), [0.25, -0.625, 0]),
    "clamp_": (lambda x: x.clamp_(min=-1, max=0.25), [0.25, -1, 0]),
    "zero_": (lambda x: x.zero_(), [0, 0, 0]),
    "fill_": (lambda x: x.fill_(Tensor(np.array(2.0))), [2, 2, 2]),
    "copy_": (lambda x: x.copy_(pc.tensor([1, 2, 3])), [1, 2, 3]),
    "masked_fill_": (lambda x: x.masked_fill_(x > 0, 9.0), [9, -1.25, 0]),
    "setitem": (lambda x: x.__setitem__(Tensor(np.array([0, 2])), pc.tensor([7.0, 8.0])), [7, -1.25, 8]),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_changes_a_leaf_in_place_and_nothing_else(name: str) -> None:
    write, wanted = WRITES[name]
    x = tensor(True)
    memory = x.data
    with no_grad():
        assert write(x) is (None if name == "setitem" else x)
    assert x.data is memory and x.tolist() == wanted and x.dtype == np.float32
    what = r"x\[...\] = value" if name == "setitem" else rf"{name}\(\)"
    with pytest.raises(GraphError, match=what + " writes into a Tensor that the graph may still need"):
        write(x)


def test_random_writes_follow_the_seed() -> None:
    with no_grad():
        for write in (lambda x: x.normal_(3.0, 0.1), lambda x: x.uniform_(2, 4)):
            pc.manual_seed(1)
            a = write(pc.empty(500))
            pc.manual_seed(1)
            assert pc.equal(a, write(pc.empty(500))) and abs(float(a.mean()) - 3) < 0.2 and float(a.std()) < 0.7
