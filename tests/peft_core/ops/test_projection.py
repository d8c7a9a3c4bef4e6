"""project: the fused op against formulas in float64, and its kernels on ragged shapes."""

import gc
from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, autocast, kernels, ops, packing
from peft_core.dtypes import as_dtype, bfloat16
from peft_core.ops import projection, projection_fused
from peft_core.ops.projection import Layout
from support.cases import Case, every, relative_error

needs_tiles = pytest.mark.skipif(not kernels.tiles_supported(), reason="numba compiles no tiles here")
DTYPES = [pytest.param("bfloat16", marks=needs_tiles), pytest.param("float32", marks=pytest.mark.skipif(
    not kernels.tiles_supported(np.float32), reason="numba compiles no tiles here"))]  # fmt: skip
LIMITS = {"bfloat16": 8e-3, "float32": 5e-6}


def before_products(x: np.ndarray, norm: Any, shift: Any, activation: str | None, eps: float) -> np.ndarray:
    if shift is not None:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * norm + shift
    if norm is not None:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm
    if activation == "gelu_tanh":
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if activation == "swiglu":
        gate, up = np.split(x, 2, axis=-1)
        return gate / (1 + np.exp(-gate)) * up
    return x


def reference(x, residual, norm, shift, *tensors, layout, eps=1e-5, activation=None) -> np.ndarray:
    h, flat, outputs = before_products(x, norm, shift, activation, eps), list(tensors), []
    for biased, scales in zip(layout.biased, layout.scales, strict=True):
        y = h @ flat.pop(0).T
        y = y + flat.pop(0) if biased else y
        for scale in scales:
            a, b = flat.pop(0), flat.pop(0)
            y = y + scale * (h @ a.T) @ b.T
        outputs.append(y)
    y = np.concatenate(outputs, axis=-1)
    return y if residual is None else residual + y


TWO = Layout((True, False), ((0.5, 2.0), (3.0,)))  # two linears: a bias and two adapters, no bias and one
SHAPES = [(4, 6), (4,), (2, 6), (4, 2), (3, 6), (4, 3), (5, 6), (2, 6), (5, 2)]


def group_inputs(x: tuple, norm: int, residual: bool) -> Any:
    shapes = [x, *([(x[0], 9)] if residual else []), *[(6,)] * norm, *SHAPES]
    return lambda rng: [rng.normal(size=s) for s in shapes]


def call(norm: int, residual: bool, function: Any) -> Any:
    """``function`` as one of the arrays that are there: Case has no place for None."""

    def spread(x, *rest, **params):
        rest = list(rest)
        r = rest.pop(0) if residual else None
        own = [rest.pop(0) for _ in range(norm)]
        return function(x, r, *own, *[None] * (2 - norm), *rest, **params)

    return spread


def row(name: str, *, norm: int = 0, activation: str | None = None, residual: bool = False, **more: Any) -> Case:
    """``norm``: 0, 1 (RMSNorm) or 2 (LayerNorm) arrays of a norm."""
    x = (3, 12) if activation == "swiglu" else (3, 6)
    return Case(name, call(norm, residual, ops.project), group_inputs(x, norm, residual),
                call(norm, residual, reference), params={"layout": TWO, "activation": activation}, retains=None,
                slack=4, **more)  # fmt: skip


CASES = [
    row("plain"),
    row("norm", norm=1),
    row("layer norm", norm=2),
    row("gated", activation="swiglu"),
    row("gelu", activation="gelu_tanh"),
    row("residual", residual=True),
    row("norm residual", norm=1, residual=True),
    row("layer norm residual", norm=2, residual=True),
    row("gated residual", activation="swiglu", residual=True),
    row("gelu residual", activation="gelu_tanh", residual=True),
    row("norm autocast", norm=1, autocast="bfloat16", out="bfloat16", dtypes=("float32",)),
    row("norm residual autocast", norm=1, residual=True, autocast="bfloat16", out="float32", dtypes=("float32",)),
]


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def _adapted(rng: np.random.Generator, n_in: int, outs: list, ranks: list, dtype: Any = np.float32) -> tuple:
    """(tensors, layout): frozen read-only weights, adapters that train."""
    tensors, scales = [], []
    for n_out, rs in zip(outs, ranks, strict=True):
        w = (rng.normal(size=(n_out, n_in)) / np.sqrt(n_in)).astype(dtype)
        w.flags.writeable = False
        tensors.append(Tensor(w))
        scales.append(tuple(0.5 + i for i in range(len(rs))))
        for r in rs:
            tensors.append(Tensor((rng.normal(size=(r, n_in)) / np.sqrt(n_in)).astype("f4"), True))
            tensors.append(Tensor((rng.normal(size=(n_out, r)) / np.sqrt(r)).astype("f4"), True))
    return tensors, Layout((False,) * len(outs), tuple(scales))


