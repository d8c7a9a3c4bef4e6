"""Starting values of an adapter: functions from sizes to (A, B), float32, drawn from a seeded generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from peft_core.random import Generator

Start = tuple[np.ndarray, np.ndarray]  # A (R, I), B (O, R)


def kaiming(r: int, n_in: int, n_out: int, generator: Generator) -> Start:
    """A ~ U(-1/sqrt(I), 1/sqrt(I)), B = 0: PEFT's default."""
    return _fan_in_uniform(r, n_in, generator), np.zeros((n_out, r), np.float32)


def gaussian(r: int, n_in: int, n_out: int, generator: Generator) -> Start:
    """A ~ N(0, 1/r^2), B = 0 (arXiv:2106.09685, section 4.1; the deviation 1/r is PEFT's)."""
    return generator.normal((r, n_in), 0.0, 1.0 / r, np.float32), np.zeros((n_out, r), np.float32)


def random(r: int, n_in: int, n_out: int, generator: Generator) -> Start:
    """A ~ U(-1/sqrt(I), 1/sqrt(I)), B ~ U(-1/sqrt(R), 1/sqrt(R)): not the base model at step 0; for tests."""
    return _fan_in_uniform(r, n_in, generator), _fan_in_uniform(n_out, r, generator)


def table(kind: bool | str, r: int, n_rows: int, width: int, generator: Generator) -> Start:
    """For an embedding: A = 0, B ~ N(0, 1), as PEFT starts it; with kind False A ~ N(0, 1) too; for tests."""
    a = generator.normal((r, n_rows), 0.0, 1.0, np.float32) if kind is False else np.zeros((r, n_rows), np.float32)
    return a, generator.normal((width, r), 0.0, 1.0, np.float32)


def _fan_in_uniform(n_out: int, n_in: int, generator: Generator) -> np.ndarray:
    bound = n_in**-0.5
    return generator.uniform((n_out, n_in), -bound, bound, np.float32)


_STARTS: dict[bool | str, Callable[[int, int, int, Generator], Start]] = {
    True: kaiming, "gaussian": gaussian, False: random,
}  # fmt: skip


def starting_values(kind: bool | str, r: int, n_in: int, n_out: int, generator: Generator) -> Start:
    """A (r, n_in) and B (n_out, r) for a value of ``init_lora_weights`` that LoraConfig accepted."""
    return _STARTS[kind](r, n_in, n_out, generator)
