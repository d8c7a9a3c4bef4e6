import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from peft_core import Tensor, autocast, bfloat16, no_grad
from peft_core.kernels import use_kernels
from peft_core.ops.attention import BLOCK, attention, slope_block, softmax_block
from support.cases import Case, every, relative_error

module = sys.modules["peft_core.ops.attention"]  # the package's face gives the function under that name


def reference(q, k, v, *, cu_q, cu_k=None, k_lengths=None, causal=True, scale=None, window=None):
    """One query and one head at a time, in float64: a loop that knows nothing of blocks."""
    cu_k = cu_q if cu_k is None else cu_k
    k_lengths = np.diff(cu_k) if k_lengths is None else k_lengths
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o = np.zeros(q.shape)
    for b in range(len(cu_q) - 1):
        keys, values = (a[cu_k[b] : cu_k[b] + k_lengths[b]] for a in (k, v))
        n_q, n_k = int(cu_q[b + 1] - cu_q[b]), len(keys)
        for i in range(n_q):
            last = i + n_k - n_q if causal else n_k - 1
            seen = [j for j in range(n_k) if j <= last and (window is None or j > last - window)]
            if not seen:
                continue
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                s = np.full(n_k, -np.inf)
                s[seen] = scale * (keys[seen, g] @ q[cu_q[b] + i, h])
                p = np.exp(s - s.max())
                o[cu_q[b] + i, h] = p @ values[:, g] / p.sum()
    return o


def qkv(n, s, heads=4, groups=2, width=8):
    return lambda rng: [rng.normal(size=(n, heads, width)), *(rng.normal(size=(s, groups, width)) for _ in range(2))]


def lse_bytes(q, k, v):
    return q.shape[0] * q.shape[1] * (8 if q.dtype == np.float64 else 4)


def row(name, inputs, **params):
    more = {key: params.pop(key) for key in set(params) & set(Case.__dataclass_fields__)}
    defaults = dict(retains={0, 1, 2}, extra_bytes=lse_bytes, formulas=(softmax_block, slope_block))
    return Case(name, attention, inputs=inputs, reference=reference, params=params, **(defaults | more))


CASES = [
    row("attention", qkv(11, 11), cu_q=[0, 11]),
    row("attention_ragged", qkv(40, 40, 6, 2), cu_q=[0, 3, 3, 4, 21, 40]),
    row("attention_one_group", qkv(9, 9, 3, 1), cu_q=[0, 5, 9]),
    row("attention_no_groups", qkv(9, 9, 3, 3), cu_q=[0, 5, 9]),
    row("attention_not_causal", qkv(30, 30), cu_q=[0, 3, 30], causal=False),
    row("attention_scale", qkv(9, 9), cu_q=[0, 9], scale=0.7),
    row("attention_window", qkv(30, 30), cu_q=[0, 3, 30], window=5),
    row("attention_window_of_one", qkv(6, 6), cu_q=[0, 6], window=1, grads=(2,)),
    row("attention_cross", qkv(7, 25), cu_q=[0, 3, 7], cu_k=[0, 8, 25], causal=False),
    row("attention_cache", qkv(6, 48), cu_q=[0, 1, 3, 6], cu_k=[0, 16, 32, 48], k_lengths=[16, 7, 3]),
    row("attention_cache_window", qkv(6, 48), cu_q=[0, 1, 3, 6], cu_k=[0, 16, 32, 48], k_lengths=[16, 7, 4], window=4),
    row("attention_fewer_keys", qkv(9, 5), cu_q=[0, 6, 9], cu_k=[0, 5, 5]),
    row("attention_blocks", qkv(300, 300, 2, 1, 4), cu_q=[0, 300], dtypes=("float32", "float64"), nonfinite=False),
    row("attention_blocks_window", qkv(300, 300, 2, 1, 4), cu_q=[0, 300], window=150, dtypes=("float32", "float64"),
        nonfinite=False),  # a NaN in v at a key that no query of a block sees stays out of that block, unlike in P v
    row("attention_autocast", qkv(11, 11), cu_q=[0, 11], autocast="bfloat16", out="bfloat16", dtypes=("float32",),
        slack=3, retains=set(), extra_bytes=lambda q, k, v: lse_bytes(q, k, v) + 2 * (q.size + k.size + v.size)),
    row("attention_mixed", qkv(11, 11), cu_q=[0, 11], fixed={1: "bfloat16", 2: "bfloat16"}, dtypes=("float32",),
        retains={0}, extra_bytes=lambda q, k, v: lse_bytes(q, k, v) + 4 * (k.size + v.size)),
]  # fmt: skip


