"""Chat messages to text: one fixed shape for messages, and a model's own template rendered in a sandbox.

Templates come from downloaded directories, so they are untrusted programs. Three things keep them harmless: jinja2's
sandbox (no private attributes), a budget for loops and repetitions, and a bound on the size of what they write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from peft_core.errors import DataError

MAX_RENDERED_CHARACTERS = 20_000_000
MAX_LOOP_STEPS = 1_000_000
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


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}``: some templates mark answers with it; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which also stops a private attribute at once and repetitions that would fill the memory."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # The stock answer is an undefined value that prints as nothing: an attack would pass for an empty string.
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for size, times in ((left, right), (right, left)):
                if (
                    isinstance(size, str | list | tuple)
                    and isinstance(times, int)
                    and len(size) * times > MAX_LOOP_STEPS
                ):
                    raise SecurityError(f"a repetition of {len(size) * times:,} elements is not allowed")
        elif operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise SecurityError(f"the power {right} is not allowed")
        elif operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\*|\d{4})", left):
            raise SecurityError("a field width of more than three digits is not allowed")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, and non-ASCII text: the model would be trained on the escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)


def _counted_range() -> Callable[..., range]:
    steps = 0

    def counted(*bounds: int) -> range:
        nonlocal steps
        numbers = range(*bounds)
        # Subtraction instead of len(): the length of range(10**30) does not fit into len().
        steps += max(0, (numbers.stop - numbers.start) // numbers.step) + 1
        if steps > MAX_LOOP_STEPS:
            raise SecurityError(f"more than {MAX_LOOP_STEPS:,} loop steps are not allowed")
        return numbers

    return counted


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
        for piece in _compile(template).generate(
            **variables,
            messages=[dict(message) for message in messages],
            tools=list(tools) if tools else None,
            documents=list(documents) if documents else None,
            add_generation_prompt=add_generation_prompt,
            range=_counted_range(),
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
        raise DataError(f"{where}: messages is {_short(messages)}; expected a list of at least one message.")
    return [_plain_message(message, f"{where}: message {i}") for i, message in enumerate(messages)]


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {_short(message)}; expected an object with 'role' and 'content'.")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise DataError(f"{where} has the role {_short(role)}; expected a string under 'role' (or 'from').")
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
        raise DataError(f"{where} has the content {_short(content)}; expected a string or a list of text parts.")
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
                f"{where} has the content part {_short(part)}; expected type 'text', 'reasoning' or 'tool_call' with a "
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
    except json.JSONDecodeError as error:
        raise DataError(f"{where} has a tool call that is not valid JSON ({error}): {_short(value)}.") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(f"{where} has the tool call {_short(value)}; expected an object with 'name' and 'arguments'.")
    return [{"type": "function", "function": call} for call in calls]


def _parsed_arguments(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise DataError(f"{where} has the tool call {_short(call)}; expected an object with 'function' or 'name'.")
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        # OpenAI writes arguments as a JSON string; templates apply tojson themselves and would quote it twice.
        try:
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        except json.JSONDecodeError:
            return call
    return call


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{where} has tool_calls {_short(value)}; expected a list.")
    return value


def plain_tools(tools: Any, *, where: str = "chat") -> list[dict[str, Any]] | None:
    """Return tool schemas as templates expect them (``{"type": "function", "function": {...}}``), or None for no tools.

    Accepts a list or its JSON text, of whole schemas or of bare functions. Raises DataError for anything else.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: tools is not valid JSON ({error}): {_short(tools)}.") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: tools is {_short(tools)}; expected a list of objects, or its JSON text.")
    return [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool} for tool in tools
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
