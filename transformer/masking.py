"""Rows to token ids and labels: which characters are trained, decided on the text and carried over by offsets.

No marker string is searched for and no label is masked for its token id: a pad token equal to EOS changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from peft_core.errors import ConfigError, DataError, expect
from transformer.rows import IGNORED_LABEL, ChatRow, PromptRow, Row, TextRow, TokenRow
from transformer.tokenizer import Offsets, Tokenizer

Ids = npt.NDArray[np.int32]
LOSS_ON = ("assistant", "all")


@dataclass(frozen=True)
class Passage:
    """A text to tokenize, the character spans that are trained, and whether EOS follows it."""

    text: str
    spans: list[tuple[int, int]]
    ends: bool = False
    n_unwritten: int = 0  # answers left out because the template does not write their tool calls
    n_empty: int = 0  # answers in which nothing but the end is trained


@dataclass(frozen=True)
class Sample:
    """Ids and unshifted labels of one training row, both (T,) int32."""

    input_ids: Ids
    labels: Ids
    source: int  # index of the row it was made from
    where: str
    format: str
    last_token: int | None = field(default=None)  # last trained token that is not white space
    starts_with_bos: bool = False
    n_unwritten: int = 0
    n_empty: int = 0

    @property
    def n_trained(self) -> int:
        """Number of targets: labels that some earlier token predicts, so the first position never counts."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED_LABEL))


def passages(
    row: Row, tokenizer: Tokenizer, *, loss_on: str = "assistant", now: datetime | None = None
) -> list[Passage]:
    """Return the texts to train on that one row makes (several when a template rewrites earlier turns)."""
    if isinstance(row, ChatRow) and row.format == "alpaca" and tokenizer.chat_template is None:
        row = _plain_alpaca(row)
    if isinstance(row, ChatRow):
        return _chat_passages(row, tokenizer, loss_on, now)
    if isinstance(row, PromptRow):
        expect(
            tokenizer.eos_token_id is not None,
            DataError,
            f"{row.where}: {tokenizer.name_or_path} has no eos_token, so a completion cannot end",
            expected="eos_token in tokenizer_config.json",
            fix="Add it there; it must be a token of the vocabulary.",
        )
        start = 0 if loss_on == "all" else len(row.prompt)
        text = row.prompt + row.completion
        return [Passage(text, [(start, len(text))], ends=True, n_empty=int(not row.completion.strip()))]
    if isinstance(row, TextRow):
        return [Passage(row.text, [(0, len(row.text))], ends=True)]
    return []


def _plain_alpaca(row: ChatRow) -> PromptRow:
    """The instruction form for a base model, which has no template."""
    system = "".join(f"{message['content']}\n\n" for message in row.messages if message["role"] == "system")
    question = next(message["content"] for message in row.messages if message["role"] == "user")
    answer = row.messages[-1]["content"]
    return PromptRow(row.where, f"{system}### Instruction:\n{question}\n\n### Response:\n", answer, row.format)


def _chat_passages(row: ChatRow, tokenizer: Tokenizer, loss_on: str, now: datetime | None) -> list[Passage]:
    render = partial(tokenizer.render, tools=row.tools, where=row.where, now=now)
    if loss_on == "all":
        text = render(row.messages)
        return [Passage(text, [(0, len(text))])]
    # An answer before any question has no prompt: it stays context.
    turns = [i for i, trained in enumerate(row.trained) if trained and i > 0]
    if not turns:
        return [Passage(render(row.messages), [])]
    whole = render(row.messages[: turns[-1] + 1])
    made: list[Passage] = []
    joint, n_unwritten = True, 0
    for i in turns:
        before = render(row.messages[:i], add_generation_prompt=True)
        after = whole if i == turns[-1] else render(row.messages[: i + 1])
        start = len(before)
        if not after.startswith(before):
            joint = False
            start = _answer_start(before, after, render(row.messages[:i]), f"{row.where}: message {i}")
        joint = joint and whole.startswith(after)
        if _calls_written(row.messages[i], after[start:]):
            made.append(Passage(after, [(start, len(after))], n_empty=int(_is_empty(row.messages[i]))))
        else:
            n_unwritten += 1
    if joint or not made:
        n_empty = sum(one.n_empty for one in made)
        return [Passage(whole, [span for one in made for span in one.spans], n_unwritten=n_unwritten, n_empty=n_empty)]
    return [replace(made[0], n_unwritten=n_unwritten), *made[1:]]


def _is_empty(message: dict[str, Any]) -> bool:
    """Whether there is nothing to learn from an answer but to end at once."""
    said = str(message.get("content") or "") + str(message.get("reasoning_content") or "")
    return not said.strip() and not message.get("tool_calls")


