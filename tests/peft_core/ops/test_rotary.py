import sys
import tracemalloc
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from peft_core import Tensor, autocast, kernels, no_grad
from peft_core.ops.attention import slope_block, softmax_block
from peft_core.ops.rope import _rotate
from peft_core.ops.rotary import rotary_attention
from support.cases import Case, every, relative_error

module = sys.modules["peft_core.ops.rotary"]
TILES = kernels.tiles_supported()
needs_tiles = pytest.mark.skipif(not TILES, reason="no AVX512-BF16 here")


def angles(lengths, width, dtype=np.float32):
    position = np.concatenate([np.arange(n) for n in lengths])
    angle = position[:, None] / 100 ** (np.arange(0, width, 2) / width)
    return dict(cos=np.cos(angle).astype(dtype), sin=np.sin(angle).astype(dtype))


def shape(lengths, heads, groups, width):
    return dict(
        **angles(lengths, width), cu_seqlens=[0, *np.cumsum(lengths)], n_heads=heads, n_kv_heads=groups, head_dim=width
    )


def reference(qkv, *, cos, sin, cu_seqlens, n_heads, n_kv_heads, head_dim, scale=None, window=None):
    """Row by row and head by head in float64, the rotation as a complex product."""
    n, half = len(qkv), head_dim // 2
    x = qkv.reshape(n, -1, head_dim)
    z = (x[..., :half] + 1j * x[..., half:]) * (cos.astype("f8") + 1j * sin.astype("f8"))[:, None]
    turned, o = np.concatenate([z.real, z.imag], -1), np.zeros((n, n_heads, head_dim))
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


def row(name, lengths, heads, groups, width, **more):
    """A row of the table; ``keeps_o``: it runs on tiles."""
    o = more.pop("keeps_o", False)
    params = shape(lengths, heads, groups, width) | {k: more.pop(k) for k in ("scale", "window") if k in more}
    n, columns = sum(lengths), (heads + 2 * groups) * width

    def kept(x):
        return n * heads * (8 if x.dtype == np.float64 else 4) + 2 * params["cos"].nbytes

    return Case(name, rotary_attention, inputs=lambda rng: [rng.normal(size=(n, columns))], reference=reference,
                retains={0, "y"} if o and TILES else {0}, extra_bytes=kept, params=params, **more)  # fmt: skip


FORMULAS = dict(formulas=(softmax_block, slope_block, _rotate), nonfinite=False)  # a complex NaN spoils both parts
CASES = [
    row("rotary", [11], 4, 2, 8, slack=4, **FORMULAS),
    row("rotary_ragged", [3, 0, 1, 17, 19], 6, 2, 4, slack=4, **FORMULAS),
    row("rotary_scale_window", [3, 27], 2, 2, 8, scale=0.7, window=5, slack=4, **FORMULAS),
    row("rotary_autocast", [3, 8], 4, 2, 8, autocast="bfloat16", out="bfloat16", dtypes=("float32",), slack=4,
        nonfinite=False),
    row("rotary_tiles", [3, 0, 45, 1, 60], 3, 1, 64, dtypes=("bfloat16",), keeps_o=True, slack=2, nonfinite=False),
    row("rotary_tiles_wide", [50, 7], 2, 2, 128, dtypes=("bfloat16",), keeps_o=True, slack=2, nonfinite=False),
    row("rotary_tiles_scale", [50, 7], 4, 2, 64, scale=0.3, window=50, dtypes=("bfloat16",), keeps_o=True, slack=2,
        nonfinite=False),
]  # fmt: skip


@every(CASES)
def test_case(check, case, dtype):
    check(case, dtype)


def make(lengths, heads, groups, width, seed=0):
    """(qkv, gy) in bfloat16, and the parameters."""
    rng, n = np.random.default_rng(seed), sum(lengths)
    arrays = [rng.standard_normal((n, w * width)).astype(ml_dtypes.bfloat16) for w in (heads + 2 * groups, heads)]
    return *arrays, shape(lengths, heads, groups, width)


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


@needs_tiles
@pytest.mark.parametrize("lengths", [RAGGED, [1, 1, 2]])
@pytest.mark.parametrize("heads, groups, width", [(9, 3, 64), (8, 8, 128)])
def test_tiles_agree_with_the_formula_in_float64(lengths, heads, groups, width):
    x, gy, params = make(lengths, heads, groups, width)
    truth = run(x.astype(np.float64), gy.astype(np.float64), params)
    # among few keys the gradient of q is a small difference, of which o's rounding is a larger part
    agree(run(x, gy, params), truth, params, 5e-3 if len(x) > 4 else 3e-2)