@every(CASES)
def test_case(check, case, dtype):
    check(case, dtype)


def make(rng, n, s=None, heads=4, groups=2, width=8, dtype=np.float32):
    return [a.astype(dtype) for a in qkv(n, s or n, heads, groups, width)(rng)]


def run(arrays, gy=None, **params):
    """(o, dq, dk, dv), with gy of ones unless given."""
    tensors = [Tensor(a, requires_grad=True) for a in arrays]
    y = attention(*tensors, **params)
    y.backward(np.ones_like(y.data) if gy is None else gy)
    return y.data, *(t._grad for t in tensors)


@pytest.mark.parametrize("n", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 300])
@pytest.mark.parametrize("window", [None, BLOCK, 100])
@pytest.mark.parametrize("kernels", [True, False])
def test_blocks_have_no_seams(n, window, kernels, monkeypatch):
    rng = np.random.default_rng(n)
    arrays, gy = make(rng, n, heads=2, groups=1, width=4, dtype=np.float32), rng.normal(size=(n, 2, 4)).astype("f4")
    with use_kernels(kernels):
        got = run(arrays, gy, cu_q=[0, n], window=window)
        monkeypatch.setattr(module, "BLOCK", 10**6)
        whole = run(arrays, gy, cu_q=[0, n], window=window)
    assert relative_error(got[0], reference(*(a.astype("f8") for a in arrays), cu_q=[0, n], window=window)) < 1e-6
    assert [relative_error(a, b) < 2e-6 for a, b in zip(got, whole, strict=True)] == [True] * 4


def test_packed_rows_equal_separate_rows():
    rng = np.random.default_rng(0)
    arrays, lengths = make(rng, 140), [5, 0, 130, 1, 4]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    packed = run(arrays, cu_q=cu)
    for a, b in pairwise(cu):
        alone = run([x[a:b] for x in arrays], cu_q=[0, b - a])
        for whole, part in zip(packed, alone, strict=True):
            assert relative_error(whole[a:b], part) < 1e-6


def test_autocast_equals_inputs_rounded_beforehand():
    arrays = make(np.random.default_rng(0), 30)
    rounded = [a.astype(bfloat16) for a in arrays]
    expected = run(rounded, cu_q=[0, 30])
    with autocast("bfloat16"):
        got = run(arrays, cu_q=[0, 30])
    assert got[0].dtype == bfloat16 and got[0].tobytes() == expected[0].tobytes()
    for g, e in zip(got[1:], expected[1:], strict=True):
        assert g.dtype == np.float32 and relative_error(g, e) < 2.0**-8


def test_a_cached_step_equals_the_last_query_of_the_whole():
    rng = np.random.default_rng(0)
    q, k, v = make(rng, 20)
    whole = attention(q, k, v, cu_q=[0, 20]).data
    slot = np.full((2, 32, 2, 8), np.nan, np.float32)  # what lies behind k_lengths is never read
    for cache, x in zip(slot, (k, v), strict=True):
        cache[:20] = x
    step = attention(q[17:], slot[0], slot[1], cu_q=[0, 3], cu_k=[0, 32], k_lengths=[20]).data
    assert relative_error(step, whole[17:]) < 1e-6


@pytest.mark.parametrize("kernels", [True, False])
def test_a_query_without_keys_gives_zeros_and_gets_none(kernels):
    arrays = make(np.random.default_rng(0), 9, 5)
    with use_kernels(kernels):
        y, dq, dk, dv = run(arrays, cu_q=[0, 6, 9], cu_k=[0, 4, 5], k_lengths=[4, 0])
    alone = [0, 1, 6, 7, 8]
    assert not y[alone].any() and not dq[alone].any() and y[2:6].all() and dq[3:6].any(axis=(1, 2)).all()
    assert np.isfinite(dk).all() and np.isfinite(dv).all() and not dk[4].any() and not dv[4].any()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_stay_in_their_row(which, bad, kernels):
    arrays = make(np.random.default_rng(0), 300)
    arrays[which][210] = bad
    with use_kernels(kernels), np.errstate(invalid="ignore"):
        results = run(arrays, cu_q=[0, 200, 300])
    assert not np.isfinite(results[0][210:]).all(axis=(1, 2)).all()
    for x in results[: 3 if which == 2 else 4]:  # dv = P^T do does not depend on v
        assert not np.isfinite(x[200:]).all()
    for x in results:
        assert np.isfinite(x[:200]).all()