def _calls_written(message: dict[str, Any], answer: str) -> bool:
    """Whether the template wrote the tools an answer calls: one that does not would teach to answer with nothing."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return all(str(call.get("name", "")) in answer for call in calls if isinstance(call, dict))


def _answer_start(before: str, after: str, history: str, where: str) -> int:
    """Where the answer starts if the template writes the prompt for it differently from its place in the history."""
    start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    expect(
        start >= len(history),
        DataError,
        f"{where}: the chat template rewrites the messages before an answer once the answer is there",
        expected="a history that stays the same up to the last question",
        fix="Set model.chat_template to a template that does not, or use prompt/completion rows.",
    )
    return start


def trained_tokens(offsets: Offsets, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return for each token whether one of its characters lies in a span.

    A token across the border of prompt and answer counts as the answer's: nothing else would teach that part of it.
    """
    bounds = np.array(offsets, np.int64).reshape(-1, 2)
    chosen = np.zeros(len(bounds), bool)
    for start, stop in spans:
        chosen |= (bounds[:, 1] > start) & (bounds[:, 0] < stop)
    return chosen  # (T,)


def encode_rows(
    rows: Iterable[Row],
    tokenizer: Tokenizer,
    *,
    loss_on: str = "assistant",
    now: datetime | None = None,
    chunk: int = 512,
) -> Iterator[Sample]:
    """Yield the samples of all rows in order, uncut. Raises ConfigError for ``loss_on``, DataError naming the row."""
    expect(loss_on in LOSS_ON, ConfigError, f"data.loss_on is {loss_on!r}", expected=" or ".join(map(repr, LOSS_ON)))
    # One moment for the whole data set: a template that prints the date must not change between two rows.
    now = now or datetime.now()
    numbered = enumerate(rows)
    finish = _Finisher(tokenizer, loss_on)
    while part := list(islice(numbered, chunk)):
        made = [(source, row, passages(row, tokenizer, loss_on=loss_on, now=now)) for source, row in part]
        encoded = iter(tokenizer.encode_batch_with_offsets([one.text for _, _, some in made for one in some]))
        for source, row, some in made:
            if isinstance(row, TokenRow):
                yield finish.tokens(source, row)
            for passage in some:
                yield finish.passage(source, row, passage, *next(encoded))


class _Finisher:
    """Ids and offsets to a Sample: BOS, EOS, labels, and the facts the report counts."""

    def __init__(self, tokenizer: Tokenizer, loss_on: str) -> None:
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self._blank: dict[int, bool] = {}

    def tokens(self, source: int, row: TokenRow) -> Sample:
        highest = max(row.input_ids, default=0)
        expect(
            min(row.input_ids, default=0) >= 0 and highest < len(self.tokenizer),
            DataError,
            f"{row.where}: input_ids go up to {highest} (down to {min(row.input_ids, default=0)})",
            expected=f"ids from 0 to {len(self.tokenizer) - 1}, as this tokenizer has",
            fix="Tokenize the data with the tokenizer of this model.",
        )
        return self._sample(source, row, row.input_ids, np.array(row.labels, np.int32))

    def passage(self, source: int, row: Row, passage: Passage, ids: list[int], offsets: Offsets) -> Sample:
        chosen = trained_tokens(offsets, passage.spans)
        if isinstance(row, ChatRow) and self.loss_on == "assistant":
            self._stop_at_ends(ids, offsets, passage.spans, chosen)
        complete = self.tokenizer.with_prefix(ids)
        if len(complete) > len(ids):
            added = len(complete) - len(ids)
            chosen = np.concatenate([np.full(added, self.loss_on == "all" or isinstance(row, TextRow)), chosen])
        eos = self.tokenizer.eos_token_id
        if passage.ends and eos is not None and (not ids or ids[-1] != eos):
            complete = [*complete, eos]
            chosen = np.append(chosen, True)
        labels = np.where(chosen, np.array(complete, np.int32), np.int32(IGNORED_LABEL))
        sample = self._sample(source, row, complete, labels.astype(np.int32))
        return replace(sample, n_unwritten=passage.n_unwritten, n_empty=passage.n_empty)

    def _stop_at_ends(
        self, ids: list[int], offsets: Offsets, spans: Sequence[tuple[int, int]], chosen: npt.NDArray[np.bool_]
    ) -> None:
        """White space after an answer's end token is not trained.

        Generation stops at the end token, and the line break that many templates write after it comes from the template
        again: a model is never asked for it. Templates with ``{% generation %}`` marks close them before it too. An
        answer that ends with plain text keeps its white space: there it may be what ends it.
        """
        bounds = np.array(offsets, np.int64).reshape(-1, 2)
        for start, stop in spans:
            inside = np.flatnonzero((bounds[:, 1] > start) & (bounds[:, 0] < stop))
            last = next((int(t) for t in inside[::-1] if not self._is_blank(ids[t])), None)
            if last is not None and self.tokenizer.is_added(ids[last]):
                chosen[inside[inside > last]] = False

    def _sample(self, source: int, row: Row, ids: list[int], labels: Ids) -> Sample:
        last = next((int(i) for i in labels[::-1] if i != IGNORED_LABEL and not self._is_blank(int(i))), None)
        bos = self.tokenizer.bos_token_id
        starts = bool(ids) and bos is not None and ids[0] == bos
        return Sample(np.array(ids, np.int32), labels, source, row.where, row.format, last, starts)

    def _is_blank(self, token_id: int) -> bool:
        if token_id not in self._blank:
            self._blank[token_id] = not self.tokenizer.decode([token_id], skip_special_tokens=False).strip()
        return self._blank[token_id]
