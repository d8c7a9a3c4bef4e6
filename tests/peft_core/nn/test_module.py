import copy

import ml_dtypes
import numpy as np
import pytest

from peft_core import Tensor, nn, tensor
from peft_core.errors import ModelError


class Leaf(nn.Module):
    def __init__(self, n=2):
        self.n = n
        self.weight = nn.Parameter(np.arange(n, dtype=np.float32))

    def extra_repr(self):
        return f"{self.n}"


class Tree(nn.Module):
    def __init__(self):
        self.child = Leaf()  # set before the own parameter: the order of names is parameters first
        self.scale = nn.Parameter(np.ones(1, np.float32))
        self.plain = tensor([7.0])
        self.layers = [Leaf(3), Leaf(3), Leaf(4)]
        self.pair = (Leaf(), Leaf())
        self.named = {"a": Leaf(), 1: Leaf()}
        self.numbers = [1, 2, 3]
        self.register_buffer("table", tensor([1.0, 2.0]))
        self.register_buffer("scratch", tensor([3, 4]), persistent=False)
        self.register_buffer("nothing", None)


NAMES = ["scale", "child.weight", "layers.0.weight", "layers.1.weight", "layers.2.weight", "pair.0.weight",
         "pair.1.weight", "named.a.weight", "named.1.weight"]  # fmt: skip


def test_names_are_paths_of_attributes_lists_and_dicts():
    tree = Tree()
    assert [name for name, _ in tree.named_parameters()] == NAMES
    assert [name for name, _ in tree.named_modules()][:3] == ["", "child", "layers.0"]
    assert [name for name, _ in tree.named_children()] == [n.rpartition(".")[0] for n in NAMES[1:]]
    assert [name for name, _ in tree.named_parameters("model")][1] == "model.child.weight"
    assert [name for name, _ in tree.named_parameters(recurse=False)] == ["scale"]
    assert [name for name, _ in tree.named_buffers()] == ["table", "scratch"]
    assert len(list(tree.modules())) == 9 and len(list(tree.children())) == 8


def test_a_plain_tensor_is_no_parameter_and_a_list_of_parameters_is():
    class Odd(nn.Module):
        def __init__(self):
            self.plain = tensor([1.0], requires_grad=True)
            self.several = [nn.Parameter(np.ones(1, np.float32)), nn.Parameter(np.ones(2, np.float32))]

    assert [name for name, _ in Odd().named_parameters()] == ["several.0", "several.1"]


def test_tied_parameters_and_shared_modules_are_yielded_once_but_saved_under_every_name():
    class Tied(nn.Module):
        def __init__(self):
            self.a = Leaf()
            self.b = Leaf()
            self.b.weight = self.a.weight
            self.again = self.a

    tied = Tied()
    assert [name for name, _ in tied.named_parameters()] == ["a.weight"]
    assert [name for name, _ in tied.named_modules()] == ["", "a", "b"]
    assert [name for name, _ in tied.named_children()] == ["a", "b"]
    assert list(tied.state_dict()) == ["a.weight", "b.weight", "again.weight"]


def test_a_module_that_refers_to_its_parent_ends():
    child, parent = Leaf(), Leaf()
    parent.child, child.parent = child, parent
    assert [name for name, _ in parent.named_parameters()] == ["weight", "child.weight"]


def test_state_dict_is_the_memory_itself_without_what_is_not_persistent():
    tree = Tree()
    state = tree.state_dict()
    assert list(state) == ["scale", "table", *NAMES[1:]]
    assert state["scale"].data is tree.scale.data and not state["scale"].requires_grad
    assert list(tree.child.state_dict(prefix="x")) == ["x.weight"]


def test_load_state_dict_copies_in_the_parameters_own_dtype():
    source, target = Tree(), Tree().to("bfloat16")
    for parameter in source.parameters():
        parameter.data += 0.5
    memory = target.child.weight.data
    kept = target.load_state_dict({name: value.numpy() for name, value in source.state_dict().items()})
    assert kept == ([], [])
    assert target.child.weight.data is memory and memory.dtype == ml_dtypes.bfloat16
    for name, value in target.state_dict().items():
        np.testing.assert_array_equal(value.numpy().astype(np.float32), source.state_dict()[name].numpy())


