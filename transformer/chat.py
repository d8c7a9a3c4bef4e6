"""Chat messages to text: one fixed shape for messages, and a model's template rendered (in sandbox.py's sandbox)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from peft_core.errors import DataError, short
from transformer.sandbox import MAX_RENDERED_CHARACTERS, compiled, one_rendering

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function": "tool",
}


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    now: datetime | None = None,
    where: str = "chat",
    **variables: Any,
) -> str:
    """Return ``messages`` as the text that ``template`` makes of them.

    The environment is the one Hugging Face templates are written for: ``trim_blocks``, ``lstrip_blocks``, loop
    controls, ``raise_exception``, ``strftime_now``, ``tojson`` without escapes. ``now`` fixes the date that
    ``strftime_now`` prints; ``variables`` are passed on (``bos_token`` ...); ``where`` names the row in errors.
    Raises DataError when the template refuses the messages, is not valid, or does what the sandbox forbids.
    """
    moment = now or datetime.now()
    pieces: list[str] = []
    size = 0
    try:
        with one_rendering():
            for piece in compiled(template).generate(
                **variables,
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=list(documents) if documents else None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=moment.strftime,
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise SecurityError(f"more than {MAX_RENDERED_CHARACTERS:,} characters are not allowed")
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"{where}: the chat template is not valid at its line {error.lineno} ({error.message}); expected a Jinja "
            "template. Fix it, or set model.chat_template to another one."
        ) from error
    except SecurityError as error:
        raise DataError(
            f"{where}: the chat template does what the sandbox forbids ({error}); expected one that only formats "
            "messages. Do not trust this model directory, or set model.chat_template to a template that you know."
        ) from error
    # A template is a program: any operation on a row that lacks what it expects may fail, with any exception class.
    except Exception as error:
        raise DataError(
            f"{where}: the chat template refuses these messages ({type(error).__name__}: {error}); expected roles and "
            f"contents that it knows, got roles {[message.get('role') for message in messages]}. Fix the row, or set "
            "model.chat_template to another template."
        ) from error
    return "".join(pieces)


def plain_messages(messages: Any, *, where: str = "chat") -> list[dict[str, Any]]:
    """Return messages in the one shape templates are written for: ``role``, ``content`` as a string, ``tool_calls``.

    Accepts ``role``/``content`` and ``from``/``value``; a content that is a list of parts (``text`` or ``value``)
    becomes one string, a ``reasoning`` part ``reasoning_content``, a ``tool_call`` part an entry of ``tool_calls``.
    Raises DataError, naming ``where`` and the message's index, for anything else.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages is {short(messages)}; expected a list of at least one message.")
    return [_plain_message(message, f"{where}: message {i}") for i, message in enumerate(messages)]


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {short(message)}; expected an object with 'role' and 'content'.")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise DataError(f"{where} has the role {short(role)}; expected a string under 'role' (or 'from').")
    content = message.get("content", message.get("value"))
    plain = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
    plain = {"role": ROLES.get(role, role), "content": content, **plain}
    if role == "function_call":
        plain.update(role="assistant", content="", tool_calls=_tool_calls(content, where))
    elif isinstance(content, list):
        _join_parts(plain, content, where)
    elif content is None and (plain.get("tool_calls") or plain.get("reasoning_content")):
        plain["content"] = ""  # many templates add content to a string without looking
    elif not isinstance(content, str):
        raise DataError(f"{where} has the content {short(content)}; expected a string or a list of text parts.")
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_parsed_arguments(call, where) for call in _listed(plain["tool_calls"], where)]
    return plain


def _join_parts(plain: dict[str, Any], parts: list[Any], where: str) -> None:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else None
        value = part.get("text", part.get("value")) if isinstance(part, dict) else None
        if kind == "tool_call":
            calls += _tool_calls(value, where)
        elif kind in ("text", "reasoning") and isinstance(value, str):
            (texts if kind == "text" else reasoning).append(value)
        else:
            raise DataError(
                f"{where} has the content part {short(part)}; expected type 'text', 'reasoning' or 'tool_call' with a "
                "string under 'text' or 'value'. Images and sound are not supported: remove such rows."
            )
    plain["content"] = "".join(texts)
    if reasoning:
        plain["reasoning_content"] = "".join(reasoning)
    if calls:
        plain["tool_calls"] = [*_listed(plain.get("tool_calls") or [], where), *calls]


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls written as JSON text (one object or a list), in the shape templates expect."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} has a tool call that is not valid JSON ({error}): {short(value)}.") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(f"{where} has the tool call {short(value)}; expected an object with 'name' and 'arguments'.")
    return [{"type": "function", "function": call} for call in calls]


def _parsed_arguments(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise DataError(f"{where} has the tool call {short(call)}; expected an object with 'function' or 'name'.")
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        # OpenAI writes arguments as a JSON string; templates apply tojson themselves and would quote it twice.
        try:
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        except (ValueError, RecursionError):
            return call
    return call


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{where} has tool_calls {short(value)}; expected a list.")
    return value


def plain_tools(tools: Any, *, where: str = "chat") -> list[dict[str, Any]] | None:
    """Return tool schemas as templates expect them (``{"type": "function", "function": {...}}``), or None for no tools.

    Accepts a list or its JSON text, of whole schemas or of bare functions. Raises DataError for anything else.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: tools is not valid JSON ({error}): {short(tools)}.") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: tools is {short(tools)}; expected a list of objects, or its JSON text.")
    return [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool} for tool in tools
    ]


def expect_characters(value: Any, where: str) -> None:
    """Raise DataError if a text inside ``value`` holds half of a character, which no tokenizer and no file takes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            at = error.start
            raise DataError(
                f"{where} holds {value[at]!r} after {value[max(0, at - 20) : at]!r}; expected whole characters. "
                "It is half of a cut emoji, or a byte that was not UTF-8: remove or repair it."
            ) from error
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            expect_characters(key, where)
            expect_characters(inside, where)
    elif isinstance(value, list):
        for inside in value:
            expect_characters(inside, where)
