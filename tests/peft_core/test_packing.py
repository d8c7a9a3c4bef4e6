import gc

import ml_dtypes
import numpy as np
import pytest

from peft_core import kernels, packing
from peft_core.safetensors_io import SafeFile, save_file

needs_tiles = pytest.mark.skipif(not kernels.tiles_supported(), reason="no AVX512-BF16 here")


def frozen(*shape):
    w = np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
    w.flags.writeable = False
    return w


def panels(w):
    """[O/48][ceil(I/2)][48] pairs of w (O, I), said in NumPy."""
    n_out, n_in = w.shape
    padded = np.zeros((-(-n_out // 48) * 48, (n_in + 1) // 2 * 2), w.dtype)
    padded[:n_out, :n_in] = w
    return padded.view(np.uint32).reshape(-1, 48, padded.shape[1] // 2).transpose(0, 2, 1).reshape(-1)


@needs_tiles
@pytest.mark.parametrize("shape", [(1, 1), (48, 96), (50, 33), (97, 64)])
def test_both_orientations(shape):
    w = frozen(*shape)
    assert (packing.packed_forward(w) == panels(w)).all()
    assert (packing.packed_backward(w) == panels(np.ascontiguousarray(w.T))).all()


@needs_tiles
def test_a_group_of_weights():
    a, b = frozen(50, 8), frozen(6, 8)
    assert (packing.packed_forward(a, b) == np.concatenate([panels(a), panels(b)])).all()
    assert (packing.packed_backward(a, b) == panels(np.ascontiguousarray(np.concatenate([a, b]).T))).all()


@needs_tiles
def test_packed_once_and_as_long_as_the_array_lives():
    w = frozen(50, 8)
    first = packing.packed_forward(w)
    assert packing.packed_forward(w) is first
    assert packing.packed_backward(w) is not first
    keys = [key for key in packing._packed if key[1] == (id(w),)]
    assert len(keys) == 2
    del w
    gc.collect()
    assert not any(key in packing._packed for key in keys)


@needs_tiles
@pytest.mark.parametrize("change", ["writeable", "float32", "vector"])
def test_only_what_cannot_change_is_packed(change):
    w = frozen(4, 4)
    w = {"writeable": w.copy(), "float32": w.astype(np.float32), "vector": w[0]}[change]
    if change == "float32":
        w.flags.writeable = False
    assert not packing.can_pack(w)
    with pytest.raises(ValueError, match="expected a read-only bfloat16 array"):
        packing.packed_forward(w)


def test_nothing_is_packed_without_tiles(monkeypatch):
    monkeypatch.setenv("PEFT_CORE_BF16", "off")
    assert not packing.can_pack(frozen(4, 4))


def test_pages_of_a_mapped_file_are_dropped_and_come_back(tmp_path):
    w = frozen(300, 64)
    save_file({"a": np.zeros(3, np.float32), "w": w, "z": np.zeros(9, np.float32)}, tmp_path / "x.safetensors")
    mapped = SafeFile(tmp_path / "x.safetensors").get("w")
    assert not mapped.flags.writeable
    assert (mapped == w).all()
    assert packing.drop_mapped_pages(mapped)
    assert (mapped == w).all()
    assert not packing.drop_mapped_pages(w)
