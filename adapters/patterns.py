"""How long a regular expression may try: an adapter's patterns come with a download, and ``re`` knows no time limit.

``re`` tries every way in which a pattern can match, and nested repetitions have exponentially many. Counted here, from
the parsed pattern, is an upper bound of the ways from one start in a module path, which is short and of plain names.
"""

from __future__ import annotations

import re
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from peft_core.errors import ConfigError, expect

MAX_WAYS = 3 * 10**7
_PATH = 64  # places in a path where a repetition may end
_SAME = 8  # places in a path with one given letter
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_ALPHABET = [chr(code) for code in range(32, 127)]


def expect_pattern(name: str, pattern: str, full: str | None = None) -> None:
    """Raise ConfigError unless ``pattern`` is a regular expression that ends in a short time on every module path.

    ``full``: the expression that ``pattern`` becomes a part of.
    """
    try:
        re.compile(pattern)
        re.compile(full or pattern)
        count = _ways(list(_parser.parse(full or pattern)))
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{name} {pattern!r} is not a regular expression ({error}); expected one. Fix it.") from error
    expect(count <= MAX_WAYS, ConfigError,
           f"{name} {pattern!r} may try for hours: its repetitions match in too many ways",
           expected="no repetition of what itself varies, as in (.+)+, and few .* side by side",
           fix="Write it without, or list the module names.")  # fmt: skip


def _ways(items: list[Any], after: set[str] | None = None) -> int:
    """In how many ways a sequence can match from one start; ``after``: the letters that can follow, None if many."""
    count = 1
    for i, (op, value) in enumerate(items):
        count *= _item(str(op), value, _starts(items[i + 1 : i + 2]) if i + 1 < len(items) else after)
    return min(count, MAX_WAYS + 1)


def _item(op: str, value: Any, after: set[str] | None) -> int:
    if op in _REPEATS:
        low, high, body = value
        return _repeat(low, high, body, after)
    if op == "BRANCH":
        return _choice(value[1], after)
    if op == "GROUPREF_EXISTS":
        return _choice([branch or [] for branch in value[1:]], after)
    if op == "SUBPATTERN":
        return _ways(list(value[-1]), after)
    if op in ("ASSERT", "ASSERT_NOT"):
        return _ways(list(value[-1]))
    return _ways(list(value)) if op == "ATOMIC_GROUP" else 1


def _choice(branches: list[Any], after: set[str] | None) -> int:
    """Alternatives that begin differently exclude each other."""
    starts = [_starts(list(branch)) for branch in branches]
    letters = [letter for some in starts for letter in some or ()]
    exclude = all(starts) and len(set(letters)) == len(letters)
    counts = [_ways(list(branch), after) for branch in branches]
    return max(counts) if exclude else sum(counts)


def _repeat(low: int, high: Any, body: Any, after: set[str] | None) -> int:
    inner, most = _ways(list(body)), min(int(high), _PATH)
    ends = sum(inner**rounds for rounds in range(min(int(low), most), most + 1))
    if len(body) == 1 and inner == 1 and ends > 1 and after:  # one letter again and again, up to one of a few letters
        ends = min(ends, _SAME) if _takes(body[0], after) else 1
    idle = max(1, int(low)) if body.getwidth()[0] == 0 else 1  # rounds that may eat no letter, each of them made
    return idle * ends


def _starts(items: list[Any]) -> set[str] | None:
    """The letters, in lower case, that a sequence begins with, if they are few; None: it may begin with many."""
    if not items:
        return None
    op, value = str(items[0][0]), items[0][1]
    if op == "LITERAL":
        return {chr(value).lower()}
    if op == "SUBPATTERN":
        return _starts(list(value[-1]))
    if op in _REPEATS and value[0] > 0:
        return _starts(list(value[2]))
    if op == "BRANCH":
        starts = [_starts(list(branch)) for branch in value[1]]
        return set().union(*(some or () for some in starts)) if all(starts) else None
    few = op == "IN" and len(value) <= _SAME and all(str(kind) == "LITERAL" for kind, _ in value)
    return {chr(code).lower() for _, code in value} if few else None


def _takes(item: Any, letters: set[str]) -> bool:
    """Whether an item may match one of ``letters``, in either case of them."""
    op, value = str(item[0]), item[1]
    both = {form for letter in letters for form in (letter, letter.upper())}
    if op == "LITERAL":
        return chr(value) in both
    if op == "NOT_LITERAL":
        return any(letter != chr(value).lower() for letter in letters)
    if op != "IN":
        return True
    inside = any(_listed(str(kind), what, letter) for kind, what in value for letter in both)
    if str(value[0][0]) != "NEGATE":
        return inside
    return not all(any(_listed(str(k), w, form) for k, w in value for form in (x, x.upper())) for x in letters)


def _listed(kind: str, what: Any, letter: str) -> bool:
    if kind == "LITERAL":
        return chr(what) == letter
    if kind == "RANGE":
        return bool(what[0] <= ord(letter) <= what[1])
    shapes = {"DIGIT": r"\d", "WORD": r"\w", "SPACE": r"\s", "NOT_DIGIT": r"\D", "NOT_WORD": r"\W", "NOT_SPACE": r"\S"}
    shape = shapes.get(str(what).removeprefix("CATEGORY_"))
    return shape is not None and re.match(shape, letter) is not None
