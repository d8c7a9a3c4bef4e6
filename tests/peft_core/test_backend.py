"""Devices, dtypes, errors, autocast and random numbers."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from peft_core import amp, backend, dtypes, errors, random


def test_devices_are_named_as_in_pytorch():
    assert str(backend.as_device("cuda")) == "cuda:0" and str(backend.as_device(None)) == "cpu"
    assert backend.as_device("cuda:1") == backend.Device("cuda", 1)
    for name in ("gpu", "cpu:0", "cuda:x"):
        with pytest.raises(ValueError, match=rf"device {name!r} is not known; expected 'cpu', 'cuda'"):
            backend.as_device(name)


def test_numpy_arrays_and_scalars_belong_to_the_cpu():
    assert backend.xp_of(np.ones(2), 3.0) is np and backend.device_of(np.ones(2)) == backend.CPU
    a = np.ones(2)
    assert backend.to_device(a, "cpu") is a and backend.to_numpy(a) is a


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_all_finite_sees_the_last_element_of_any_dtype(dtype, monkeypatch):
    monkeypatch.setattr(backend, "_PIECE", 4)
    a = np.ones((3, 3), dtypes.as_dtype(dtype))
    assert backend.all_finite(a) and backend.all_finite(np.ones(3, np.int64)) and backend.all_finite(a[:0])
    for value in (np.nan, np.inf, -np.inf):
        a[2, 2] = value
        assert not backend.all_finite(a) and not backend.all_finite(a.T)


def test_memory_figures_are_bytes_of_this_process():
    assert 10e6 < backend.rss_bytes() <= backend.peak_rss_bytes() * 1.01


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux hands the peak on")
def test_the_peak_is_not_that_of_the_process_that_started_this_one():
    here = np.ones(40_000_000, np.float32)
    code = "from peft_core.backend import peak_rss_bytes; print(peak_rss_bytes())"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 10e6 < child < here.nbytes < backend.peak_rss_bytes()


def test_importing_the_core_loads_no_numba_cupy_or_torch():
    code = "import sys, peft_core; print([m for m in ('numba', 'cupy', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("kinds", "result"),
    [("bf16 bf16", "bf16"), ("bf16 fp16", "fp32"), ("bf16 fp32", "fp32"), ("fp16 double", "double"),
     ("int64 bf16", "bf16"), ("int8 int64", "int64")],
)  # fmt: skip
def test_promotion(kinds, result):
    assert dtypes.promote(*map(dtypes.as_dtype, kinds.split())) == dtypes.as_dtype(result)


def test_dtype_names_go_both_ways():
    for code, dtype in dtypes.SAFETENSORS_CODES.items():
        assert dtypes.as_dtype(dtypes.dtype_name(dtype)) == dtype and dtypes.code_of(dtype) == code
    assert dtypes.as_dtype("torch.bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert dtypes.accumulate_dtype("float16") == np.float32 and dtypes.accumulate_dtype("int64") == np.int64
    with pytest.raises(ValueError, match="dtype 'bf17' is not known; expected one of"):
        dtypes.as_dtype("bf17")
    with pytest.raises(ValueError, match="complex64 cannot be stored in a safetensors file"):
        dtypes.code_of(np.complex64)


def test_expect_words_happened_expected_and_fix():
    errors.expect(True, errors.DataError, "x", expected="y")
    with pytest.raises(errors.DataError, match=r"^3 rows; expected at least 4\. Add one\.$"):
        errors.expect(False, errors.DataError, "3 rows", expected="at least 4", fix="Add one.")
    assert issubclass(errors.AdapterError, errors.FileError) and issubclass(errors.GraphError, RuntimeError)


def test_autocast_nests_and_ends():
    assert amp.compute_dtype() is None
    with amp.autocast("bfloat16"):
        with amp.autocast(None):
            assert amp.compute_dtype() is None
        assert amp.compute_dtype() == dtypes.bfloat16
    assert amp.compute_dtype() is None
    with pytest.raises(ValueError, match="autocast dtype is int64; expected float16"):
        amp.autocast("int64")


def test_random_streams_repeat_from_a_state_and_differ_between_keys():
    g = random.Generator(7)
    first, state = g.uniform(5), g.get_state()
    then = g.normal((2, 3))
    g.set_state(state)
    np.testing.assert_array_equal(g.normal((2, 3)), then)
    np.testing.assert_array_equal(random.Generator(7).uniform(5), first)
    keys = {random.Generator(s).key() for s in range(1000)} | {g.key() for _ in range(1000)}
    assert len(keys) == 2000 and all(0 <= k < 2**64 for k in keys)


def test_random_moments_and_dtypes():
    g = random.Generator(0)
    u, n = g.uniform(100_000, -2, 4), g.normal(100_000, 1.0, 3.0)
    assert u.dtype == n.dtype == np.float32 and u.min() >= -2 and u.max() < 4
    assert abs(u.mean() - 1) < 0.03 and abs(u.var() - 3) < 0.05 and abs(n.mean() - 1) < 0.05 and abs(n.std() - 3) < 0.05
    assert sorted(g.permutation(50)) == list(range(50)) and set(g.integers(0, 3, 100)) == {0, 1, 2}


def test_the_default_generator_is_seeded_as_a_whole():
    random.manual_seed(3)
    state = random.get_state()
    a = random.default_generator.key()
    random.set_state(state)
    assert random.default_generator.key() == a


def test_values_and_lists_in_error_texts_are_short():
    assert errors.short("a" * 200) == "'" + "a" * 76 + "..." and errors.short([1]) == "[1]"
    assert errors.some([3, 1, 3, 2]) == "3, 1, 2"
    assert errors.some(range(9)) == "0, 1, 2, 3, 4 and 4 more" and errors.some("abc", 2) == "a, b and 1 more"
