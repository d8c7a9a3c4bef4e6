"""Does a pretrained story model only repeat its text? The share of sampled sentences that stand nowhere in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from run.story_model import BOS, END, TEXT_SEED, plain_texts
from transformer.generate import generate
from transformer.tokenizer import Tokenizer

_END = re.compile(r'(?<=[.?!])\s+|(?<=[.!]")\s+')


def sentences(text: str) -> list[str]:
    """The sentences of a text; ``"..?" asked Ida.`` is one."""
    return [part for part in _END.split(text) if part]


def sampled_sentences(model: Any, tokenizer: Tokenizer, n: int = 200, seed: int = 0) -> list[str]:
    """``n`` whole sentences of stories that the model samples from nothing, at temperature 1."""
    found: list[str] = []
    for round_number in range(100):
        rows = generate(model, [[BOS]] * 16, max_new_tokens=160, do_sample=True, seed=seed + round_number,
                        eos_token_id=END)  # fmt: skip
        for row in rows:
            parts = sentences(tokenizer.decode(row))
            found += parts if row[-1] == END else parts[:-1]  # without the end token the last one is cut off
        if len(found) >= n:
            break
    return found[:n]


def new_sentences(found: list[str], n_documents: int, seed: int = TEXT_SEED) -> Iterator[str]:
    """Those of ``found`` that stand nowhere in the first ``n_documents`` documents."""
    wanted = set(found)
    for text in plain_texts(seed, n_documents):
        wanted.difference_update(sentences(text))
    return (sentence for sentence in found if sentence in wanted)
