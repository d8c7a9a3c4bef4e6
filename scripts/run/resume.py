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
    """The ``extra`` of a checkpoint, read before any weight is.  Raises FileError."""
    try:
        return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["extra"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{checkpoint} is not a readable checkpoint ({error!r}); expected state.json. Use another."
        ) from error


def check_same_run(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Raises ConfigError naming changed settings, or DataError with both hashes."""
    before, after = saved["settings"], now["settings"]
    changed = [
        f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(FREE)
    ]
    if changed:
        raise ConfigError(
            f"{checkpoint} was written with other settings: {'; '.join(changed)}. Expected the same ones, so that "
            "the run continues exactly. Set them back, or start another run in another output_dir."
        )
    for key, what in (("train_rows", "training rows"), ("val_rows", "validation rows"), ("base", "base weights")):
        if saved[key] != now[key]:
            raise DataError(
                f"the {what} are not those that {checkpoint} was trained on: sha256 {saved[key][:16]} then, "
                f"{now[key][:16]} now; expected the same. Bring them back, or start another run in another output_dir."
            )
