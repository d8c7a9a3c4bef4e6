"""project for few rows without gradients: the numbers of the large kernel, bit for bit, and what is kept ready."""

import gc

import numpy as np
import pytest

from peft_core import Tensor, autocast, kernels, no_grad, ops
from peft_core.dtypes import as_dtype, bfloat16
from peft_core.ops import projection_few, projection_fused
from peft_core.ops.projection import Layout, members
from support.cases import relative_error

DTYPES = [pytest.param(name, marks=pytest.mark.skipif(
    not (kernels.tiles_supported(as_dtype(name)) and kernels.team_supported()), reason="no tiles, or no team"))
          for name in ("bfloat16", "float32")]  # fmt: skip
LIMITS = {"bfloat16": 8e-3, "float32": 5e-6}
GROUPS = [  # width, outputs, ranks, what stands before, residual, bias
    (64, [50, 22], [[4], [16, 3]], "norm", False, False),
    (66, [96], [[8]], "plain", True, True),
    (34, [50, 4], [[8], []], "gated", True, False),
    (192, [192, 64, 64], [[16]] * 3, "norm", False, True),
    (96, [48], [[]], "gated", False, False),
    (48, [98, 98], [[64], [28, 5]], "plain", False, False),
    (64, [50, 22], [[4], [16, 3]], "layer", False, True),
    (34, [50, 4], [[8], []], "gelu", True, True),
]


def example(group, n, dtype, stored=bfloat16):
    """(x, residual, (norm, shift), tensors, what ops.project takes by name), all frozen and read-only."""
    width, outs, ranks, before, residual, biased = group
    rng, arrays, scales = np.random.default_rng(0), [], []
    for n_out, rs in zip(outs, ranks, strict=True):
        arrays.append((rng.normal(size=(n_out, width)) / np.sqrt(width)).astype(stored))
        if biased:
            arrays.append(rng.normal(size=n_out).astype(stored))
        scales.append(tuple(0.5 + i for i in range(len(rs))))
        for r in rs:
            arrays.append((rng.normal(size=(r, width)) / np.sqrt(width)).astype("f4"))
            arrays.append((rng.normal(size=(n_out, r)) / np.sqrt(r)).astype("f4"))
    norm = rng.normal(size=width).astype("f4") if before in ("norm", "layer") else None
    shift = rng.normal(size=width).astype("f4") if before == "layer" else None
    for a in [*arrays, *(a for a in (norm, shift) if a is not None)]:
        a.flags.writeable = False
    x = rng.normal(size=(n, width * (2 if before == "gated" else 1))).astype("f4")
    x = x if norm is not None else x.astype(dtype)
    r = rng.normal(size=(n, sum(outs))).astype("f4") if residual else None
    activation = {"gated": "swiglu", "gelu": "gelu_tanh"}.get(before)
    params = {"layout": Layout((biased,) * len(outs), tuple(scales)), "activation": activation}
    return x, r, (norm, shift), [Tensor(a) for a in arrays], params


def project(x, residual, norm, tensors, params, dtype):
    with no_grad(), autocast(dtype):
        return ops.project(x, residual, *norm, *tensors, **params).data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_any_number_of_rows_gives_the_bits_of_the_large_kernel_and_the_values_of_float64(group, dtype, monkeypatch):
    dtype, limit = as_dtype(dtype), LIMITS[dtype]
    x, residual, norm, tensors, params = example(group, 40, dtype)
    large = project(x, residual, norm, tensors, params, dtype)
    wide = [Tensor(t.data.astype(dtype).astype("f8")) for t in tensors]
    with kernels.use_kernels(False), no_grad():
        truth = ops.project(
            *(None if a is None else a.astype("f8") for a in (x, residual, *norm)), *wide, **params
        ).data
    calls, run = [], projection_few.run_team
    monkeypatch.setattr(projection_few, "run_team", lambda *args: (calls.append(1), run(*args)))
    for n in range(1, projection_few.ROWS + 1):
        y = project(x[:n], None if residual is None else residual[:n], norm, tensors, params, dtype)
        np.testing.assert_array_equal(y, large[:n])
        assert y.dtype == large.dtype and relative_error(y, truth[:n]) < limit
    assert len(calls) == projection_few.ROWS
    project(x, residual, norm, tensors, params, dtype)
    assert len(calls) == projection_few.ROWS  # 40 rows are not few


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3, 5])
def test_the_number_of_threads_changes_nothing(threads, dtype):
    dtype, before = as_dtype(dtype), kernels.get_num_threads()
    parts = *example(GROUPS[0], 3, dtype), dtype
    y = project(*parts)
    try:
        kernels.set_num_threads(threads)
        np.testing.assert_array_equal(project(*parts), y)
    finally:
        kernels.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS[:3], ids=str)
