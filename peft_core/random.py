"""Seeded, counter-based random numbers: a state is two integers, so that a run can be saved and continued exactly.

Each draw takes the next key (a hash of seed and counter) and starts a fresh Philox stream from it (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). What was drawn before never shifts what is drawn next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """A bijective hash of 64-bit integers (the finaliser of splitmix64; Steele et al., OOPSLA 2014, section 4)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class Generator:
    """A stream of keys from ``seed``; arrays are drawn on the CPU, one key a call."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.counter = int(seed), 0

    def manual_seed(self, seed: int) -> Generator:
        """Restart from ``seed`` and return self."""
        self.seed, self.counter = int(seed), 0
        return self

    def key(self) -> int:
        """The next 64-bit key."""
        self.counter += 1
        return mix64(mix64(self.seed & _MASK) ^ (self.counter & _MASK))

    def _stream(self) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self.key()))

    def uniform(self, shape: Any, low: float = 0.0, high: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
        """Numbers from [low, high), of ``shape`` and float ``dtype``."""
        return (low + (high - low) * self._stream().random(shape)).astype(dtype)

    def normal(self, shape: Any, mean: float = 0.0, std: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
        """Gaussian numbers of ``shape`` and float ``dtype``."""
        return (mean + std * self._stream().standard_normal(shape)).astype(dtype)

    def integers(self, low: int, high: int, shape: Any = None) -> np.ndarray:
        """Integers from [low, high), int64."""
        return self._stream().integers(low, high, shape)

    def permutation(self, n: int) -> np.ndarray:
        """0 ... n-1 in random order, int64."""
        return self._stream().permutation(n)

    def get_state(self) -> dict[str, int]:
        """A JSON-able state for ``set_state``."""
        return {"seed": self.seed, "counter": self.counter}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue exactly where ``get_state`` was called."""
        self.seed, self.counter = int(state["seed"]), int(state["counter"])


default_generator = Generator()


def manual_seed(seed: int) -> Generator:
    """Restart the default generator from ``seed`` and return it."""
    default_generator.set_state({"seed": seed, "counter": 0})
    return default_generator


def get_state() -> dict[str, int]:
    """The default generator's state."""
    return default_generator.get_state()


def set_state(state: dict[str, int]) -> None:
    """Restore the default generator's state."""
    default_generator.set_state(state)
