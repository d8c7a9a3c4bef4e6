"""Batch: rows of tokens as one flat stream, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from peft_core.errors import DataError, expect

IGNORED = -100  # a target that no loss is taken of


@dataclass(frozen=True)
class Batch:
    """B rows of tokens, one after the other.

    ids (N,): the tokens.  targets (N,): at each token the id that should follow, -100 where no loss is taken.
    positions (N,): place of a token in its own row.  cu_seqlens (B+1,): row b is cu_seqlens[b] ... cu_seqlens[b+1].
    All int64 NumPy arrays.  ``rows``: the B numbers of the rows in their dataset, by which errors name them, or None.
    """

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    rows: tuple[int, ...] | None = None

    @staticmethod
    def from_rows(rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Batch:
        """A batch of (input_ids, labels) pairs; labels[i] belongs to input_ids[i], -100 means no loss.

        The shift happens here, once: a token's target is the label of the token after it in its own row.
        Raises DataError for no rows, an empty row, lengths that differ, or values that are not integers.
        """
        pairs = [(_integers(ids, f"row {i}: input_ids"), _integers(labels, f"row {i}: labels"))
                 for i, (ids, labels) in enumerate(rows)]  # fmt: skip
        expect(pairs, DataError, "a batch was made of 0 rows", expected="at least 1")
        for i, (ids, labels) in enumerate(pairs):
            expect(len(ids) > 0, DataError, f"row {i} has 0 tokens", expected="at least 1",
                   fix="Leave empty rows out.")  # fmt: skip
            expect(len(ids) == len(labels), DataError, f"row {i} has {len(ids)} input_ids and {len(labels)} labels",
                   expected="one label per token (-100: no loss)")  # fmt: skip
        targets = [np.append(labels[1:], IGNORED) for _, labels in pairs]
        return Batch.flat([ids for ids, _ in pairs], targets)

    @staticmethod
    def flat(ids: Sequence[np.ndarray], targets: Sequence[np.ndarray] | None = None, starts: Any = 0) -> Batch:
        """Rows of ids and already shifted targets (default: none); positions of row b count from ``starts[b]``."""
        lengths = np.array([len(row) for row in ids], np.int64)  # (B,)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)  # (B+1,)
        stream = np.concatenate(ids).astype(np.int64, copy=False)  # (N,)
        first = np.repeat(cu_seqlens[:-1] - starts, lengths)  # (N,)
        wanted = np.full(len(stream), IGNORED, np.int64) if targets is None else np.concatenate(targets)
        return Batch(stream, wanted.astype(np.int64, copy=False), np.arange(len(stream)) - first, cu_seqlens)

    @property
    def n_rows(self) -> int:
        """B, the number of rows."""
        return len(self.cu_seqlens) - 1

    @property
    def n_tokens(self) -> int:
        """N, the number of tokens."""
        return len(self.ids)

    @property
    def one_each(self) -> bool:
        """True where no row has more than one token."""
        return bool((np.diff(self.cu_seqlens) <= 1).all())

    @property
    def n_labelled(self) -> int:
        """The number of tokens that a loss is taken of."""
        return int(np.count_nonzero(self.targets != IGNORED))


def _integers(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int64)
    expect(array.ndim == 1 and array.dtype.kind in "iu", DataError,
           f"{name} has shape {array.shape} and dtype {array.dtype}", expected="a flat list of integers")  # fmt: skip
    return array.astype(np.int64, copy=False)
