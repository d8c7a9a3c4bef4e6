import threading
import time
from collections import namedtuple

import numpy as np
import pytest

from peft_core import Generator, Tensor, is_grad_enabled, manual_seed, no_grad
from peft_core.errors import ConfigError, DataError
from peft_core.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)


class Numbers(Dataset):
    def __init__(self, n=23, slow=False, bad=None):
        self.n, self.slow, self.bad = n, slow, bad

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index == self.bad:
            raise KeyError("no such thing")
        if self.slow:
            time.sleep(0.002 * (index % 3))
        return index


def order(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_in_order_whatever_the_workers(workers, drop_last):
    loader = DataLoader(Numbers(slow=True), 4, num_workers=workers, drop_last=drop_last, pin_memory=True)
    expected = [list(range(i, min(i + 4, 23))) for i in range(0, 23, 4)]
    assert order(loader) == expected[: 5 if drop_last else 6] and len(loader) == (5 if drop_last else 6)
    assert order(loader) == order(loader)


def test_shuffle_is_seeded_new_at_each_pass_and_the_same_with_workers():
    def passes(workers, generator=None):
        loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=workers, generator=generator)
        return [order(loader), order(loader)]

    first, second = passes(0, Generator(5))
    assert first != second and sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == list(range(23))
    assert passes(3, Generator().manual_seed(5)) == [first, second] != passes(0, Generator(6))
    manual_seed(1)
    one = passes(0)
    manual_seed(1)
    assert passes(2) == one


def test_samplers():
    data = Numbers(5)
    assert order(DataLoader(data, 2, sampler=[4, 4, 0])) == [[4, 4], [0]]
    assert order(DataLoader(data, batch_sampler=[[3], [1, 2]])) == [[3], [1, 2]]
    assert order(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3))) == [[0, 1, 2], [3, 4]]
    assert sorted(RandomSampler(data, Generator(0))) == [0, 1, 2, 3, 4] and len(RandomSampler(data)) == 5


def test_workers_read_ahead_but_not_everything():
    seen, gate = [], threading.Event()

    class Watched(Numbers):
        def __getitem__(self, index):
            seen.append(index)
            gate.set()
            return index

    batches = iter(DataLoader(Watched(100), 1, num_workers=2, prefetch_factor=3))
    next(batches)
    assert gate.wait(5)
    deadline = time.monotonic() + 5
    while len(seen) < 7 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sorted(seen) == list(range(7))  # the one that was taken, and 2 * 3 more
    batches.close()


def test_a_loop_that_is_left_early_leaves_no_thread_behind():
    before = {t for t in threading.enumerate() if t.name.startswith("DataLoader")}
    for _ in DataLoader(Numbers(1000), 1, num_workers=4):
        break
    deadline = time.monotonic() + 5
    while {t for t in threading.enumerate() if t.name.startswith("DataLoader")} - before:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_workers_run_in_the_context_of_the_loop_and_are_started_once():
    started, recording = [], []

    class Asks(Numbers):
        def __getitem__(self, index):
            recording.append(is_grad_enabled())
            return index

    with no_grad():
        order(DataLoader(Asks(12), 1, num_workers=3, worker_init_fn=started.append))
    assert recording == [False] * 12 and sorted(started) == list(range(len(started))) and 1 <= len(started) <= 3


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_name_the_index_and_come_after_the_batches_before(workers):
    got = []
    with pytest.raises(KeyError, match="no such thing") as info:
        for batch in DataLoader(Numbers(bad=9), 4, num_workers=workers):
            got += batch.tolist()
    assert info.value.__notes__ == ["raised in a DataLoader: batch 2, index 9"] and got == list(range(8))
    with pytest.raises(ZeroDivisionError) as info:
        list(DataLoader(Numbers(3), 2, num_workers=workers, collate_fn=lambda rows: 1 / 0))
    assert info.value.__notes__ == ["raised in a DataLoader: batch 0, collate_fn of the rows 0, 1"]


