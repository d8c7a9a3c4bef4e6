"""Checks of the tiles for whatever CPU numba is told to compile for, against float64; each raises where they differ.

    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma python -m support.tile_checks tiles ops

``tests/peft_core/test_tile_machines.py`` runs this in a process of its own, for numba reads the two variables once.
"""

import sys

import ml_dtypes
import numpy as np
from numba import njit
from numba.core.registry import cpu_target

from peft_core import Tensor, autocast, bfloat16, kernels, ops, tile_code, tiles
from peft_core.ops.projection import Layout

SIZES = ((8, 48), (6, 64), (8, 16), (12, 32))
LONG = tile_code.CHUNK + 3  # words: a second chunk, and an odd one
tile_8x48, tile_6x64, tile_8x16, tile_12x32 = (getattr(tiles, f"tile_{r}x{c}") for r, c in SIZES)


@njit(nogil=True)
def every_tile(which, a, lda, w, ldw, k, c, ldc, add):
    """c at 7 of a at 3 and w at 5, by one of the sizes."""
    if which == 0:
        tile_8x48(a, 3, lda, w, 5, ldw, k, c, 7, ldc, add)
    elif which == 1:
        tile_6x64(a, 3, lda, w, 5, ldw, k, c, 7, ldc, add)
    elif which == 2:
        tile_8x16(a, 3, lda, w, 5, ldw, k, c, 7, ldc, add)
    else:
        tile_12x32(a, 3, lda, w, 5, ldw, k, c, 7, ldc, add)


def _product(which, k, add, half):
    """One tile out of the middle of larger arrays, and what stands beside it in c."""
    rng, (rows, columns) = np.random.default_rng(k), SIZES[which]
    a, w = rng.standard_normal((rows, k + 2, 2)), rng.standard_normal((k + 1, columns + 16, 2))
    c = rng.standard_normal((rows, columns + 1)).astype("f4")
    kind, a, w = (ml_dtypes.bfloat16, a, w) if half else (np.float32, a[..., :1], w[..., :1])
    a, w, word = np.ascontiguousarray(a.astype(kind)), np.ascontiguousarray(w.astype(kind)), "u4" if half else "f4"
    flat = [np.concatenate([np.zeros(n, x.dtype), x]) for n, x in
            ((3, a.view(word).reshape(-1)), (5, w.view(word).reshape(-1)), (7, c.reshape(-1)))]  # fmt: skip
    every_tile(which, flat[0], k + 2, flat[1], columns + 16, k, flat[2], columns + 1, add)
    got = flat[2][7:].reshape(rows, -1)
    truth = np.einsum("rkh,kch->rc", a[:, :k].astype(float), w[:k, :columns].astype(float)) + add * c[:, :columns]
    np.testing.assert_allclose(got[:, :columns], truth, atol=1e-6 * (k + 10), err_msg=f"{SIZES[which]} {k=} {half=}")
    assert (got[:, columns] == c[:, columns]).all() and not flat[2][:7].any(), "wrote past the tile"


@njit(nogil=True)
def rounded(x, bits, pairs):
    """x in sixteens as bits of bf16, and each sixteen below the next as pairs."""
    for i in range(0, len(pairs), 16):
        tiles.round16(x, i, bits, i)
        tiles.pair16(x, i, i + 16, pairs, i)


def _rounding():
    """Every way to round, infinities and NaNs of any payload."""
    odd = np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1.00390625, 1.01171875], np.float32)  # the last two: ties
    rest = np.random.default_rng(0).integers(0, 2**32, 16 * 200 - 8, dtype=np.uint32)
    payloads = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    x = np.concatenate([odd, payloads.view("f4"), rest[:-4].view("f4")])
    bits, pairs = np.zeros(len(x), np.uint16), np.zeros(len(x) - 16, np.uint32)
    rounded(x, bits, pairs)
    with np.errstate(invalid="ignore"):
        truth = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    nan, tiny = np.isnan(x), np.abs(x) < 2.0**-126  # what is tiny becomes 0 where AVX512-BF16 rounds
    assert nan.sum() > 5, "no NaN to round"
    assert np.isnan(bits.view(ml_dtypes.bfloat16)[nan][:-16]).all(), "a NaN became a number"
    same = (bits == truth) | nan | tiny
    assert same[:-16].all(), f"{x[:-16][~same[:-16]]} rounded wrongly"
    assert (pairs == (bits[:-16] | bits[16:].astype(np.uint32) << 16))[:-16].all(), "pairs differ from halves"


def check_tiles():
    """Tiles of each size, kind and remainder; rounding; and that the code is for the CPU that was asked for."""
    for half in (False, True):
        for which in range(len(SIZES)):
            for k in (0, 1, 2, 5, LONG):
                for add in (0, 1):
                    _product(which, k, add, half)
    _rounding()
    code = "".join(every_tile.inspect_asm(s) for s in every_tile.signatures)
    has = {word: word in code for word in ("zmm", "ymm", "vdpbf16ps")}
    machine = tile_code.machine_of(*cpu_target.target_context.codegen().magic_tuple())
    assert has == {"zmm": machine.lanes == 16, "ymm": machine.lanes > 4, "vdpbf16ps": machine.bf16}, (machine, has)
    return machine


def _close(got, truth, limit, what):
    error = np.linalg.norm(np.asarray(got, float) - truth) / np.linalg.norm(truth)
    assert error < limit, f"{what}: relative error {error:.1e}"


def _frozen(rng, *shape):
    w = (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(ml_dtypes.bfloat16)
    w.flags.writeable = False
    return w


def check_ops():
    """project, attention and loss in bfloat16, each by its kernel, against the formulas on the same values."""
    assert kernels.tiles_supported(bfloat16) and kernels.tiles_supported(np.float32)
    rng = np.random.default_rng(0)
    x, qkv = rng.standard_normal((37, 64)).astype("f4"), rng.standard_normal((50, 3 * 32)).astype(ml_dtypes.bfloat16)
    w, head, targets = _frozen(rng, 50, 64), _frozen(rng, 100, 64), rng.integers(0, 100, 37)
    a, b = (Tensor((rng.standard_normal(s) / 8).astype("f4"), True) for s in ((4, 64), (50, 4)))
    angles = np.outer(np.arange(50), 0.1 ** np.arange(16)).astype("f4")

    def run(precision):
        with autocast(precision):
            y = ops.project(Tensor(x, True), None, Tensor(np.ones(64, "f4")), None, Tensor(w), a, b,
                            layout=Layout((False,), ((2.0,),)))  # fmt: skip
            loss = ops.head_loss(Tensor(x.astype(bfloat16)), Tensor(head), targets)
        o = ops.rotary_attention(Tensor(qkv if precision else qkv.astype(float)), cos=np.cos(angles),
                                 sin=np.sin(angles), cu_seqlens=[0, 3, 50], n_heads=1, n_kv_heads=1,
                                 head_dim=32)  # fmt: skip
        return {"project": y.data, "attention": o.data, "loss": loss.data}

    got = run("bfloat16")
    with kernels.use_kernels(False):
        truth = run(None)
    for name, value in got.items():
        _close(value, np.asarray(truth[name], float), 1e-2, name)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print({"tiles": check_tiles, "ops": check_ops}[name]())
