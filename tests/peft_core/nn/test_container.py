"""Sequential, ModuleList and ModuleDict: names, order, and what they refuse."""

from collections import OrderedDict
from typing import Any

import pytest

from peft_core import nn, ones


def names(module: nn.Module) -> list[str]:
    return list(module.state_dict())


def linear(n: int) -> nn.Linear:
    return nn.Linear(n, n, bias=False)


def test_sequential_with_names() -> None:
    model = nn.Sequential(OrderedDict([("up", nn.Linear(2, 3)), ("act", nn.ReLU()), ("down", nn.Linear(3, 1))]))
    assert names(model) == ["up.weight", "up.bias", "down.weight", "down.bias"] and len(model) == 3
    assert model(ones(4, 2)).tolist() == model.down(model.act(model.up(ones(4, 2)))).tolist()
    assert model[0] is model.up and model[-1] is model.down and list(model[1:]) == [model.act, model.down]


def test_sequential_grows_and_is_replaced() -> None:
    model = nn.Sequential(linear(2))
    second, third = linear(2), linear(2)
    assert model.append(second) is model and names(model) == ["0.weight", "1.weight"]
    model[0] = third
    model.insert(1, nn.ReLU())
    assert [type(m).__name__ for m in model] == ["Linear", "ReLU", "Linear"]
    assert model[0] is third and model[2] is second and names(model) == ["0.weight", "2.weight"]


def test_module_list() -> None:
    layers = nn.ModuleList(linear(n) for n in (1, 2))
    layers.extend([linear(3)])
    layers.insert(0, nn.Identity())
    assert [n for n, _ in layers.named_children()] == ["0", "1", "2", "3"] and len(layers) == 4
    assert [m.in_features for m in layers[1:]] == [1, 2, 3] and isinstance(layers[1:], nn.ModuleList)
    assert names(layers) == ["1.weight", "2.weight", "3.weight"]
    with pytest.raises(NotImplementedError, match=r"ModuleList was called but defines no forward\(\)"):
        layers(ones(1))


def test_module_dict() -> None:
    blocks = nn.ModuleDict({"a": linear(1), "b": nn.ReLU()})
    blocks["c"] = linear(2)
    blocks["a"] = linear(3)
    assert list(blocks) == blocks.keys() == ["a", "b", "c"] and len(blocks) == 3 and "b" in blocks and "d" not in blocks
    assert blocks["a"].in_features == 3 and [k for k, _ in blocks.items()] == ["a", "b", "c"]
    assert names(blocks) == ["a.weight", "c.weight"] and blocks.values()[1] is blocks["b"]
    with pytest.raises(KeyError, match="d"):
        blocks["d"]


@pytest.mark.parametrize(
    ("use", "error", "text"),
    [
        (lambda: nn.Sequential(nn.ReLU(), 3), TypeError, "Sequential argument 1 is a int; expected a Module"),
        (lambda: nn.Sequential({"a": 3}), TypeError, r"add_module\('a'\) got a int; expected a Module"),
        (lambda: nn.ModuleList([3]), TypeError, "ModuleList argument 0 is a int; expected a Module"),
        (lambda: nn.ModuleDict({"a": 3}), TypeError, "ModuleDict got a int for 'a'; expected a Module"),
        (lambda: nn.ModuleDict({"a.b": nn.ReLU()}), KeyError, "ModuleDict cannot use the key 'a.b'"),
        (lambda: nn.ModuleDict({"keys": nn.ReLU()}), KeyError, "ModuleDict cannot use the key 'keys'"),
    ],
)
def test_refusals(use: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        use()
