import sys
import tracemalloc
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from peft_core import Tensor, autocast, kernels, no_grad
from peft_core.dtypes import as_dtype
from peft_core.ops.attention import slope_block, softmax_block
from peft_core.ops.rope import _rotate
from peft_core.ops.rotary import rotary_attention
from support.cases import ALL, Case, every, relative_error

module = sys.modules["peft_core.ops.rotary"]
DTYPES = ("bfloat16", "float32")
NEEDS_TILES = [
    pytest.param(name, marks=pytest.mark.skipif(not kernels.tiles_supported(as_dtype(name)), reason=f"no {name} tiles"))
    for name in DTYPES
]
on_tiles = pytest.mark.parametrize("dtype", NEEDS_TILES)
BOUND = {"bfloat16": 5e-3, "float32": 2e-6}


def angles(lengths, width, dtype=np.float32):
    position = np.concatenate([np.arange(n) for n in lengths])
    angle = position[:, None] / 100 ** (np.arange(0, width, 2) / width)
    return dict(cos=np.cos(angle).astype(dtype), sin=np.sin(angle).astype(dtype))


def shape(lengths, heads, groups, width, turned=True):
    where = angles(lengths, width) if turned else dict(cos=None, sin=None)
    return dict(**where, cu_seqlens=[0, *np.cumsum(lengths)], n_heads=heads, n_kv_heads=groups, head_dim=width)


