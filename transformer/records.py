"""Data files to records, the values of their lines; every error names ``path:line``."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft_core.errors import DataError, expect

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".txt", ".parquet")
_AN_OBJECT_A_LINE = "expected one JSON object per line. Fix or remove this line."
_AN_ARRAY = "expected a JSON array of objects. Fix the file, or name it .jsonl if each line is an object."
TOO_DEEP = "JSON that is nested too deeply"
_BLANK = re.compile(r"[ \t\r\n]*")


def records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (``path:line``, value) of each record of a file, in order.  Raises DataError."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_records(file)
        return
    expect(
        suffix in SUFFIXES,
        DataError,
        f"{file} ends in {suffix!r}",
        expected=f"one of {' '.join(SUFFIXES)}",
        fix="Rename the file after its format.",
    )
    text = _read_text(file)
    if suffix == ".json":
        yield from _json_records(file, text)
    elif suffix == ".csv":
        yield from _csv_records(file, text)
    else:
        # Only "\n" ends a row: str.splitlines would also cut at U+2028, which is legal inside a JSON string.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"{file}:{number}"
                yield where, {"text": line.rstrip("\r")} if suffix == ".txt" else _parsed(line, file, number)


def _read_text(file: Path) -> str:
    content = file.read_bytes()
    expect(content.strip(), DataError, f"{file} is empty", expected="at least one row")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file}:{line}: not UTF-8 text (byte 0x{content[error.start]:02x}); expected UTF-8. "
            f"Convert it: iconv -f latin1 -t utf-8 {file}"
        ) from error


def _parsed(text: str, file: Path, line: int = 1, expected: str = _AN_OBJECT_A_LINE) -> Any:
    """The value of a JSON text that starts on ``line``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, text, file, line, expected) from error


def _unreadable(error: Exception, text: str, file: Path, line: int, expected: str) -> DataError:
    """What json raised, in words: besides syntax it has limits, on nesting and on the digits of a number."""
    if isinstance(error, json.JSONDecodeError):
        message = error.msg.replace(" delimiter", "")
        line += error.lineno - 1
        what = f"not valid JSON ({message} at column {error.colno}): {_around(text, error.pos)}"
    else:
        what = TOO_DEEP if isinstance(error, RecursionError) else "JSON with a number of thousands of digits"
    return DataError(f"{file}:{line}: {what}; {expected}")


def _around(text: str, position: int) -> str:
    start, stop = max(0, position - 20), position + 20
    return ("..." if start else "") + text[start:stop].strip() + ("..." if stop < len(text) else "")


def _json_records(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Elements of a JSON array with the line each starts on, or (a common misnomer) one object per line."""
    start = len(text) - len(text.lstrip())
    if text[start] == "[":
        yield from list(_elements(file, text, start))  # a damaged file is one error, before any row is used
        return
    first = next(line for line in text.split("\n") if line.strip())
    if first.strip() != text.strip() and not _is_json(first):
        yield f"{file}:1", _parsed(text, file, expected=_AN_ARRAY)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{file}:{number}", _parsed(line, file, number)


def _elements(file: Path, text: str, start: int) -> Iterator[tuple[str, Any]]:
    """(``path:line``, value) of each element of the JSON array at ``start``."""
    decoder, line, counted = json.JSONDecoder(), 1, 0
    position = _after_blank(text, start + 1)
    more = text[position : position + 1] != "]"
    try:
        while more:
            line, counted = line + text.count("\n", counted, position), position
            value, end = decoder.raw_decode(text, position)
            yield f"{file}:{line}", value
            position = _after_blank(text, end)
            more = text[position : position + 1] == ","
            position = _after_blank(text, position + 1) if more else position
        if text[position : position + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
        if (position := _after_blank(text, position + 1)) < len(text):
            raise json.JSONDecodeError("Extra data", text, position)
    except (ValueError, RecursionError) as error:
        syntax = isinstance(error, json.JSONDecodeError)  # knows its line, counted from the start of the text
        raise _unreadable(error, text, file, 1 if syntax else line, _AN_ARRAY) from error


def _after_blank(text: str, position: int) -> int:
    found = _BLANK.match(text, position)
    return found.end() if found else position


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return not isinstance(error, json.JSONDecodeError)  # whole, though more than json takes
    return True


def _csv_records(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses a field of more than 128 KiB
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    start = 2
    try:
        for record in reader:
            where = f"{file}:{start}"
            expect(
                None not in record and None not in record.values(),
                DataError,
                f"{where}: the row has another number of columns than the header",
                expected=f"{len(reader.fieldnames or ())} columns ({', '.join(reader.fieldnames or ())})",
                fix='Quote fields that contain a comma: "a, b".',
            )
            yield where, record
            start = reader.line_num + 1
    except csv.Error as error:
        where = f"{file}:{start}"
        raise DataError(f"{where}: not valid CSV ({error}); expected comma-separated fields.") from error


def _parquet_records(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{file}: reading parquet needs pyarrow; expected it installed. pip install pyarrow") from error
    for number, record in enumerate(pyarrow.parquet.read_table(file).to_pylist(), 1):
        yield f"{file}:{number}", record
