import types

import pytest

from peft_core import backend, cuda
from peft_core.nn import Parameter, utils


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(backend, "cupy_or_none", lambda: None)
    assert not cuda.is_available() and not cuda.is_bf16_supported() and cuda.device_count() == 0
    assert cuda.memory_allocated() == cuda.max_memory_allocated("cuda:0") == cuda.memory_reserved() == 0
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    for call in (cuda.synchronize, cuda.current_device, cuda.get_device_name):
        with pytest.raises(RuntimeError, match=rf"cuda\.{call.__name__}\(\) without a CUDA device; expected an NVIDIA"):
            call()


class FakePool:
    def __init__(self):
        self.used, self.total = {0: 0, 1: 0}, {0: 0, 1: 0}
        self.current = 0

    def used_bytes(self):
        return self.used[self.current]

    def total_bytes(self):
        return self.total[self.current]

    def free_all_blocks(self):
        self.total = dict(self.used)


def fake_cupy():
    """As much of CuPy as the face asks: a pool per device, hooks, devices."""
    pool, hooks, waited = FakePool(), [], []

    class MemoryHook:
        def __enter__(self):
            hooks.append(self)

    class Device:
        def __init__(self, index=None):
            self.id = pool.current if index is None else index

        def __enter__(self):
            self.before, pool.current = pool.current, self.id
            return self

        def __exit__(self, *exc):
            pool.current = self.before

        def synchronize(self):
            waited.append(self.id)

    runtime = types.SimpleNamespace(getDeviceCount=lambda: 2, getDeviceProperties=lambda i: {"name": b"GPU %d" % i})
    inside = types.SimpleNamespace(MemoryHook=MemoryHook, Device=Device, runtime=runtime)
    cupy = types.SimpleNamespace(cuda=inside, get_default_memory_pool=lambda: pool)

    def allocate(index, size):
        with Device(index):
            pool.used[index] += size
            pool.total[index] = max(pool.total[index], pool.used[index])
            for hook in hooks:
                hook.malloc_postprocess(device_id=index, size=size, mem_size=size, mem_ptr=0, pmem_id=0)

    return cupy, allocate, waited


def test_with_a_device(monkeypatch):
    cupy, allocate, waited = fake_cupy()
    monkeypatch.setattr(backend, "cupy_or_none", lambda: cupy)
    monkeypatch.setattr(cuda, "_watch", None)
    assert cuda.is_available() and cuda.device_count() == 2 and cuda.current_device() == 0
    allocate(0, 100)
    assert cuda.max_memory_allocated() == 100 == cuda.memory_allocated()
    allocate(0, 50)
    allocate(1, 7)
    allocate(0, -120)
    assert cuda.memory_allocated(0) == 30 and cuda.max_memory_allocated("cuda") == 150 == cuda.memory_reserved()
    assert cuda.max_memory_allocated("cuda:1") == 7 == cuda.memory_allocated(backend.as_device("cuda:1"))
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == 30
    cuda.empty_cache()
    assert cuda.memory_reserved() == 30 and cuda.get_device_name(1) == "GPU 1"
    cuda.synchronize(1)
    assert waited == [1]
    with pytest.raises(ValueError, match=r"device 'cpu' has no CUDA memory; expected 'cuda', 'cuda:<number>' or a num"):
        cuda.memory_allocated("cpu")


def test_a_driver_that_fails_is_no_device(monkeypatch):
    def failing():
        raise RuntimeError("driver too old")

    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(backend, "_cupy", failing)
    assert backend.cupy_or_none() is None and backend.cuda_device_count() == 0
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 0)
    monkeypatch.setattr(backend, "_cupy", lambda: types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    assert backend.cupy_or_none() is None


def test_this_face_stands_where_torch_has_it():
    import peft_core

    assert peft_core.cuda is cuda and peft_core.nn.utils is utils and Parameter is peft_core.nn.Parameter
