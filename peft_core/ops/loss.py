"""Cross entropy, of logits and of the language-model head.  Statistics and losses are kept in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..amp import compute_dtype
from ..backend import Array, xp_of
from ..blas import product
from ..dtypes import accumulate_dtype, bfloat16, promote
from ..kernels import formula, get_num_threads, run_kernel
from ..packing import can_pack, packed_backward, packed_forward, words
from ..tape import op
from ..workspace import workspace

TILE_BLOCK = 64  # rows whose logits a thread holds on tiles: enough work for each byte of the head that is read
_NO_INDEX = -1  # every row that gets this far has a label
PANEL = 4096  # vocabulary rows of a half-precision head that are widened at a time

# exp(x) = 2^k 2^f as in attention.py: numba has no vectorised exp, and its cache no use for shared functions
_LOG2E = np.float32(1 / math.log(2))
_C = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(8))
_HALF, _LOWEST, _ZERO, _ONE = np.float32(0.5), np.float32(-126), np.float32(0), np.float32(1)
_LANES = 16


@formula
def cross_entropy_rows(z: Array, targets: Array, losses: Array, ignore_index: int, slope: bool) -> None:
    """losses (M,) = log(sum(exp(z))) - z[target] of z (M, V); with ``slope`` z becomes softmax(z) - onehot(target).

    A row whose target is ``ignore_index`` has loss 0 and slope 0.  Without ``slope`` z is left as it is.
    """
    xp = xp_of(z)
    labelled = targets != ignore_index  # (M,)
    at = xp.arange(len(z)), xp.where(labelled, targets, 0)
    with np.errstate(invalid="ignore"):  # inf - inf is the NaN that a diverged run has to show
        top = z.max(-1, keepdims=True)  # (M, 1)
        here = z[at]
        e = xp.subtract(z, top, out=z if slope else None)
        xp.exp(e, out=e)
        total = e.sum(-1, keepdims=True)  # (M, 1)
        losses[...] = xp.where(labelled, xp.log(total[:, 0]) + (top[:, 0] - here), 0)
    if slope:
        z /= total
        z[at] -= 1
        z[~labelled] = 0


@cross_entropy_rows.cpu()
def _cross_entropy_rows(t, T, z, targets, losses, ignore_index, slope):
    width = z.shape[1]
    lanes = np.empty(_LANES, np.float32)  # a maximum per lane: LLVM does not vectorise one that has to respect NaN
    for i in range(len(z) * t // T, len(z) * (t + 1) // T):
        row, target = z[i], targets[i]
        if target == ignore_index:
            losses[i] = _ZERO
            if slope:
                row[:] = _ZERO
            continue
        lanes[:] = row[0]
        full = width // _LANES * _LANES
        for j in range(0, full, _LANES):
            for c in range(_LANES):
                lanes[c] = row[j + c] if row[j + c] > lanes[c] else lanes[c]
        top = lanes[0]
        for c in range(1, _LANES):
            top = lanes[c] if lanes[c] > top else top
        for j in range(full, width):
            top = row[j] if row[j] > top else top
        here, total = row[target], _ZERO
        for j in range(width):
            y = (row[j] - top) * _LOG2E
            y = _LOWEST if y < _LOWEST else y  # this way round a NaN stays
            k = np.floor(y + _HALF)
            f = y - k
            e = ((((((_C[7] * f + _C[6]) * f + _C[5]) * f + _C[4]) * f + _C[3]) * f + _C[2]) * f + _C[1]) * f + _C[0]
            e *= np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
            total += e
            if slope:
                row[j] = e
        losses[i] = np.log(total) + (top - here)
        if slope:
            share = _ONE / total
            for j in range(width):
                row[j] *= share
            row[target] -= _ONE


# ------------------------------------------------------------------------------------------------ the ops


@op
def cross_entropy(
    logits: Array, targets: Array, *, ignore_index: int = -100, reduction: str = "mean", needs: tuple[bool, bool]
) -> tuple:
    """loss = log(sum(exp(logits))) - logits[target], averaged over the labelled rows, summed, or as it is ("none").

    logits (..., V), targets (...) integers -> scalar, or (...) for "none"; float32 (float64 for float64 logits).
    A row whose target is ``ignore_index`` counts nowhere.  The mean over no labelled row is NaN with gradient 0, as in
    PyTorch: a loss of 0 would look like success.  Retains logits, targets.
    Raises ValueError for another reduction or shape, IndexError for a target outside the vocabulary.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy got reduction={reduction!r}; expected 'mean', 'sum' or 'none'.")
    _check_targets("cross_entropy", logits.shape[:-1], targets, logits.shape[-1], ignore_index)
    xp, shape, kind, work = xp_of(logits), logits.shape, logits.dtype, accumulate_dtype(logits.dtype)
    flat = xp.ascontiguousarray(targets).reshape(-1)  # (M,)
    losses = xp.empty(flat.shape, work)
    cross_entropy_rows(_work_copy(logits, work, False), flat, losses, ignore_index, False)
    y, weight = losses.reshape(shape[:-1]), 1.0
    if reduction != "none":
        n_labelled = int((flat != ignore_index).sum())
        weight = 1.0 if reduction == "sum" else 1.0 / n_labelled if n_labelled else math.nan
        y = xp.asarray(losses.sum(dtype=np.float64) * weight).astype(work)
    if not needs[0]:
        return y, None

    def joint(gy: Array, acc: list) -> tuple:
        z = _work_copy(logits, work, True)  # (M, V)
        cross_entropy_rows(z, flat, xp.empty(flat.shape, work), ignore_index, True)
        if not math.isnan(weight):  # no labelled row: z is 0, and stays so
            z *= work.type(weight) * gy.reshape(-1, 1).astype(work, copy=False)  # (M, 1), or (1, 1)
        return z.reshape(shape).astype(kind, copy=False), None

    return y, joint


