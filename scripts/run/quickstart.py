"""The run that ``finetune.py`` makes without a config: a small pretrained story model learns to fill in cards.

The base in configs/quickstart/base was made by scripts/pretrain.py; the rows follow from a rule (cards.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters import set_active
from run import base
from run.cards import held_out_rows, is_right, training_rows, write_rows
from run.config import RunConfig
from run.config_file import Note, build_config, override_names
from run.job import Job
from run.rundir import next_numbered
from transformer.generate import generate

HOME = Path(__file__).resolve().parents[2] / "configs" / "quickstart"
BANNER = """\
quick start: a small story model, pretrained by scripts/pretrain.py, learns to fill in a card about a story (LoRA).
             Nothing is downloaded. Its answers to stories with names that no row has are scored before and after.
"""
SHOWN, SCORED, ANSWER_TOKENS = 3, 60, 24


def quickstart_config(
    overrides: list[str],
    note: Note,
    scratch: Path | None = None,
    on_made: Callable[[Path], object] = lambda folder: None,
) -> RunConfig:
    """Write the rows into a new runs/quickstart-N (or ``scratch``) and return the config that uses them.

    ``on_made`` hears of a new folder before anything is in it.
    """
    build_config(_for(Path("runs"), overrides), overrides, lambda text: None)  # a wrong override leaves nothing behind
    folder = scratch if scratch is not None else next_numbered(Path("runs"), "quickstart")
    on_made(folder)
    print(BANNER)
    write_rows(folder / "data" / "train.jsonl", training_rows())
    write_rows(folder / "data" / "val.jsonl", held_out_rows(SCORED))
    return build_config(_for(folder, overrides), overrides, note)


# A setting on the command line takes the place of the one that this run has for the same purpose.
_REPLACES = {
    "data.val_size": "val_path",
    "train.max_tokens_per_step": "batch_size",
    "train.num_train_epochs": "max_steps",
}


def _for(folder: Path, overrides: list[str]) -> dict[str, dict[str, Any]]:
    tables = _tables(folder)
    for name in override_names(overrides) & _REPLACES.keys():
        tables[name.split(".")[0]].pop(_REPLACES[name], None)
    return tables


def _tables(folder: Path) -> dict[str, dict[str, Any]]:
    here, home = Path.cwd(), HOME / "base"
    return {
        "model": {"path": str(home.relative_to(here) if home.is_relative_to(here) else home)},
        "lora": {"r": 16, "lora_alpha": 32},
        "data": {"path": str(folder / "data" / "train.jsonl"), "val_path": str(folder / "data" / "val.jsonl"),
                 "max_seq_length": 256},
        "train": {"max_steps": 90, "batch_size": 16, "learning_rate": 4e-3, "seed": 0},
        "eval": {"eval_steps": 30, "max_new_tokens": ANSWER_TOKENS,
                 "sample_prompts": [story(row) for row in shown_rows(held_out_rows(SCORED))[:1]]},
        "output": {"output_dir": str(folder), "save_steps": 90},
        "log": {"logging_steps": 10},
    }  # fmt: skip


def show_scores(job: Job) -> tuple[int, int]:
    """Print answers to held-out stories without and with the adapter, and how many are right; returns the two counts.

    The adapter is that of the last step.
    """
    rows, n = held_out_rows(SCORED), SCORED
    set_active(job.model, [])
    before = answers(job, rows)
    set_active(job.model, ["default"])
    after = answers(job, rows)
    print("answers  to held-out stories, before and after")
    for row in shown_rows(rows):
        i = rows.index(row)
        print(f"  story  {story(row)}\n  before {before[i]!r}\n  after  {after[i]!r}")
    counts = tuple(sum(is_right(a, row) for a, row in zip(given, rows, strict=True)) for given in (before, after))
    session = job.session
    if session.first_loss is not None and session.last_loss is not None:
        print(f"held-out loss  before {session.first_loss:.4f}  after {session.last_loss:.4f}")
    print(f"score    before {counts[0]}/{n} right ({counts[0] / n:.1%}), after {counts[1]}/{n} right "
          f"({counts[1] / n:.1%}); right is the whole card and nothing else")  # fmt: skip
    return counts[0], counts[1]


def shown_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows to print: those with the shortest stories."""
    return sorted(rows, key=lambda row: len(story(row)))[:SHOWN]


def story(row: dict[str, Any]) -> str:
    """What the user says in a row."""
    return row["messages"][0]["content"]


def answers(job: Job, rows: list[dict[str, Any]]) -> list[str]:
    """What the model answers to each row's prompt, greedily."""
    ids = [base.prompt_ids(job.tokenizer, story(row)) for row in rows]
    out = generate(job.model, ids, max_new_tokens=ANSWER_TOKENS, eos_token_id=job.stop_ids)
    return [job.tokenizer.decode(new) for new in out]