def test_load_state_dict_reports_everything_at_once_and_writes_nothing():
    tree = Tree()
    state = {name: value.numpy() + 1 for name, value in tree.state_dict().items()}
    del state["layers.1.weight"], state["table"]
    state["head.weight"] = np.zeros((2, 3), np.float32)
    state["scale"] = np.ones(5, np.float32)
    state["child.weight"] = np.ones(2, np.int64)
    with pytest.raises(ModelError) as info:
        tree.load_state_dict(state)
    assert str(info.value) == (
        "the state does not fit Tree; nothing was loaded; expected the names, shapes and kinds of Tree:\n"
        "  missing     table (2,)\n"
        "  missing     layers.1.weight (3,)\n"
        "  unexpected  head.weight (2, 3)\n"
        "  does not fit  scale: got float32 (5,), expected float32 (1,)\n"
        "  does not fit  child.weight: got int64 (2,), expected float32 (2,)\n"
        "Load the state of this model, or pass strict=False to ignore missing and unexpected names."
    )
    np.testing.assert_array_equal(tree.named["a"].weight.data, [0, 1])


def test_load_state_dict_not_strict_still_refuses_shapes():
    tree = Tree()
    kept = tree.load_state_dict({"scale": np.full(1, 9, np.float32), "more": np.ones(1, np.float32)}, strict=False)
    assert kept.unexpected_keys == ["more"] and kept.missing_keys == ["table", *NAMES[1:]]
    assert tree.scale.item() == 9
    with pytest.raises(ModelError, match="scale: got float32 \\(2,\\), expected float32 \\(1,\\)") as info:
        tree.load_state_dict({"scale": np.ones(2, np.float32)}, strict=False)
    assert "missing" not in str(info.value)


def test_load_state_dict_replaces_memory_that_cannot_be_written():
    leaf = Leaf()
    leaf.weight.data.flags.writeable = False
    mapped = leaf.weight.data
    leaf.load_state_dict({"weight": np.array([5, 6], np.float32)})
    np.testing.assert_array_equal(leaf.weight.data, [5, 6])
    np.testing.assert_array_equal(mapped, [0, 1])


def test_get_submodule():
    tree = Tree()
    assert tree.get_submodule("") is tree
    assert tree.get_submodule("layers.2") is tree.layers[2]
    assert tree.get_submodule("pair.1") is tree.pair[1]
    assert tree.get_submodule("named.1") is tree.named[1]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("layers.7.mlp", "no module 'layers.7.mlp': 'layers' has no '7'; expected one of: 0, 1, 2."),
        ("chld", "no module 'chld': Tree has no 'chld'; expected one of: child, layers, pair, named."),
        ("child.weight", "no module 'child.weight': 'child' has no 'weight'; expected one of: (nothing)."),
        ("layers", "'layers' is a list; expected a module in it: layers.0, layers.1, layers.2."),
    ],
)
def test_a_wrong_path_says_what_exists(path, text):
    for call in (Tree().get_submodule, lambda p: Tree().set_submodule(p, Leaf())):
        with pytest.raises(AttributeError) as info:
            call(path)
        assert str(info.value) == text


def test_a_wrong_path_into_a_long_list_is_short():
    tree = Leaf()
    tree.layers = [Leaf() for _ in range(30)]
    with pytest.raises(AttributeError, match=r"expected one of: 0, 1, .*11, \.\.\. \(30 in all\)\.$"):
        tree.get_submodule("layers.99")


def test_set_submodule():
    tree, new = Tree(), Leaf(5)
    for path in ("child", "layers.1", "named.a", "named.1"):
        tree.set_submodule(path, new)
        assert tree.get_submodule(path) is new
    assert list(tree.named) == ["a", 1]  # replaced, not added under another type of key
    assert [n for n, _ in tree.named_modules()][1] == "child"


def test_set_submodule_errors():
    tree = Tree()
    with pytest.raises(ValueError, match=r"would replace the model itself; expected the path of a module inside it"):
        tree.set_submodule("", Leaf())
    with pytest.raises(ValueError, match=r"set_submodule\('pair.0'\): 'pair' is a tuple; expected a list or a dict"):
        tree.set_submodule("pair.0", Leaf())
    with pytest.raises(TypeError, match=r"set_submodule\('child'\) got a int; expected a Module"):
        tree.set_submodule("child", 3)


def test_a_dict_key_with_a_dot_is_refused():
    tree = Leaf()
    tree.named = {"a.b": Leaf()}
    with pytest.raises(ValueError, match=r"key 'a.b' of 'named' contains a dot; expected none"):
        list(tree.parameters())


def test_to_converts_floats_moves_gradients_and_keeps_objects():
    tree = Tree()
    weight = tree.child.weight
    weight.grad = np.ones(2, np.float32)
    assert tree.to("float16") is tree
    assert tree.child.weight is weight and weight.dtype == np.float16 and weight.grad.dtype == np.float16
    assert tree.table.dtype == np.float16 and tree.scratch.dtype == np.int64
    assert tree.to("cpu", np.float32).scale.dtype == np.float32
    with pytest.raises(ValueError, match="dtype 'float23' is not known"):
        tree.to("float23")


