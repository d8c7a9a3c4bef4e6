"""The kernel of ``head_loss`` on register tiles: product with the head, softmax, loss and gradient by blocks of rows.

A thread takes a block of rows through the whole vocabulary twice: once for logits, maxima and sums, once for the
gradient's product with the head. The logits of a block lie by panels, [panel][row][48], as the tile writes them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..tile_parts import FAST, INLINE, elements, exp, per, put
from ..tiles import COLUMNS as C
from ..tiles import round16, tile_8x48

ROWS = 8  # of a tile
GROUP = 8  # panels of slopes that one product with the head takes
LANES = 16
_F4 = np.float32
_ZERO, _ONE, _HIDDEN = _F4(0), _F4(1), _F4(-1e30)


def scratch_words(block: int, width: int, n_classes: int) -> int:
    """Words of scratch that a thread needs for blocks of ``block`` rows."""
    panels, columns = -(-n_classes // C), -(-width // C) * C
    return block * (width + 16 + panels * C + GROUP * C + 16 + columns + 2 * LANES)


@njit(**INLINE)
def _round_rows(x, r0, rows, tiled, a16, ld):  # type: ignore[no-untyped-def]
    """The left operand: elements of rows r0.. of x, zeros for the rows and the column that fill it up."""
    width, flat = x.shape[1], x.reshape(-1)
    whole = width // 16 * 16
    for i in range(tiled):
        row = a16[i * ld : i * ld + width + 1]
        if i >= rows:
            row[:] = 0
            continue
        for k in range(0, whole, 16):
            round16(flat, (r0 + i) * width + k, row, k)
        for k in range(whole, width):
            put(row, k, x[r0 + i, k])
        row[width] = 0


@njit(**INLINE)
def _raise(top, s):  # type: ignore[no-untyped-def]
    for c in range(LANES):
        best = top[c]
        best = s[c] if s[c] > best else best
        best = s[c + LANES] if s[c + LANES] > best else best
        top[c] = s[c + 2 * LANES] if s[c + 2 * LANES] > best else best


@njit(**INLINE)
def _exp_and_sum(s, top, total, keep):  # type: ignore[no-untyped-def]
    for c in range(LANES):
        x, y, z = exp(s[c] - top), exp(s[c + LANES] - top), exp(s[c + 2 * LANES] - top)
        total[c] += x + y + z
        if keep:
            s[c], s[c + LANES], s[c + 2 * LANES] = x, y, z


@njit(**INLINE)
def _logits(a, ld, w, depth, n_classes, tiled, block, z, top):  # type: ignore[no-untyped-def]
    """z [panel][row][48] and the running maxima, 16 lanes a row; classes that fill a panel up are hidden."""
    top[:] = _HIDDEN
    for j in range((n_classes + C - 1) // C):
        missing = (j + 1) * C - n_classes
        for p in range(0, tiled, ROWS):
            at = (j * block + p) * C
            tile_8x48(a, p * ld, ld, w, j * depth * C, C, depth, z, at, C, 0)
            for i in range(ROWS):
                if missing > 0:
                    for c in range(C - missing, C):
                        z[at + i * C + c] = _HIDDEN
                _raise(top[(p + i) * LANES : (p + i + 1) * LANES], z[at + i * C : at + (i + 1) * C])


@njit(**INLINE)
def _softmax(z, rows, block, n_panels, targets, r0, want, top, total, losses):  # type: ignore[no-untyped-def]
    """losses; with ``want`` z becomes exp(z - top) less the row's sum at the target, whose inverse is left in top."""
    for i in range(rows):
        best = top[i * LANES]
        for c in range(1, LANES):
            best = top[i * LANES + c] if top[i * LANES + c] > best else best
        at = (targets[r0 + i] // C * block + i) * C + targets[r0 + i] % C
        losses[r0 + i] = best - z[at]
        top[i * LANES] = best
    total[:] = _ZERO
    for j in range(n_panels):
        for i in range(rows):
            at = (j * block + i) * C
            _exp_and_sum(z[at : at + C], top[i * LANES], total[i * LANES : (i + 1) * LANES], want)
    for i in range(rows):
        whole = _ZERO
        for c in range(LANES):
            whole += total[i * LANES + c]
        losses[r0 + i] += np.log(whole)
        top[i * LANES] = _ONE / whole
        if want:
            z[(targets[r0 + i] // C * block + i) * C + targets[r0 + i] % C] -= whole


@njit(**INLINE)
def _scale(s, share):  # type: ignore[no-untyped-def]
    for c in range(C):
        s[c] *= share


@njit(**INLINE)
def _send_back(z, rows, tiled, block, w, n_classes, width, top, slopes, dh):  # type: ignore[no-untyped-def]
    """dh (block, columns) = softmax's slopes, as words, times the head."""
    columns, slopes16, step, n_panels = (
        (width + C - 1) // C * C,
        elements(slopes),
        per(slopes),
        (n_classes + C - 1) // C,
    )
    words, ld = (n_classes + step - 1) // step, GROUP * C // step + 16  # never a power of two
    slopes[:] = 0
    for j0 in range(0, n_panels, GROUP):
        for j in range(j0, min(n_panels, j0 + GROUP)):
            for i in range(rows):
                at, to = (j * block + i) * C, step * i * ld + (j - j0) * C
                _scale(z[at : at + C], top[i * LANES])
                for c in range(0, C, 16):
                    round16(z, at + c, slopes16, to + c)
        k0 = j0 * C // step
        depth = min(GROUP * C // step, words - k0)
        for d in range(0, columns, C):
            for p in range(0, tiled, ROWS):
                tile_8x48(slopes, p * ld, ld, w, d * words + k0 * C, C, depth, dh, p * columns + d, columns, j0)


@njit(**FAST)
def head_rows(t, T, x, targets, w_forward, w_backward, n_classes, want, losses, gh, scratch, block):  # type: ignore[no-untyped-def]
    """losses (M,) of the rows x (M, D) with their targets; with ``want`` gh (M, D), the gradient of their sum."""
    n, width = x.shape
    work = scratch[t]
    step = per(work)
    depth = (width + step - 1) // step
    ld, n_panels = depth + 16, (n_classes + C - 1) // C
    columns, at = (width + C - 1) // C * C, 0
    a = work[: block * ld]
    at += block * ld
    z = work[at : at + block * n_panels * C].view(_F4)
    at += block * n_panels * C
    slopes = work[at : at + block * (GROUP * C // step + 16)]
    at += len(slopes)
    dh = work[at : at + block * columns].view(_F4)
    at += block * columns
    top = work[at : at + block * LANES].view(_F4)
    total = work[at + block * LANES : at + 2 * block * LANES].view(_F4)
    n_tiles = (n + ROWS - 1) // ROWS
    end = min(n, n_tiles * (t + 1) // T * ROWS)
    for r0 in range(n_tiles * t // T * ROWS, end, block):
        rows = min(block, end - r0)
        tiled = (rows + ROWS - 1) // ROWS * ROWS
        _round_rows(x, r0, rows, tiled, elements(a), step * ld)
        _logits(a, ld, w_forward, depth, n_classes, tiled, block, z, top)
        _softmax(z, rows, block, n_panels, targets, r0, want, top, total, losses)
        if want:
            _send_back(z, rows, tiled, block, w_backward, n_classes, width, top, slopes, dh)
            for i in range(rows):
                for d in range(width):
                    gh[r0 + i, d] = dh[i * columns + d]
