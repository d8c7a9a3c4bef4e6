import gc
import mmap

import ml_dtypes
import numpy as np
import pytest

from peft_core import kernels, packing
from peft_core.safetensors_io import SafeFile, save_file

BF16 = np.dtype(ml_dtypes.bfloat16)
needs_tiles = pytest.mark.skipif(not kernels.tiles_supported(), reason="numba compiles no tiles here")
dtypes = pytest.mark.parametrize("dtype", [BF16, np.dtype("f4")], ids=str)


def frozen(*shape, dtype=BF16):
    w = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    w.flags.writeable = False
    return w


def panels(w):
    """[O/48][I in words][48] words of w (O, I), said in NumPy."""
    per = 4 // w.itemsize
    n_out, n_in = w.shape
    padded = np.zeros((-(-n_out // 48) * 48, -(-n_in // per) * per), w.dtype)
    padded[:n_out, :n_in] = w
    words = padded.view(np.uint32 if per == 2 else np.float32)
    return words.reshape(-1, 48, words.shape[1]).transpose(0, 2, 1).reshape(-1)


@needs_tiles
@dtypes
@pytest.mark.parametrize("stored", [BF16, np.dtype("f4"), np.dtype("f2")], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (48, 96), (50, 33), (97, 64)])
def test_both_orientations(shape, stored, dtype):
    w = frozen(*shape, dtype=stored)
    assert (packing.packed_forward(w, dtype=dtype) == panels(w.astype(dtype))).all()
    assert (packing.packed_backward(w, dtype=dtype) == panels(np.ascontiguousarray(w.T).astype(dtype))).all()


@needs_tiles
@dtypes
def test_a_group_of_weights(dtype):
    a, b = frozen(50, 8, dtype=dtype), frozen(6, 8, dtype=dtype)
    assert (packing.packed_forward(a, b, dtype=dtype) == np.concatenate([panels(a), panels(b)])).all()
    stacked = np.ascontiguousarray(np.concatenate([a, b]).T)
    assert (packing.packed_backward(a, b, dtype=dtype) == panels(stacked)).all()


@needs_tiles
def test_packed_once_a_dtype_and_as_long_as_the_array_lives():
    w = frozen(50, 8)
    first = packing.packed_forward(w, dtype=BF16)
    assert packing.packed_forward(w, dtype=BF16) is first
    assert packing.packed_backward(w, dtype=BF16) is not first
    assert packing.packed_forward(w, dtype=np.dtype("f4")).dtype == np.float32
    kept = len(packing._packed)
    del w
    gc.collect()
    assert len(packing._packed) == kept - 3


@needs_tiles
@pytest.mark.parametrize("change", ["writeable", "float64", "integers", "vector"])
def test_only_what_cannot_change_is_packed(change):
    w = frozen(4, 4)
    w = {"writeable": w.copy(), "float64": w.astype("f8"), "integers": w.astype("i4"), "vector": w[0]}[change]
    if change != "writeable":
        w.flags.writeable = False
    assert not packing.can_pack(w, BF16)
    with pytest.raises(ValueError, match="expected a read-only matrix of floats"):
        packing.packed_forward(w, dtype=BF16)


def test_nothing_is_packed_without_tiles(monkeypatch):
    monkeypatch.setenv("PEFT_CORE_TILES", "off")
    assert not packing.can_pack(frozen(4, 4), BF16)


def test_pages_of_a_mapped_file_are_dropped_and_come_back(tmp_path):
    w = frozen(300, 64)
    save_file({"a": np.zeros(3, np.float32), "w": w, "z": np.zeros(9, np.float32)}, tmp_path / "x.safetensors")
    mapped = SafeFile(tmp_path / "x.safetensors").get("w")
    assert not mapped.flags.writeable
    assert (mapped == w).all()
    assert packing.drop_mapped_pages(mapped)
    assert (mapped == w).all()
    assert not packing.drop_mapped_pages(w)


@pytest.mark.parametrize("kind", ["copy on write", "anonymous"])
def test_pages_that_no_file_holds_stay(tmp_path, kind):
    w = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)
    np.zeros_like(w).tofile(tmp_path / "zeros")
    if kind == "anonymous":
        mapped = np.frombuffer(mmap.mmap(-1, w.nbytes), np.float32).reshape(w.shape)
    else:
        mapped = np.memmap(tmp_path / "zeros", np.float32, "c", shape=w.shape)
    mapped[...] = w
    mapped.flags.writeable = False
    assert not packing.drop_mapped_pages(mapped)
    assert (mapped == w).all()


@needs_tiles
def test_an_interrupt_while_packing_leaves_nothing_that_another_array_could_get(monkeypatch):
    def interrupt(w):
        raise KeyboardInterrupt

    a, b = frozen(50, 8), frozen(6, 8)
    monkeypatch.setattr(packing, "drop_mapped_pages", interrupt)
    kept = len(packing._packed)
    with pytest.raises(KeyboardInterrupt):
        packing.packed_forward(a, b, dtype=BF16)
    del b
    gc.collect()
    assert len(packing._packed) == kept


@needs_tiles
def test_what_was_writable_in_between_is_packed_anew():
    a, b = frozen(50, 8), frozen(6, 8)
    packing.packed_forward(a, b, dtype=BF16)
    b.flags.writeable = True
    assert not packing.can_pack(b, BF16)
    b *= 2
    b.flags.writeable = False
    assert (packing.packed_forward(a, b, dtype=BF16) == np.concatenate([panels(a), panels(b)])).all()
