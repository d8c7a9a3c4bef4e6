"""Which rows make up which optimizer step: a pure function of the rows, the settings and the seed.

Nothing is drawn while training, so step i of a resumed run is step i of the first one, and a checkpoint keeps only i.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from peft_core.errors import ConfigError, expect
from transformer.batch import Batch

Rows = Sequence[tuple[Any, Any]]
Order = npt.NDArray[np.int64]
_SPLIT_STREAM = 2**64 - 1
_REPEAT_STREAM = 2**64 - 2


def shuffled(n: int, seed: int, stream: int) -> Order:
    """Return a permutation of range(n) that depends on (seed, stream) alone, the same with every NumPy version.

    Philox4x64 keyed by both numbers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); the raw words
    are sorted, because NumPy keeps raw bits stable and reserves the right to change ``Generator.permutation``.
    """
    expect(seed >= 0, ConfigError, f"seed is {seed}", expected="0 or a positive number")
    words = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(n)
    return np.argsort(np.asarray(words, np.uint64), kind="stable").astype(np.int64)


class Steps(Sequence[list[Batch]]):
    """``steps[i]`` is the list of micro-batches of optimizer step i, each with the indices of its ``rows``.

    With ``batch_size``, a step has ``batch_size * gradient_accumulation_steps`` rows in micro-batches of batch_size.
    With ``max_tokens_per_step``, it has as many rows as fit, divided into at most ``gradient_accumulation_steps``
    micro-batches of similar size. ``max_tokens_per_pass`` cuts each micro-batch further, between rows, into parts of
    similar size: activations need less memory, and as gradients are divided once a step by its labelled tokens, the
    step stays the same but for rounding. The last step of an epoch may be smaller; no row is left out and none moves to
    the next epoch. ``max_steps`` overrides ``num_epochs`` and goes round as often as needed. Raises ConfigError.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int | None = None,
        *,
        max_tokens_per_step: int | None = None,
        max_tokens_per_pass: int | None = None,
        gradient_accumulation_steps: int = 1,
        num_epochs: int | None = None,
        max_steps: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        expect(len(rows), ConfigError, "there are no rows to train on", expected="at least one row")
        expect(
            (batch_size is None) != (max_tokens_per_step is None),
            ConfigError,
            f"batch_size is {batch_size} and max_tokens_per_step is {max_tokens_per_step}",
            expected="exactly one of them",
        )
        expect(
            num_epochs is not None or max_steps is not None,
            ConfigError,
            "neither num_epochs nor max_steps is set",
            expected="at least one of them",
        )
        given = {
            "batch_size": batch_size,
            "max_tokens_per_step": max_tokens_per_step,
            "max_tokens_per_pass": max_tokens_per_pass,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "num_epochs": num_epochs,
            "max_steps": max_steps,
        }
        for name, value in given.items():
            expect(value is None or value >= 1, ConfigError, f"{name} is {value}", expected="1 or more")
        self.rows = rows
        self.batch_size = batch_size
        self.max_tokens_per_step = max_tokens_per_step
        self.max_tokens_per_pass = max_tokens_per_pass
        self.accumulation = gradient_accumulation_steps
        self.seed = seed
        self.shuffle = shuffle
        self.lengths = np.array([len(ids) for ids, _ in rows], np.int64)
        if max_tokens_per_step is not None:
            longest = int(self.lengths.max())
            expect(
                longest <= max_tokens_per_step,
                ConfigError,
                f"max_tokens_per_step is {max_tokens_per_step} and the longest row has {longest} tokens",
                expected=f"at least {longest}",
                fix="Raise it, or lower data.max_seq_length.",
            )
        self._plans: dict[int, list[Order]] = {}
        self._first = [0]  # first step of each epoch, and the end
        while self._wants_epoch(num_epochs, max_steps):
            self._first.append(self._first[-1] + self._steps_in(len(self._first) - 1))
        self._n_steps = self._first[-1] if max_steps is None else max_steps

    def _wants_epoch(self, num_epochs: int | None, max_steps: int | None) -> bool:
        if max_steps is not None:
            return self._first[-1] < max_steps
        return len(self._first) <= (num_epochs or 0)

    def _steps_in(self, epoch: int) -> int:
        if self.batch_size is not None:
            return -(-len(self.rows) // (self.batch_size * self.accumulation))
        return len(self._plan(epoch))

    def order(self, epoch: int) -> Order:
        """Return the row indices of an epoch, in the order they are trained."""
        return shuffled(len(self.rows), self.seed, epoch) if self.shuffle else np.arange(len(self.rows))

    def _plan(self, epoch: int) -> list[Order]:
        if epoch not in self._plans:
            self._plans = {epoch: self._cut(self.order(epoch))}  # steps are taken in order: one epoch is enough
        return self._plans[epoch]

    def _cut(self, order: Order) -> list[Order]:
        if self.batch_size is not None:
            size = self.batch_size * self.accumulation
            return [order[i : i + size] for i in range(0, len(order), size)]
        cuts, tokens = [], 0
        for position, length in enumerate(self.lengths[order].tolist()):
            tokens += length
            if tokens > (self.max_tokens_per_step or 0):
                cuts.append(position)
                tokens = length
        return np.split(order, cuts)

    def _micro(self, chosen: Order) -> list[Order]:
        if self.batch_size is None:
            parts = self._parts(chosen, self.accumulation)
        else:
            parts = [chosen[i : i + self.batch_size] for i in range(0, len(chosen), self.batch_size)]
        if self.max_tokens_per_pass is None:
            return parts
        tokens = [int(self.lengths[part].sum()) for part in parts]
        return [cut for part, n in zip(parts, tokens, strict=True)
                for cut in self._parts(part, -(-n // self.max_tokens_per_pass))]  # fmt: skip

    def _parts(self, chosen: Order, most: int) -> list[Order]:
        """``chosen`` in at most ``most`` parts of similar size: a row belongs to the part its middle token lies in."""
        lengths = self.lengths[chosen]
        middle = np.cumsum(lengths) - lengths / 2
        part = np.minimum(middle * most / max(lengths.sum(), 1), most - 1).astype(np.int64)
        return [chosen[part == k] for k in np.unique(part)]

    def __len__(self) -> int:
        return self._n_steps

    def epoch_of(self, step: int) -> int:
        """Return the epoch (from 0) that a step belongs to."""
        return int(np.searchsorted(self._first, step, side="right")) - 1

    def with_passes(self, max_tokens: int | None) -> Steps:
        """The same steps in passes of at most ``max_tokens`` tokens, or of one row."""
        steps = copy.copy(self)
        steps.max_tokens_per_pass = max_tokens
        return steps

    def row_indices(self, step: int) -> list[Order]:
        """Return for each micro-batch of a step the indices of its rows."""
        if not -len(self) <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        step %= len(self)
        epoch = self.epoch_of(step)
        return self._micro(self._plan(epoch)[step - self._first[epoch]])

    @overload
    def __getitem__(self, step: int) -> list[Batch]: ...
    @overload
    def __getitem__(self, step: slice) -> list[list[Batch]]: ...
    def __getitem__(self, step: int | slice) -> list[Batch] | list[list[Batch]]:
        if isinstance(step, slice):
            return [self[i] for i in range(*step.indices(len(self)))]
        return [self._batch(tuple(micro.tolist())) for micro in self.row_indices(step)]

    def _batch(self, rows: tuple[int, ...]) -> Batch:
        return replace(Batch.from_rows([self.rows[i] for i in rows]), rows=rows)


def batches(rows: Rows, batch_size: int = 8, max_tokens: int | None = None) -> Iterator[Batch]:
    """Yield the rows in order, ``batch_size`` at a time, fewer where they would have more than ``max_tokens`` tokens.

    A row is never cut. This is the order in which evaluation reads them.
    """
    chosen: list[Any] = []
    for i in range(len(rows)):
        tokens = sum(len(ids) for ids, _ in [*chosen, rows[i]])
        if chosen and (len(chosen) == batch_size or (max_tokens is not None and tokens > max_tokens)):
            yield Batch.from_rows(chosen)
            chosen = []
        chosen.append(rows[i])
    if chosen:
        yield Batch.from_rows(chosen)


def split_indices(n: int, val_size: int | float, seed: int) -> tuple[Order, Order]:
    """Return the indices of (training, validation) rows, both ascending, chosen by the seed.

    ``val_size`` is a number of rows (int) or a share of them (float below 1). Raises ConfigError unless both get a row.
    """
    is_share = isinstance(val_size, float) and val_size < 1
    expect(
        n >= 2,
        ConfigError,
        f"data.val_size is {val_size}, and there {'is 1 row' if n == 1 else f'are {n} rows'} to divide",
        expected="at least 2 rows, one for each side",
        fix="Remove data.val_size, add rows, or use data.val_path.",
    )
    size = min(max(1, round(n * val_size)), n - 1) if is_share and val_size > 0 else int(val_size)
    expect(
        0 < size < n and (is_share or size == val_size),
        ConfigError,
        f"data.val_size is {val_size} of {n} rows",
        expected=f"a whole number from 1 to {n - 1}, or a fraction between 0 and 1",
    )
    order = shuffled(n, seed, _SPLIT_STREAM)
    return np.sort(order[size:]), np.sort(order[:size])


def repeat_indices(weights: npt.NDArray[np.float64], seed: int) -> Order:
    """Return row indices in which row i appears ``weights[i]`` times; a fraction is the chance of one more."""
    whole = np.floor(weights).astype(np.int64)
    words = np.random.Philox(key=np.array([seed, _REPEAT_STREAM], np.uint64)).random_raw(len(weights))
    chance = (np.asarray(words, np.uint64) >> np.uint64(11)) * 2.0**-53
    return np.repeat(np.arange(len(weights)), whole + (chance < weights - whole))


def data_hash(rows: Rows) -> str:
    """Return the SHA-256 (hex) of all ids and labels with their lengths: equal data, equal hash."""
    digest = hashlib.sha256()
    for ids, labels in rows:
        for part in (ids, labels):
            array = np.ascontiguousarray(np.asarray(part), "<i8")
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.tobytes())
    return digest.hexdigest()
