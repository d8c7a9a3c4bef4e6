"""Data files to rows: which files, which format, and what each row must hold. Every error names ``path:line``."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft_core.errors import ConfigError, DataError, expect, short
from transformer.chat import expect_characters, plain_messages, plain_tools
from transformer.records import SUFFIXES, TOO_DEEP, records

IGNORED_LABEL = -100

# Format -> the keys it needs. The first format whose keys are all there wins: published files often carry a rendered
# "text" or a "prompt" beside the richer form.
FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "input_ids": ("input_ids",),
    "alpaca": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
KNOWN = "messages | conversations | instruction, input, output | prompt, completion | text | input_ids, labels"
OPTIONAL_KEYS = ("input", "labels", "attention_mask", "system", "tools")
PROMPT_NAMES = ("question", "query", "input", "instruction", "problem", "source", "context")
COMPLETION_NAMES = ("answer", "response", "output", "target", "solution", "reply", "chosen")


@dataclass(frozen=True)
class ChatRow:
    """Messages in the plain shape, and for each whether its answer is trained."""

    where: str
    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[dict[str, Any]] | None = None
    format: str = "messages"


@dataclass(frozen=True)
class PromptRow:
    """A prompt and the completion that follows it directly, without a separator."""

    where: str
    prompt: str
    completion: str
    format: str = "prompt"


@dataclass(frozen=True)
class TextRow:
    """Plain text, trained as a whole."""

    where: str
    text: str
    format: str = "text"


@dataclass(frozen=True)
class TokenRow:
    """Ids and unshifted labels (-100 where no loss is taken)."""

    where: str
    input_ids: list[int]
    labels: list[int]
    format: str = "input_ids"


Row = ChatRow | PromptRow | TextRow | TokenRow


def data_files(path: str | Path) -> list[Path]:
    """Return the data files that a path names: a file, a glob, or a directory's files of known kinds, sorted.

    Raises DataError if there is none.
    """
    text, place = str(path), Path(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        found = sorted(file for file in place.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES)
    elif glob.has_magic(text):
        found = sorted(Path(name) for name in glob.glob(text, recursive=True) if Path(name).is_file())
    else:
        raise DataError(f"{path} does not exist; expected a file, a glob or a directory. Check data.path.")
    expect(found, DataError, f"{path} holds no data file", expected=f"files ending in {' '.join(SUFFIXES)}")
    return found


def read_rows(path: str | Path, *, format: str = "auto", columns: Mapping[str, str] | None = None) -> list[Row]:
    """Return the rows of all files that ``path`` names, in order.

    ``columns`` maps our key to the file's (``{"prompt": "question", "completion": "answer"}``); its ``separator`` cuts
    the lines of a .txt file into prompt and completion, the separator staying at the prompt's end. Raises DataError.
    """
    columns = dict(columns or {})
    separator = columns.pop("separator", None)
    expect(
        format in ("auto", *FORMATS), ConfigError, f"data.format is {format!r}", expected=f"auto {' '.join(FORMATS)}"
    )
    known = {key for keys in FORMATS.values() for key in keys} | set(OPTIONAL_KEYS)
    unknown = sorted(set(columns) - known)
    expect(not unknown, ConfigError, f"data.columns has {unknown}", expected=f"keys among {sorted(known)} or separator")
    rows: list[Row] = []
    for file in data_files(path):
        count = len(rows)
        for where, record in records(file):
            try:
                rows.append(_row(where, record, format, columns, separator if file.suffix.lower() == ".txt" else None))
            except RecursionError as error:
                raise DataError(f"{where}: {TOO_DEEP}; expected a row. Fix or remove it.") from error
        expect(len(rows) > count, DataError, f"{file} has no rows", expected="at least one row")
    return rows


# ---- records to rows


def _row(where: str, record: Any, format: str, columns: Mapping[str, str], separator: str | None) -> Row:
    expect(isinstance(record, dict), DataError, f"{where}: the row is {short(record)}", expected="a JSON object")
    if separator is not None:
        prompt, found, completion = record["text"].partition(separator)
        expect(found, DataError, f"{where}: the line has no {separator!r}", expected="prompt, separator, completion")
        # The separator stays: without it the last word of the prompt and the first of the answer could share a token.
        return PromptRow(where, prompt + separator, completion)
    missing = [name for name in columns.values() if name not in record]
    expect(
        not missing,
        DataError,
        f"{where}: data.columns names {missing}, the row has {_braced(record)}",
        expected="columns that every row has",
    )
    offered = set(columns) or set(record)
    record = {**record, **{ours: record[theirs] for ours, theirs in columns.items()}}
    kind = format if format != "auto" else next((k for k, keys in FORMATS.items() if offered.issuperset(keys)), None)
    if kind is None or not set(record).issuperset(FORMATS[kind]):
        raise DataError(_no_format(where, record, format))
    row: Row = _BUILDERS[kind](where, record)
    return row


def _no_format(where: str, record: Mapping[str, Any], format: str) -> str:
    asked = "no known format"
    if format != "auto":
        asked = f"not data.format = {format!r} (needs {', '.join(FORMATS[format])})"
    names = list(record)
    prompt = next((name for name in (*PROMPT_NAMES, "prompt") if name in names), None)
    completion = next((name for name in (*COMPLETION_NAMES, "completion") if name in names), None)
    if (prompt is None or completion is None) and len(names) == 2:
        prompt, completion = names
    fix = f'{{ prompt = "{prompt or "YOUR_COLUMN"}", completion = "{completion or "YOUR_COLUMN"}" }}'
    if len(names) == 1:
        fix = f'{{ text = "{names[0]}" }}'
    return f"{where}: keys {_braced(record)} match {asked}. Known: {KNOWN}. Add: data.columns = {fix}"


def _chat_row(where: str, record: Mapping[str, Any], key: str) -> ChatRow:
    given = record[key]
    messages = plain_messages(given, where=where)
    trained = [_is_trained(message, f"{where}: message {i}") for i, message in enumerate(messages)]
    if record.get("system") and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _string(record, "system", where)}, *messages]
        trained = [False, *trained]
    for message in messages:
        for weight in ("loss_weight", "weight", "train"):
            message.pop(weight, None)
    tools = plain_tools(record.get("tools"), where=where)
    expect_characters(messages, f"{where}: messages")
    expect_characters(tools, f"{where}: tools")
    return ChatRow(where, messages, trained, tools, key)


def _is_trained(message: Mapping[str, Any], where: str) -> bool:
    weight = next((message[key] for key in ("loss_weight", "weight", "train") if message.get(key) is not None), None)
    is_answer = bool(message["role"] == "assistant")
    if weight is None:
        return is_answer
    expect(
        weight in (0, 1) and isinstance(weight, int | float),
        DataError,
        f"{where} has the loss weight {weight!r}",
        expected="0 or 1",
        fix="Fractions are not supported: repeat the row instead.",
    )
    expect(
        is_answer or not weight,
        DataError,
        f"{where} is of role {message['role']!r} and has a loss weight of 1",
        expected="weights of 1 on assistant messages only",
        fix='Use data.loss_on = "all" to train on everything.',
    )
    return bool(weight)


def _alpaca_row(where: str, record: Mapping[str, Any]) -> ChatRow:
    instruction, output = _string(record, "instruction", where), _string(record, "output", where)
    extra = _string(record, "input", where) if record.get("input") else ""
    messages = [
        {"role": "user", "content": f"{instruction}\n\n{extra}" if extra else instruction},
        {"role": "assistant", "content": output},
    ]
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": _string(record, "system", where)})
    return ChatRow(where, messages, [message["role"] == "assistant" for message in messages], format="alpaca")


def _prompt_row(where: str, record: Mapping[str, Any]) -> PromptRow:
    return PromptRow(where, _string(record, "prompt", where), _string(record, "completion", where))


def _text_row(where: str, record: Mapping[str, Any]) -> TextRow:
    return TextRow(where, _string(record, "text", where))


def _token_row(where: str, record: Mapping[str, Any]) -> TokenRow:
    ids = _integers(record, "input_ids", where)
    labels = _integers(record, "labels", where) if record.get("labels") is not None else list(ids)
    kept = _integers(record, "attention_mask", where) if record.get("attention_mask") is not None else [1] * len(ids)
    expect(
        len(ids) == len(labels) == len(kept),
        DataError,
        f"{where}: {len(ids)} input_ids, {len(labels)} labels, attention_mask of {len(kept)}",
        expected="equal lengths",
    )
    ids = [i for i, keep in zip(ids, kept, strict=True) if keep]
    labels = [label for label, keep in zip(labels, kept, strict=True) if keep]
    wrong = next((t for t, label in enumerate(labels) if label not in (IGNORED_LABEL, ids[t])), None)
    expect(
        wrong is None,
        DataError,
        f"{where}: label {labels[wrong or 0] if labels else 0} at position {wrong} is neither -100 nor the token there",
        expected="unshifted labels",
        fix="Do not shift them: the library does.",
    )
    return TokenRow(where, ids, labels)


_BUILDERS: dict[str, Any] = {
    "messages": lambda where, record: _chat_row(where, record, "messages"),
    "conversations": lambda where, record: _chat_row(where, record, "conversations"),
    "input_ids": _token_row,
    "alpaca": _alpaca_row,
    "prompt": _prompt_row,
    "text": _text_row,
}


def _string(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record[key]
    expect(isinstance(value, str), DataError, f"{where}: {key} is {short(value)}", expected="a string")
    expect_characters(value, f"{where}: {key}")
    return str(value)


def _integers(record: Mapping[str, Any], key: str, where: str) -> list[int]:
    value = record[key]
    good = isinstance(value, list) and all(type(i) is int for i in value)
    expect(good, DataError, f"{where}: {key} is {short(value)}", expected="a list of integers")
    return list(value)


def _braced(record: Mapping[str, Any] | Sequence[str]) -> str:
    names = [str(name) for name in record]
    return "{" + ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") + "}"
