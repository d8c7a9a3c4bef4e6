"""A data set ready to train on, and the report that lets a person see what will be trained before it is.

dataset = load_dataset("train.jsonl", tokenizer, max_seq_length=2048)
train, val = dataset.split(0.05, seed=42)
steps = Steps(train, batch_size=4, gradient_accumulation_steps=4, num_epochs=3, seed=42)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peft_core.errors import ConfigError, DataError, expect
from transformer.masking import Ids, Sample, encode_rows
from transformer.rows import IGNORED_LABEL, Row, read_rows
from transformer.sampling import Steps, batches, data_hash, repeat_indices, shuffled, split_indices
from transformer.tokenizer import Tokenizer

__all__ = ["DataReport", "Dataset", "Steps", "batches", "data_hash", "encode_dataset", "load_dataset", "shuffled"]

OVERLONG = ("drop", "truncate", "error")
CHAT_FORMATS = ("messages", "conversations", "alpaca")


@dataclass(frozen=True)
class DataReport:
    """Counts of what was read and what will be trained; lengths are in tokens and before any row was cut."""

    n_rows: int  # rows read from the files
    formats: dict[str, int]  # format -> rows
    n_samples: int  # rows to train on (a chat row can make several)
    max_seq_length: int | None
    n_too_long: int  # dropped because longer than max_seq_length
    n_truncated: int  # kept, cut to max_seq_length
    n_untrained: int  # dropped because no token of theirs is trained
    length_p50: int
    length_p95: int
    length_max: int
    n_tokens: int  # in the samples kept
    n_trained: int  # targets in the samples kept
    end_token: str | None  # the token that most samples end with
    n_ending: int  # samples whose trained end is a token that stops generation
    n_with_bos: int
    example_where: str
    example: str  # trained text between >> and <<
    notes: tuple[str, ...] = field(default=())

    @property
    def trained_share(self) -> float:
        """Trained tokens over all tokens, 0 to 1."""
        return self.n_trained / max(self.n_tokens, 1)

    def lines(self) -> list[str]:
        """Return the report as the lines a person reads at the start of a run."""
        limit = "" if self.max_seq_length is None else f" longer than {self.max_seq_length:,}"
        formats = ", ".join(f"{count:,} {name}" for name, count in self.formats.items())
        return [
            f"{self.n_rows:,} rows ({formats}) -> {self.n_samples:,} samples",
            f"tokens/row p50 {self.length_p50:,} p95 {self.length_p95:,} max {self.length_max:,}"
            f" | trained tokens {100 * self.trained_share:.0f} % | dropped {self.n_too_long:,} rows{limit}"
            f" | cut {self.n_truncated:,} | {self.n_untrained:,} rows without trained tokens",
            f"end-of-turn token {self.end_token} is trained in {self.n_ending:,}/{self.n_samples:,} rows"
            f" | BOS in {self.n_with_bos:,}/{self.n_samples:,} rows",
            *self.notes,
        ]


class Dataset(Sequence[tuple[Ids, Ids]]):
    """``dataset[i]`` is (input_ids, labels), both (T,) int32, labels unshifted with -100 where no loss is taken."""

    def __init__(self, samples: Sequence[Sample], report: DataReport, weights: npt.NDArray[np.float64]) -> None:
        self.samples = list(samples)
        self.report = report
        self.weights = weights  # (n,) how often a sample is repeated in an epoch

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [(sample.input_ids, sample.labels) for sample in self.samples[index]]
        sample = self.samples[index]
        return sample.input_ids, sample.labels

    def __iter__(self) -> Iterator[tuple[Ids, Ids]]:
        return ((sample.input_ids, sample.labels) for sample in self.samples)

    def where(self, index: int) -> str:
        """Return ``path:line`` of the row that a sample was made from."""
        return self.samples[index].where

    def hash(self) -> str:
        """Return the SHA-256 of all ids and labels, which a resumed run compares."""
        return data_hash(self)

    def subset(self, indices: Iterable[int]) -> Dataset:
        """Return the samples at these indices, in this order."""
        chosen = [int(i) for i in indices]
        return Dataset([self.samples[i] for i in chosen], self.report, self.weights[chosen])

    def split(self, val_size: int | float, seed: int) -> tuple[Dataset, Dataset]:
        """Return (training, validation); samples made from one row stay on one side. Raises ConfigError."""
        sources = sorted({sample.source for sample in self.samples})
        _, val = split_indices(len(sources), val_size, seed)
        held_out = {sources[int(i)] for i in val}
        inside = [sample.source in held_out for sample in self.samples]
        return self.subset(np.flatnonzero(~np.array(inside))), self.subset(np.flatnonzero(inside))

    def repeated(self, seed: int) -> Dataset:
        """Return the samples as often as the weights of their files say (itself if all are 1)."""
        return self if np.all(self.weights == 1) else self.subset(repeat_indices(self.weights, seed))


def load_dataset(
    path: str | Path | Sequence[Any],
    tokenizer: Tokenizer,
    *,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    loss_on: str = "assistant",
    max_seq_length: int | None = 2048,
    overlong: str = "drop",
    stop_ids: Iterable[int] | None = None,
    now: datetime | None = None,
) -> Dataset:
    """Read, render, tokenize and mask the rows of a file, a glob, a directory, or a list of these.

    A list entry is a path or ``{"path": ..., "weight": w}``. ``stop_ids`` are the ids that end generation besides the
    tokenizer's EOS; ``now`` fixes the date that a template prints (keep it to get the same data on resume).
    Raises ConfigError and DataError.
    """
    rows: list[Row] = []
    weights: list[float] = []
    for place, weight in _sources(path):
        found = read_rows(place, format=format, columns=columns)
        rows += found
        weights += [weight] * len(found)
    dataset = encode_dataset(
        rows, tokenizer, loss_on=loss_on, max_seq_length=max_seq_length, overlong=overlong, stop_ids=stop_ids, now=now
    )
    dataset.weights = np.array([weights[sample.source] for sample in dataset.samples], np.float64)
    return dataset


def _sources(path: str | Path | Sequence[Any]) -> list[tuple[str | Path, float]]:
    entries = [path] if isinstance(path, str | Path | Mapping) else list(path)
    sources: list[tuple[str | Path, float]] = []
    for entry in entries:
        place = entry.get("path") if isinstance(entry, Mapping) else entry
        weight = entry.get("weight", 1.0) if isinstance(entry, Mapping) else 1.0
        expect(
            isinstance(place, str | Path) and isinstance(weight, int | float) and weight > 0,
            ConfigError,
            f"data.path has the entry {entry!r}",
            expected='a path, or { path = "FILE", weight = 2.0 } with a positive weight',
        )
        sources.append((str(place), float(weight)))
    expect(sources, ConfigError, "data.path is empty", expected="at least one path")
    return sources


def encode_dataset(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    loss_on: str = "assistant",
    max_seq_length: int | None = 2048,
    overlong: str = "drop",
    stop_ids: Iterable[int] | None = None,
    now: datetime | None = None,
) -> Dataset:
    """Return the data set of rows already read; see ``load_dataset``."""
    expect(overlong in OVERLONG, ConfigError, f"data.overlong is {overlong!r}", expected=" or ".join(OVERLONG))
    expect(
        max_seq_length is None or max_seq_length >= 2,
        ConfigError,
        f"data.max_seq_length is {max_seq_length}",
        expected="2 or more: a token is predicted from at least one before it",
    )
    stops = {tokenizer.eos_token_id, *(stop_ids or ())} - {None}
    build = _Build(tokenizer, max_seq_length, overlong, {int(i) for i in stops if i is not None})
    for sample in encode_rows(rows, tokenizer, loss_on=loss_on, now=now):
        build.add(sample)
    build.check()
    report = build.report(Counter(row.format for row in rows))
    return Dataset(build.kept, report, np.ones(len(build.kept)))


class _Build:
    """Keeps, cuts or drops samples, and counts."""

    def __init__(self, tokenizer: Tokenizer, max_seq_length: int | None, overlong: str, stops: set[int]) -> None:
        self.tokenizer = tokenizer
        self.limit = max_seq_length
        self.overlong = overlong
        self.stops = stops
        self.kept: list[Sample] = []
        self.lengths: list[int] = []
        self.needed: list[int] = []  # the smallest max_seq_length that keeps the sample
        self.ends: Counter[int | None] = Counter()  # last trained token of chat samples, before cutting
        self.n_too_long = self.n_truncated = self.n_untrained = self.n_ending = 0
        self.n_unwritten = self.n_empty = self.n_with_empty = 0

    def add(self, sample: Sample) -> None:
        length = len(sample.input_ids)
        self.n_unwritten += sample.n_unwritten
        self.lengths.append(length)
        self.needed.append(self._needed(sample))
        if sample.n_trained and sample.format in CHAT_FORMATS:
            self.ends[sample.last_token] += 1
        if sample.n_trained and self.limit is not None and length > self.limit:
            expect(
                self.overlong != "error",
                DataError,
                f"{sample.where}: the row has {length:,} tokens",
                expected=f"at most max_seq_length={self.limit:,} (data.overlong is 'error')",
                fix='Raise data.max_seq_length, or set data.overlong to "drop" or "truncate".',
            )
            if self.overlong == "drop":
                self.n_too_long += 1
                return
            sample = replace(
                sample,
                input_ids=sample.input_ids[: self.limit],
                labels=sample.labels[: self.limit],
                last_token=None,  # a cut row has no end
            )
            self.n_truncated += 1 if sample.n_trained else 0
        if not sample.n_trained:
            self.n_untrained += 1
            return
        self.n_ending += sample.last_token in self.stops
        self.n_empty += sample.n_empty
        self.n_with_empty += sample.n_empty > 0
        self.kept.append(sample)

    def _needed(self, sample: Sample) -> int:
        if self.overlong != "truncate":
            return len(sample.input_ids)
        trained = np.flatnonzero(sample.labels[1:] != IGNORED_LABEL)
        return int(trained[0]) + 2 if len(trained) else len(sample.input_ids)

    def check(self) -> None:
        """Raise DataError if nothing is left, or if a tuned model would never learn to stop."""
        if not self.kept:
            raise DataError(self._nothing_left())
        chats = any(sample.format in CHAT_FORMATS for sample in self.kept)
        if chats and not self.n_ending:
            raise DataError(self._no_end())

    def _nothing_left(self) -> str:
        total = len(self.lengths)
        if self.n_untrained == total and (self.limit is None or max(self.lengths) <= self.limit):
            return (
                f"{total:,} of {total:,} rows have no trained token (no assistant message after a question, an empty "
                "text, or labels of -100 only); expected at least one row to train on. "
                'Check the roles, or set data.loss_on = "all".'
            )
        ordered = np.sort(self.needed)
        wanted = int(ordered[min(total - 1, int(np.ceil(0.99 * total)) - 1)])
        wanted = -(-wanted // 64) * 64
        kept = 100 * float(np.mean(ordered <= wanted))
        return (
            f"{total:,} of {total:,} rows have no trained token after cutting to max_seq_length={self.limit:,} "
            f"(data.overlong is {self.overlong!r}: {self.n_too_long:,} longer, {self.n_untrained:,} with none left; "
            f"the longest has {max(self.lengths):,} tokens); expected at least one row to train on. "
            f"Raise it to {wanted:,} (keeps {kept:.1f} %), or shorten the rows."
        )

    def _no_end(self) -> str:
        if any(token in self.stops for token in self.ends):
            return (
                f"no row ends a turn with a trained end token: all rows that end with {self._names(self.stops)} are "
                f"longer than max_seq_length={self.limit:,}; the tuned model would never stop. "
                f"Raise it (the longest row has {max(self.lengths):,} tokens), or shorten the rows."
            )
        usual = self.ends.most_common(1)[0][0]
        is_token = usual is not None and self.tokenizer.is_added(usual)
        ending = self._names([usual]) if is_token else "no special token"
        eos = self.tokenizer.eos_token
        fix = (
            f'Set eos_token to "{ending}" in tokenizer_config.json and its id in generation_config.json'
            if is_token
            else "Let the template write eos_token after an answer"
        )
        return (
            f"no row ends a turn with a trained end token: eos is {eos or 'not set'} but this template ends "
            f"turns with {ending}; the tuned model would never stop. {fix}, "
            f"or set model.chat_template to a template that ends turns with "
            f"{eos or 'the eos_token'}."
        )

    def _names(self, ids: Iterable[int | None]) -> str:
        return ", ".join(str(self.tokenizer.convert_ids_to_tokens(i)) for i in ids if i is not None)

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.n_unwritten:
            notes.append(
                f"{self.n_unwritten:,} answers are not trained: the chat template does not write tool calls. "
                "Set model.chat_template to one that does."
            )
        if self.n_empty:
            notes.append(
                f"{self.n_empty:,} answers in {self.n_with_empty:,} of {len(self.kept):,} rows are empty: they teach "
                "to end at once. Remove them unless that is meant."
            )
        return tuple(notes)

    def report(self, formats: Mapping[str, int]) -> DataReport:
        lengths = np.array(self.lengths)
        p50, p95 = (int(x) for x in np.percentile(lengths, [50, 95], method="higher"))
        example = self.kept[min(range(len(self.kept)), key=lambda i: abs(len(self.kept[i].input_ids) - p50))]
        endings = Counter(sample.last_token for sample in self.kept if sample.last_token in self.stops)
        return DataReport(
            n_rows=sum(formats.values()),
            formats=dict(formats),
            n_samples=len(self.kept),
            max_seq_length=self.limit,
            n_too_long=self.n_too_long,
            n_truncated=self.n_truncated,
            n_untrained=self.n_untrained,
            length_p50=p50,
            length_p95=p95,
            length_max=int(lengths.max()),
            n_tokens=sum(len(sample.input_ids) for sample in self.kept),
            n_trained=sum(sample.n_trained for sample in self.kept),
            end_token=self._names([endings.most_common(1)[0][0]]) if endings else None,
            n_ending=self.n_ending,
            n_with_bos=sum(sample.starts_with_bos for sample in self.kept),
            example_where=example.where,
            example=marked_text(self.tokenizer, example),
            notes=self._notes(),
        )


def marked_text(tokenizer: Tokenizer, sample: Sample) -> str:
    """Return a sample's text with its trained parts between >> and <<, special tokens visible."""
    trained = sample.labels != IGNORED_LABEL
    borders = np.flatnonzero(np.diff(trained)) + 1
    pieces = []
    for ids, on in zip(np.split(sample.input_ids, borders), np.split(trained, borders), strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        pieces.append(f">>{text}<<" if on[0] else text)
    return "".join(pieces)
