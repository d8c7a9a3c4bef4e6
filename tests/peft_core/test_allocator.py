"""Freed memory is kept inside the context and given back after it, as the system's counts of pages say."""

import subprocess
import sys

import pytest

from peft_core import allocator

needs_glibc = pytest.mark.skipif(allocator._glibc() is None, reason="the C library is not glibc")
SCRIPT = """
import resource
import numpy as np
from peft_core.allocator import keep_freed_memory

def faults(n):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(n):
        np.ones(1 << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

with keep_freed_memory():
    with keep_freed_memory():
        faults(2)
    inside = faults(8)  # the inner one's end is not the end
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(64)]
    del arrays
    held = resident_mb()
after = resident_mb()
print(inside, held - after, faults(8))
"""


@needs_glibc
@pytest.mark.skipif(sys.platform != "linux", reason="counts pages in /proc")
def test_pages_are_touched_for_the_first_time_once():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    inside, returned_mb, outside = map(float, done.stdout.split())
    assert inside < 100  # 8 arrays of 256 pages each
    assert returned_mb > 32  # of 64 MB
    assert outside > 1000


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    with allocator.keep_freed_memory():
        assert allocator.keep_freed_memory._inside == 1
    assert allocator.keep_freed_memory._inside == 0
