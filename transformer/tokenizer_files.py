"""The files of a tokenizer directory: reading them with errors that say what to do, and writing them unchanged."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from peft_core.errors import FileError, expect
from peft_core.files import atomic_write

SAVED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def load_backend(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer in ``directory/tokenizer.json``, its truncation and padding off.  Raises FileError."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        other = [
            name
            for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
            if (directory / name).is_file()
        ]
        fix = (
            f"It has {', '.join(other)}: load it once with transformers' AutoTokenizer and save_pretrained, which "
            "writes tokenizer.json."
            if other
            else "Download the tokenizer files of the model too."
        )
        raise FileError(f"{directory} has no tokenizer.json; expected one. {fix}")
    with file.open("rb") as stream:
        pointer = stream.read(64).startswith(b"version https://git-lfs")
    expect(
        not pointer,
        FileError,
        f"{file} is a Git LFS pointer",
        expected="the file itself",
        fix="Run: git lfs pull",
    )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise FileError(
            f"{file} cannot be read ({error}); expected a file of the tokenizers package {tokenizers.__version__} or "
            "older. Download it again, or upgrade tokenizers."
        ) from error
    for block, switch_off in (("truncation", backend.no_truncation), ("padding", backend.no_padding)):
        if getattr(backend, block) is not None:
            warnings.warn(f"{file} switches {block} on; it is ignored, rows are never cut or padded here", stacklevel=4)
            switch_off()
    return backend


def asked(directory: str | Path, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``call`` of the tokenizers package, whose failures are faults of ``directory/tokenizer.json``: a FileError."""
    try:
        return call(*args, **options)
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise FileError(
            f"{directory}/tokenizer.json fails on this text ({error}); expected rules that end for any text. Get the "
            "file from the model's source again, or use another tokenizer."
        ) from error


def _is_failure(error: BaseException) -> bool:
    """The package raises bare Exception, and a Rust panic, which is not even that: over a pattern that never ends."""
    known = isinstance(error, Exception) and not isinstance(error, MemoryError)
    return known or type(error).__name__ == "PanicException"


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a ``chat_template.jinja`` file wins over the config, as in transformers."""
    value = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        try:
            templates = {str(entry["name"]): str(entry["template"]) for entry in value}
        except (TypeError, KeyError) as error:
            raise FileError(
                f"{directory}/tokenizer_config.json: chat_template is a list without name and template ({error!r}); "
                "expected a string, or a list of objects with both."
            ) from error
    elif value is not None:
        raise FileError(
            f"{directory}/tokenizer_config.json: chat_template is {type(value).__name__}; expected a string."
        )
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def save_files(source: Path, target: Path, templates: Mapping[str, str], changed: bool) -> None:
    """Copy the tokenizer files of ``source``; write ``templates`` where they are missing, or anew if ``changed``."""
    files = {name: (source / name).read_bytes() for name in SAVED_FILES if (source / name).is_file()}
    expect(
        "tokenizer.json" in files,
        FileError,
        f"{source}/tokenizer.json no longer exists",
        expected="the files this tokenizer was loaded from",
    )
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    if changed or (templates and not config.get("chat_template")):
        config.pop("chat_template", None)
        if list(templates) == ["default"]:
            config["chat_template"] = templates["default"]
        elif templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        files["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    if not templates:
        files.pop("chat_template.jinja", None)
    elif changed or "chat_template.jinja" not in files:
        files["chat_template.jinja"] = templates.get("default", next(iter(templates.values()))).encode()
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        atomic_write(target / name, content)
