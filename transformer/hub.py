"""Where a model's files are: a directory, or a Hub id whose files the Hugging Face cache already holds."""

from __future__ import annotations

import os
import re
from pathlib import Path

from peft_core.errors import ModelError, expect


def cache_directory() -> Path:
    """The Hugging Face cache: HF_HUB_CACHE, or hub/ under HF_HOME, or ~/.cache/huggingface/hub."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(home).expanduser() / "hub"


def resolve_directory(name_or_path: str | os.PathLike) -> Path:
    """The directory meant by a path or by a Hub id "org/name" in the local cache; nothing is ever downloaded.

    Raises ModelError that says where it looked and which command fetches the files.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = os.fspath(name_or_path)
    expect(not path.exists(), ModelError, f"{name} is a file", expected="a model directory", fix="Give its directory.")
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name):
        raise ModelError(f"{name} does not exist; expected a model directory or a Hub id org/name. Check the path.")
    stored = cache_directory() / ("models--" + name.replace("/", "--"))
    main = stored / "refs" / "main"
    snapshot = stored / "snapshots" / (main.read_text().strip() if main.is_file() else "main")
    expect(snapshot.is_dir(), ModelError,
           f"{name} is no directory here, and the Hugging Face cache {cache_directory()} does not hold it",
           expected="a model directory, or a Hub id that was downloaded before",
           fix=f"Run: hf download {name}")  # fmt: skip
    return snapshot
