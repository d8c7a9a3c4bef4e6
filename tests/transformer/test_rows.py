"""Files and formats to rows; every error names path:line."""

from __future__ import annotations

import json

import pytest

from peft_core.errors import ConfigError, DataError
from transformer.rows import ChatRow, PromptRow, TextRow, TokenRow, data_files, read_rows


def rows_of(tmp_path, content, name="d.jsonl", **options):
    path = tmp_path / name
    if isinstance(content, list):
        content = "\n".join(json.dumps(row) for row in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_rows(path, **options)


def test_formats_are_recognised_by_their_keys(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = rows_of(
        tmp_path,
        [
            {"messages": chat, "text": "rendered", "prompt": "q", "tools": "[]"},
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            {"instruction": "i", "input": "x", "output": "o", "text": "t"},
            {"prompt": "p", "completion": "c", "id": 3},
            {"text": "t"},
            {"input_ids": [1, 2, 0], "labels": [-100, 2, -100], "attention_mask": [1, 1, 0]},
        ],
    )
    assert [type(row) for row in rows] == [ChatRow, ChatRow, ChatRow, PromptRow, TextRow, TokenRow]
    assert [row.format for row in rows] == ["messages", "conversations", "alpaca", "prompt", "text", "input_ids"]
    assert rows[0].messages == chat and rows[0].trained == [False, True]
    assert [m["role"] for m in rows[1].messages] == ["system", "user", "assistant"]
    assert rows[2].messages[0]["content"] == "i\n\nx"
    assert (rows[5].input_ids, rows[5].labels) == ([1, 2], [-100, 2])
    assert rows[4].where == f"{tmp_path / 'd.jsonl'}:5"


def test_columns_and_separator(tmp_path):
    (row,) = rows_of(
        tmp_path,
        [{"question": "q", "answer": "a", "text": "x"}],
        columns={"prompt": "question", "completion": "answer"},
    )
    assert (row.prompt, row.completion) == ("q", "a")
    (row,) = rows_of(tmp_path, "x : 1||yes||no\n\n", "d.txt", columns={"separator": "||"})
    assert (row.prompt, row.completion) == ("x : 1||", "yes||no")
    with pytest.raises(DataError, match=r"d.txt:2: the line has no '\|\|'"):
        rows_of(tmp_path, "a||b\nc", "d.txt", columns={"separator": "||"})
    with pytest.raises(DataError, match=r"d.jsonl:1: data.columns names \['z'\], the row has \{a\}"):
        rows_of(tmp_path, [{"a": 1}], columns={"text": "z"})
    with pytest.raises(ConfigError, match=r"data.columns has \['nope'\]"):
        rows_of(tmp_path, [{"a": 1}], columns={"nope": "a"})
    with pytest.raises(ConfigError, match=r"data.format is 'chatml'"):
        rows_of(tmp_path, [{"a": 1}], format="chatml")


def test_json_array_csv_and_line_numbers(tmp_path):
    rows = rows_of(tmp_path, '[\n{"text": "a\\nb"},\n\n{"text":\n"c"}\n]', "d.json")
    assert [row.where.rsplit(":", 1)[1] for row in rows] == ["2", "4"]
    assert [row.where[-2:] for row in rows_of(tmp_path, '{"text": "a"}\n{"text": "b"}', "d.json")] == [":1", ":2"]
    assert len(rows_of(tmp_path, '{\n"text": "a"\n}', "d.json")) == 1
    rows = rows_of(tmp_path, 'prompt,completion\n"a\nb",c\nd,"e, f"\n', "d.csv")
    assert [(row.prompt, row.completion, row.where[-2:]) for row in rows] == [("a\nb", "c", ":2"), ("d", "e, f", ":4")]
    with pytest.raises(DataError, match=r"d.csv:2: the row has another number of columns than the header; expected 2"):
        rows_of(tmp_path, "prompt,completion\na,b,c\n", "d.csv")
    with pytest.raises(DataError, match=r"d.csv:2: not valid CSV"):
        rows_of(tmp_path, 'prompt,completion\n"a,b\n', "d.csv")


def test_line_separator_character_inside_a_string_does_not_end_a_row(tmp_path):
    (row,) = rows_of(tmp_path, '{"text": "a\u2028b\x85c"}\r\n')
    assert row.text == "a\u2028b\x85c"
    assert [r.text for r in rows_of(tmp_path, "a\u2028b\r\nc", "d.txt")] == ["a\u2028b", "c"]


def test_bad_json_names_line_and_column(tmp_path):
    with pytest.raises(DataError, match=r"d.jsonl:2: not valid JSON \(Expecting ',' at column 14\)"):
        rows_of(tmp_path, '{"text": "a"}\n{"text": "a" 1}')
    with pytest.raises(DataError, match=r"d.json:2: not valid JSON"):
        rows_of(tmp_path, '[{"text": "a"},\n{"text" "b"}]', "d.json")


@pytest.mark.parametrize(
    ("damaged", "text"),
    [
        ('[{"none": "a"},\n{"text": "b"},]', r"d.json:2: not valid JSON \(Expecting value at column 15\): "),
        ('[{"none": "a"}\n{"text": "b"}]', r"d.json:2: not valid JSON \(Expecting ',' at column 1\): "),
        ('[{"none": "a"},\n', r"d.json:2: not valid JSON \(Expecting value at column 1\): "),
        ('[{"none": "a"}\n', r"d.json:2: not valid JSON \(Expecting ',' at column 1\): "),
        ('[{"none": "a"}]\n]', r"d.json:2: not valid JSON \(Extra data at column 1\): "),
        ("[,]", r"d.json:1: not valid JSON \(Expecting value at column 2\): "),
    ],
)
def test_a_damaged_array_is_refused_before_its_rows_are(tmp_path, damaged, text):
    with pytest.raises(DataError, match=text + r"(?s:.*); expected a JSON array of objects\. Fix the file"):
        rows_of(tmp_path, damaged, "d.json")


DEEP, LONG = '{"text": ' + "[" * 100_000, '{"input_ids": [' + "9" * 5000 + "]}"


@pytest.mark.parametrize(
    ("line", "what"),
    [(DEEP, "JSON that is nested too deeply"), (LONG, "JSON with a number of thousands of digits")],
)
def test_what_json_refuses_beside_syntax_names_the_line(tmp_path, line, what):
    with pytest.raises(DataError, match=rf"d.jsonl:2: {what}; expected one JSON object per line\. Fix or remove this"):
        rows_of(tmp_path, '{"text": "a"}\n' + line)
    with pytest.raises(DataError, match=rf"d.json:2: {what}; expected one JSON object per line\. Fix or remove this"):
        rows_of(tmp_path, '{"text": "a"}\n' + line, "d.json")
    with pytest.raises(DataError, match=rf"d.json:3: {what}; expected a JSON array of objects\. Fix the file"):
        rows_of(tmp_path, '[\n{"text": "a"},\n' + line + "]", "d.json")
    with pytest.raises(DataError, match=rf"d.json:1: {what}; expected one JSON object per line\."):
        rows_of(tmp_path, line, "d.json")


def test_a_row_too_deep_for_its_error_text_names_the_line(tmp_path, monkeypatch):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    monkeypatch.setattr("transformer.rows.records", lambda file: [(f"{file}:7", {"text": deep})])  # as of a newer json
    with pytest.raises(
        DataError, match=r"d.jsonl:7: JSON that is nested too deeply; expected a row\. Fix or remove it"
    ):
        rows_of(tmp_path, "{}")


@pytest.mark.parametrize("text", [DEEP, '[{"name": "f", "x": ' + "9" * 5000 + "}]"])
def test_json_inside_a_row_has_the_same_limits(tmp_path, text):
    message = {"role": "user", "content": "a"}
    with pytest.raises(DataError, match=r"d.jsonl:1: tools is not valid JSON"):
        rows_of(tmp_path, [{"messages": [message], "tools": text}])
    with pytest.raises(DataError, match=r"d.jsonl:1: message 0 has a tool call that is not valid JSON"):
        rows_of(tmp_path, [{"messages": [{"role": "function_call", "content": text}]}])
    call = {"function": {"name": "f", "arguments": text}}
    (row,) = rows_of(tmp_path, [{"messages": [{"role": "assistant", "content": "a", "tool_calls": [call]}]}])
    assert row.messages[0]["tool_calls"] == [call]


CUT = "hi \ud83d"  # what is left of an emoji that was cut in UTF-16


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"text": CUT}, "text"),
        ({"prompt": "p", "completion": CUT}, "completion"),
        ({"instruction": CUT, "output": "o"}, "instruction"),
        ({"messages": [{"role": "user", "content": CUT}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": CUT}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "system": CUT}, "system"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", CUT: 1}]}, "tools"),
    ],
)
def test_half_a_character_names_the_row(tmp_path, row, key):
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path, [{"text": "a"}, row])
    text = f"d.jsonl:2: {key} holds '\\ud83d' after 'hi '; expected whole characters. It is half of a cut emoji"
    assert text in str(caught.value)
    assert rows_of(tmp_path, [{"text": "a", "unused": CUT}])[0].text == "a"


