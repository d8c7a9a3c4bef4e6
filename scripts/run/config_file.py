"""From a TOML file and ``section.key=value`` arguments to a RunConfig, or to one sentence that says what to change."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from peft_core.checkpoint import parse_size
from peft_core.errors import ConfigError
from run.config import SECTIONS, RunConfig
from run.names import ALIASES, NOT_YET, PACKING, means_unused

Note = Callable[[str], None]
Where = dict[str, str]  # "section.key" -> "file.toml:14" or "command line"


def load_config(path: str | Path | None, overrides: Sequence[str] = (), note: Note = print) -> RunConfig:
    """The RunConfig of the file at ``path`` with ``overrides`` on top; ``note`` is told each name it translates.

    Raises ConfigError for a file that cannot be read, an unknown key, a wrong value, and settings that exclude another.
    """
    tables, where = ({}, {}) if path is None else _read(Path(path))
    return build_config(tables, overrides, note, where, source=str(path) if path else "command line")


def build_config(
    tables: dict[str, Any],
    overrides: Sequence[str] = (),
    note: Note = print,
    where: Where | None = None,
    source: str = "",
) -> RunConfig:
    """The RunConfig of ``tables`` (section -> key -> value) with ``overrides`` on top."""
    places: Where = dict(where or {})
    settings = _translate(_flatten(tables, places, source), places, note)
    given = dict(map(parse_override, overrides))
    places.update(dict.fromkeys(given, "command line"))
    settings.update(_translate(given, places, note))  # translated apart: an override may use the other name of a key
    nested: dict[str, dict[str, Any]] = {}
    for full, value in settings.items():
        section, key = full.split(".", 1)
        nested.setdefault(section, {})[key] = value
    for name in SECTIONS:
        nested.setdefault(name, {})
    try:
        config = RunConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(_explain(error, settings, places, source)) from None
    _check_together(config, places)
    return config


def parse_override(text: str) -> tuple[str, Any]:
    """The full key and the value of ``section.key=value``; what is no TOML value is taken as text."""
    key, sign, value = text.partition("=")
    if not sign or "." not in key:
        raise ConfigError(f"argument {text!r} is not section.key=value; expected for example train.learning_rate=1e-4.")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def override_names(overrides: Sequence[str]) -> set[str]:
    """The settings that ``overrides`` give, under our names."""
    keys = [parse_override(text)[0] for text in overrides]
    return {full if _is_ours(full) else ALIASES.get(full.rsplit(".", 1)[-1], full) for full in keys}


def _is_ours(full: str) -> bool:
    section, _, key = full.partition(".")
    return section in SECTIONS and key in SECTIONS[section].model_fields


def to_toml(config: RunConfig) -> str:
    """The text of ``config.resolved.toml``: reading it gives an equal config."""
    lines = []
    for section, values in config.to_dict().items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)  # the shortest text that reads back as the same number
    # A JSON string is a TOML basic string, except that TOML wants U+007F escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---------------------------------------------------------------------------------------------- reading


def _read(path: Path) -> tuple[dict[str, Any], Where]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); expected a TOML file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); expected a TOML file."
        ) from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML ({error}); expected lines such as learning_rate = 2e-4.") from error
    return tables, _positions(text, path)


def _positions(text: str, path: Path) -> Where:
    """Where each key stands: tomllib keeps no positions, so the text is looked through once more."""
    found: Where = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{path}:{number}"
        if heading := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            section = heading[1].replace('"', "").replace("'", "")
            found.setdefault(section, place)
        elif key := re.match(r"\s*([A-Za-z0-9_.\-\"' ]+?)\s*=", line):
            name = key[1].replace('"', "").replace("'", "")
            found.setdefault(f"{section}.{name}" if section else name, place)
    return found


def _flatten(tables: dict[str, Any], where: Where, source: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, values in tables.items():
        if section in SECTIONS and isinstance(values, dict):
            flat.update({f"{section}.{key}": value for key, value in values.items()})
        elif section in SECTIONS:
            raise ConfigError(f"{_at(section, where, source)}{section} is {values!r}; expected a section [{section}].")
        else:
            raise ConfigError(_unknown(section, where, source))
    return flat


# ---------------------------------------------------------------------------------------------- other tools' names


def _translate(settings: dict[str, Any], where: Where, note: Note) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for full, value in settings.items():
        section, _, key = full.partition(".")
        target = full
        if full in NOT_YET:
            if not means_unused(value):
                raise ConfigError(f"{_at(full, where)}{full} is {value!r}, which is not supported yet. Remove it.")
            continue
        if section not in SECTIONS:
            raise ConfigError(_unknown(full, where))
        if key not in SECTIONS[section].model_fields:
            if section in ("data", "train") and key in PACKING:
                note(f"note: {full} is not needed: rows are always computed side by side without padding.")
                continue
            if key not in ALIASES:
                raise ConfigError(_unknown(full, where))
            target = ALIASES[key]
            note(f"note: {full} is called {target} here.")
        if target in out or (target != full and target in settings):
            raise ConfigError(f"{_at(full, where)}{target} is given twice ({full}); expected one of the two names.")
        out[target], where[target] = value, where.get(full, "")
    return out


def _unknown(full: str, where: Where, source: str = "") -> str:
    section, _, key = full.partition(".")
    own = list(SECTIONS[section].model_fields) if section in SECTIONS else []
    near = difflib.get_close_matches(key, own, n=1, cutoff=0.6) if key else []
    if not near:  # the right word in the wrong section, or no section at all
        last = full.rsplit(".", 1)[-1]
        every = {name: f"{s}.{name}" for s, cls in SECTIONS.items() for name in cls.model_fields}
        every.update(ALIASES)
        close = difflib.get_close_matches(last, every, n=1, cutoff=0.75)
        near = (
            [every[close[0]]] if close else [] if own else difflib.get_close_matches(section, SECTIONS, n=1, cutoff=0.6)
        )
    if near:
        hint = f"Did you mean {near[0]!r}?"
    else:
        hint = f"Known in [{section}]: {' '.join(own)}." if own else f"Sections: {' '.join(SECTIONS)}."
    return f"{_at(full, where, source)}unknown key {full!r}. {hint}"


# ---------------------------------------------------------------------------------------------- wrong values


def _at(full: str, where: Where, source: str = "") -> str:
    place = where.get(full) or where.get(full.split(".")[0]) or source
    return f"{place}: " if place else ""


def _explain(error: ValidationError, settings: dict[str, Any], where: Where, source: str) -> str:
    """One sentence for the first wrong setting: the whole value as given, not the item that pydantic stopped at."""
    section, key = (str(part) for part in error.errors()[0]["loc"][:2])
    expected = SECTIONS[section].model_fields[key].description
    full = f"{section}.{key}"
    if full not in settings:
        return f"{_at(section, where, source)}{full} is missing; expected {expected}."
    return f"{_at(full, where, source)}{full} is {settings[full]!r}; expected {expected}."


def _check_together(config: RunConfig, where: Where) -> None:
    """Settings that exclude or need each other."""
    train, data = config.train, config.data
    for first, second, a, b in (
        ("train.batch_size", "train.max_tokens_per_step", train.batch_size, train.max_tokens_per_step),
        ("train.warmup_ratio", "train.warmup_steps", train.warmup_ratio, train.warmup_steps),
        ("data.val_path", "data.val_size", data.val_path, data.val_size),
    ):
        if a is not None and b is not None:
            raise ConfigError(
                f"{_at(second, where)}{first} and {second} are both set; expected one of them. Remove one."
            )
    if train.memory_budget != "auto":
        parse_size(train.memory_budget, f"{_at('train.memory_budget', where)}train.memory_budget")
    size = data.val_size
    if isinstance(size, float) and size >= 1 and size != int(size):
        raise ConfigError(
            f"{_at('data.val_size', where)}data.val_size is {size}; expected a share below 1, or whole rows."
        )
    if config.eval.early_stopping_patience and not (data.val_path or data.val_size):
        why = "" if size is None else f" (data.val_size is {size})"
        raise ConfigError(
            f"{_at('eval.early_stopping_patience', where)}eval.early_stopping_patience is set without validation rows"
            f"{why}; expected data.val_path or {'a larger ' if why else ''}data.val_size. "
            "Set one, such as data.val_size=0.05, or remove eval.early_stopping_patience."
        )
