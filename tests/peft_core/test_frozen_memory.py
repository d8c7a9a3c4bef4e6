"""Writing into weights whose memory is read-only: mapped from a file, frozen, or merged."""

import copy
from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, kernels, nn, no_grad
from peft_core.errors import GraphError
from peft_core.kept import seal
from peft_core.nn import Parameter, init


def read_only(x: Any = 1.0) -> np.ndarray:
    x = np.full((48, 16), x, np.float32)
    x.flags.writeable = False
    return x


def set_row(w: Any) -> None:
    w[0] = 3


WRITES: dict[str, Any] = {
    "mul_": lambda w: w.mul_(3), "+=": lambda w: w.__iadd__(2), "x[...] =": set_row,
    "copy_": lambda w: w.copy_(3.0 * w),
    "fill_": lambda w: w.fill_(3), "clamp_": lambda w: w.clamp_(3, 4), "normal_": lambda w: w.normal_(3, 0),
    "masked_fill_": lambda w: w.masked_fill_(w > 0, 3), "init.normal_": lambda w: init.normal_(w, 3, 0),
    "init.constant_": lambda w: init.constant_(w, 3),
}  # fmt: skip
writes = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


@writes
def test_a_parameter_gets_memory_of_its_own(write: Any) -> None:
    held = read_only()
    w = Parameter(held, requires_grad=False)
    with no_grad():
        write(w)
    assert (w.data[0] == 3).all() and (held == 1).all()
    array = w.data
    with no_grad():
        write(w)
    assert w.data is array  # once


@writes
def test_what_was_packed_of_the_old_values_is_not_used(write: Any) -> None:
    if not kernels.tiles_supported(np.float32):
        pytest.skip("no AVX-512 here")
    layer = nn.Linear(16, 48, bias=False)
    layer.weight = Parameter(read_only(), requires_grad=False)
    x = Tensor(np.ones((2, 16), np.float32))
    with no_grad():
        before = nn.project(x, layer).data[0, 0]
        write(layer.weight)
        after = nn.project(x, layer).data[0, 0]
    assert (before, after) == (16, 48)


@writes
@pytest.mark.parametrize("kind", ["detached", "row", "transposed"])
def test_a_view_of_a_frozen_weight_says_what_to_do(write: Any, kind: str) -> None:
    w = Parameter(read_only(), requires_grad=False)
    with no_grad():
        view = {"detached": w.detach(), "row": w[:1], "transposed": w.T}[kind]
        with pytest.raises(GraphError, match=r"read-only memory .*Write into the Parameter itself, or use x = x.clone"):
            write(view)
        write(own := view.clone())
    assert (own.data[0] == 3).all() and (w.data == 1).all()


@writes
@pytest.mark.parametrize("kind", [Tensor, Parameter])
def test_an_expanded_one_says_what_to_do(write: Any, kind: Any) -> None:
    x = kind(np.broadcast_to(np.ones(16, np.float32), (48, 16)), requires_grad=False)
    with no_grad(), pytest.raises(GraphError, match=r"expanded Tensor of shape \(48, 16\).*x = x.clone\(\) first"):
        write(x)


def test_memory_is_sealed_where_nobody_else_holds_it() -> None:
    w = Parameter(np.ones((4, 4), np.float32), requires_grad=False)
    assert seal(w) and not w.data.flags.writeable and seal(w)
    held = copy.deepcopy(w)
    array = held.data
    assert not seal(held) and array.flags.writeable
    del array
    row = held.data[1]
    assert not seal(held) and row.flags.writeable
    del row
    other = held.detach()
    assert not seal(held)
    del other
    assert seal(held)
    assert not seal(Parameter(np.ones((4, 4), np.float32)[:2], requires_grad=False))


def test_frozen_weights_stay_so_in_another_dtype_and_with_other_values() -> None:
    layer = nn.Linear(16, 48)
    layer.weight = Parameter(read_only(), requires_grad=False)
    layer.bfloat16()
    layer.load_state_dict({"weight": np.full((48, 16), 2.0, np.float32), "bias": np.zeros(48, np.float32)})
    assert (layer.weight.data == 2).all() and str(layer.weight.dtype) == "bfloat16"
    assert not layer.weight.data.flags.writeable and layer.bias.data.flags.writeable


def test_a_buffer_is_there_to_be_written_to() -> None:
    layer = nn.Linear(16, 48)
    layer.register_buffer("seen", Tensor(read_only()))
    layer.load_state_dict(dict(layer.state_dict(), seen=np.full((48, 16), 2.0, np.float32)))
    assert layer.seen.data.flags.writeable
