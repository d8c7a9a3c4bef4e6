"""Error classes by what a person has to fix, and the one function that words an expected error.

Every text has the same three parts: what happened (with the values) / what was expected / how to fix it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PeftCoreError(Exception):
    """Base of every error that this library expects and explains."""


class ConfigError(PeftCoreError, ValueError):
    """A setting is wrong: a key, a value, a combination."""


class DataError(PeftCoreError, ValueError):
    """The training or evaluation data cannot be used as given."""


class FileError(PeftCoreError, OSError):
    """A file on disk is missing, damaged, or not what its name says."""


class ModelError(FileError):
    """A model's config and weights do not fit together, or this library does not know the model."""


class AdapterError(FileError):
    """An adapter does not fit the model, or its file is not a LoRA adapter that can be read in full."""


class GraphError(PeftCoreError, RuntimeError):
    """The autograd graph is used in a way it does not support."""


class DivergedError(PeftCoreError, FloatingPointError):
    """A loss or a gradient became NaN or infinite."""


class OutOfMemoryError(PeftCoreError, MemoryError):
    """Memory ran out, or an estimate says that it will."""


class ExportError(PeftCoreError, RuntimeError):
    """A written result failed its own verification."""


def short(value: Any, limit: int = 80) -> str:
    """The repr of a value for an error text, cut to ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def some(items: Iterable[Any], n: int = 5) -> str:
    """The first ``n`` different items for an error text, and how many more there are."""
    items = list(dict.fromkeys(items))
    return ", ".join(map(str, items[:n])) + (f" and {len(items) - n} more" if len(items) > n else "")


def expect(condition: object, error: type[PeftCoreError], happened: str, *, expected: str, fix: str = "") -> None:
    """Raise ``error`` unless ``condition`` holds: "<happened>; expected <expected>. <fix>"."""
    if not condition:
        raise error(f"{happened}; expected {expected}." + (f" {fix}" if fix else ""))
