"""Attention of one query a row, as generation asks for it, against float64 and the op's general form."""

import numpy as np
import pytest

from peft_core import no_grad
from peft_core.dtypes import bfloat16
from peft_core.kernels import use_kernels
from peft_core.ops.attention import attention
from support.cases import relative_error


def truth(q, k, v, first, lengths, window=None):
    q, k, v = (x.astype("f8") for x in (q, k, v))
    repeats, out = q.shape[1] // k.shape[1], np.empty(q.shape)
    for b, (at, n) in enumerate(zip(first, lengths, strict=True)):
        least = at if window is None else max(at, at + n - window)
        for h in range(q.shape[1]):
            s = k[least : at + n, h // repeats] @ q[b, h] / np.sqrt(q.shape[2])
            p = np.exp(s - s.max())
            out[b, h] = p @ v[least : at + n, h // repeats] / p.sum()
    return out


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("dtype", "limit"), [(np.float32, 1e-6), (bfloat16, 4e-3)])
@pytest.mark.parametrize(("heads", "groups", "width"), [(6, 2, 16), (3, 3, 5), (4, 1, 64)])
def test_rows_with_one_query(heads, groups, width, dtype, limit, window, kernels):
    rng = np.random.default_rng(0)
    room, lengths = 9, np.array([9, 1, 0, 4])
    first = np.arange(4) * room
    q = rng.normal(size=(3, heads, width)).astype(dtype)  # row 2 is done
    k, v = (rng.normal(size=(4 * room, groups, width)).astype(dtype) for _ in range(2))
    with no_grad(), use_kernels(kernels):
        o = attention(q, k, v, cu_q=[0, 1, 2, 2, 3], cu_k=np.arange(5) * room, k_lengths=lengths, window=window).data
    assert o.dtype == dtype
    assert relative_error(o, truth(q, k, v, first[[0, 1, 3]], lengths[[0, 1, 3]], window)) < limit


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_bad_key_shows_in_its_row_alone(bad, kernels):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=s).astype("f4") for s in ((2, 2, 4), (8, 2, 4), (8, 2, 4)))
    v[5] = bad
    with no_grad(), use_kernels(kernels), np.errstate(invalid="ignore"):
        o = attention(q, k, v, cu_q=[0, 1, 2], cu_k=[0, 4, 8]).data
    assert np.isfinite(o[0]).all() and not np.isfinite(o[1]).any()
