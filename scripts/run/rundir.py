"""The run directory: its names, who may use it, what is appended, which checkpoints stay."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft_core.errors import ConfigError
from peft_core.safetensors_io import atomic_write

# What a run writes: --overwrite removes these and nothing else.
RUN_FILES = ("config.resolved.toml", "metrics.jsonl", "samples.jsonl", "preflight.json", "run.lock")
RUN_DIRS = ("checkpoints", "adapter", "adapter_last")
_STEP = re.compile(r"step-(\d+)(?:\.micro-(\d+))?")


class RunDir:
    """One run's files under ``path``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.resolved.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.preflight = self.path / "preflight.json"
        self.adapter = self.path / "adapter"
        self.adapter_last = self.path / "adapter_last"

    # ------------------------------------------------------------------ who may use it

    def in_use(self) -> bool:
        """Whether a run has been here."""
        return any((self.path / name).exists() for name in (*RUN_FILES[:-1], *RUN_DIRS))

    def check_free(self, overwrite: bool) -> None:
        """Raises ConfigError if the directory holds a run, unless ``overwrite``."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"output_dir {self.path} is a file; expected a folder. Use another output_dir.")
        if self.in_use() and not overwrite:
            raise ConfigError(
                f"output_dir {self.path} already holds a run ({self.progress()}). "
                "Use --resume, --overwrite, or another output_dir."
            )

    def open_new(self, overwrite: bool) -> None:
        """Make the directory ready for a new run; with ``overwrite`` the files of an old one go, and no others."""
        self.check_free(overwrite)
        for name in RUN_DIRS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in RUN_FILES[:-1]:
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory: two runs would mix their files.  Raises ConfigError if another process holds it."""
        try:
            import fcntl
        except ImportError:  # Windows: no advisory locks of this kind
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "run.lock", "a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"output_dir {self.path} is in use by another process at this moment; "
                    "expected a folder of its own. Wait for it to end, or use another output_dir."
                ) from None
            yield

    def progress(self) -> str:
        """ "step 400 of 858", from what the run wrote."""
        step = max((int(record.get("step", 0)) for record in read_jsonl(self.metrics)), default=0)
        try:
            total = json.loads(self.preflight.read_text(encoding="utf-8"))["plan"]["steps"]
        except (OSError, ValueError, KeyError, TypeError):
            return f"step {step}"
        return f"step {step} of {total}"

    # ------------------------------------------------------------------ records

    def append(self, file: Path, record: dict[str, Any]) -> None:
        """Add one line of JSON; it is on disk when this returns."""
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")

    def sizes(self) -> dict[str, int]:
        """Bytes of the growing files: a checkpoint remembers them."""
        return {file.name: file.stat().st_size if file.exists() else 0 for file in (self.metrics, self.samples)}

    def rewind(self, sizes: dict[str, int]) -> None:
        """Cut the growing files back to ``sizes``: the steps after a checkpoint will be run and recorded again."""
        for name, size in sizes.items():
            file = self.path / name
            if file.exists() and file.stat().st_size > size:
                atomic_write(file, file.read_bytes()[:size])

    # ------------------------------------------------------------------ checkpoints

    def checkpoint(self, step: int, micro: int) -> Path:
        """The folder of the checkpoint after ``step`` whole steps and ``micro`` micro-batches of the next."""
        return self.path / "checkpoints" / (f"step-{step}" + (f".micro-{micro}" if micro else ""))

    def checkpoints(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        found = []
        for path in (self.path / "checkpoints").glob("step-*"):
            if name := _STEP.fullmatch(path.name):
                found.append(((int(name[1]), int(name[2] or 0)), path))
        return [path for _, path in sorted(found)]

    def prune(self, keep: int | None) -> None:
        """Delete the oldest checkpoints beyond ``keep``."""
        for path in self.checkpoints()[:-keep] if keep else []:
            shutil.rmtree(path, ignore_errors=True)

    def find_checkpoint(self, given: str | None) -> Path:
        """The checkpoint to resume: ``given``, or the last.  Raises ConfigError naming what is there."""
        there = self.checkpoints()
        if given:
            path = Path(given)
            if not (path / "state.json").is_file():
                names = " ".join(p.name for p in there) or "none"
                raise ConfigError(
                    f"--resume {path} is not a checkpoint; expected a folder step-N. In {self.path}: {names}."
                )
            return path
        if not there:
            raise ConfigError(
                f"output_dir {self.path} holds no checkpoint to resume; expected checkpoints/step-N. "
                "Start again with --overwrite, or use another output_dir."
            )
        return there[-1]


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The records of a file of ours; none if it does not exist, and a line cut off by a crash is skipped."""
    records = []
    with_lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for line in with_lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def next_numbered(parent: Path, name: str) -> Path:
    """``parent/name-N`` with the first N from 1 that is free, made at once so that two runs never share one."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / f"{name}-{number}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
