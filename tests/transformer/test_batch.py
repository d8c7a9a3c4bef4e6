"""Rows become one stream, and labels are shifted once."""

import numpy as np
import pytest

from peft_core.errors import DataError
from transformer.batch import Batch


def test_rows_become_a_stream():
    batch = Batch.from_rows([([5, 6, 7], [-100, 6, 7]), ([8], [8]), ([9, 4], [9, 4])])
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.targets.tolist() == [6, 7, -100, -100, 4, -100]  # the first label of a row is nobody's target
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert (batch.n_rows, batch.n_tokens, batch.n_labelled) == (3, 6, 3)
    assert batch.rows is None
    arrays = (batch.ids, batch.targets, batch.positions, batch.cu_seqlens)
    assert {a.dtype for a in arrays} == {np.dtype(np.int64)}


def test_positions_can_count_on():
    batch = Batch.flat([np.array([1]), np.array([], np.int64), np.array([2, 3])], starts=np.array([4, 0, 7]))
    assert batch.positions.tolist() == [4, 7, 8]
    assert batch.cu_seqlens.tolist() == [0, 1, 1, 3]
    assert batch.n_labelled == 0


@pytest.mark.parametrize(("rows", "text"), [
    ([], "a batch was made of 0 rows; expected at least 1."),
    ([([], [])], "row 0 has 0 tokens; expected at least 1."),
    ([([1], [1]), ([1, 2], [1])], "row 1 has 2 input_ids and 1 labels; expected one label per token"),
    ([([1.5], [1])], r"row 0: input_ids has shape \(1,\) and dtype float64; expected a flat list of integers"),
    ([([[1]], [1])], r"row 0: input_ids has shape \(1, 1\)"),
])  # fmt: skip
def test_refused(rows, text):
    with pytest.raises(DataError, match=text):
        Batch.from_rows(rows)