@op
def head_loss(
    h: Array, w: Array, targets: Array, *, ignore_index: int = -100, chunk: int = 512, needs: tuple[bool, bool, bool]
) -> tuple:
    """The sum of cross_entropy(h w^T, targets) over the labelled rows, never holding more than chunk x V logits.

    h (N, D), w (V, D), targets (N,) integers -> scalar float32 (float64 for float64 inputs); products in the compute
    dtype, sums and statistics in float32.  No labelled row gives 0.0.  The gradient is linear in the loss's own, so the
    forward forms it where it is wanted, over each chunk's logits; evaluation forms none.
    A frozen read-only w is packed once where the CPU has tiles; a thread then holds 8 to 64 rows.
    Retains (labelled rows, D) if h trains, (V, D) if w does.
    Raises ValueError for shapes that do not fit or chunk < 1, IndexError for a target outside the vocabulary.
    """
    if h.ndim != 2 or w.ndim != 2 or h.shape[1] != w.shape[1] or chunk < 1:
        raise ValueError(
            f"head_loss got h {h.shape}, w {w.shape}, chunk={chunk}; "
            "expected h (N, D), w (V, D) and a chunk of at least 1."
        )
    _check_targets("head_loss", h.shape[:1], targets, w.shape[0], ignore_index)
    xp, kinds, n = xp_of(h), (h.dtype, w.dtype), h.shape[0]
    dtype = compute_dtype() or promote(*kinds)
    work = accumulate_dtype(dtype)
    targets = xp.ascontiguousarray(targets)
    rows = xp.flatnonzero(targets != ignore_index)  # (M,)
    if not needs[1] and isinstance(h, np.ndarray) and len(rows) and can_pack(w, dtype):
        losses, gh, gw = *_on_tiles(h, w, targets, rows, chunk, dtype, needs[0]), None
    else:
        losses, gh, gw = _by_chunks(h, w, targets, rows, chunk, dtype, needs)
    y = xp.asarray(losses.sum(dtype=np.float64)).astype(work)
    del losses, h

    def joint(gy: Array, acc: list) -> tuple:
        g = gy.astype(work, copy=False)
        gx = None
        if gh is not None:
            gx = xp.zeros((n, gh.shape[1]), kinds[0]) if acc[0] is None else acc[0]
            gx[rows] += (gh * g).astype(kinds[0], copy=False)
        return gx, None if gw is None else (gw * g).astype(kinds[1], copy=False), None

    return y, joint


