"""Datasets and DataLoader under the names of ``torch.utils.data``.

Workers are threads: NumPy lets go of the interpreter lock where reading and decoding take time, nothing has to be
copied or pickled, and a dataset may hold Tensors. Batches come in the order of the sampler whatever the workers do.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from .. import ops, random
from ..creation import tensor
from ..errors import ConfigError, DataError, expect
from ..random import Generator
from ..tensor import Tensor

__all__ = [
    "BatchSampler", "ConcatDataset", "DataLoader", "Dataset", "RandomSampler", "SequentialSampler", "Subset",
    "TensorDataset", "default_collate", "random_split",
]  # fmt: skip


class Dataset:
    """Rows by number.  Subclasses define ``__getitem__(index)`` and ``__len__()``."""

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no __getitem__(index); expected one.")

    def __add__(self, other: Any) -> ConcatDataset:
        return ConcatDataset([self, other])


class TensorDataset(Dataset):
    """Row i is the tuple of the i-th rows of ``tensors``.  Raises DataError where these have different lengths."""

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [len(t) for t in tensors]
        expect(tensors and len(set(lengths)) == 1, DataError, f"TensorDataset got Tensors of lengths {lengths}",
               expected="one length")  # fmt: skip
        self.tensors = tensors

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return tuple(t[index] for t in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])


class Subset(Dataset):
    """The rows ``indices`` of ``dataset``."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index]]

    def __len__(self) -> int:
        return len(self.indices)


class ConcatDataset(Dataset):
    """The rows of all ``datasets``, one after the other.  Raises DataError for an index outside."""

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(datasets)

    def __getitem__(self, index: int) -> Any:
        left = index + len(self) if index < 0 else index
        for dataset in self.datasets if left >= 0 else []:
            if left < len(dataset):
                return dataset[left]
            left -= len(dataset)
        raise DataError(f"row {index} of a ConcatDataset; expected an index below {len(self)}.")

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self.datasets)


