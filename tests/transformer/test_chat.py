"""Messages in one shape, and templates in a sandbox that fails cleanly."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from peft_core.backend import peak_rss_bytes
from peft_core.errors import DataError
from transformer import sandbox
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
        # filters and methods that pad
        "{{ 'a' | center(10**9) }}",
        "{{ 'a' | center(width=10**9) }}",
        "{{ 'a'.center(10**9) }}{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ 'a\tb'.expandtabs(10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ ('a\n' * 10000) | indent('x' * 100000) }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ [1] | slice(10**9, 'x') | list }}",
        "{{ [1, 2] | tojson(indent=10**9) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ strftime_now('%999999999d') }}",
        # texts that multiply
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
        "{{ ('a' * 100000) | join('b' * 100000) }}",
        "{{ ('b' * 100000).join('a' * 100000) }}",
        "{{ (range(100000) | map('string')) | join('b' * 100000) }}",
        "{{ ['a' * 100000] * 100000 }}",
        "{% set x = ['a' * 100000] %}{% set y = [x] * 1000 %}{{ y }}",
        "{% set x = [['a' * 1000000, 'a' * 1000000]] %}{% set x = [x, x, x, x, x, x] %}{{ [x, x, x, x] | tojson }}",
        "{{ ([{'a': 'b' * 1000000}] * 100) | map(attribute='a') | join }}",
        "{{ ''.join(([{'a': 'b' * 1000000}] * 100) | map(attribute='a')) }}",
        "{{ (range(100000) | map('center', 999)) | list | length }}{{ (range(900000) | map('center', 999)) | list }}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        # output that a variable keeps, loops without range, calls without loops
        "{% set x %}{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(900000) %}" + "static " * 1000 + "{% endfor %}{% endset %}",
        "{% set l = [1] * 10000 %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}",
        "{% set l = 'a' * 10000 %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{{ lipsum(n=10**6) }}",
    ],
)
def test_hostile_template_fails_cleanly_and_soon(template):
    start, before = time.perf_counter(), peak_rss_bytes()
    with pytest.raises(DataError, match=r"data.jsonl:3: the chat template"):
        render_chat(template, HI, where="data.jsonl:3")
    assert time.perf_counter() - start < 20  # of hours; speed is no promise here
    assert peak_rss_bytes() - before < 500e6  # of gigabytes


def test_seconds_are_limited_too(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.0)
    with pytest.raises(DataError, match="more than 0 seconds are not allowed"):
        render_chat("{% for m in messages %}{{ m.content }}{% endfor %}", HI)


def test_harmless_uses_of_the_limited_operations():
    template = (
        "{{ 'a' | center(5) }}|{{ 'ab'.ljust(4) }}|{{ 'a\nb' | indent(2) }}|{{ '%05.1f' | format(2.5) }}|"
        "{{ '{:>4}'.format(7) }}|{{ [1, 2] | tojson(indent=2) }}|{{ messages | map(attribute='role') | join(', ') }}|"
        "{{ '-'.join(messages | map(attribute='content')) }}|{{ 'x' ~ 1 ~ none }}|{{ 'aXa'.replace('X', '--') }}|"
        "{{ [3, 1] | sort | first }}|"
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}|"
        "{{ 10**9 }}|{{ (10**9) | tojson }}|{{ messages[-1]['content'] | trim | upper }}|{{ missing is defined }}|"
        "{% for k, v in {'b': 1}.items() %}{{ k }}{{ v | string }}{% else %}none{% endfor %}|{{ missing }}|"
        "{% set n = namespace(found=false) %}{% for m in messages if m.role == 'user' %}{% set n.found = true %}"
        "{% endfor %}{{ n.found }}|{% set t %}{{ 'kept' }}{% endset %}{{ t }}|{{ range(3) | list }}|"
        "{{ 'long content ' * 10 | int }}"
    )
    assert render_chat(template, HI) == (
        "  a  |ab  |a\n  b|002.5|   7|[\n  1,\n  2\n]|user|hi|x1None|a--a|1|1/1True |1000000000|1000000000|HI|False|"
        "b1||True|kept|[0, 1, 2]|" + "long content " * 10
    )


def test_a_long_row_is_not_taken_for_an_attack():
    rows = [{"role": role, "content": "word " * 100_000} for role in ("user", "assistant")]
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content | trim) ~ '\n' }}{% endfor %}"
    assert len(render_chat(template, rows)) > 999_000


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
