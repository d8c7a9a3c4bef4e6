"""Tokens to text on the terminal as they come: a character may need several tokens, so text waits until it is whole."""

from __future__ import annotations

import sys
from typing import TextIO

from transformer.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character yet


class Stream:
    """Prints the text of one answer as its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, out: TextIO | None = None) -> None:
        self.tokenizer, self.out = tokenizer, out or sys.stdout
        self.ids: list[int] = []
        self.shown = ""

    def take(self, row: int, token: int) -> None:
        """One more token of the (only) row."""
        self.ids.append(int(token))
        text = self.tokenizer.decode(self.ids)
        # Decoders may change earlier characters (a leading space) only while little has been shown.
        if not text.endswith(_BROKEN) and text.startswith(self.shown):
            self._show(text)

    def end(self) -> str:
        """Print what is left and a line end; the whole answer."""
        text = self.tokenizer.decode(self.ids)
        if text.startswith(self.shown):
            self._show(text)
        print(file=self.out, flush=True)
        return text

    def _show(self, text: str) -> None:
        print(text[len(self.shown) :], end="", file=self.out, flush=True)
        self.shown = text
