"""Kernels of ``projection_ranks.py``, called on one thread: they move little.  Imported inside functions only."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from ..tile_parts import kernel, pair_rows, put


@kernel
def gather(t, T, a, b, row, rank, a_out, b_out):
    """a (n, I) into a_out (R, I) from row ``row``, b (O, n) into b_out (O, R_m) from column ``rank``, as elements."""
    for i in range(len(a)):
        source, out = a[i], a_out[row + i]
        for k in range(len(source)):
            put(out, k, source[k])
    flat, to, n = b.reshape(-1), b_out.reshape(-1), b.shape[1]
    if n == b_out.shape[1]:
        for k in range(len(flat)):
            put(to, k, flat[k])
    else:
        for o in range(len(b)):
            for k in range(n):
                put(to, o * b_out.shape[1] + rank + k, flat[o * n + k])


@kernel
def pair(t, T, rows, out, at, ld):
    """From out[at], ``ld`` apart: elements ``rows`` (R, I) as the right operand of a product that sums over R."""
    n, width = rows.shape
    pair_rows(rows.reshape(-1), width, n, width, out[at:], ld)


@kernel
def cut_a(t, T, sums, at, ld, out):
    """out (n, I) = the sum over threads of the rows from ``at``, ``ld`` apart, of each thread's sums."""
    for i in range(len(out)):
        to, first = out[i], at + i * ld
        for k in range(len(to)):
            to[k] = sums[0, first + k]
        for s in range(1, len(sums)):
            for k in range(len(to)):
                to[k] += sums[s, first + k]


@kernel
def cut_b(t, T, sums, at, ld, out):
    """out (O, n) = the transpose of the sum over threads of the rows from ``at``, ``ld`` apart."""
    n_out, n = out.shape
    for r in range(n):
        for o in range(n_out):
            out[o, r] = sums[0, at + r * ld + o]
    for s in range(1, len(sums)):
        for r in range(n):
            for o in range(n_out):
                out[o, r] += sums[s, at + r * ld + o]
