"""From the [data] and [train] sections to training rows, validation rows and the plan of optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from peft_core.errors import ConfigError, DataError
from run.config import DataSection, TrainSection
from transformer.batch import Batch
from transformer.data import Dataset, Steps, load_dataset
from transformer.sampling import batches
from transformer.tokenizer import Tokenizer

DEFAULT_BATCH_ROWS = 4
VALIDATION_ROWS = 8  # rows of one validation batch; the loss does not depend on it beyond rounding


@dataclass
class Rows:
    """Training rows, validation rows (None without any), and one line for each source of them."""

    train: Dataset
    val: Dataset | None
    split: str

    def val_batches(self, max_tokens: int) -> list[Batch]:
        """The validation rows in order, at most ``max_tokens`` tokens or one row at a time."""
        return list(batches(self.val or (), VALIDATION_ROWS, max_tokens))


def load_rows(data: DataSection, tokenizer: Tokenizer, *, seed: int, stop_ids: list[int], now: datetime) -> Rows:
    """Read, render, tokenize and mask.  Raises DataError and ConfigError."""

    def read(path: Any) -> Dataset:
        return load_dataset(
            path,
            tokenizer,
            format=data.format,
            columns=data.columns,
            loss_on=data.loss_on,
            stop_ids=stop_ids,
            now=now,
            max_seq_length=data.max_seq_length,
            overlong=data.overlong,
        )

    train, val, split = read(data.path), None, ""
    if data.val_path:
        val = read(data.val_path)
        split = f"train {len(train):,} / val {len(val):,} (data.val_path)"
    elif data.val_size:
        whole = isinstance(data.val_size, float) and data.val_size >= 1
        train, val = train.split(int(data.val_size) if whole else data.val_size, seed)
        if not len(train) or not len(val):
            raise DataError(
                f"data.val_size is {data.val_size}, which leaves {len(train)} rows for training and {len(val)} "
                "for validation; expected some on both sides. Change data.val_size."
            )
        split = f"train {len(train):,} / val {len(val):,} (seed {seed})"
    else:
        why = "set data.val_size to see a validation loss" if data.val_size is None else "data.val_size is 0"
        split = f"train {len(train):,} / val 0 ({why})"
    return Rows(train.repeated(seed), val, split)


@dataclass
class Plan:
    """The optimizer steps of a run and what a person wants to know about them."""

    steps: Steps
    warmup: int
    epochs: float
    steps_per_epoch: float
    rows_per_micro: int | None  # None: rows are chosen by tokens
    accumulation: int
    tokens_per_step: int  # on average
    longest_micro: int  # tokens of the largest micro-batch
    longest_row: int

    def longest_pass(self, tokens: int) -> int:
        """Tokens of the largest pass of the first epoch when micro-batches are cut to ``tokens``."""
        steps, lengths = self.steps.with_passes(tokens), self.steps.lengths
        first = range(min(len(steps), math.ceil(self.steps_per_epoch)))
        return max(int(lengths[part].sum()) for i in first for part in steps.row_indices(i))

    def line(self, train: TrainSection) -> str:
        """ "3 epochs = 858 steps; batch 4 x accum 4 = 16 rows (~8.1k tokens) a step; warmup 26"."""
        each = (
            f"batch {self.rows_per_micro} x accum {self.accumulation} = {self.rows_per_micro * self.accumulation} rows"
            if self.rows_per_micro
            else f"at most {train.max_tokens_per_step:,} tokens"
        )
        return (
            f"{self.epochs:.4g} epochs = {len(self.steps):,} steps; {each} (~{self.tokens_per_step:,} tokens) a step; "
            f"warmup {self.warmup}; {train.lr_scheduler_type} from {train.learning_rate:g}"
        )


def make_plan(rows: Dataset, train: TrainSection, shuffle: bool) -> Plan:
    """All steps of a run.  Raises ConfigError."""
    options: dict[str, Any] = {
        "max_tokens_per_step": train.max_tokens_per_step,
        "seed": train.seed,
        "shuffle": shuffle,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
    }
    size = None if train.max_tokens_per_step else train.batch_size or DEFAULT_BATCH_ROWS
    whole = math.ceil(train.num_train_epochs)
    steps = Steps(rows, size, num_epochs=whole, max_steps=train.max_steps, **options)
    per_epoch = len(Steps(rows, size, num_epochs=1, **options))
    if train.max_steps is None and whole != train.num_train_epochs:
        count = max(1, math.ceil(train.num_train_epochs / whole * len(steps) - 1e-9))
        steps = Steps(rows, size, max_steps=count, **options)
    lengths = [len(ids) for ids, _ in rows]
    # One epoch shows the sizes of all: the later ones hold the same rows in another order.
    micro = [
        sum(lengths[int(n)] for n in part) for i in range(min(len(steps), per_epoch)) for part in steps.row_indices(i)
    ]
    return Plan(
        steps,
        warmup_steps(train, len(steps)),
        len(steps) / per_epoch,
        per_epoch,
        size,
        train.gradient_accumulation_steps,
        round(sum(micro) / min(len(steps), per_epoch)),
        max(micro),
        max(lengths),
    )


def warmup_steps(train: TrainSection, total: int) -> int:
    """The number of warm-up steps; without a setting 3 % of the run.  Raises ConfigError if it is the whole run."""
    if train.warmup_steps is not None:
        if train.warmup_steps >= total:
            raise ConfigError(
                f"train.warmup_steps is {train.warmup_steps} and the run has {total} steps; expected fewer "
                "warm-up steps than steps. Lower train.warmup_steps."
            )
        return train.warmup_steps
    ratio = 0.03 if train.warmup_ratio is None else train.warmup_ratio
    return math.ceil(ratio * total - 1e-9)
