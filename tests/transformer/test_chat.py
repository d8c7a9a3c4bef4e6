"""Messages in one shape, and templates in a sandbox that fails cleanly."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from peft_core.errors import DataError
from transformer.chat import plain_messages, plain_tools, render_chat

HI = [{"role": "user", "content": "hi"}]


def test_environment_is_the_one_templates_are_written_for():
    template = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}|\n{% endfor %}\n"
        "{{ {'a': 'é<'} | tojson }} {{ strftime_now('%Y') }} {{ tools[0].name }} {{ documents[0].t }} {{ bos_token }}"
        "{% generation %}x{% endgeneration %}"
    )
    text = render_chat(
        template, HI * 2, tools=[{"name": "f"}], documents=[{"t": "d"}], now=datetime(2024, 1, 2), bos_token="<s>"
    )
    assert text == 'hi|\n{"a": "é<"} 2024 f d <s>x'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 9 ** 99999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_hostile_template_fails_cleanly_and_soon(template):
    start = time.perf_counter()
    with pytest.raises(DataError, match=r"data.jsonl:3: the chat template"):
        render_chat(template, HI, where="data.jsonl:3")
    assert time.perf_counter() - start < 5


def test_errors_of_a_template_name_the_row():
    with pytest.raises(DataError, match=r"a:7: the chat template refuses these messages \(TemplateError: no system\)"):
        render_chat("{{ raise_exception('no system') }}", HI, where="a:7")
    with pytest.raises(DataError, match="a:7: the chat template is not valid at its line 2"):
        render_chat("\n{% if %}", HI, where="a:7")


def test_all_published_shapes_become_one():
    assert plain_messages([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    parts = [{"type": "text", "value": "a"}, {"type": "text", "text": "b"}, {"type": "reasoning", "value": "r"}]
    call = '{"name": "f", "arguments": {"x": 1}}'
    (message,) = plain_messages([{"role": "assistant", "content": [*parts, {"type": "tool_call", "value": call}]}])
    assert message == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "r",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    (message,) = plain_messages([{"from": "function_call", "value": call}])
    assert message["role"] == "assistant" and message["tool_calls"][0]["function"]["name"] == "f"
    openai = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    (message,) = plain_messages([{"role": "assistant", "content": None, "tool_calls": [openai]}])
    assert message["content"] == "" and message["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert plain_tools('[{"name": "f"}]') == [{"type": "function", "function": {"name": "f"}}]
    assert plain_tools("") is None


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], r"r:1: messages is \[\]; expected a list"),
        ([3], "r:1: message 0 is 3; expected an object"),
        ([{"content": "x"}], "r:1: message 0 has the role None"),
        ([{"role": "user", "content": 5}], "r:1: message 0 has the content 5; expected a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], "Images and sound are not supported"),
        ([{"from": "function_call", "value": "{"}], "tool call that is not valid JSON"),
        ([{"from": "function_call", "value": "{}"}], "expected an object with 'name' and 'arguments'"),
        ([{"role": "assistant", "content": "", "tool_calls": 3}], "tool_calls 3; expected a list"),
        ([{"role": "assistant", "content": "", "tool_calls": [3]}], "tool call 3; expected an object"),
    ],
)
def test_other_shapes_are_refused_by_row_and_message(messages, text):
    with pytest.raises(DataError, match=text):
        plain_messages(messages, where="r:1")


def test_wrong_tools_are_refused():
    with pytest.raises(DataError, match="r:1: tools is not valid JSON"):
        plain_tools("{", where="r:1")
    with pytest.raises(DataError, match="r:1: tools is 3; expected a list of objects"):
        plain_tools(3, where="r:1")