def test_what_is_retained_is_x_and_s_and_nothing_of_the_width_of_h() -> None:
    rng = np.random.default_rng(0)
    tensors, layout = _adapted(rng, 64, [32, 32], [[4], [4]])
    x, norm = Tensor(rng.normal(size=(100, 64)).astype("f4"), True), Tensor(np.ones(64, "f4"))
    with kernels.use_kernels(False):
        y = ops.project(x, None, norm, None, *tensors, layout=layout)
    run = y.grad_fn.vjp.__self__
    own = [run.x, run.before.r, *run.s]
    assert run.x.base is x.data or run.x is x.data
    assert sum(a.nbytes for a in own if a is not None) - x.data.nbytes == 100 * 4 + 2 * 100 * 4 * 4
    assert not any(isinstance(v, np.ndarray) and v.size > x.data.size for v in vars(run).values())


def test_a_frozen_group_over_a_plain_input_retains_no_activation() -> None:
    rng = np.random.default_rng(0)
    tensors, layout = _adapted(rng, 64, [32], [[]])
    x = Tensor(rng.normal(size=(100, 64)).astype("f4"), True)
    with kernels.use_kernels(False):
        y = ops.project(x, None, None, None, *tensors, layout=layout)
    assert y.grad_fn.vjp.__self__.x is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_retain_no_more(dtype: str) -> None:
    rng = np.random.default_rng(0)
    tensors, layout = _adapted(rng, 64, [32, 32], [[16], [16]])
    x, norm = Tensor(rng.normal(size=(100, 64)).astype("f4"), True), Tensor(np.ones(64, "f4"))
    with autocast(dtype):
        call = ops.project(x, None, norm, None, *tensors, layout=layout).grad_fn.vjp
        bare = ops.project(x, None, None, None, tensors[0], layout=Layout((False,), ((),))).grad_fn.vjp
    assert np.shares_memory(call.x, x.data) and call.norm.r.shape == (100,) and call.s.shape == (100, 32)
    kept = {id(v): v for v in (*vars(call).values(), *call.norm) if isinstance(v, np.ndarray) and v is not call.x}
    assert sum(v.nbytes for v in kept.values()) == 100 * 4 + call.s.nbytes + norm.data.nbytes
    assert len(bare.x) == 0 and len(bare.s) == 0


def test_adapters_that_are_zero_leave_the_base_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    tensors, layout = _adapted(rng, 64, [32, 16], [[4], [4]])
    for b in (tensors[2], tensors[5]):
        b.data[...] = 0
    x, norm = rng.normal(size=(10, 64)).astype("f4"), np.ones(64, "f4")
    with_terms = ops.project(x, None, norm, None, *tensors, layout=layout)
    without = ops.project(x, None, norm, None, tensors[0], tensors[3], layout=Layout((False, False), ((), ())))
    np.testing.assert_array_equal(with_terms.data, without.data)


# ------------------------------------------------------------------------------------------------ kernels on tiles

TILES = [  # rows, width, outputs, ranks, what stands before, residual
    (37, 64, [50, 22], [[4], [16, 3]], "norm", False),
    (1, 64, [50, 22], [[4], [16, 3]], "norm", True),
    (300, 66, [96], [[8]], "plain", True),
    (13, 34, [50], [[8]], "gated", True),
    (130, 34, [50, 4], [[8], []], "plain", False),
    (515, 192, [192, 64, 64], [[16]] * 3, "norm", False),
    (205, 96, [48], [[]], "gated", False),
    (99, 48, [98, 98], [[64], [33]], "norm", False),
    (37, 64, [50, 22], [[4], [16, 3]], "layer", False),
    (515, 192, [576], [[16]], "layer", False),
    (13, 34, [50], [[8]], "gelu", True),
    (205, 96, [48], [[]], "gelu", False),
]
ODD = [
    (13, 33, [51], [[3]], "gated", True),
    (21, 63, [1, 7], [[5], []], "norm", False),
    (21, 63, [1, 7], [[5], []], "layer", True),
    (13, 33, [51], [[3]], "gelu", True),
]  # bf16 pairs up what is even