def test_nan_comes_out_of_its_row_alone(group, dtype):
    dtype = as_dtype(dtype)
    x, residual, norm, tensors, params = example(group, 3, dtype)
    x[1, 2] = np.nan
    y = project(x, residual, norm, tensors, params, dtype).astype("f4")
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_low_rank_term_that_is_written_to_counts_at_once(dtype):
    dtype = as_dtype(dtype)
    x, residual, norm, tensors, params = example((64, [50], [[4]], "norm", False, False), 2, dtype)
    tensors[2] = Tensor(tensors[2].data.copy())
    first = project(x, residual, norm, tensors, params, dtype).astype("f4")
    tensors[2].data[...] = 0
    bare = project(x, residual, norm, tensors[:1], {"layout": Layout((False,), ((),))}, dtype).astype("f4")
    second = project(x, residual, norm, tensors, params, dtype).astype("f4")
    assert np.abs(first - bare).max() > 0.1
    np.testing.assert_array_equal(second, bare)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_ready_goes_when_its_arrays_go_and_another_scale_is_another_group(dtype):
    dtype = as_dtype(dtype)
    gc.collect()
    before = len(projection_few._kept)
    x, residual, norm, tensors, params = example((64, [50], [[4]], "norm", False, False), 2, dtype)
    first = project(x, residual, norm, tensors, params, dtype)
    project(x, residual, norm, tensors, params, dtype)
    assert len(projection_few._kept) == before + 1
    other = params | {"layout": Layout((False,), ((1.5,),))}
    assert np.abs(project(x, residual, norm, tensors, other, dtype).astype("f4") - first.astype("f4")).max() > 0.1
    assert len(projection_few._kept) == before + 2
    del norm, tensors
    gc.collect()
    assert len(projection_few._kept) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("why", ["writable", "off", "float64"])
def test_what_the_kernel_does_not_compute_it_leaves_alone(why, dtype, monkeypatch):
    dtype = as_dtype(dtype)
    x, residual, norm, tensors, params = example(GROUPS[0], 2, dtype)
    monkeypatch.setattr(projection_few, "run_team", lambda *args: pytest.fail("the kernel ran"))
    if why == "writable":
        tensors[0] = Tensor(tensors[0].data.copy())
    if why == "off":
        monkeypatch.setenv("PEFT_CORE_TILES", "off")
    y = project(x, residual, norm, tensors, params, np.dtype("f8") if why == "float64" else dtype)
    assert np.isfinite(y.astype("f4")).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_take_the_large_kernel(dtype, monkeypatch):
    x, residual, norm, tensors, params = example(GROUPS[0], 2, as_dtype(dtype))
    monkeypatch.setattr(projection_few, "run_team", lambda *args: pytest.fail("the kernel ran"))
    tensors[1].requires_grad = True
    with autocast(dtype):
        y = ops.project(x, residual, *norm, *tensors, **params)
    assert isinstance(y.grad_fn.vjp, projection_fused._Backward)
    assert len(list(members(tuple(tensors), params["layout"], 4))) == 2