def reference(qkv, *, cos, sin, cu_seqlens, n_heads, n_kv_heads, head_dim, scale=None, window=None):
    """Row by row and head by head in float64, the rotation as a complex product."""
    n, half = len(qkv), head_dim // 2
    x = turned = qkv.reshape(n, -1, head_dim)
    if cos is not None:
        z = (x[..., :half] + 1j * x[..., half:]) * (cos.astype("f8") + 1j * sin.astype("f8"))[:, None]
        turned = np.concatenate([z.real, z.imag], -1)
    o = np.zeros((n, n_heads, head_dim))
    for a, b in pairwise(cu_seqlens):
        ahead = np.arange(b - a)[:, None] - np.arange(b - a)
        seen = (ahead >= 0) & (ahead < (window or n + 1))
        for h in range(n_heads):
            g = n_heads + h // (n_heads // n_kv_heads)
            s = turned[a:b, h] @ turned[a:b, g].T * (head_dim**-0.5 if scale is None else scale)
            s = np.where(seen, s, -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
            o[a:b, h] = p @ x[a:b, g + n_kv_heads] / p.sum(-1, keepdims=True)
    return o.reshape(n, -1)


def row(name, lengths, heads, groups, width, turned=True, **more):
    """A row of the table; it runs on tiles if its width is a multiple of 16, and then keeps o."""
    params = shape(lengths, heads, groups, width, turned) | {k: more.pop(k) for k in ("scale", "window") if k in more}
    n, columns = sum(lengths), (heads + 2 * groups) * width
    tiles = width % 16 == 0 and kernels.tiles_supported(as_dtype(more["dtypes"][0]))

    def kept(x):
        return n * heads * (8 if x.dtype == np.float64 else 4) + (2 * params["cos"].nbytes if turned else 0)

    return Case(name, rotary_attention, inputs=lambda rng: [rng.normal(size=(n, columns))], reference=reference,
                retains={0, "y"} if tiles else {0}, extra_bytes=kept, params=params, **more)  # fmt: skip


def tile_rows(dtype):
    """Rows on tiles.  A NaN spreads to earlier queries of its block."""
    more = dict(dtypes=(dtype,), slack=2, nonfinite=False)
    return [
        row(f"tiles_{dtype}", [3, 0, 45, 1, 60], 3, 1, 64, **more),
        row(f"tiles_wide_{dtype}", [50, 7], 2, 2, 128, **more),
        row(f"tiles_scale_{dtype}", [50, 7], 4, 2, 64, scale=0.3, window=50, **more),
        row(f"tiles_window_{dtype}", [150, 7], 2, 1, 32, window=11, **more),
        row(f"tiles_unturned_{dtype}", [50, 7], 2, 1, 48, turned=False, **more),
    ]


FORMULAS = dict(formulas=(softmax_block, slope_block, _rotate), nonfinite=False)  # a complex NaN spoils both parts
CASES = [
    row("rotary", [11], 4, 2, 8, dtypes=ALL, slack=4, **FORMULAS),
    row("rotary_ragged", [3, 0, 1, 17, 19], 6, 2, 4, dtypes=ALL, slack=4, **FORMULAS),
    row("rotary_scale_window", [3, 27], 2, 2, 8, scale=0.7, window=5, dtypes=ALL, slack=4, **FORMULAS),
    row("rotary_autocast", [3, 8], 4, 2, 8, autocast="bfloat16", out="bfloat16", dtypes=("float32",), slack=4,
        nonfinite=False),
    row("rotary_unturned", [3, 0, 11], 4, 2, 7, turned=False, dtypes=ALL, slack=4,
        formulas=(softmax_block, slope_block), nonfinite=False),
    *tile_rows("bfloat16"),
    *tile_rows("float32"),
]  # fmt: skip


@every(CASES)
def test_case(check, case, dtype):
    check(case, dtype)


def make(lengths, heads, groups, width, dtype="bfloat16", turned=True):
    """(qkv, gy) and the parameters."""
    rng, n = np.random.default_rng(0), sum(lengths)
    arrays = [rng.standard_normal((n, w * width)).astype(as_dtype(dtype)) for w in (heads + 2 * groups, heads)]
    return *arrays, shape(lengths, heads, groups, width, turned)


def run(x, gy, params):
    t = Tensor(x, requires_grad=True)
    y = rotary_attention(t, **params)
    y.backward(gy)
    return y.data, t._grad


def agree(got, truth, params, bound):
    """Value and the three parts of the gradient, each by norm."""
    heads, groups, width = params["n_heads"], params["n_kv_heads"], params["head_dim"]
    parts = np.cumsum([heads * width, groups * width])
    pairs = [(got[0], truth[0]), *zip(np.split(got[1], parts, 1), np.split(truth[1], parts, 1), strict=True)]
    errors = [relative_error(a, b) for a, b in pairs]
    assert max(errors) < bound, errors


RAGGED = [37, 512, 300, 1, 700]


@pytest.fixture
def counted(monkeypatch):
    """A list that grows by one with each call on tiles."""
    calls: list = []
    right = module._attend_on_tiles
    monkeypatch.setattr(module, "_attend_on_tiles", lambda *a: calls.append(1) or right(*a))
    return calls


@on_tiles
@pytest.mark.parametrize("lengths", [RAGGED, [1, 1, 2]])
@pytest.mark.parametrize("heads, groups, width", [(9, 3, 64), (8, 8, 128)])
def test_tiles_agree_with_the_formula_in_float64(heads, groups, width, lengths, dtype, counted):
    x, gy, params = make(lengths, heads, groups, width, dtype)
    truth = run(x.astype(np.float64), gy.astype(np.float64), params)
    # among few keys the gradient of q is a small difference, of which o's rounding is a larger part
    agree(run(x, gy, params), truth, params, BOUND[dtype] * (1 if len(x) > 4 else 6))
    assert len(counted) == 1


@on_tiles
@pytest.mark.parametrize("width", [16, 32, 48, 80, 96, 112, 256])
@pytest.mark.parametrize("turned", [True, False])
def test_widths(width, turned, dtype, counted):
    x, gy, params = make([100, 130, 3], 2, 1, width, dtype, turned)
    truth = run(x.astype(np.float64), gy.astype(np.float64), params)
    agree(run(x, gy, params), truth, params, BOUND[dtype])
    assert len(counted) == 1


@on_tiles
@pytest.mark.parametrize("window", [1, 2, 47, 48, 49, 96, 385, 800, 1699, 1700])
def test_windows(window, dtype, counted):
    """Shorter and longer than a block of queries and than the chunks of keys of both passes."""
    x, gy, params = make([1700, 60, 1], 2, 1, 64, dtype)
    params |= {"window": window}
    truth = run(x.astype(np.float64), gy.astype(np.float64), params)
    if window == 1:  # each query sees itself alone: no gradient but v's
        truth[1][:, : 3 * 64] = 0
        got = run(x, gy, params)
        assert np.abs(got[1][:, : 3 * 64].astype("f4")).max() < 100 * BOUND[dtype]
        got[1][:, : 3 * 64] = 0
    else:
        got = run(x, gy, params)
    agree(got, truth, params, BOUND[dtype])
    assert len(counted) == 1


@on_tiles
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [None, 60])
def test_any_number_of_threads_gives_the_same_sums_each_time(threads, window, dtype):
    before = kernels.get_num_threads()
    x, gy, params = make([500, 5, 130], 6, 2, 64, dtype)
    params |= {"window": window}
    truth = run(x.astype(np.float64), gy.astype(np.float64), params)
    try:
        kernels.set_num_threads(threads)
        first = run(x, gy, params)
        for _ in range(3):
            again = run(x, gy, params)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
    finally:
        kernels.set_num_threads(before)
    agree(first, truth, params, BOUND[dtype])


