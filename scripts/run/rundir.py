"""The run directory: its names, who may use it, what is appended, which checkpoints stay."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from peft_core.errors import ConfigError, FileError
from peft_core.safetensors_io import atomic_write

# What a run writes: --overwrite removes these and nothing else.
RUN_FILES = ("config.resolved.toml", "metrics.jsonl", "samples.jsonl", "preflight.json", "run.lock")
RUN_DIRS = ("checkpoints", "adapter", "adapter_last")
_STEP = re.compile(r"step-(\d+)(?:\.micro-(\d+))?")


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """What the system refuses inside is said about output_dir: it is a setting, and another one may work."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise ConfigError(
            f"output_dir {path} cannot be used ({error.strerror or error}); expected a folder that may be written to, "
            "or a place to make one, with room. Free space, change its permissions, or use another output_dir."
        ) from error


class RunDir:
    """One run's files under ``path``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.opened = False  # whether open_new() was called: only then are the files this run's own
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
        """Raises ConfigError if the directory holds a run, unless ``overwrite``, or could not be written to."""
        with usable(self.path):
            there = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
            if not there.is_dir():
                what = "is a file" if there == self.path else f"lies below {there}, which is a file"
                raise ConfigError(f"output_dir {self.path} {what}; expected a folder. Use another output_dir.")
            if not os.access(there, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"no permission to write into {there}")
            if self.in_use() and not overwrite:
                raise ConfigError(
                    f"output_dir {self.path} already holds a run ({self.progress()}). "
                    "Use --resume, --overwrite, or another output_dir."
                )

    def open_new(self, overwrite: bool) -> None:
        """Make the directory ready for a new run; with ``overwrite`` the files of an old one go, and no others."""
        self.check_free(overwrite)
        self.opened = True
        with usable(self.path):
            self._clear()

    def _clear(self) -> None:
        for name in RUN_DIRS:
            if (self.path / name).exists():
                shutil.rmtree(self.path / name)
        for name in RUN_FILES[:-1]:
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def given_back_unless(self, started: Callable[[], object]) -> Iterator[None]:
        """If the block raises before ``started()`` holds, what the run wrote goes: there is nothing to resume."""
        try:
            yield
        except BaseException:
            if self.opened and not started():
                with suppress(OSError):
                    self._clear()
            raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory: two runs would mix their files.  Raises ConfigError if another process holds it."""
        try:
            import fcntl
        except ImportError:  # Windows: no advisory locks of this kind
            yield
            return
        with usable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / "run.lock", "a", encoding="utf-8")  # noqa: SIM115  (closed two lines below)
        with lock as file:
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
        """Add one line of JSON, handed to the system when this returns.  Raises FileError where it refuses."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with open(file, "a", encoding="utf-8") as stream:
                stream.write(line)
        except OSError as error:
            raise FileError(
                f"{file} could not be written ({error.strerror or error}); expected a file that may be added to, with "
                "room. Free space or change its permissions, then continue with --resume."
            ) from error

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
    with usable(parent):
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = parent / f"{name}-{number}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