@pytest.mark.parametrize("kernels", [True, False])
def test_large_scores_do_not_overflow(kernels):
    arrays = make(np.random.default_rng(0), 12)
    arrays[0] *= 1000
    with use_kernels(kernels):
        y = run(arrays, cu_q=[0, 12])
    assert relative_error(y[0], reference(*(a.astype("f8") for a in arrays), cu_q=[0, 12])) < 1e-5
    assert all(np.isfinite(a).all() for a in y)


def test_only_wanted_gradients_are_formed():
    q, k, v = make(np.random.default_rng(0), 6)
    tensors = [Tensor(q), Tensor(k), Tensor(v, requires_grad=True)]
    attention(*tensors, cu_q=[0, 6]).backward(np.ones_like(q))
    assert [t._grad is None for t in tensors] == [True, True, False]
    assert relative_error(tensors[2]._grad, run((q, k, v), cu_q=[0, 6])[3]) < 1e-6


def peak(function):
    function()  # kernels are compiled outside the measurement
    tracemalloc.start()
    function()
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return top


@pytest.mark.parametrize("kernels", [True, False])
def test_memory_is_linear_in_the_length(kernels):
    peaks = {}
    with use_kernels(kernels):
        for n in (2048, 4096):
            arrays = make(np.random.default_rng(0), n, heads=2, groups=1, width=16)
            with no_grad():
                forward = peak(lambda arrays=arrays, n=n: attention(*arrays, cu_q=[0, n]))
            peaks[n] = forward, peak(lambda arrays=arrays, n=n: run(arrays, cu_q=[0, n]))
    assert peaks[4096][0] < 2.3 * peaks[2048][0] and peaks[4096][1] < 2.3 * peaks[2048][1], peaks
    assert peaks[4096][1] < 4096 * 4096 * 4, peaks  # less than one T x T array of one head


@pytest.mark.parametrize(("shapes", "params", "text"), [
    (((4, 3, 8), (4, 2, 8), (4, 2, 8)), {}, "expected q (N, H, K), k and v (S, G, K) with H a multiple of G"),
    (((4, 2, 8), (4, 2, 4), (4, 2, 4)), {}, "q (4, 2, 8), k (4, 2, 4), v (4, 2, 4)"),
    (((4, 2, 8), (4, 2, 8), (5, 2, 8)), {}, "k (4, 2, 8), v (5, 2, 8)"),
    (((4, 2, 8),) * 3, {"window": 0}, "window=0 with causal=True; expected a window of at least 1 key"),
    (((4, 2, 8),) * 3, {"window": 3, "causal": False}, "window=3 with causal=False"),
    (((4, 2, 8),) * 3, {"cu_q": [0, 3]}, "cu_q=[0, 3] for 4 queries; expected offsets that rise from 0 to 4"),
    (((4, 2, 8),) * 3, {"cu_q": [0, 3, 2, 4]}, "cu_q=[0, 3, 2, 4] for 4 queries"),
    (((4, 2, 8),) * 3, {"cu_k": [0, 5]}, "cu_k=[0, 5] for 4 keys; expected offsets that rise from 0 to 4"),
    (((4, 2, 8),) * 3, {"cu_k": [0, 2, 4]}, "1 rows of queries, 2 of keys and 2 key lengths"),
    (((4, 2, 8),) * 3, {"k_lengths": [5]}, "k_lengths=[5] for rows of [4] keys; expected 0 to the row's keys"),
    (((12, 2, 8),) * 3, {"cu_q": list(range(11))}, "cu_q=[0, 1, 2, 3, 4, 5, 6, 7, ... 11 in all] for 12 queries"),
])  # fmt: skip
def test_errors_name_values_and_what_was_expected(shapes, params, text):
    with pytest.raises(ValueError) as caught:
        attention(*(np.zeros(s, np.float32) for s in shapes), **({"cu_q": [0, shapes[0][0]]} | params))
    assert text in str(caught.value)


@pytest.mark.reference
@pytest.mark.parametrize("window", [None, 70])
def test_equals_torch(window):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays, gy = make(rng, 300), rng.normal(size=(300, 4, 8)).astype(np.float32)
    got = run(arrays, gy, cu_q=[0, 300], window=window)
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    ahead = torch.arange(300)[None, :] - torch.arange(300)[:, None]
    mask = (ahead <= 0) & (ahead > -(window or 1000))
    q, k, v = (t.transpose(0, 1)[None] for t in tensors)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    y.backward(torch.tensor(gy))
    for a, b in zip(got, [y.detach(), *(t.grad for t in tensors)], strict=True):
        assert relative_error(a, b.numpy()) < 2e-6
