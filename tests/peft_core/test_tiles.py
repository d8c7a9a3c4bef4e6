"""The register tile and its parts against float64, as this CPU has them.  Others: test_tile_machines.py."""

import ml_dtypes
import numpy as np
import pytest

from peft_core import kernels

needs_tiles = pytest.mark.skipif(not kernels.tiles_supported(), reason="numba compiles no tiles here")
needs_float_tiles = pytest.mark.skipif(not kernels.tiles_supported(np.float32), reason="numba compiles no tiles here")


def bf16(rng, *shape):
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def has_multiply_add():
    from numba.core.registry import cpu_target

    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return not triple.startswith("x86") or "+fma" in features.split(",")


def elementwise(function, x, dtype=np.float32, **constant):
    from numba import njit

    from peft_core import tile_parts

    f = getattr(tile_parts, function)
    if constant:
        general, (value,) = f, constant.values()
        f = njit(**tile_parts.INLINE)(lambda x: general(x, value))

    @njit(**{**tile_parts.INLINE, "inline": "never"})
    def run(x, y):
        for i in range(len(x)):
            y[i] = f(x[i])

    y = np.empty(len(x), dtype)
    run(x, y)
    return y


@needs_tiles
@pytest.mark.parametrize("rows, columns", [(8, 48), (6, 64), (8, 16), (12, 32)])
@pytest.mark.parametrize("k", [1, 2, 5, 16])
@pytest.mark.parametrize("add", [0, 1])
def test_a_tile_is_a_product(rows, columns, k, add):
    from numba import njit

    from peft_core import tiles

    tile = getattr(tiles, f"tile_{rows}x{columns}")

    @njit(nogil=True)
    def run(a, w, c):
        tile(a, 3, k + 2, w, 5, columns + 16, k, c, 7, columns + 1, add)

    rng = np.random.default_rng(0)
    a, w = bf16(rng, rows, 2 * (k + 2)), bf16(rng, k, columns + 16, 2)
    c = rng.standard_normal((rows, columns + 1)).astype(np.float32)
    flat_a = np.concatenate([np.zeros(3, np.uint32), a.view(np.uint32).reshape(-1)])
    flat_w = np.concatenate([np.zeros(5, np.uint32), w.view(np.uint32).reshape(-1)])
    flat_c = np.concatenate([np.zeros(7, np.float32), c.reshape(-1)])
    run(flat_a, flat_w, flat_c)
    got = flat_c[7:].reshape(rows, -1)
    truth = a[:, : 2 * k].astype(float) @ w[:, :columns].astype(float).transpose(0, 2, 1).reshape(2 * k, columns)
    np.testing.assert_allclose(got[:, :columns], truth + add * c[:, :columns], atol=1e-5)
    assert (got[:, columns] == c[:, columns]).all(), "wrote past the tile"


@needs_float_tiles
@pytest.mark.parametrize("rows, columns", [(8, 48), (6, 64), (8, 16), (12, 32)])
@pytest.mark.parametrize("k", [1, 2, 5, 16])
@pytest.mark.parametrize("add", [0, 1])
def test_a_tile_of_float32_is_a_product(rows, columns, k, add):
    from numba import njit

    from peft_core import tiles

    tile = getattr(tiles, f"tile_{rows}x{columns}")

    @njit(nogil=True)
    def run(a, w, c):
        tile(a, 3, k + 2, w, 5, columns + 16, k, c, 7, columns + 1, add)

    rng = np.random.default_rng(0)
    a, w, c = (rng.standard_normal(s).astype("f4") for s in ((rows, k + 2), (k, columns + 16), (rows, columns + 1)))
    flat = [np.concatenate([np.zeros(n, np.float32), x.reshape(-1)]) for n, x in ((3, a), (5, w), (7, c))]
    run(*flat)
    got = flat[2][7:].reshape(rows, -1)
    truth = a[:, :k].astype(float) @ w[:, :columns].astype(float)
    np.testing.assert_allclose(got[:, :columns], truth + add * c[:, :columns], atol=1e-5)
    assert (got[:, columns] == c[:, columns]).all(), "wrote past the tile"


@needs_tiles
def test_a_tile_of_two_kinds_of_words_is_refused():
    from numba import njit

    from peft_core import tiles

    @njit
    def run(a, w, c):
        tiles.tile_8x48(a, 0, 1, w, 0, 48, 1, c, 0, 48, 0)

    a, w, c = np.zeros(8, np.uint32), np.zeros(48, np.float32), np.zeros(8 * 48, np.float32)
    with pytest.raises(TypeError, match="a tile of uint32 and float32 into float32"):
        run(a, w, c)