def test_unknown_keys_propose_the_columns(tmp_path):
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path, [{"question": "q", "answer": "a"}])
    text = str(caught.value)
    assert ":1: keys {question, answer} match no known format. Known: messages | " in text
    assert text.endswith('Add: data.columns = { prompt = "question", completion = "answer" }')
    with pytest.raises(DataError, match=r"match not data.format = 'text' \(needs text\)"):
        rows_of(tmp_path, [{"question": "q", "answer": "a"}], format="text")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": 3}, "text is 3; expected a string"),
        ({"messages": "x"}, "messages is 'x'; expected a list"),
        ({"input_ids": [1.5]}, r"input_ids is \[1.5\]; expected a list of integers"),
        ({"input_ids": [1], "labels": [1, 2]}, "1 input_ids, 2 labels, attention_mask of 1; expected equal lengths"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "label 2 at position 0 .* expected unshifted labels"),
        (
            {"messages": [{"role": "user", "content": "a", "loss_weight": 1}]},
            "has a loss weight of 1; expected weights",
        ),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "loss weight 0.5; expected 0 or 1"),
        ([1], r"the row is \[1\]; expected a JSON object"),
    ],
)
def test_wrong_types_name_the_row(tmp_path, row, text):
    with pytest.raises(DataError, match=f"d.jsonl:1.*{text}"):
        rows_of(tmp_path, [row])


def test_empty_and_foreign_files(tmp_path):
    with pytest.raises(DataError, match=r"d.jsonl is empty; expected at least one row"):
        rows_of(tmp_path, "\n")
    with pytest.raises(DataError, match=r"d.json has no rows"):
        rows_of(tmp_path, "[]", "d.json")
    with pytest.raises(DataError, match=r"d.jsonl:2: not UTF-8 text \(byte 0xff\)"):
        rows_of(tmp_path, b'{"text": "a"}\n\xff')
    with pytest.raises(DataError, match=r"ends in '.xlsx'; expected one of"):
        rows_of(tmp_path, "x", "d.xlsx")
    with pytest.raises(DataError, match="does not exist; expected a file, a glob or a directory"):
        data_files(tmp_path / "none")
    with pytest.raises(DataError, match="holds no data file"):
        data_files(tmp_path / "*.nothing")


def test_directory_and_glob_are_sorted(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "notes.md"):
        (tmp_path / name).write_text('{"text": "%s"}' % name)  # noqa: UP031
    assert [row.text for row in read_rows(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert [row.text for row in read_rows(tmp_path / "*.jsonl")] == ["a.jsonl", "b.jsonl"]