def test_train_eval_requires_grad_zero_grad_apply():
    tree = Tree()
    assert tree.layers[0].training and "training" not in vars(tree.layers[0])
    assert tree.eval() is tree and not any(m.training for m in tree.modules())
    assert all(m.training for m in tree.train().modules())
    assert tree.requires_grad_(False) is tree and not any(p.requires_grad for p in tree.parameters())
    tree.scale.grad = np.ones(1, np.float32)
    tree.zero_grad()
    assert tree.scale.grad is None
    order = []
    assert tree.apply(lambda m: order.append(type(m).__name__)) is tree
    assert order[-1] == "Tree" and len(order) == 9


def test_register_buffer_takes_tensors_only():
    for value, word in ((np.ones(2), "ndarray"), (nn.Parameter(np.ones(2, np.float32)), "Parameter")):
        with pytest.raises(TypeError, match=rf"register_buffer\('b'\) got a {word}; expected a Tensor or None"):
            Leaf().register_buffer("b", value)


def test_calling_a_module_without_forward():
    with pytest.raises(NotImplementedError, match=r"Leaf was called but defines no forward\(\); expected a method"):
        Leaf()(1)


def test_parameter():
    shared = Tensor(np.ones(2, np.float32))
    parameter = nn.Parameter(shared)
    assert parameter.requires_grad and parameter.data is shared.data and not nn.Parameter(shared, False).requires_grad
    assert repr(parameter).startswith("Parameter containing:\ntensor([1., 1.]")
    with pytest.raises(ValueError, match="requires_grad on dtype int64"):
        nn.Parameter(np.ones(2, np.int64))


def test_deepcopy_is_independent():
    tree = Tree()
    other = copy.deepcopy(tree)
    other.scale.data += 1
    assert tree.scale.item() == 1 and isinstance(other.scale, nn.Parameter) and other.scale.requires_grad


def test_repr_is_a_tree_that_counts_equal_neighbours():
    assert repr(Tree()) == (
        "Tree(\n"
        "  (child): Leaf(2)\n"
        "  (layers): ModuleList(\n"
        "    (0-1): 2 x Leaf(3)\n"
        "    (2): Leaf(4)\n"
        "  )\n"
        "  (pair): ModuleTuple(\n"
        "    (0-1): 2 x Leaf(2)\n"
        "  )\n"
        "  (named): ModuleDict(\n"
        "    (a): Leaf(2)\n"
        "    (1): Leaf(2)\n"
        "  )\n"
        ")"
    )


def test_a_parameter_is_not_replaced_by_a_plain_tensor_unnoticed():
    layer = nn.Linear(2, 2)
    with pytest.raises(
        TypeError, match=r"Linear.weight is a Parameter and was set to a plain Tensor.*Parameter\(tensor\)"
    ):
        layer.weight = tensor([[1.0, 2.0], [3.0, 4.0]])
    layer.weight = nn.Parameter(tensor([[1.0, 2.0], [3.0, 4.0]]))
    layer.bias = None
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


def test_registration_by_name():
    module = nn.Module()
    module.register_parameter("scale", nn.Parameter(tensor([1.0])))
    module.register_parameter("shift", None)
    module.add_module("inner", nn.Linear(1, 1))
    assert list(module.state_dict()) == ["scale", "inner.weight", "inner.bias"] and module.shift is None
    assert module.get_parameter("inner.bias") is module.inner.bias and module.get_parameter("scale") is module.scale
    for use, text in [
        (
            lambda: module.register_parameter("x", tensor([1.0])),
            r"register_parameter\('x'\) got a Tensor; expected a Para",
        ),
        (lambda: module.add_module("x", 3), r"add_module\('x'\) got a int; expected a Module"),
    ]:
        with pytest.raises(TypeError, match=text):
            use()
    with pytest.raises(AttributeError, match=r"no parameter 'inner'; expected a name of named_parameters\(\)"):
        module.get_parameter("inner")


def test_conversions_of_a_module():
    layer = nn.Linear(2, 2)
    weight = layer.weight
    for name, dtype in [("half", "float16"), ("bfloat16", "bfloat16"), ("double", "float64"), ("float", "float32")]:
        assert getattr(layer, name)() is layer and str(layer.weight.dtype) == str(layer.bias.dtype) == dtype
    assert layer.cpu() is layer.to("cpu") is layer.to(dtype="float64") is layer and layer.weight is weight
    assert str(layer.to(device="cpu", dtype="float32").bias.dtype) == "float32"
