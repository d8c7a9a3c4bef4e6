"""Steps are a pure function of rows, settings and seed; nothing is left out, nothing is taken twice."""

from __future__ import annotations

import numpy as np
import pytest

from peft_core.errors import ConfigError
from transformer.sampling import Steps, batches, data_hash, repeat_indices, shuffled, split_indices

ROWS = [(np.full(n, i), np.full(n, i)) for i, n in enumerate([5, 8, 3, 2, 9, 4, 7, 6, 1, 10, 3])]


ORDER_42 = [7, 1, 6, 4, 3, 5, 0, 2]  # fixed: another order would break every resumed run


def flat(steps, first, last):
    return [int(i) for s in range(first, last) for micro in steps.row_indices(s) for i in micro]


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"max_tokens_per_step": 20}])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_epoch_has_every_row_once(options, accumulation):
    steps = Steps(ROWS, **options, gradient_accumulation_steps=accumulation, num_epochs=3, seed=1)
    for epoch in range(3):
        inside = [s for s in range(len(steps)) if steps.epoch_of(s) == epoch]
        assert sorted(flat(steps, inside[0], inside[-1] + 1)) == list(range(len(ROWS)))
        assert flat(steps, inside[0], inside[-1] + 1) == steps.order(epoch).tolist()
    for s in range(len(steps)):
        parts = steps.row_indices(s)
        assert 1 <= len(parts) <= accumulation and all(len(part) for part in parts)
        if "batch_size" in options:
            assert all(len(part) <= 2 for part in parts)
        else:
            assert sum(len(ROWS[i][0]) for part in parts for i in part) <= 20


def test_passes_cut_between_rows_and_change_no_step():
    rows = [(np.arange(n), np.arange(n)) for n in (5, 9, 3, 8, 20, 1, 1, 2)]
    whole = Steps(rows, 4, num_epochs=1)
    cut = Steps(rows, 4, num_epochs=1, max_tokens_per_pass=12)
    assert max(len(step) for step in cut) > 1
    for a, b in zip(whole, cut, strict=True):
        assert [i for batch in b for i in batch.rows] == [i for batch in a for i in batch.rows]
        assert all(batch.n_tokens <= 12 + 20 and batch.rows for batch in b)
    assert [len(step) for step in Steps(rows, 4, num_epochs=1, max_tokens_per_pass=1)] == [4, 4]
    assert [len(step) for step in Steps(rows, 4, num_epochs=1, max_tokens_per_pass=49)] == [1, 1]


def test_order_depends_on_seed_and_epoch_only_and_never_changes():
    one = Steps(ROWS, 2, num_epochs=2, seed=7)
    late = Steps(ROWS, 2, num_epochs=9, seed=7)
    assert flat(late, 8, 12) == flat(one, 8, 12)  # a resumed run asks for a late step first
    assert not np.array_equal(shuffled(50, 7, 0), shuffled(50, 7, 1))
    assert not np.array_equal(shuffled(50, 7, 0), shuffled(50, 8, 0))
    assert shuffled(8, 42, 0).tolist() == ORDER_42
    assert Steps(ROWS, 2, num_epochs=1, shuffle=False).order(0).tolist() == list(range(len(ROWS)))


def test_the_order_of_steps_follows_their_seed():
    orders = {seed: Steps(ROWS, 2, num_epochs=2, seed=seed) for seed in (0, 7, 8)}
    assert len({tuple(steps.order(epoch)) for steps in orders.values() for epoch in (0, 1)}) == 6
    for seed, steps in orders.items():
        assert steps.order(1).tolist() == shuffled(len(ROWS), seed, 1).tolist()
        assert flat(steps, 6, 12) == steps.order(1).tolist()


def test_a_split_of_few_rows():
    assert [len(part) for part in split_indices(2, 0.99, 0)] == [1, 1]
    assert [len(part) for part in split_indices(3, 0.01, 0)] == [2, 1]
    for n, told in ((1, "there is 1 row"), (0, "there are 0 rows")):
        with pytest.raises(ConfigError, match=rf"data.val_size is 0.1, and {told} to divide; expected at least 2 rows"):
            split_indices(n, 0.1, 0)


