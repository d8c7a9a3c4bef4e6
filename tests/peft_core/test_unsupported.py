"""What is left out of torch says so, by name, with what to use instead."""

from typing import Any

import pytest

import peft_core as pc
from peft_core import UnsupportedError, nn


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: pc.compile, "peft_core.compile is not supported: nothing is compiled"),
        (lambda: pc.autograd, "peft_core.autograd is not supported: gradients are plain arrays of first order"),
        (lambda: pc.load, "peft_core.load is not supported: files are read and written as safetensors"),
        (lambda: pc.backends, "peft_core.backends is not supported: there is no such setting; leave the line out"),
        (lambda: pc.cdist, "peft_core.cdist is not supported: it is none of torch's names that are here"),
        (lambda: pc.LongTensor, r"peft_core.LongTensor is not supported: expected tensor\(data, dtype=...\)"),
        (lambda: nn.BatchNorm2d, "peft_core.nn.BatchNorm2d is not supported: batch statistics are left out"),
        (lambda: nn.LSTM, "peft_core.nn.LSTM is not supported: recurrent layers"),
        (lambda: nn.GLU, "peft_core.nn.GLU is not supported: .* Close to it: GELU"),
        (lambda: nn.functional.avg_pool2d, r"functional.avg_pool2d is not supported: expected MaxPool2d, or x.mean"),
        (lambda: nn.functional.pad, "peft_core.nn.functional.pad is not supported"),
        (lambda: nn.init.orthogonal_, "peft_core.nn.init.orthogonal_ is not supported"),
        (lambda: pc.ones(2).register_hook(print), "Tensor.register_hook is not supported: there are no hooks"),
        (lambda: pc.ones(2).median(), r"Tensor.median is not supported: expected NumPy on x.numpy\(\)"),
        (lambda: pc.ones(2).scatter_(0, 0, 0), "Tensor.scatter_ is not supported: in-place functions are limited"),
        (lambda: pc.ones(2).maen(), "Tensor.maen is not supported: .* Close to it: mean"),
        (lambda: nn.Linear(1, 1).register_forward_hook(print), "Linear.register_forward_hook is not supported"),
    ],
)
def test_names(use: Any, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text) as caught:
        use()
    assert isinstance(caught.value, AttributeError | NotImplementedError)


def test_a_name_that_is_missing_is_missing_for_hasattr_and_getattr() -> None:
    assert not hasattr(pc, "vmap") and not hasattr(pc.ones(1), "register_hook") and not hasattr(nn, "GRU")
    assert getattr(nn.Linear(1, 1), "scale", None) is None
    with pytest.raises(AttributeError, match=r"'Linear' object has no attribute 'wieght'. Close to it: weight"):
        nn.Linear(1, 1).wieght  # noqa: B018
    with pytest.raises(AttributeError, match="peft_core has no attribute '__wrapped__'"):
        pc.__wrapped__  # noqa: B018


def test_everything_that_is_promised_is_there() -> None:
    for module in (pc, nn, nn.functional, pc.ops):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert len(set(module.__all__)) == len(module.__all__)
