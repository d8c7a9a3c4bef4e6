"""Whether an exported result computes what base and adapter compute together: judged by logits on a probe batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from adapters import load_adapter, set_active
from peft_core.dtypes import dtype_name
from peft_core.errors import ExportError
from peft_core.random import Generator
from peft_core.tape import no_grad
from transformer.load import from_pretrained

ROWS, LENGTH = 2, 24
# Largest ||difference|| / ||logits||, by the dtype that the weights were rounded to: some ten times what rounding does.
LIMITS = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 5e-2}


def verify_merged(base: Path, adapter: Path, merged: Path, lost: float) -> str:
    """One line about the comparison.  ``lost``: share of the update that rounding took.  Raises ExportError."""
    plain, tuned = _base_and_tuned(base, adapter)
    model = from_pretrained(merged)
    limit = max(LIMITS[name] for name in _dtypes(model))
    return _judge(plain, tuned, _logits(model), limit, lost)


def verify_adapter(base: Path, adapter: Path, written: Path) -> str:
    """One line about the comparison of two adapters on one base.  Raises ExportError."""
    plain, tuned = _base_and_tuned(base, adapter)
    return _judge(plain, tuned, _base_and_tuned(base, written)[1], LIMITS["float32"], 0.0)


def _base_and_tuned(base: Path, adapter: Path) -> tuple[np.ndarray, np.ndarray]:
    model = from_pretrained(base)
    load_adapter(model, adapter)
    tuned = _logits(model)
    set_active(model, [])
    return _logits(model), tuned


def _dtypes(model: Any) -> set[str]:
    return {dtype_name(p.dtype) for p in model.parameters()}


def _logits(model: Any) -> np.ndarray:
    ids = Generator(0).integers(0, model.config.vocab_size, (ROWS, LENGTH))
    model.eval()
    with no_grad():
        return np.asarray(model(ids).logits.numpy(), np.float64)  # (B, T, V)


def _judge(plain: np.ndarray, tuned: np.ndarray, result: np.ndarray, limit: float, lost: float) -> str:
    error, effect = float(np.linalg.norm(result - tuned)), float(np.linalg.norm(tuned - plain))
    relative = error / max(float(np.linalg.norm(tuned)), 1e-30)
    moved = effect / max(float(np.linalg.norm(plain)), 1e-30)  # of the base's: a norm alone grows with the vocabulary
    facts = f"logits differ by {relative:.1e} of their size (limit {limit:.0e}), the adapter moves them by {moved:.1e}"
    # A merge that did nothing may differ less than rounding does: the difference must be small beside the effect too.
    idle = lost < 0.1 and error > 0.5 * effect + 1e-6 * float(np.linalg.norm(tuned))
    if not np.isfinite(relative) or relative > limit or idle:
        raise ExportError(
            f"the exported result does not compute what base and adapter do: {facts}; nothing was written. "
            "Expected the same up to rounding. Try --dtype float32; if that fails too, it is a bug."
        )
    return facts