def test_max_steps_goes_round_and_overrides_epochs():
    assert len(Steps(ROWS, 4, max_steps=10)) == 10
    assert len(Steps(ROWS, 4, max_steps=2, num_epochs=5)) == 2
    steps = Steps(ROWS, 4, num_epochs=2)
    assert [steps.epoch_of(s) for s in range(len(steps))] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(IndexError, match="step 6 of 6"):
        steps[6]


def test_batches_name_their_rows():
    for options in ({"batch_size": 2}, {"max_tokens_per_step": 20}):
        steps = Steps(ROWS, **options, gradient_accumulation_steps=2, num_epochs=2)
        for i, step in enumerate(steps):
            assert [batch.rows for batch in step] == [tuple(part.tolist()) for part in steps.row_indices(i)]
            for batch in step:
                assert [type(row) for row in batch.rows] == [int] * batch.n_rows
                starts = batch.ids[batch.cu_seqlens[:-1]].tolist()  # every token of row i is i
                assert starts == list(batch.rows)


def test_items_are_batches():
    steps = Steps(ROWS, 2, gradient_accumulation_steps=2, num_epochs=1)
    assert sum(batch.n_tokens for step in steps for batch in step) == sum(len(ids) for ids, _ in ROWS)
    assert len(steps[-1]) == 2 and len(steps[:2]) == 2
    assert sum(batch.n_tokens for batch in batches(ROWS, 3)) == sum(len(ids) for ids, _ in ROWS)
    assert [len(batch.cu_seqlens) - 1 for batch in batches(ROWS, 3)] == [3, 3, 3, 2]
    assert [batch.n_tokens for batch in batches(ROWS, 3, max_tokens=9)] == [5, 8, 5, 9, 4, 7, 7, 10, 3]  # rows of ROWS


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_epochs": 1}, "batch_size is None and max_tokens_per_step is None; expected exactly one"),
        ({"batch_size": 1}, "neither num_epochs nor max_steps is set"),
        ({"batch_size": 0, "num_epochs": 1}, "batch_size is 0; expected 1 or more"),
        ({"max_tokens_per_step": 5, "num_epochs": 1}, "the longest row has 10 tokens; expected at least 10"),
        ({"batch_size": 1, "num_epochs": 1, "seed": -1}, "seed is -1"),
    ],
)
def test_wrong_settings(options, text):
    with pytest.raises(ConfigError, match=text):
        Steps(ROWS, **options)[0]
    with pytest.raises(ConfigError, match="there are no rows to train on"):
        Steps([], 1, num_epochs=1)


def test_split_is_disjoint_complete_and_seeded():
    train, val = split_indices(100, 0.1, 3)
    assert len(val) == 10 and sorted([*train, *val]) == list(range(100))
    assert np.array_equal(split_indices(100, 10, 3)[1], val)
    assert not np.array_equal(split_indices(100, 10, 4)[1], val)
    for wrong in (0, 100, 0.0, 1.5, -3):
        with pytest.raises(ConfigError, match=f"data.val_size is {wrong} of 100 rows"):
            split_indices(100, wrong, 3)


def test_repeats_follow_the_weights():
    counts = np.bincount(repeat_indices(np.repeat([2.0, 0.25, 1.5], 1000), 0), minlength=3000).reshape(3, 1000)
    assert (counts[0] == 2).all() and counts[1].max() == 1 and abs(counts[1].mean() - 0.25) < 0.05
    assert abs(counts[2].mean() - 1.5) < 0.06


def test_hash_changes_with_any_id_label_or_border():
    base = [([1, 2], [1, 2]), ([3], [3])]
    others = [[([1, 2], [-100, 2]), ([3], [3])], [([1], [1]), ([2, 3], [2, 3])], [([3], [3]), ([1, 2], [1, 2])]]
    assert len({data_hash(rows) for rows in [base, *others]}) == 4
    assert data_hash(base) == data_hash([(np.array(ids, np.int32), np.array(y)) for ids, y in base])