@needs_tiles
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_sums_each_time(threads):
    before = kernels.get_num_threads()
    x, gy, params = make([500, 5, 130], 6, 2, 64)
    truth = run(x.astype(np.float64), gy.astype(np.float64), params)
    try:
        kernels.set_num_threads(threads)
        first = run(x, gy, params)
        for _ in range(3):
            again = run(x, gy, params)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
    finally:
        kernels.set_num_threads(before)
    agree(first, truth, params, 5e-3)


@needs_tiles
@pytest.mark.parametrize("lengths", [[2048], RAGGED, [512] * 4, [1] * 50 + [900]])
@pytest.mark.parametrize("threads", [2, 4])
def test_work_is_shared_fairly(lengths, threads):
    plan = module._plan((0, *np.cumsum(lengths)), 9, 3, threads)
    for (tasks, bounds), step in ((plan.forward, module.LANES), (plan.backward, 2 * module.LANES)):
        assert bounds[0] == 0 and bounds[-1] == len(tasks) and (np.diff(bounds) >= 0).all()
        work = np.minimum(tasks[:, 2] + step, np.array(lengths)[tasks[:, 0]]) + step
        shares = [work[a:b].sum() for a, b in pairwise(bounds)]
        assert max(shares) < 1.1 * np.mean(shares), shares


def test_without_tiles_the_formula_runs(monkeypatch):
    x, gy, params = make([100, 37], 4, 2, 64)
    on = run(x, gy, params)
    monkeypatch.setenv("PEFT_CORE_TILES", "off")
    monkeypatch.setattr(module, "_attend_on_tiles", None)
    off = run(x, gy, params)
    assert on[0].dtype == off[0].dtype == x.dtype and on[1].dtype == off[1].dtype == x.dtype
    agree(on, off, params, 6e-3)


def test_a_shorter_window_and_other_types_take_the_formula(monkeypatch):
    monkeypatch.setattr(module, "_attend_on_tiles", None)
    x, gy, params = make([100, 37], 4, 2, 64)
    y, g = run(x, gy, params | {"window": 99})
    assert y.dtype == g.dtype == x.dtype
    run(x.astype(np.float32), gy.astype(np.float32), params)
    with autocast("bfloat16"):
        y, g = run(x.astype(np.float32), gy, params)
    assert y.dtype == ml_dtypes.bfloat16 and g.dtype == np.float32


@pytest.mark.parametrize("tiles", ["on", "off"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_nan_comes_out_and_stays_in_its_row(bad, part, tiles, monkeypatch):
    monkeypatch.setenv("PEFT_CORE_TILES", tiles)
    x, gy, params = make([60, 100, 5], 4, 2, 64)
    x[100, {"q": 0, "k": 4 * 64, "v": 6 * 64}[part]] = bad
    with np.errstate(all="ignore"):
        y, g = (a.astype(np.float32) for a in run(x, gy, params))
    own = slice(60, 160)
    assert not np.isfinite(y[100, :64]).all() and not np.isfinite(g[own]).all()
    if part != "q":
        assert not np.isfinite(y[130, :64]).all()
    for a in (y, g):
        assert np.isfinite(a[:60]).all() and np.isfinite(a[160:]).all()


@needs_tiles
def test_large_scores_do_not_overflow():
    x, gy, params = make([70], 2, 1, 64)
    x, gy = (a.astype(np.float32) * 100 for a in (x, gy))
    truth = run(x.astype(ml_dtypes.bfloat16).astype(np.float64), gy.astype(np.float64), params)
    y, g = run(x.astype(ml_dtypes.bfloat16), gy.astype(ml_dtypes.bfloat16), params)
    assert np.isfinite(y.astype(np.float32)).all() and np.isfinite(g.astype(np.float32)).all()
    assert relative_error(y, truth[0]) < 0.2  # scores of some thousands, rounded to bf16: nearly a maximum


@needs_tiles
def test_read_only_inputs_and_gradients_are_taken():
    x, gy, params = make([70, 3], 2, 1, 64)
    expected = run(x.copy(), gy.copy(), params)
    for a in (x, gy, params["cos"], params["sin"]):
        a.flags.writeable = False
    assert all((a == b).all() for a, b in zip(run(x, gy, params), expected, strict=True))


@needs_tiles
def test_memory_is_linear_in_the_length():
    x, gy, params = make([3000], 2, 1, 64)
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
    ({"cu_seqlens": [0, 9]}, "rotary_attention got cu_q=[0, 9] for 10 queries"),
    ({"window": 0}, "rotary_attention got window=0"),
])  # fmt: skip
def test_errors_name_values_and_what_was_expected(change, text):
    x, _, params = make([10], 2, 1, 64)
    with pytest.raises(ValueError) as caught:
        rotary_attention(x, **(params | change))
    assert text in str(caught.value)