@pytest.mark.skipif(not (kernels.tiles_supported() and kernels.tiles_supported(np.float32)), reason="no tiles here")
def test_words_and_elements():
    from numba import njit

    from peft_core.tile_parts import elements, get, pair_rows, per, put

    @njit
    def run(words, rows, out):
        for k in range(len(rows)):
            put(elements(words), k, rows[k] * np.float32(2))
            rows[k] = get(elements(words), k)
        pair_rows(elements(words), 3, 4, 3, out, 5)
        return per(words)

    x = np.random.default_rng(0).standard_normal(12).astype("f4")
    x[1] = np.nan
    for kind, count in ((np.uint32, 6), (np.float32, 12)):
        words, rows, out = np.zeros(count, kind), x.copy(), np.zeros(20, kind)
        dtype = ml_dtypes.bfloat16 if kind == np.uint32 else np.float32
        assert run(words, rows, out) == 12 // count
        truth = (x * 2).astype(dtype).astype("f4")
        np.testing.assert_array_equal(rows, truth)
        np.testing.assert_array_equal(words.view(dtype).astype("f4"), truth)
        n = 12 // count
        got = out.view(dtype).astype("f4").reshape(-1, 5, n)[: 4 // n, :3]
        np.testing.assert_array_equal(got, truth.reshape(4 // n, n, 3).transpose(0, 2, 1))


@needs_tiles
def test_exp_is_exact_and_hides_nothing():
    x = np.linspace(-87.3, 88.72, 100_001).astype(np.float32)
    limit = 4e-7 if has_multiply_add() else 5e-6
    assert abs(elementwise("exp", x) / np.exp(x.astype(float)) - 1).max() < limit
    odd = np.array([np.nan, np.inf, -np.inf, 0, 88.72283, 88.723, 1e30, -88, -1e30], np.float32)
    got = elementwise("exp", odd)
    assert np.isnan(got[0])
    np.testing.assert_allclose(got[1:], [np.inf, 0, 1, 3.402e38, np.inf, np.inf, 0, 0], rtol=1e-3)


@needs_tiles
@pytest.mark.parametrize("exact, bound", [(False, 2e-5), (True, 2e-7)])
def test_exp2_is_close_and_hides_nothing(exact, bound):
    x = -np.linspace(0, 126, 100_001).astype(np.float32)
    assert abs(elementwise("exp2", x, exact=exact) / np.exp2(x.astype(float)) - 1).max() < bound
    got = elementwise("exp2", np.array([np.nan, -np.inf, -1e30], np.float32), exact=exact)
    assert np.isnan(got[0])
    assert (got[1:] < 1e-37).all()


@needs_tiles
def test_bits_round_like_ml_dtypes():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    bits, truth = elementwise("bf16_bits", x, np.uint16), x.astype(ml_dtypes.bfloat16)
    nan = np.isnan(x)
    assert nan.any()
    assert np.isnan(bits.view(ml_dtypes.bfloat16)[nan]).all()
    assert (bits == truth.view(np.uint16))[~nan].all()
    assert (elementwise("widen", bits)[~nan] == truth.astype(np.float32)[~nan]).all()


@needs_tiles
def test_vectors_round_like_ml_dtypes():
    from numba import njit

    from peft_core.tiles import pair16, round16

    @njit
    def run(x, one, same, two):
        round16(x, 0, one, 0)
        round16(x, 16, same, 0)
        pair16(x, 0, 16, two, 0)

    x = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    x[3] = np.nan
    one, same, two = np.zeros(16, np.uint16), np.zeros(16, np.float32), np.zeros(16, np.uint32)
    run(x, one, same, two)
    np.testing.assert_array_equal(same, x[16:])
    truth = x.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(2, 16)
    np.testing.assert_array_equal(one.view(ml_dtypes.bfloat16).astype(np.float32), truth[0])
    np.testing.assert_array_equal(two.view(ml_dtypes.bfloat16).astype(np.float32).reshape(16, 2), truth.T)


def test_tiles_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("PEFT_CORE_TILES", "off")
    assert not kernels.tiles_supported()
    monkeypatch.delenv("PEFT_CORE_TILES")
    with kernels.use_kernels(False):
        assert not kernels.tiles_supported()


def test_tiles_that_cannot_be_compiled_are_said_once(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernels, "run_kernel", broken)
    kernels._tiles_run.cache_clear()
    try:
        assert not kernels.tiles_supported()
        assert not kernels.tiles_supported()
    finally:
        kernels._tiles_run.cache_clear()
    assert capsys.readouterr().err.count("no such instruction") == 1


@needs_tiles
def test_a_change_of_a_part_compiles_the_kernels_anew():
    from peft_core import tile_parts
    from peft_core.ops import projection_tiles

    own, parts, *_ = projection_tiles.forward._cache._cache_file._source_stamp
    assert own and parts == tile_parts._PARTS.hexdigest()
