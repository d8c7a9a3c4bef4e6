import ml_dtypes
import numpy as np
import pytest

from adapters import LoraLinear, LowRank
from peft_core import Tensor, no_grad
from peft_core.errors import AdapterError
from peft_core.nn import Linear
from peft_core.random import Generator, manual_seed
from peft_core.recompute import recompute

N, I, O, R = 5, 12, 7, 3  # noqa: E741


def parts(dtype="float32", bias=True):
    g = Generator(3)
    base = Linear(I, O, bias=bias, dtype=dtype, generator=g)
    base.requires_grad_(False)
    adapters = {name: LowRank(g.normal((R, I)), g.normal((O, R)), s) for name, s in (("a", 0.5), ("b", -2.0))}
    return base, adapters, g.normal((N, I))


def expected(base, low_ranks, x):
    y = x.astype(np.float64) @ base.weight.data.astype(np.float64).T + base.bias.data.astype(np.float64)
    for m in low_ranks:
        y = y + m.scaling * (x.astype(np.float64) @ m.A.data.T.astype(np.float64)) @ m.B.data.T.astype(np.float64)
    return y


@pytest.mark.parametrize("active", [(), ("a",), ("b",), ("a", "b")])
def test_forward_is_the_formula_for_the_active_adapters(active):
    base, adapters, x = parts()
    y = LoraLinear(base, adapters, active)(Tensor(x)).data
    want = expected(base, [adapters[name] for name in active], x)
    assert np.abs(y - want).max() <= 1e-5 * np.abs(want).max()


def test_gradients_of_a_and_b_are_the_formulas():
    base, adapters, x = parts()
    y = LoraLinear(base, adapters, ["a"])(Tensor(x))
    gy = Generator(9).normal((N, O))
    y.backward(gy)
    a = adapters["a"]
    ga = a.scaling * (gy @ a.B.data).T @ x  # (R, I)
    gb = a.scaling * gy.T @ (x @ a.A.data.T)  # (O, R)
    assert np.abs(a.A._grad - ga).max() <= 1e-4 * np.abs(ga).max()
    assert np.abs(a.B._grad - gb).max() <= 1e-4 * np.abs(gb).max()
    assert adapters["b"].A._grad is None and base.weight._grad is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_parameters_are_float32_and_the_output_has_the_bases_dtype(dtype):
    base, adapters, x = parts(dtype)
    for inputs in (x, x.astype(base.weight.dtype)):
        layer = LoraLinear(base, adapters)
        assert layer(Tensor(inputs)).dtype == base(Tensor(inputs)).dtype
    half = LowRank(np.ones((R, I), ml_dtypes.bfloat16), np.zeros((O, R), np.float16), np.float64(2.0))
    assert half.A.dtype == half.B.dtype == np.float32 and type(half.scaling) is float
    assert half.delta().dtype == np.float32


def test_read_only_arrays_become_parameters_of_their_own():
    a = np.ones((R, I), np.float32)
    a.flags.writeable = False
    low_rank = LowRank(a, np.zeros((O, R)), 1.0)
    assert low_rank.A.data.flags.writeable and not np.shares_memory(low_rank.A.data, a)


def test_zero_b_leaves_the_output_bit_equal():
    base, adapters, x = parts("bfloat16")
    for m in adapters.values():
        m.B.data = np.zeros_like(m.B.data)
    assert np.array_equal(LoraLinear(base, adapters)(Tensor(x)).data, base(Tensor(x)).data)


def test_delta_and_merged():
    base, adapters, x = parts()
    layer = LoraLinear(base, adapters)
    before, held = base.weight.data.copy(), base.weight.data
    new = layer.merged()
    want = before.astype(np.float64)
    for m in adapters.values():
        want = want + m.scaling * m.B.data.astype(np.float64) @ m.A.data.astype(np.float64)
    assert type(new) is Linear and new is not base and new.bias is base.bias
    assert np.abs(new.weight.data - want).max() <= 1e-5
    assert layer.base_layer is base and base.weight.data is held and np.array_equal(held, before)
    assert not new.weight.requires_grad and new(Tensor(x)).shape == (N, O)


def test_dropout_acts_on_the_input_of_a_only_and_only_in_training():
    base, _, x = parts()
    m = LowRank(np.eye(I, dtype=np.float32), np.ones((O, I), np.float32), 1.0, dropout=0.5)
    layer = LoraLinear(base, {"a": m})
    manual_seed(4)
    one = layer(Tensor(x)).data - base(Tensor(x)).data
    layer.eval()
    plain = layer(Tensor(x)).data - base(Tensor(x)).data
    assert np.abs(plain - x.sum(1, keepdims=True)).max() < 1e-4
    assert np.abs(one - plain).max() > 0.1
    assert np.allclose(one, one[:, :1], atol=1e-4)  # one dropped input for all of the layer's outputs


def test_recompute_reruns_with_the_adapters_and_the_mask_of_the_forward():
    def gradients(again):
        base, adapters, x = parts()
        for m in adapters.values():
            m.dropout = 0.5
        layer = LoraLinear(base, adapters, ["a"])
        manual_seed(11)
        y = recompute(layer, Tensor(x)) if again else layer(Tensor(x))
        layer.active = ("b",)
        y.backward(np.ones(y.shape, np.float32))
        assert layer.active == ("b",) and adapters["b"].A._grad is None
        return adapters["a"].A._grad, adapters["a"].B._grad

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        assert np.array_equal(plain, again)


def test_half_precision_parameters_are_refused():
    base, adapters, x = parts()
    layer = LoraLinear(base, adapters)
    layer.to("bfloat16")
    with pytest.raises(AdapterError, match=r"adapter parameters are bfloat16; expected float32. Convert the base"):
        layer(Tensor(x))


def test_what_other_code_reads_of_a_linear_is_there():
    base, adapters, _ = parts()
    layer = LoraLinear(base, adapters)
    assert layer.weight is base.weight and layer.bias is base.bias
    assert (layer.in_features, layer.out_features) == (I, O)
    with no_grad():
        assert layer(Tensor(np.zeros((2, 3, I), np.float32))).shape == (2, 3, O)
