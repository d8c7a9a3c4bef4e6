"""A tiny base model, rows and a config file for the tests of the pages; everything runs in a second or less."""

from __future__ import annotations

import importlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from run.cards import write_rows
from support.tiny_run import tiny_rows, write_tiny_model


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """The directory of a one-layer model of width 32, shared: copy it before damaging it."""
    folder = tmp_path_factory.mktemp("tiny") / "base"
    write_tiny_model(folder, hidden=32, layers=1)
    return folder


@dataclass
class Outcome:
    """What a page did."""

    code: int
    out: str
    err: str


class Lab:
    """A folder with a config, its rows and a base, and the pages run in-process."""

    def __init__(self, folder: Path, base: Path, capsys) -> None:
        self.folder, self.base, self.capsys = folder, base, capsys
        self.config = folder / "run.toml"
        self.data = folder / "train.jsonl"
        self.run_dir = folder / "out"
        write_rows(self.data, tiny_rows(24, seed=1))
        write_rows(folder / "val.jsonl", tiny_rows(6, seed=2))
        self.settings: dict[str, dict] = {
            "model": {"path": str(base)},
            "lora": {"r": 4, "lora_alpha": 8},
            "data": {"path": str(self.data), "val_path": str(folder / "val.jsonl")},
            "train": {"max_steps": 6, "batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2},
            "eval": {"eval_steps": 3},
            "output": {"output_dir": str(self.run_dir), "save_steps": 2},
            "log": {"logging_steps": 2},
        }

    def write(self, **sections: dict) -> Path:
        """Write the config, ``sections`` over the settings (None removes a key)."""
        lines = []
        for name, values in self.settings.items():
            merged = {**values, **sections.get(name, {})}
            lines.append(f"[{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in merged.items() if value is not None]
        self.config.write_text("\n".join(lines) + "\n")
        return self.config

    def own_base(self) -> Path:
        """A copy of the base, to be damaged."""
        copy = self.folder / "base"
        shutil.copytree(self.base, copy)
        self.settings["model"]["path"] = str(copy)
        return copy

    def run(self, page: str, *argv) -> Outcome:
        """``page`` with these arguments, in this process."""
        self.capsys.readouterr()
        code = importlib.import_module(page).main([str(word) for word in argv])
        captured = self.capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    def finetune(self, *argv, **sections: dict) -> Outcome:
        """finetune.py with the config."""
        return self.run("finetune", self.write(**sections), *argv)

    def records(self, folder: Path | None = None) -> list[dict]:
        """metrics.jsonl without times, speeds and memory."""
        text = ((folder or self.run_dir) / "metrics.jsonl").read_text()
        skip = ("time_s", "tokens_per_s", "memory_bytes")
        return [{k: v for k, v in json.loads(line).items() if k not in skip} for line in text.splitlines()]


@pytest.fixture
def lab(tmp_path, tiny_base, capsys) -> Lab:
    """A fresh Lab."""
    return Lab(tmp_path, tiny_base, capsys)