class _Example:
    def __init__(self, n, width, outs, ranks, before, residual, dtype="bfloat16", stored=bfloat16) -> None:
        rng, self.dtype = np.random.default_rng(0), as_dtype(dtype)
        x = rng.normal(size=(n, width * (2 if before == "gated" else 1))).astype("f4")
        if before == "layer":
            x += 3  # a mean that has to be taken away
        self.x = x if before in ("norm", "layer") else x.astype(self.dtype)
        self.norm = rng.normal(size=width).astype("f4") if before in ("norm", "layer") else None
        self.shift = rng.normal(size=width).astype("f4") if before == "layer" else None
        self.residual = rng.normal(size=(n, sum(outs))).astype("f4") if residual else None
        self.tensors, self.layout = _adapted(rng, width, outs, ranks, stored)
        self.gy = rng.normal(size=(n, sum(outs))).astype("f4" if residual else self.dtype)
        self.activation = {"gated": "swiglu", "gelu": "gelu_tanh"}.get(before)

    def run(self, gy=None) -> dict[str, np.ndarray]:
        for t in self.tensors:
            t.grad = None
        x, residual = Tensor(self.x, True), None if self.residual is None else Tensor(self.residual, True)
        norm, shift = (None if a is None else Tensor(a) for a in (self.norm, self.shift))
        with autocast(self.dtype):
            y = ops.project(x, residual, norm, shift, *self.tensors, layout=self.layout, activation=self.activation)
        self.vjp = y.grad_fn.vjp
        y.backward(self.gy if gy is None else gy)
        out = {"y": y.data, "x": x._grad} | ({} if residual is None else {"residual": residual._grad})
        return out | {f"tensor {i}": t._grad for i, t in enumerate(self.tensors) if t.requires_grad}

    def truth(self) -> dict[str, np.ndarray]:
        """The same numbers in float64: tape and formula that the table above checks against central differences."""
        wide = [Tensor(t.data.astype("f8"), t.requires_grad) for t in self.tensors]
        for t in wide:  # the kernels round all weights first
            t.data = t.data.astype(self.dtype).astype("f8")
        x = Tensor(self.x.astype("f8"), True)
        residual = None if self.residual is None else Tensor(self.residual.astype("f8"), True)
        norm, shift = (None if a is None else Tensor(a.astype("f8")) for a in (self.norm, self.shift))
        y = ops.project(x, residual, norm, shift, *wide, layout=self.layout, activation=self.activation)
        y.backward(self.gy.astype("f8"))
        out = {"y": y.data, "x": x._grad} | ({} if residual is None else {"residual": residual._grad})
        return out | {f"tensor {i}": t._grad for i, t in enumerate(wide) if t.requires_grad}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [bfloat16, np.float32, np.float16])
@pytest.mark.parametrize("shape", TILES + ODD, ids=str)
def test_the_kernels_agree_with_float64(shape: tuple, dtype: str, stored: Any) -> None:
    if dtype == "bfloat16" and shape in ODD:
        return  # the formula's, see below
    example = _Example(*shape, dtype=dtype, stored=stored)
    got, truth = example.run(), example.truth()
    assert isinstance(example.vjp, projection_fused._Backward)
    assert got.keys() == truth.keys()
    for name, value in got.items():
        assert relative_error(value, truth[name]) < LIMITS[dtype], (name, relative_error(value, truth[name]))


