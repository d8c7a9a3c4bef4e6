"""The whole way from files to a data set: cutting, dropping, counting, and the errors that stop a useless run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peft_core.errors import ConfigError, DataError
from support.tiny_tokenizer import CHATML, write_tokenizer
from transformer.data import load_dataset
from transformer.tokenizer import AutoTokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def tok(tmp_path):
    return AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "tok"))


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(tmp_path, rows, name="d.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_overlong_rows_are_dropped_cut_or_refused(tmp_path, tok):
    path = write(tmp_path, [chat("q", "yes"), chat("q", "yes " * 50)])
    dropped = load_dataset(path, tok, max_seq_length=40)
    assert len(dropped) == 1 and dropped.report.n_too_long == 1
    cut = load_dataset(path, tok, max_seq_length=40, overlong="truncate")
    ids, labels = cut[1]
    assert len(ids) == 40 and labels[-1] == ids[-1] != tok.eos_token_id  # no false end
    assert cut.report.n_truncated == 1 and cut.report.n_ending == 1
    with pytest.raises(DataError, match=r"d.jsonl:2: the row has \d+ tokens; expected at most max_seq_length=40"):
        load_dataset(path, tok, max_seq_length=40, overlong="error")
    with pytest.raises(ConfigError, match=r"data.overlong is 'x'"):
        load_dataset(path, tok, overlong="x")
    with pytest.raises(ConfigError, match=r"data.max_seq_length is 1"):
        load_dataset(path, tok, max_seq_length=1)


def test_rows_without_a_trained_token_are_dropped_and_counted(tmp_path, tok):
    only_question = {"messages": [{"role": "user", "content": "q"}]}
    data = load_dataset(write(tmp_path, [only_question, chat("q", "a")]), tok)
    assert len(data) == 1 and data.report.n_untrained == 1
    with pytest.raises(DataError, match=r"1 of 1 rows have no trained token \(no assistant message"):
        load_dataset(write(tmp_path, [only_question]), tok)


def test_all_rows_lost_to_the_limit_names_one_that_keeps_them(tmp_path, tok):
    path = write(tmp_path, [chat("q " * 60, "a")] * 3)
    for overlong in ("drop", "truncate"):
        with pytest.raises(
            DataError, match=r"3 of 3 rows have no trained token after cutting to max_seq_length=20"
        ) as e:
            load_dataset(path, tok, max_seq_length=20, overlong=overlong)
        wanted = int(str(e.value).split("Raise it to ")[1].split(" ")[0].replace(",", ""))
        assert "keeps 100.0 %" in str(e.value)
        assert len(load_dataset(path, tok, max_seq_length=wanted)) == 3


def test_template_whose_end_token_does_not_stop_generation_is_refused(tmp_path):
    path = write(tmp_path, [chat("q", "a")])
    base = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "b", eos_token="<|endoftext|>"))
    text = r"eos is <\|endoftext\|> but this template ends turns with <\|im_end\|>"
    with pytest.raises(DataError, match=text):
        load_dataset(path, base)
    end = base.convert_tokens_to_ids("<|im_end|>")
    assert load_dataset(path, base, stop_ids=[end]).report.end_token == "<|im_end|>"
    bare = CHATML.replace("<|im_end|>", "")
    with pytest.raises(DataError, match="this template ends turns with no special token"):
        load_dataset(path, AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "c", template=bare)))


def test_all_ends_cut_off_is_an_error_of_its_own(tmp_path, tok):
    with pytest.raises(DataError, match=r"all rows that end with <\|im_end\|> are longer than max_seq_length=30"):
        load_dataset(write(tmp_path, [chat("q", "a" * 200)]), tok, max_seq_length=30, overlong="truncate")


def test_report_counts_by_an_independent_rule(tmp_path, tok):
    rows = [chat("q" * n, "yes" * n) for n in range(1, 21)]
    data = load_dataset(write(tmp_path, rows), tok)
    lengths = sorted(len(tok.apply_chat_template(row["messages"])) for row in rows)
    trained = sum(len(tok.encode("yes" * n + "<|im_end|>")) for n in range(1, 21))
    report = data.report
    assert (report.n_tokens, report.n_trained, report.length_max) == (sum(lengths), trained, lengths[-1])
    assert report.length_p50 in lengths[9:11] and report.n_ending == report.n_samples == 20
    assert ">>yes" in report.example and report.example.endswith("<|im_end|><<\n")
    assert "trained in 20/20 rows" in "\n".join(report.lines())


def test_rows_with_an_empty_answer_are_counted(tmp_path, tok):
    talk = {"messages": [*chat("q", "")["messages"], *chat("q", "")["messages"], *chat("q", "a")["messages"]]}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "user", "arguments": {}}}]}
    rows = [chat("q", "a"), chat("q", " \n"), talk, {"messages": [chat("q", "")["messages"][0], called]}]
    report = load_dataset(write(tmp_path, rows), tok).report
    note = "3 answers in 2 of 3 rows are empty: they teach to end at once. Remove them unless that is meant."
    assert note in report.lines()
    pairs = [{"prompt": "q", "completion": ""}, {"prompt": "q", "completion": "a"}]
    assert "1 answers in 1 of 2 rows are empty" in "\n".join(load_dataset(write(tmp_path, pairs), tok).report.lines())
    assert not load_dataset(write(tmp_path, [chat("q", "a")]), tok).report.notes


def test_samples_of_one_row_stay_on_one_side_of_the_split(tmp_path):
    template = CHATML.replace(
        "{{ message['content'] }}", "{{ message['content'] if loop.last or message['role'] == 'user' else '.' }}"
    )
    tok = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "t", template=template))
    rows = [{"messages": chat(f"q{i}", "a")["messages"] * 2} for i in range(10)]
    data = load_dataset(write(tmp_path, rows), tok)
    train, val = data.split(0.3, seed=0)
    sides = [{part.where(i) for i in range(len(part))} for part in (train, val)]
    assert len(data) == 20 and len(train) + len(val) == 20 and not sides[0] & sides[1]
    assert train.hash() != data.hash() == load_dataset(write(tmp_path, rows), tok).hash()


def test_list_of_files_with_weights(tmp_path, tok):
    a, b = write(tmp_path, [{"text": "a"}], "a.jsonl"), write(tmp_path, [{"text": "b"}], "b.jsonl")
    data = load_dataset([str(a), {"path": str(b), "weight": 3}], tok)
    assert len(data) == 2 and len(data.repeated(seed=0)) == 4
    with pytest.raises(ConfigError, match=r"data.path has the entry \{'weight': 2\}"):
        load_dataset([{"weight": 2}], tok)
    with pytest.raises(ConfigError, match=r"data.path is empty"):
        load_dataset([], tok)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder with real data sets beside the repository")
@pytest.mark.parametrize(
    "name",
    [
        "messages.jsonl",
        "messages_parts.jsonl",
        "messages_tools.jsonl",
        "sharegpt_tools.jsonl",
        "alpaca.json",
        "text.jsonl",
    ],
)
def test_real_files_of_each_format(tok, name):
    data = load_dataset(SHARED / "chat" / name, tok, max_seq_length=4096)
    assert data.report.n_ending == len(data) > 0.7 * data.report.n_rows