@pytest.mark.parametrize("lengths", [[2048], RAGGED, [512] * 4, [1] * 50 + [900]])
@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("block", [48, 96])
@pytest.mark.parametrize("window", [100, 2048])
def test_work_is_shared_fairly(lengths, threads, block, window):
    plan = module._plan((0, *np.cumsum(lengths)), 9, 3, threads, block, window)
    for (tasks, bounds), step in ((plan.forward, module.LANES), (plan.backward, block)):
        assert bounds[0] == 0 and bounds[-1] == len(tasks) and (np.diff(bounds) >= 0).all()
        first = np.maximum(tasks[:, 2] - window + 1, 0)
        work = np.minimum(tasks[:, 2] + step, np.array(lengths)[tasks[:, 0]]) - first + step
        shares = [work[a:b].sum() for a, b in pairwise(bounds)]
        assert max(shares) < 1.1 * np.mean(shares), shares


@pytest.mark.parametrize("dtype, bound", [("bfloat16", 6e-3), ("float32", 2e-6)])
def test_without_tiles_the_formula_runs(dtype, bound, monkeypatch):
    x, gy, params = make([100, 37], 4, 2, 64, dtype)
    on = run(x, gy, params)
    monkeypatch.setenv("PEFT_CORE_TILES", "off")
    monkeypatch.setattr(module, "_attend_on_tiles", None)
    off = run(x, gy, params)
    assert on[0].dtype == off[0].dtype == x.dtype and on[1].dtype == off[1].dtype == x.dtype
    agree(on, off, params, bound)


def test_other_types_and_widths_take_the_formula(monkeypatch):
    monkeypatch.setattr(module, "_attend_on_tiles", None)
    x, gy, params = make([100, 37], 4, 2, 64)
    run(x.astype(np.float64), gy.astype(np.float64), params)
    with autocast("bfloat16"):
        y, g = run(x.astype(np.float32), gy, params)
    assert y.dtype == ml_dtypes.bfloat16 and g.dtype == np.float32
    x, gy, params = make([100, 37], 4, 2, 24)
    run(x, gy, params)
    run(x, gy, params | {"scale": 0.0})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", ["on", "off"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("window", [None, 35])
