"""Low-rank terms of frozen adapters, gathered once."""

import numpy as np
import pytest

from peft_core import kernels
from peft_core.ops.projection import Member
from peft_core.ops.projection_ranks import ranks_of

F32 = np.dtype("f4")
pytestmark = pytest.mark.skipif(not kernels.tiles_supported(F32), reason="no AVX-512 here")


def member(*, writable: bool) -> Member:
    a, b = np.ones((16, 8), "f4"), np.ones((4, 16), "f4")
    a.flags.writeable = b.flags.writeable = writable
    return Member(np.ones((4, 8), "f4"), 0, None, [(a, b, 1.0, 1)], slice(0, 4))


def test_kept_where_nothing_can_change():
    frozen, trained = member(writable=False), member(writable=True)
    assert ranks_of([frozen], 8, F32) is ranks_of([frozen], 8, F32)
    assert ranks_of([trained], 8, F32) is not ranks_of([trained], 8, F32)


def test_a_that_was_writable_in_between_is_gathered_anew():
    m = member(writable=False)
    a = m.terms[0][0]
    assert (ranks_of([m], 8, F32).a == 1).all()
    a.flags.writeable = True
    ranks_of([m], 8, F32)
    a *= 2
    a.flags.writeable = False
    assert (ranks_of([m], 8, F32).a == 2).all()
