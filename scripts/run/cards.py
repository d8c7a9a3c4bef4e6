"""The quick start's task: read a story and fill in a card. The base tells and answers in sentences, never in cards.

    user        ... a story ... Make a card.
    assistant   Who: Mara. Where: bakery. What: kettle.

Held-out stories have names that no training row has, so an answer can only come out of the story that is asked about.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft_core.files import atomic_write
from run import story_words as words
from run.stories import Messages, chat, make_facts, tell

HELD_OUT_NAMES = (*words.SHE[::4], *words.HE[::4])
TRAIN_NAMES = tuple(name for name in (*words.SHE, *words.HE) if name not in HELD_OUT_NAMES)
REQUEST = "Make a card."


def card_rows(n: int, seed: int, names: Sequence[str]) -> list[dict[str, Messages]]:
    """``n`` chat rows whose heroes and friends are among ``names``."""
    rows = []
    for i in range(n):
        rng = random.Random(f"card/{seed}/{i}")
        facts = make_facts(rng, names)
        story = " ".join(tell(rng, facts, ending=rng.random() < 0.5))
        answer = f"Who: {facts.hero}. Where: {facts.place}. What: {facts.thing}."
        rows.append({"messages": chat(f"{story} {REQUEST}", answer)})
    return rows


def training_rows(n: int = 480) -> list[dict[str, Messages]]:
    """The rows that the quick start is tuned on."""
    return card_rows(n, 1, TRAIN_NAMES)


def held_out_rows(n: int = 60) -> list[dict[str, Messages]]:
    """The rows that it is scored on."""
    return card_rows(n, 2, HELD_OUT_NAMES)


def is_right(answer: str, row: dict[str, Any]) -> bool:
    """The rule of the score: the whole card, and nothing after it."""
    return answer.strip() == row["messages"][-1]["content"]


def write_rows(file: Path, rows: list[dict]) -> None:
    """``rows`` as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, "".join(json.dumps(row) + "\n" for row in rows))
