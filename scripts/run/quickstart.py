"""The run that ``finetune.py`` makes without a config: everything it needs is made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from run.config import RunConfig
from run.config_file import Note, build_config, override_names
from run.rundir import next_numbered
from run.tiny import tiny_rows, write_rows, write_tiny_model

BANNER = """\
quick start: a tiny Llama-shaped model with RANDOM weights learns a made-up task (counting on and back) through LoRA.
             Nothing is downloaded; the rows are made by a rule. It shows the machinery, not a useful model.
"""


def quickstart_config(
    overrides: list[str],
    note: Note,
    scratch: Path | None = None,
    on_made: Callable[[Path], object] = lambda folder: None,
) -> RunConfig:
    """Write base model and rows into a new runs/quickstart-N (or ``scratch``) and return the config that uses them.

    ``on_made`` hears of a new folder before anything is in it.
    """
    build_config(_for(Path("runs"), overrides), overrides, lambda text: None)  # a wrong override leaves nothing behind
    folder = scratch if scratch is not None else next_numbered(Path("runs"), "quickstart")
    on_made(folder)
    print(BANNER)
    write_tiny_model(folder / "base")
    write_rows(folder / "data" / "train.jsonl", tiny_rows(1000, seed=1))
    write_rows(folder / "data" / "val.jsonl", tiny_rows(60, seed=2))
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
    return {
        "model": {"path": str(folder / "base")},
        "lora": {"r": 32, "lora_alpha": 64},
        "data": {"path": str(folder / "data" / "train.jsonl"), "val_path": str(folder / "data" / "val.jsonl"),
                 "max_seq_length": 128},
        "train": {"max_steps": 200, "batch_size": 16, "learning_rate": 5e-3, "seed": 0},
        "eval": {"eval_steps": 50, "sample_prompts": ["count on from 20 to 24 please"], "max_new_tokens": 12},
        "output": {"output_dir": str(folder), "save_steps": 100},
        "log": {"logging_steps": 20},
    }  # fmt: skip
