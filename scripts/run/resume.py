"""Whether a checkpoint belongs to the run that wants to continue it: same data, same base, same settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peft_core.errors import ConfigError, DataError, FileError
from run.config import RunConfig

# What a run may change when it goes on: nothing of these touches a weight. Moved files are compared by their content.
FREE = ("output.", "log.", "model.path", "data.path", "data.val_path")
# What may change at a whole step: how it is computed, not what. Sums are rounded otherwise from there on.
ROUNDING = ("train.memory_budget", "train.gradient_checkpointing")


def base_hash(files: Iterable[Path]) -> str:
    """SHA-256 over names, sizes and both ends (1 MiB) of the base's weight files: cheap, and finds a swapped model."""
    digest = hashlib.sha256()
    for file in files:
        length = file.stat().st_size
        digest.update(f"{file.name} {length}\n".encode())
        with open(file, "rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, length - (1 << 20)))
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()


def settings(config: RunConfig) -> dict[str, Any]:
    """ "section.key" -> value, in the form that JSON gives back."""
    flat = {f"{section}.{key}": value for section, values in config.to_dict().items() for key, value in values.items()}
    return json.loads(json.dumps(flat))


def fingerprint(config: RunConfig, train_rows: str, val_rows: str, base: str) -> dict[str, Any]:
    """What a checkpoint stores about the run it belongs to; the last three are SHA-256 sums."""
    return {"settings": settings(config), "train_rows": train_rows, "val_rows": val_rows, "base": base}


def read_extra(checkpoint: Path) -> dict[str, Any]:
    """The ``extra`` of a checkpoint, and its ``micro``, read before any weight is.  Raises FileError."""
    try:
        rest = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        return {**rest["extra"], "micro": rest["progress"]["micro"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"{checkpoint} is not a readable checkpoint ({error!r}); expected state.json. Use another."
        ) from error


def check_same_run(extra: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> list[str]:
    """The changed settings that only round otherwise, which a whole step allows: "KEY was A and is B".

    Raises ConfigError naming other changed settings, or DataError with both hashes.
    """
    saved = extra["fingerprint"]
    before, after = saved["settings"], now["settings"]
    changed = {
        key: f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(FREE)
    }
    rounding = [text for key, text in changed.items() if key in ROUNDING]
    if len(rounding) < len(changed):
        raise ConfigError(
            f"{checkpoint} was written with other settings: {'; '.join(changed.values())}. Expected the same ones, so "
            "that the run continues exactly. Set them back, or start another run in another output_dir."
        )
    if rounding and extra["micro"]:
        raise ConfigError(
            f"{checkpoint} lies {extra['micro']} passes into a step and {'; '.join(rounding)}; expected the same "
            "settings up to the end of that step, whose passes are counted. Set them back, or resume a checkpoint of a "
            "whole step (a folder step-N) with --resume PATH."
        )
    for key, what in (("train_rows", "training rows"), ("val_rows", "validation rows"), ("base", "base weights")):
        if saved[key] != now[key]:
            raise DataError(
                f"the {what} are not those that {checkpoint} was trained on: sha256 {saved[key][:16]} then, "
                f"{now[key][:16]} now; expected the same. Bring them back, or start another run in another output_dir."
            )
    return rounding