def random_split(dataset: Any, lengths: Sequence[float], generator: Generator | None = None) -> list[Subset]:
    """Subsets of ``lengths`` rows (or fractions that add up to 1; what rounding leaves goes to the first) at random.

    Raises ConfigError for lengths that do not add up to the dataset.
    """
    n = len(dataset)
    sizes = [int(x) for x in lengths]
    if abs(sum(lengths) - 1) < 1e-9 and n != 1:
        sizes = [int(n * x) for x in lengths]
        for i in range(n - sum(sizes)):
            sizes[i % len(sizes)] += 1
    expect(sum(sizes) == n, ConfigError, f"random_split into {list(lengths)} of {n} rows",
           expected="lengths that add up to it, or fractions that add up to 1")  # fmt: skip
    order = (generator or random.default_generator).permutation(n).tolist()
    ends = list(itertools.accumulate(sizes))
    return [Subset(dataset, order[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


# ---------------------------------------------------------------------- orders


class SequentialSampler:
    """0, 1, ... len(dataset) - 1."""

    def __init__(self, data_source: Any) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(SequentialSampler):
    """All indices in a new random order at each pass, from the next key of ``generator`` (or the default one)."""

    def __init__(self, data_source: Any, generator: Generator | None = None) -> None:
        super().__init__(data_source)
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter((self.generator or random.default_generator).permutation(len(self)).tolist())


class BatchSampler:
    """Lists of ``batch_size`` indices of ``sampler``; the last may be shorter, or is left out with ``drop_last``."""

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool = False) -> None:
        expect(isinstance(batch_size, int) and batch_size > 0, ConfigError, f"batch_size is {batch_size!r}",
               expected="a number of rows above 0")  # fmt: skip
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(itertools.islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __len__(self) -> int:
        n = len(self.sampler)  # type: ignore[arg-type]  # a sampler without a length has a loader without one
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)


# ---------------------------------------------------------------------- batches


def default_collate(rows: Sequence[Any]) -> Any:
    """One batch of rows of one kind, as torch makes it.

    Tensors, arrays and NumPy scalars are stacked along a new first dimension; floats give float64, ints int64 and
    bools bool; mappings, named tuples and sequences are collated by key or position; strings and bytes stay a list.
    Raises DataError for shapes or lengths that differ, TypeError for something else.
    """
    first = rows[0]
    if isinstance(first, Tensor):
        _same("Tensors of shapes", [row.shape for row in rows])
        return ops.stack(rows)
    if isinstance(first, np.ndarray | np.generic):
        _same("arrays of shapes", [row.shape for row in rows])
        return Tensor(np.stack(rows))
    if isinstance(first, bool | int | float):
        return tensor(np.asarray(rows))
    if isinstance(first, str | bytes):
        return list(rows)
    if isinstance(first, Mapping):
        _same("mappings with keys", [list(row) for row in rows], key=lambda names: sorted(map(str, names)))
        return {name: default_collate([row[name] for row in rows]) for name in first}
    if isinstance(first, Sequence):
        _same("sequences of lengths", [len(row) for row in rows])
        columns = [default_collate(column) for column in zip(*rows, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    raise TypeError(f"default_collate got rows of {type(first).__name__}; expected Tensors, arrays, numbers, strings, "
                    "mappings or sequences. Pass collate_fn= to build batches of something else.")  # fmt: skip


def _same(what: str, found: list[Any], key: Callable[[Any], Any] = lambda value: value) -> None:
    expect(all(key(f) == key(found[0]) for f in found), DataError, f"a batch has {what} {_few(found)}",
           expected="equal ones", fix="Pad the rows, or pass collate_fn= to build batches yourself.")  # fmt: skip


def _few(items: Sequence[Any]) -> str:
    different = [item for i, item in enumerate(items) if item not in items[:i]]
    return ", ".join(map(str, different[:4])) + (", ..." if len(different) > 4 else "")


class DataLoader:
    """Batches of ``dataset``, in the order of the sampler.

    ``shuffle`` draws a new order at each pass from ``generator`` (default: the default generator), so that one seed
    gives the same orders again. ``num_workers`` threads read ahead, ``prefetch_factor`` (2) batches each, and change
    neither order nor content; rows that draw random numbers should draw them from something of their own, as threads
    run in any order. ``pin_memory`` and ``persistent_workers`` are accepted and have no effect.

    What a row or ``collate_fn`` raises comes out where its batch would have, with a note that names the batch and the
    index. Raises ConfigError for settings that exclude each other or are not supported, TypeError for
    a dataset without a length (a stream).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(f"DataLoader got a {type(dataset).__name__} without __getitem__ and __len__; expected rows "
                            "by number. An IterableDataset is not supported: iterate over it yourself.")  # fmt: skip
        for name, value in (("timeout", timeout), ("multiprocessing_context", multiprocessing_context)):
            expect(not value, ConfigError, f"DataLoader({name}={value!r}) is not supported", expected=f"no {name}",
                   fix="Workers are threads.")  # fmt: skip
        expect(num_workers >= 0, ConfigError, f"num_workers is {num_workers}", expected="a number of at least 0")
        expect(prefetch_factor is None or (num_workers > 0 and prefetch_factor > 0), ConfigError,
               f"prefetch_factor is {prefetch_factor} with {num_workers} workers",
               expected="a number above 0, with workers")  # fmt: skip
        expect(not (shuffle and sampler is not None), ConfigError, "DataLoader got both shuffle and a sampler",
               expected="one of them")  # fmt: skip
        if batch_sampler is None:
            expect(batch_size is not None, ConfigError, "DataLoader(batch_size=None) is not supported",
                   expected="a number of rows")  # fmt: skip
            if sampler is None:
                sampler = RandomSampler(dataset, generator) if shuffle else SequentialSampler(dataset)
            batch_sampler = BatchSampler(sampler, batch_size or 0, drop_last)
        else:
            expect(batch_size in (1, None) and not shuffle and sampler is None and not drop_last, ConfigError,
                   "DataLoader got batch_sampler with batch_size, shuffle, sampler or drop_last",
                   expected="batch_sampler alone")  # fmt: skip
            batch_size = None
        self.dataset, self.batch_size, self.sampler, self.batch_sampler = dataset, batch_size, sampler, batch_sampler
        self.num_workers, self.collate_fn = num_workers, collate_fn or default_collate
        self.pin_memory, self.drop_last, self.generator = pin_memory, drop_last, generator
        self.worker_init_fn, self.prefetch_factor = worker_init_fn, prefetch_factor or 2

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        batches = enumerate(self.batch_sampler)
        return self._ahead(batches) if self.num_workers else (self._fetch(i, indices) for i, indices in batches)

    def _fetch(self, number: int, indices: Sequence[int]) -> Any:
        where = f"batch {number}"
        try:
            many = getattr(self.dataset, "__getitems__", None)
            if many is not None:
                rows = many(list(indices))
            else:
                rows = []
                for index in indices:
                    where = f"batch {number}, index {index}"
                    rows.append(self.dataset[index])
            where = f"batch {number}, collate_fn of the rows {_few(indices)}"
            return self.collate_fn(rows)
        except Exception as error:
            error.add_note(f"raised in a DataLoader: {where}")
            raise

    def _ahead(self, batches: Iterator[tuple[int, Sequence[int]]]) -> Iterator[Any]:
        """Batches from worker threads, a few in advance."""
        numbers, local = itertools.count(), threading.local()

        def fetch(number: int, indices: Sequence[int]) -> Any:
            if not hasattr(local, "worker"):
                local.worker = next(numbers)
                if self.worker_init_fn is not None:
                    self.worker_init_fn(local.worker)
            return self._fetch(number, indices)

        def submit(n: int) -> None:  # in this context: no_grad and autocast hold for workers too
            for number, indices in itertools.islice(batches, n):
                task = functools.partial(contextvars.copy_context().run, fetch, number, indices)
                waiting.append(pool.submit(task))

        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="DataLoader")
        waiting: deque[Future] = deque()
        try:
            submit(self.num_workers * self.prefetch_factor)
            while waiting:
                ready = waiting.popleft().result()
                submit(1)
                yield ready
        finally:  # also where the loop over the loader was left early
            pool.shutdown(wait=False, cancel_futures=True)