def test_datasets():
    x, y = Tensor(np.arange(10.0, dtype=np.float32).reshape(5, 2)), Tensor(np.arange(5))
    data = TensorDataset(x, y)
    a, b = next(iter(DataLoader(data, 3)))
    assert a.shape == (3, 2) and b.tolist() == [0, 1, 2] and a.dtype == np.float32 and len(data) == 5
    both = Numbers(2) + Subset(Numbers(9), [7, 5])
    assert [both[i] for i in range(4)] == [0, 1, 7, 5] and both[-1] == 5
    parts = random_split(Numbers(10), [0.75, 0.25], Generator(0))
    assert [len(p) for p in parts] == [8, 2] and sorted(p[i] for p in parts for i in range(len(p))) == list(range(10))
    assert [len(p) for p in random_split(Numbers(10), [4, 6])] == [4, 6]

    class Many(Numbers):
        def __getitems__(self, indices):
            return [10 * i for i in indices]

    assert order(DataLoader(Many(3), 2)) == [[0, 10], [20]]


def test_default_collate():
    Pair = namedtuple("Pair", "left right")
    batch = default_collate([{"a": (1, 2.0), "b": Pair("x", True)}, {"a": (3, 4.0), "b": Pair("y", False)}])
    ints, floats = batch["a"]
    assert ints.dtype == np.int64 and floats.dtype == np.float64 and floats.tolist() == [2, 4]
    assert isinstance(batch["b"], Pair) and batch["b"].left == ["x", "y"] and batch["b"].right.dtype == np.bool_
    assert default_collate([np.float32(1), np.float32(2)]).dtype == np.float32
    assert default_collate([np.ones((2, 3)), np.zeros((2, 3))]).shape == (2, 2, 3)


@pytest.mark.parametrize(("rows", "text"), [
    ([np.ones(2), np.ones(3), np.ones(2)], r"a batch has arrays of shapes \(2,\), \(3,\); expected equal ones. Pad"),
    ([Tensor(np.ones(1)), Tensor(np.ones(2))], r"a batch has Tensors of shapes \(1,\), \(2,\)"),
    ([[1], [1, 2]], "a batch has sequences of lengths 1, 2"),
    ([{"a": 1}, {"b": 1}], r"a batch has mappings with keys \['a'\], \['b'\]"),
])  # fmt: skip
def test_rows_that_do_not_fit(rows, text):
    with pytest.raises(DataError, match=text):
        default_collate(rows)


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: DataLoader(iter([1])), TypeError, "without __getitem__ and __len__; expected rows by number. An Iterable"),
    (lambda: DataLoader(Numbers(), 0), ConfigError, "batch_size is 0; expected a number of rows above 0"),
    (lambda: DataLoader(Numbers(), None), ConfigError, r"DataLoader\(batch_size=None\) is not supported"),
    (lambda: DataLoader(Numbers(), timeout=3), ConfigError, r"timeout=3\) is not supported; expected no timeout. Work"),
    (lambda: DataLoader(Numbers(), multiprocessing_context="fork"), ConfigError, "multiprocessing_context='fork'"),
    (lambda: DataLoader(Numbers(), num_workers=-1), ConfigError, "num_workers is -1; expected a number of at least 0"),
    (lambda: DataLoader(Numbers(), prefetch_factor=2), ConfigError, "prefetch_factor is 2 with 0 workers; expected a"),
    (lambda: DataLoader(Numbers(), shuffle=True, sampler=[1]), ConfigError, "got both shuffle and a sampler; expected"),
    (lambda: DataLoader(Numbers(), 2, batch_sampler=[[1]]), ConfigError, "got batch_sampler with batch_size, shuffle"),
    (lambda: default_collate([object()]), TypeError, "default_collate got rows of object; expected Tensors, arrays,"),
    (lambda: TensorDataset(Tensor(np.ones(1)), Tensor(np.ones(2))), DataError, r"got Tensors of lengths \[1, 2\]; exp"),
    (lambda: random_split(Numbers(3), [1, 1]), ConfigError, r"random_split into \[1, 1\] of 3 rows; expected lengths"),
    (lambda: (Numbers(2) + Numbers(1))[3], DataError, "row 3 of a ConcatDataset; expected an index below 3"),
    (lambda: Dataset()[0], NotImplementedError, r"Dataset defines no __getitem__\(index\); expected one"),
])  # fmt: skip
def test_wrong_uses(make, error, text):
    with pytest.raises(error, match=text):
        make()
