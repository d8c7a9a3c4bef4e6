"""A Hugging Face tokenizer directory: text to token ids and back, with the names transformers users know.

The ids come from ``tokenizer.json`` through the ``tokenizers`` package. What that file's post-processor adds around a
text (BOS, EOS) is measured once and then kept here as ``prefix_ids`` and ``suffix_ids``: the package's own
post-processors also move character offsets, and a loss mask needs the offsets as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from peft_core.checkpoint import read_json
from peft_core.errors import ConfigError, DataError, FileError, expect
from peft_core.tensor import Tensor
from transformer.chat import expect_characters, plain_messages, plain_tools, render_chat
from transformer.hub import resolve_directory
from transformer.tokenizer_files import asked, load_backend, read_templates, save_files

SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
Offsets = list[tuple[int, int]]


class Encoded(dict[str, Any]):
    """What calling a tokenizer returns: a dict whose keys (``input_ids``, ``attention_mask``) are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Encoded:
        """The same with its Tensors on ``device``."""
        return Encoded({key: value.to(device) if isinstance(value, Tensor) else value for key, value in self.items()})


class Tokenizer:
    """Text to ids and back, special tokens, the chat template, and saving the files unchanged."""

    def __init__(self, path: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: Any) -> None:
        self.name_or_path = str(path)
        self.backend = backend
        self.config = dict(config)
        self._templates: dict[str, str] = template
        self._saved_templates = dict(template)
        self._tokens = {name: self._special_token(name) for name in SPECIAL_NAMES}
        added = backend.get_added_tokens_decoder()
        self._special_ids = {i for i, token in added.items() if token.special}
        # A byte-level decoder reads the letters of an added token as bytes: tokens with other letters are kept apart.
        self._literal = {i: token.content for i, token in added.items() if not token.content.isascii()}
        self._added = {i: token.content for i, token in added.items()}
        self.prefix_ids, self.suffix_ids = self._around()
        backend.post_processor = None
        self._size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _special_token(self, name: str) -> str | None:
        value = self.config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None or content == "":
            return None
        expect(
            isinstance(content, str),
            FileError,
            f"{self.name_or_path}/tokenizer_config.json: {name} is {content!r}",
            expected="a string",
        )
        if self.backend.token_to_id(content) is not None:
            return str(content)
        expect(
            name in ("pad_token", "unk_token"),  # this library never pads inside the model
            FileError,
            f"{self.name_or_path}: {name} {content!r} is not in the vocabulary of tokenizer.json",
            expected="a token of the vocabulary",
            fix=f"Correct {name} in tokenizer_config.json, or add the token to tokenizer.json.",
        )
        return None

    def _around(self) -> tuple[list[int], list[int]]:
        # add_bos_token of tokenizer_config.json is not read: beside a tokenizer.json, transformers 5 ignores it too.
        plain = asked(self.name_or_path, self.backend.encode, "a", add_special_tokens=False).ids
        full = asked(self.name_or_path, self.backend.encode, "a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
        raise FileError(
            f"{self.name_or_path}/tokenizer.json: its post-processor turns {plain} into {full}; expected one that only "
            "adds tokens before and after. Use a tokenizer with a TemplateProcessing post-processor."
        )

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a directory, or of a Hub id in the local cache. Raises FileError saying what to do."""
        directory = resolve_directory(path)
        backend = load_backend(directory)
        config = {
            **read_json(directory / "special_tokens_map.json", {}),
            **read_json(directory / "tokenizer_config.json", {}),
        }
        return cls(directory, backend, config, read_templates(directory, config))

    # ---- ids

    def _encoding(self, text: str) -> Any:
        return asked(self.name_or_path, self.backend.encode, _as_text(text), add_special_tokens=False)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``, with the BOS and EOS that the tokenizer itself adds unless told otherwise."""
        ids: list[int] = self._encoding(text).ids
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Return the ids of ``text`` without added tokens, and for each the (start, end) of its characters."""
        return self.encode_batch_with_offsets([text])[0]

    def encode_batch_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], Offsets]]:
        """Return ``encode_with_offsets`` of each text, computed on all cores."""
        clean = [_as_text(text) for text in texts]
        encodings = asked(self.name_or_path, self.backend.encode_batch, clean, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def with_prefix(self, ids: list[int]) -> list[int]:
        """Return ids that start with exactly what the tokenizer puts first (its BOS): added only if absent."""
        return ids if ids[: len(self.prefix_ids)] == self.prefix_ids else [*self.prefix_ids, *ids]

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        *,
        padding: bool = False,
        truncation: bool = False,
        max_length: int | None = None,
        padding_side: str = "right",
        return_tensors: str | None = None,
    ) -> Encoded:
        """Return ``input_ids`` and ``attention_mask`` of one text (lists) or of several (lists of lists, or arrays).

        ``padding`` fills rows up to the longest with ``pad_token_id`` (or ``eos_token_id``); ``return_tensors``: "np"
        gives int64 arrays (B, T), "pt" (the name in people's code) Tensors of them. Raises ConfigError for other tensor
        kinds, and when ragged rows cannot form an array.
        """
        expect(
            return_tensors in (None, "np", "pt"),
            ConfigError,
            f"return_tensors is {return_tensors!r}",
            expected="None, 'np' or 'pt'",
            fix="Models here take NumPy arrays and Tensors of peft_core.",
        )
        texts = [text] if isinstance(text, str) else list(text)
        rows = [self.encode(one, add_special_tokens) for one in texts]
        if truncation:
            expect(max_length, ConfigError, "truncation=True without max_length", expected="max_length >= 1")
            rows = [row[:max_length] for row in rows]
        masks = [[1] * len(row) for row in rows]
        if padding:
            fill = self.pad_token_id if self.pad_token_id is not None else self.eos_token_id
            width = max(len(row) for row in rows)
            rows = [_padded(row, width, fill or 0, padding_side) for row in rows]
            masks = [_padded(mask, width, 0, padding_side) for mask in masks]
        if return_tensors is not None:
            lengths = sorted({len(row) for row in rows})
            expect(
                len(lengths) == 1,
                ConfigError,
                f"rows of {lengths} tokens cannot form one array",
                expected="rows of equal length",
                fix="Pass padding=True.",
            )
            wrap = Tensor if return_tensors == "pt" else np.asarray
            return Encoded(input_ids=wrap(np.array(rows)), attention_mask=wrap(np.array(masks)))  # (B, T) int64
        if not isinstance(text, str):
            return Encoded(input_ids=rows, attention_mask=masks)
        return Encoded(input_ids=rows[0], attention_mask=masks[0])

    # ---- text

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids (a list, an array, or one id)."""
        numbers = [int(i) for i in np.asarray(ids if np.ndim(ids) or np.isscalar(ids) else list(ids)).reshape(-1)]  # type: ignore[arg-type]
        if skip_special_tokens:
            numbers = [i for i in numbers if i not in self._special_ids]
        if not any(i in self._literal for i in numbers):
            return self._decoded(numbers)
        pieces, run = [], list[int]()
        for i in [*numbers, None]:
            if i is not None and i not in self._literal:
                run.append(i)
                continue
            if run:
                pieces.append(self._decoded(run))
                run = []
            if i is not None:
                pieces.append(self._literal[i])
        return "".join(pieces)

    def _decoded(self, ids: list[int]) -> str:
        return str(asked(self.name_or_path, self.backend.decode, ids, skip_special_tokens=False))

    def batch_decode(self, rows: Iterable[Iterable[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return ``decode`` of each row."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of ``text`` as they stand in the vocabulary."""
        tokens: list[str] = self._encoding(text).tokens
        return tokens

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or ids of several; for an unknown one the id of ``unk_token`` (or None)."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the token of an id, or tokens of several; None for an id that does not exist."""
        return self.backend.id_to_token(int(ids)) if np.ndim(ids) == 0 else [self.convert_ids_to_tokens(i) for i in ids]  # type: ignore[arg-type,union-attr]

    # ---- vocabulary and special tokens

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model, without the added ones."""
        return int(self.backend.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        """Largest id + 1: the number of embedding rows that the tokenizer needs."""
        return self._size

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id, added tokens included."""
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def is_added(self, token_id: int) -> bool:
        """Whether the id is one that never comes out of ordinary text by merging (a special or added token)."""
        return token_id in self._added

    def _id(self, name: str) -> int | None:
        token = self._tokens[name]
        found: int | None = None if token is None else self.backend.token_to_id(token)
        return found

    @property
    def bos_token(self) -> str | None:
        return self._tokens["bos_token"]

    @property
    def eos_token(self) -> str | None:
        return self._tokens["eos_token"]

    @property
    def pad_token(self) -> str | None:
        return self._tokens["pad_token"]

    @pad_token.setter
    def pad_token(self, token: str | None) -> None:
        # Every tutorial has the line `tokenizer.pad_token = tokenizer.eos_token`; here padding never decides a label.
        expect(
            token is None or self.backend.token_to_id(token) is not None,
            ConfigError,
            f"pad_token {token!r} is not in the vocabulary",
            expected="an existing token",
        )
        self._tokens["pad_token"] = token

    @property
    def unk_token(self) -> str | None:
        return self._tokens["unk_token"]

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._id("unk_token")

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._special_ids)

    # ---- chat

    @property
    def chat_template(self) -> str | None:
        """The template used for chats, or None; assign a string to use another one."""
        return self._templates.get("default")

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        self._templates = {} if template is None else {"default": template}

    def render(self, messages: Any, *, where: str = "chat", tools: Any = None, **options: Any) -> str:
        """Return the chat as text; see ``render_chat``. Raises DataError without a template."""
        expect(
            self._templates,
            DataError,
            f"{where}: rows are chat messages but {self.name_or_path} has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            fix="Use an instruct model, or set model.chat_template to a template file.",
        )
        tools = plain_tools(tools, where=where)
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default") or next(iter(self._templates.values()))
        tokens = {name: token for name, token in self._tokens.items() if token is not None}
        return render_chat(
            template, plain_messages(messages, where=where), tools=tools, where=where, **{**tokens, **options}
        )

    def apply_chat_template(
        self,
        messages: Any,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        tools: Any = None,
        *,
        documents: Any = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> Any:
        """Return a chat as token ids, or as text with ``tokenize=False``; ``variables`` reach the template.

        The text is tokenized without added tokens; a BOS that this tokenizer adds and the template lacks is put first.
        """
        text = self.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            now=now,
            **variables,
        )
        return self.with_prefix(self.encode(text, add_special_tokens=False)) if tokenize else text

    # ---- files

    def save_pretrained(self, path: str | Path) -> None:
        """Copy the tokenizer's files byte for byte, with the chat template in both places where programs look for it.

        ``tokenizer_config.json`` is written anew only if its template differs. ``added_tokens.json`` is not written:
        one server counts it as new tokens. Raises FileError if the source is gone.
        """
        changed = self._templates != self._saved_templates
        save_files(Path(self.name_or_path), Path(path), self._templates, changed)


class AutoTokenizer:
    """The name under which transformers users look for ``from_pretrained``."""

    @staticmethod
    def from_pretrained(path: str | Path) -> Tokenizer:
        """The tokenizer of a directory, or of a Hub id whose files the local cache holds.  Raises FileError."""
        return Tokenizer.from_pretrained(resolve_directory(path))


def _as_text(text: Any) -> str:
    expect(isinstance(text, str), DataError, f"text to tokenize is {type(text).__name__}", expected="str")
    expect_characters(text, "text to tokenize")
    return str(text)


def _padded(row: list[int], width: int, fill: int, side: str) -> list[int]:
    filling = [fill] * (width - len(row))
    return filling + row if side == "left" else row + filling
