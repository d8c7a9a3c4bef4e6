"""Shapes under torch's names: the elements against NumPy, and what is a view."""

from typing import Any

import numpy as np
import pytest

import peft_core as pc
from peft_core import Tensor, UnsupportedError

X = np.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda x: x.reshape(4, -1), X.reshape(4, 6)),
        (lambda x: pc.reshape(x, shape=(4, 6)), X.reshape(4, 6)),
        (lambda x: x.view((6, 4)), X.reshape(6, 4)),
        (lambda x: x.view(-1), X.reshape(-1)),
        (lambda x: x.view_as(x.reshape(6, 4)), X.reshape(6, 4)),
        (lambda x: x.permute(2, 0, 1), X.transpose(2, 0, 1)),
        (lambda x: pc.permute(x, dims=(2, 0, 1)), X.transpose(2, 0, 1)),
        (lambda x: x.transpose(0, -1), X.swapaxes(0, 2)),
        (lambda x: pc.swapaxes(x, 0, 1), X.swapaxes(0, 1)),
        (lambda x: x.movedim(0, -1), np.moveaxis(X, 0, -1)),
        (lambda x: x[0].t(), X[0].T),
        (lambda x: x[0, 0].t(), X[0, 0]),
        (lambda x: x.mT, X.swapaxes(1, 2)),
        (lambda x: x[0].T, X[0].T),
        (lambda x: x.flatten(1), X.reshape(2, 12)),
        (lambda x: pc.flatten(x, start_dim=0, end_dim=1), X.reshape(6, 4)),
        (lambda x: x.unflatten(-1, (2, -1)), X.reshape(2, 3, 2, 2)),
        (lambda x: x[:1].squeeze(), X[0]),
        (lambda x: x[:1, :, :1].squeeze(0), X[0, :, :1]),
        (lambda x: x.unsqueeze(-1), X[..., None]),
        (lambda x: pc.unsqueeze(x, dim=1), X[:, None]),
        (lambda x: x[:, :1].expand(-1, 5, -1), np.broadcast_to(X[:, :1], (2, 5, 4))),
        (lambda x: x[0, 0].expand(size=(3, 4)), np.broadcast_to(X[0, 0], (3, 4))),
        (lambda x: x[:1].expand_as(x), np.broadcast_to(X[:1], X.shape)),
        (lambda x: pc.broadcast_to(x[0], (2, 3, 4)), np.broadcast_to(X[0], X.shape)),
        (lambda x: x.repeat(2, 1, 1), np.tile(X, (2, 1, 1))),
        (lambda x: x.repeat_interleave(2, dim=1), np.repeat(X, 2, 1)),
        (lambda x: pc.repeat_interleave(x, 2), np.repeat(X, 2)),
        (lambda x: x.flip(0), X[::-1]),
        (lambda x: pc.flip(x, dims=[0, -1]), X[::-1, :, ::-1]),
        (lambda x: pc.cat([x, x], dim=1), np.concatenate([X, X], 1)),
        (lambda x: pc.concat((x, x), axis=-1), np.concatenate([X, X], -1)),
        (lambda x: pc.stack([x, x], dim=1), np.stack([X, X], 1)),
        (lambda x: x.split(2, dim=2)[1], X[:, :, 2:]),
        (lambda x: pc.split(x, split_size_or_sections=[1, 3], dim=2)[1], X[:, :, 1:]),
        (lambda x: x.chunk(2, dim=1)[1], X[:, 2:]),
        (lambda x: x.unbind(1)[2], X[:, 2]),
    ],
)
def test_elements(call: Any, wanted: np.ndarray) -> None:
    assert call(Tensor(X)).tolist() == wanted.tolist()


def test_questions() -> None:
    x = Tensor(X)
    assert pc.numel(x) == x.numel() == x.nelement() == 24 and pc.is_tensor(x) and not pc.is_tensor(X)
    assert x.is_floating_point() and not pc.is_floating_point(Tensor(np.arange(3)))
    assert [len(part) for part in Tensor(np.arange(10)).chunk(4)] == [3, 3, 3, 1]
    assert pc.Size([2, 3]) == pc.zeros(2, 3).shape


def test_a_view_shares_memory_and_never_copies() -> None:
    x = Tensor(X.copy())
    for y in (
        x.view(6, 4),
        x.mT.view(2, 4, 3),
        x[:, 1].view(2, 2, 2),
        x[:, :, None].view(2, 1, 3, 4),
        x[:0].view(0, 7),
    ):
        assert y.numel() == 0 or y.data_ptr() == x[:, 1].data_ptr() or y.data_ptr() == x.data_ptr()
    x.view(-1).data[0] = -1
    assert x[0, 0, 0].item() == -1
    for strided, shape in [(x.mT, (-1,)), (x[:, 1:], (2, -1)), (x[:, :1].expand(2, 3, 4), (6, 4))]:
        if strided is not None and shape == (2, -1):
            assert strided.view(*shape).shape == (2, 8)  # rows that follow each other do join
            continue
        with pytest.raises(RuntimeError, match=r"view of shape .* and strides .* needs a copy.*Use \.reshape"):
            strided.view(*shape)
        assert strided.reshape(*shape).numel() == strided.numel() == strided.contiguous().view(*shape).numel()
    with pytest.raises(RuntimeError, match="needs a copy"):
        x.mT.view_as(x.reshape(-1))


def test_the_gradient_passes_a_view() -> None:
    x = Tensor(X.copy(), True)
    (x.view(6, 4) * Tensor(X.reshape(6, 4))).sum().backward()
    assert x.grad is not None and x.grad.tolist() == X.tolist()


def test_what_is_left_out() -> None:
    with pytest.raises(UnsupportedError, match=r"view\(dtype\('int64'\)\) is not supported: memory keeps its dtype"):
        Tensor(X).view(pc.int64)
    with pytest.raises(UnsupportedError, match="repeat_interleave with a number per element is not supported"):
        Tensor(X).repeat_interleave(pc.tensor([1, 2]), dim=0)
