"""attend_next: one new token a row against formulas in float64."""

import numpy as np
import pytest

from peft_core import kernels
from peft_core.dtypes import as_dtype
from peft_core.ops import decode
from peft_core.ops.decode import attend_next

DTYPES = [pytest.param(name, marks=pytest.mark.skipif(not kernels.tiles_supported(as_dtype(name)), reason="no tiles"))
          for name in ("bfloat16", "float32")]  # fmt: skip
LIMITS = {"bfloat16": 6e-3, "float32": 2e-6}
H, G, K, ROOM = 6, 2, 20, 50
SEEN = [1, 17, 50, 33]


def example(dtype, rotated=True):
    """qkv of four rows, a cache filled before them, and the angles; each row's last key is still to come."""
    rng, n = np.random.default_rng(0), len(SEEN)
    qkv = (2 * rng.normal(size=(n, (H + 2 * G) * K))).astype(dtype)
    keys, values = (rng.normal(size=(n * ROOM, G, K)).astype(dtype) for _ in range(2))
    angles = rng.uniform(0, 6, (n, K // 2)).astype("f4")
    slots = np.arange(n) * ROOM + np.array(SEEN) - 1
    cos, sin = (np.cos(angles), np.sin(angles)) if rotated else (None, None)
    return qkv, keys, values, {"cos": cos, "sin": sin, "slots": slots, "seen": np.array(SEEN), "n_heads": H}


def truth(qkv, keys, values, cos, sin, slots, seen, n_heads, scale=None, window=None):
    """(o, keys, values), where the new key is rounded to the cache's dtype, as the query is."""
    dtype, keys, values, out = qkv.dtype, keys.astype("f8"), values.astype("f8"), []
    for n, x in enumerate(qkv.astype("f8").reshape(len(qkv), -1, K)):
        if cos is not None:
            first, second = x[: H + G, : K // 2], x[: H + G, K // 2 :]
            c, s = cos[n].astype("f8"), sin[n].astype("f8")
            x[: H + G] = np.concatenate([first * c - second * s, second * c + first * s], 1)
        x = x.astype(dtype).astype("f8")
        keys[slots[n]], values[slots[n]] = x[H : H + G], x[H + G :]
        see = slice(slots[n] + 1 - min(seen[n], window or seen[n]), slots[n] + 1)
        for h in range(H):
            z = keys[see, h // (H // G)] @ x[h] * (K**-0.5 if scale is None else scale)
            p = np.exp(z - z.max())
            out.append(p / p.sum() @ values[see, h // (H // G)])
    return np.reshape(out, (len(qkv), H * K)), keys, values


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"scale": 0.1}, {"rotated": False}], ids=str)
def test_the_values_of_float64(options, dtype, threads):
    options, dtype, limit, before = dict(options), as_dtype(dtype), LIMITS[dtype], kernels.get_num_threads()
    qkv, keys, values, params = example(dtype, options.pop("rotated", True))
    o, all_keys, all_values = truth(qkv, keys, values, **params, **options)
    try:
        kernels.set_num_threads(threads)
        got = attend_next(qkv, keys, values, **params, **options)
    finally:
        kernels.set_num_threads(before)
    assert got.dtype == dtype and np.linalg.norm(got.astype("f8") - o) < limit * np.linalg.norm(o)
    np.testing.assert_array_equal(values.astype("f8"), all_values)  # copied; no other slot is touched
    old = np.delete(np.arange(len(keys)), params["slots"])
    np.testing.assert_array_equal(keys[old].astype("f8"), all_keys[old])
    assert np.abs(keys.astype("f8") - all_keys).max() < 10 * limit


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_scores_far_apart_do_not_overflow(dtype):
    qkv, keys, values, params = example(as_dtype(dtype), rotated=False)
    o, _, _ = truth(qkv, keys.copy(), values.copy(), scale=8.0, **params)
    got = attend_next(qkv, keys, values, scale=8.0, **params)
    assert np.abs(got - o).max() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_part_waits_for_another(dtype, monkeypatch):
    qkv, keys, values, params = example(as_dtype(dtype))
    o = attend_next(qkv, keys.copy(), values.copy(), **params)
    parts, before = 5, kernels.get_num_threads()  # 24 heads: four parts begin in the middle of a group

    def backwards(kernel, *args):
        from peft_core.ops import decode_tiles

        for t in reversed(range(parts)):
            decode_tiles._heads(t, parts, *args)

    monkeypatch.setattr(decode, "run_team", backwards)
    try:
        kernels.set_num_threads(parts)
        np.testing.assert_array_equal(attend_next(qkv, keys, values, **params), o)
    finally:
        kernels.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_know_the_others(dtype):
    dtype = as_dtype(dtype)
    qkv, keys, values, params = example(dtype)
    together = attend_next(qkv, keys, values, **params)
    for n in range(len(SEEN)):
        own = {name: params[name][n : n + 1] for name in ("cos", "sin", "slots", "seen")}
        np.testing.assert_array_equal(attend_next(qkv[n : n + 1], keys, values, n_heads=H, **own)[0], together[n])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_comes_out_of_its_head_alone(dtype):
    dtype = as_dtype(dtype)
    qkv, keys, values, params = example(dtype)
    qkv[1, K + 3] = np.nan  # head 1 of row 1
    keys[2 * ROOM + 5, 1, 0] = np.nan  # seen by heads 3, 4 and 5 of row 2
    o = attend_next(qkv, keys, values, **params).astype("f4").reshape(-1, H, K)
    bad = np.zeros((len(SEEN), H), bool)
    bad[1, 1] = bad[2, 3:] = True
    assert np.isnan(o[bad]).all() and np.isfinite(o[~bad]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("why", ["off", "float64", "another cache"])
def test_where_it_does_not_run_nothing_is_written(why, dtype, monkeypatch):
    dtype = as_dtype(dtype)
    qkv, keys, values, params = example(np.dtype("f8") if why == "float64" else dtype)
    if why == "another cache":
        keys, values = keys.astype("f2"), values.astype("f2")
    if why == "off":
        monkeypatch.setenv("PEFT_CORE_TILES", "off")
    before = keys.copy()
    assert attend_next(qkv, keys, values, **params) is None
    np.testing.assert_array_equal(keys, before)