def _by_chunks(
    h: Array, w: Array, targets: Array, rows: Array, chunk: int, dtype: np.dtype, needs: tuple[bool, bool, bool]
) -> tuple[Array, Array | None, Array | None]:
    """(losses (M,), gradients of their sum for h's rows and for w where they are wanted)."""
    xp, work = xp_of(h), accumulate_dtype(dtype)
    # in float32 until the loss's gradient is known: with loss scaling, unscaled ones would vanish in float16
    gh = xp.empty((len(rows), h.shape[1]), work) if needs[0] else None
    gw = xp.zeros(w.shape, work) if needs[1] else None
    losses = xp.empty(len(rows), work)
    logits = xp.empty((min(chunk, len(rows)), w.shape[0]), work)  # (chunk, V), for all chunks
    for i in range(0, len(rows), chunk):
        part = slice(i, i + chunk)
        x = h[rows[part]].astype(dtype, copy=False).astype(work, copy=False)  # (m, D)
        z = logits[: len(x)]
        for at, panel in _panels(w, dtype, work):
            product(x, panel.T, out=z[:, at])
        cross_entropy_rows(z, targets[rows[part]], losses[part], _NO_INDEX, gh is not None or gw is not None)
        if gh is not None or gw is not None:
            _send_back(z, x, w, dtype, None if gh is None else gh[part], gw)
    return losses, gh, gw


def _on_tiles(
    h: np.ndarray, w: np.ndarray, targets: np.ndarray, rows: np.ndarray, chunk: int, dtype: Any, want: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """(losses (M,), gradient of their sum for h's rows where wanted) with a packed head."""
    from . import loss_tiles as kernels

    x, (n_classes, width) = np.ascontiguousarray(h[rows], np.float32), w.shape  # (M, D)
    threads = get_num_threads()
    share = -(-len(rows) // (threads * kernels.ROWS))  # tiles of a thread, cut into equal blocks: each reads all of w
    most = max(1, min(TILE_BLOCK, chunk // threads) // kernels.ROWS)
    block = kernels.ROWS * -(-share // -(-share // most))
    losses, gh = np.empty(len(rows), np.float32), np.empty((len(rows) if want else 0, width), np.float32)
    forward = packed_forward(w, dtype=dtype)
    backward = packed_backward(w, dtype=dtype) if want else forward
    with workspace:
        size = kernels.scratch_words(block, width, n_classes)
        scratch = workspace.get("scratch", threads, size, dtype=words(dtype))
        run_kernel(kernels.head_rows, x, targets[rows].astype(np.int64), forward, backward, n_classes, want, losses, gh,
                   scratch, block)  # fmt: skip
    return losses, gh if want else None


def _send_back(z: Array, x: Array, w: Array, dtype: np.dtype, gh: Array | None, gw: Array | None) -> None:
    """gh = z w and gw += z^T x, for z (m, V) the slopes of a chunk and x (m, D) its rows."""
    if gh is not None:
        gh[...] = 0
        for at, panel in _panels(w, dtype, gh.dtype):
            gh += product(z[:, at], panel)
    if gw is not None:
        gw += product(z.T, x)


def _panels(w: Array, dtype: np.dtype, work: np.dtype) -> Iterator[tuple[slice, Array]]:
    """w (V, D) rounded to ``dtype`` and widened to ``work``: whole where that is w itself, else by panels of rows."""
    if w.dtype == work == dtype:
        yield slice(None), w
        return
    for i in range(0, w.shape[0], PANEL):
        panel = w[i : i + PANEL]
        yield slice(i, i + PANEL), _widened(panel if dtype == work else panel.astype(dtype, copy=False), work)


def _widened(x: Array, work: np.dtype) -> Array:
    if x.dtype == bfloat16 and work == np.float32:  # the upper half of a float32: three times as fast as astype
        return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(work, copy=False)


def _work_copy(logits: Array, work: np.dtype, copy: bool) -> Array:
    copy = copy or not getattr(logits.flags, "writeable", True)  # numba would refuse to compile for a mapped file
    return logits.astype(work, order="C", copy=copy).reshape(-1, logits.shape[-1])  # (M, V)


def _check_targets(name: str, shape: tuple, targets: Any, n_classes: int, ignore_index: int) -> None:
    if targets.shape != shape:
        raise ValueError(f"{name} got targets of shape {targets.shape}; expected {shape}, one for each row.")
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= n_classes))
    if bool(wrong.any()):
        raise IndexError(
            f"{name} got target {int(targets[wrong][0])} for {n_classes} classes; expected 0 to {n_classes - 1}, "
            f"or ignore_index={ignore_index}."
        )
