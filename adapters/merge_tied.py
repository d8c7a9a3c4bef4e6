"""What merging on disk has to know of names alone: tied heads, and which tensors an adapter replaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters.stored import HEADS, StoredAdapter
from peft_core.checkpoint import Checkpoint

TABLES = ("embed_tokens", "wte", "embed_in", "word_embeddings")


class WithHead(Mapping[str, np.ndarray]):
    """A checkpoint in which the tied head stands under its own name too, behind the others."""

    def __init__(self, base: Checkpoint, head: str, table: str) -> None:
        self.base, self.head, self.table = base, head, table

    @property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        return self.base.directory

    def _at(self, name: str) -> str:
        return self.table if name == self.head else name

    def __getitem__(self, name: str) -> np.ndarray:
        return self.base[self._at(name)]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.base, self.head])

    def __len__(self) -> int:
        return len(self.base) + 1

    def file(self, name: str) -> Path:
        """The file that a tensor stands in."""
        return self.base.file(self._at(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.base.shape(self._at(name))

    def dtype(self, name: str) -> np.dtype:
        """Element type of a tensor."""
        return self.base.dtype(self._at(name))


Base = Checkpoint | WithHead


def is_tied(stored: StoredAdapter, names: list[str], config: dict[str, Any]) -> bool:
    """Whether the base ties its head: as its config says; one that says nothing ties it if it has one but no tensor."""
    said = config.get("tie_word_embeddings")
    if said is not None:
        return bool(said)
    changed = [*stored.pairs, *(name.rpartition(".")[0] for name in stored.whole)]
    kinds = ("ForCausalLM", "LMHeadModel")
    has_head = (any(str(kind).endswith(kinds) for kind in config.get("architectures") or [])
                or stored.config.task_type == "CAUSAL_LM" or any(_last(path) in HEADS for path in changed))  # fmt: skip
    return has_head and not any(_last(name.removesuffix(".weight")) in HEADS for name in names)


def touches_tie(stored: StoredAdapter, names: list[str]) -> tuple[str, str] | None:
    """(head, table), the tensors' names, if ``stored`` changes one of the two; None if it leaves both alone."""
    changed = [*stored.pairs, *(name.rpartition(".")[0] for name in stored.whole)]
    table = next((name for name in names if name.endswith(".weight") and _last(name.removesuffix(".weight")) in TABLES),
                 None)  # fmt: skip
    ours = {_last(path) for path in changed}
    if table is None or not ours & {*HEADS, *TABLES}:
        return None
    head = next((path for path in changed if _last(path) in HEADS), HEADS[0])
    return f"{head}.weight", table


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def wanted_whole(stored: StoredAdapter, names: list[str]) -> list[str]:
    """The base's tensors ``names`` that the config says are in the file as they are."""
    config, saved = stored.config, stored.config.modules_to_save or []
    chosen = []
    for name in names:
        path = name.rpartition(".")[0]
        above = [path[:i] for i, letter in enumerate(path) if letter == "."] + [path]
        inside = config.bias == "all" or (config.bias == "lora_only" and path in stored.pairs)
        bias = name.endswith(".bias") and inside
        if bias or any(part.endswith(entry) for entry in saved for part in above):
            chosen.append(name)
    return chosen