def test_nan_comes_out_and_stays_in_its_row(window, bad, part, tiles, dtype, monkeypatch):
    monkeypatch.setenv("PEFT_CORE_TILES", tiles)
    x, gy, params = make([60, 100, 5], 4, 2, 64, dtype)
    params |= {"window": window}
    x[100, {"q": 0, "k": 4 * 64, "v": 6 * 64}[part]] = bad
    with np.errstate(all="ignore"):
        y, g = (a.astype(np.float32) for a in run(x, gy, params))
    own = slice(60, 160)
    assert not np.isfinite(y[100, :64]).all() and not np.isfinite(g[own]).all()
    if part != "q":
        assert not np.isfinite(y[130, :64]).all()
    for a in (y, g):
        assert np.isfinite(a[:60]).all() and np.isfinite(a[160:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", ["on", "off"])
def test_a_query_whose_scores_are_all_minus_infinity_shows_it(tiles, dtype, monkeypatch):
    monkeypatch.setenv("PEFT_CORE_TILES", tiles)
    x, gy, params = make([5, 60], 1, 1, 64, dtype, turned=False)
    x[30, 0], x[5:, 64] = -np.inf, 1
    with np.errstate(all="ignore"):
        y, g = run(x, gy, params)
    assert np.isnan(y[30].astype("f4")).all() and np.isnan(g[30].astype("f4")).any()
    assert np.isfinite(np.delete(y.astype("f4"), 30, 0)).all()


@on_tiles
def test_large_scores_do_not_overflow(dtype):
    x, gy, params = make([70], 2, 1, 64, dtype)
    x, gy = ((a.astype(np.float32) * 100).astype(a.dtype) for a in (x, gy))
    truth = run(x.astype(np.float64), gy.astype(np.float64), params)
    y, g = run(x, gy, params)
    assert np.isfinite(y.astype(np.float32)).all() and np.isfinite(g.astype(np.float32)).all()
    # scores of some thousands: nearly a maximum, and rounded to bf16 not always the same one
    assert relative_error(y, truth[0]) < (0.2 if dtype == "bfloat16" else 1e-3)


@on_tiles
def test_read_only_inputs_and_gradients_are_taken(dtype):
    x, gy, params = make([70, 3], 2, 1, 64, dtype)
    expected = run(x.copy(), gy.copy(), params)
    for a in (x, gy, params["cos"], params["sin"]):
        a.flags.writeable = False
    assert all((a == b).all() for a, b in zip(run(x, gy, params), expected, strict=True))


@on_tiles
def test_memory_is_linear_in_the_length(dtype):
    x, gy, params = make([3000], 2, 1, 64, dtype)
    run(x, gy, params)  # the work buffers are there now
    tracemalloc.start()
    run(x, gy, params)
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert top < 4 * (x.nbytes + gy.nbytes), top  # one head's scores alone would be 36 MB


def test_nothing_is_recorded_without_a_gradient():
    x, _, params = make([5], 2, 1, 64)
    with no_grad():
        assert rotary_attention(Tensor(x, requires_grad=True), **params).grad_fn is None


def test_no_tokens_give_nothing():
    x, gy, params = make([70], 2, 1, 64)
    params = params | {"cos": params["cos"][:0], "sin": params["sin"][:0], "cu_seqlens": [0]}
    assert [a.shape for a in run(x[:0], gy[:0], params)] == [(0, 128), (0, 256)]


@pytest.mark.parametrize(("change", "text"), [
    ({"n_heads": 3}, "qkv (10, 256), cos (10, 32), sin (10, 32) for 3 heads, 1 key heads of width 64; expected qkv"),
    ({"n_kv_heads": 0}, "for 2 heads, 0 key heads"),
    ({"head_dim": 63}, "of width 63"),
    ({"cos": None}, "cos None, sin (10, 32) for 2 heads"),
    ({"cos": None, "sin": None, "head_dim": 32}, "cos None, sin None for 2 heads, 1 key heads of width 32; "
     "expected qkv (N, 128), cos and sin (N, 16) and an even width, or None for both"),
    ({"cu_seqlens": [0, 9]}, "rotary_attention got cu_q=[0, 9] for 10 queries"),
    ({"window": 0}, "rotary_attention got window=0"),
])  # fmt: skip
def test_errors_name_values_and_what_was_expected(change, text):
    x, _, params = make([10], 2, 1, 64)
    with pytest.raises(ValueError) as caught:
        rotary_attention(x, **(params | change))
    assert text in str(caught.value)
