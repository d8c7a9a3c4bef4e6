"""A transformer stack that reads and writes Hugging Face model directories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .batch import Batch
from .config import ModelConfig
from .export import save_pretrained
from .generate import generate
from .load import AutoModelForCausalLM, from_pretrained
from .model import CausalLM

if TYPE_CHECKING:
    from .tokenizer import AutoTokenizer

__all__ = [
    "AutoModelForCausalLM", "AutoTokenizer", "Batch", "CausalLM", "ModelConfig", "from_pretrained", "generate",
    "save_pretrained",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "AutoTokenizer":  # late: the packages behind it take longer to import than all of the above
        from .tokenizer import AutoTokenizer

        return AutoTokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
