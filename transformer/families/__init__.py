"""The families of models that can be read, by the ``model_type`` of their config.json."""

from __future__ import annotations

from typing import Any

from peft_core.errors import ModelError, expect

from .base import HEAD, Family, Stack
from .gpt2 import GPT2
from .llama import LLAMA, MISTRAL

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL)}


def family_of(model_type: Any, where: str = "config.json") -> Family:
    """The family of a ``model_type``.  Raises ModelError that lists the known ones."""
    expect(isinstance(model_type, str) and model_type in FAMILIES, ModelError,
           f"{where}: model_type is {model_type!r}", expected=f"one of {', '.join(sorted(FAMILIES))}",
           fix="Other families are not implemented; choose a model of one of these.")  # fmt: skip
    return FAMILIES[model_type]


__all__ = ["FAMILIES", "HEAD", "Family", "Stack", "family_of"]