@needs_tiles
def test_a_float32_input_is_rounded_and_its_gradient_is_float32() -> None:
    example = _Example(*TILES[2])
    truth = example.truth()
    example.x = example.x.astype("f4")
    got = example.run()
    assert isinstance(example.vjp, projection_fused._Backward) and got["x"].dtype == np.float32
    assert all(relative_error(value, truth[name]) < LIMITS["bfloat16"] for name, value in got.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", ["norm", "layer", "plain", "gated", "gelu"])
def test_nan_comes_out_of_the_kernels(before: str, dtype: str) -> None:
    example = _Example(20, 64, [50], [[4]], before, True, dtype=dtype)
    example.x[3, 5] = np.nan
    got = example.run()
    assert np.isnan(got["y"][3].astype("f4")).all() and np.isfinite(np.delete(got["y"], 3, 0)).all()
    assert np.isnan(got["tensor 1"]).any() and np.isnan(got["tensor 2"]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(dtype: str) -> None:
    example = _Example(*TILES[5], dtype=dtype)
    first, second = example.run(), example.run()
    assert all((first[k].tobytes() == second[k].tobytes()) for k in first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_has_arrived_is_added_to_in_place(dtype: str) -> None:
    example = _Example(*TILES[0], dtype=dtype)
    once = example.run()
    gx, vjp = once["x"], example.vjp
    arrived = np.random.default_rng(1).normal(size=gx.shape).astype("f4")
    total = arrived.copy()
    out = vjp(example.gy, [total] + [None] * (len(vjp.needs) - 1))
    assert out[0] is total
    np.testing.assert_array_equal(total, arrived + gx)  # the same bits as adding afterwards: recompute does


@needs_tiles
@pytest.mark.parametrize("why", ["writable", "trains", "odd", "float64", "off"])
def test_what_the_kernels_do_not_compute_takes_the_formula(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = _Example(20, 64, [50], [[4]], "norm", False)
    w = example.tensors[0]
    if why == "writable":
        w.data = w.data.copy()
    if why == "trains":
        w.requires_grad = True
    if why == "odd":
        example = _Example(20, 63, [50], [[4]], "norm", False)
    if why == "off":
        monkeypatch.setenv("PEFT_CORE_TILES", "off")
    with autocast("float64" if why == "float64" else "bfloat16"):
        y = ops.project(example.x, None, example.norm, None, *example.tensors, layout=example.layout)
    assert isinstance(y.grad_fn.vjp.__self__, projection._Projection)


@needs_tiles
def test_packed_weights_go_when_the_weights_go() -> None:
    gc.collect()
    before = len(packing._packed)
    example = _Example(20, 64, [50], [[4]], "norm", False)
    example.run()
    assert len(packing._packed) == before + 2  # forward and backward
    del example
    gc.collect()
    assert len(packing._packed) == before


# ------------------------------------------------------------------------------------------------ shapes


def _wrong(part: str) -> tuple[_Example, dict[str, Any]]:
    """An example with one array of another shape."""
    example = _Example(5, 64, [50, 22], [[4], [3]], "gated" if part == "gate" else "norm", True)
    if part in ("x", "gate"):
        example.x = example.x[:, :-2]
    if part == "norm":
        example.norm = example.norm[:-1]
    if part == "residual":
        example.residual = example.residual[:1]
    if part == "width":
        example.tensors[3] = Tensor(np.zeros((22, 62), np.float32))
    if part == "a":
        example.tensors[1] = Tensor(np.zeros((4, 62), np.float32), True)
    if part == "b":
        example.tensors[2] = Tensor(np.zeros((50, 5), np.float32), True)
    return example, {"layout": example.layout, "activation": example.activation}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("x", r"x \(5, 62\), expected \(5, 64\)"),
        ("gate", r"x \(5, 126\), expected \(5, 128\)"),
        ("norm", r"norm \(63,\), expected \(64,\)"),
        ("residual", r"residual \(1, 72\), expected \(5, 72\)"),
        ("width", r"w \(22, 62\), expected \(22, 64\)"),
        ("a", r"a \(4, 62\), expected \(4, 64\)"),
        ("b", r"b \(50, 5\), expected \(50, 4\)"),
    ],
)
def test_shapes_that_do_not_fit(part: str, text: str, enabled: bool) -> None:
    example, params = _wrong(part)
    with kernels.use_kernels(enabled), pytest.raises(ValueError, match=text):
        ops.project(example.x, example.residual, example.norm, None, *example.tensors, **params)


@pytest.mark.parametrize(("norm", "shift", "activation"), [(1, 0, "swiglu"), (0, 1, None), (0, 0, "relu")])
def test_what_cannot_stand_before_the_products(norm: int, shift: int, activation: str | None) -> None:
    x, w = np.zeros((2, 4), np.float32), np.zeros((3, 4), np.float32)
    own = [np.ones(4, np.float32) if given else None for given in (norm, shift)]
    with pytest.raises(ValueError, match="expected a norm, with or without a shift, or an activation of None"):
        ops.project(x, None, *own, w, layout=Layout((False,), ((),)), activation=activation)
