"""The quick start on the committed base: what the README promises of it."""

import json
import shlex

import pytest

from peft_core.checkpoint import read_json
from run import cards, quickstart
from run.config_file import load_config
from transformer import AutoModelForCausalLM, AutoTokenizer

BASE = quickstart.HOME / "base"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """One whole quick start: its folder and what it printed."""
    import contextlib
    import io

    import finetune

    folder, out = tmp_path_factory.mktemp("quick"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(folder)
        assert finetune.main([]) == 0
    return folder, out.getvalue()


def test_the_base_is_small_bfloat16_and_answers_in_a_chat():
    assert sum(file.stat().st_size for file in BASE.iterdir()) <= 6_000_000
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BASE), AutoTokenizer.from_pretrained(BASE)
    assert model.num_parameters() == read_json(BASE.parent / "pretrain.json")["parameters"]
    assert all(str(p.dtype) == "bfloat16" for p in model.parameters())
    assert tokenizer.chat_template and tokenizer.vocab_size == model.config.vocab_size


def test_hardly_an_answer_is_right_before_and_most_are_after(tuned):
    out = tuned[1]
    assert "Nothing is downloaded" in out
    lines = out.splitlines()
    before, after = (int(word.split("/")[0]) for word in lines[-1].split() if "/" in word)
    assert before < 0.05 * quickstart.SCORED and after > 0.8 * quickstart.SCORED
    assert quickstart.SCORED >= 50
    losses = next(line.split() for line in lines if line.startswith("held-out loss"))
    assert float(losses[5]) < 0.2 * float(losses[3])
    assert sum(line.startswith("sample   '... ") and " Make a card.' -> '" in line for line in lines) == 3
    shown = [i for i, line in enumerate(lines) if line.startswith("  story  ")]
    assert len(shown) == quickstart.SHOWN
    for i in shown:
        row = next(row for row in cards.held_out_rows() if lines[i] == f"  story  {quickstart.story(row)}")
        assert lines[i + 1].startswith("  before ") and not cards.is_right(lines[i + 1][9:].strip("'"), row)
        assert lines[i + 2].startswith("  after  ") and cards.is_right(lines[i + 2][9:].strip("'"), row)


def test_the_rows_it_used_are_those_of_the_rule(tuned):
    data = tuned[0] / "runs" / "quickstart-1" / "data"
    for name, rows in (("train", cards.training_rows()), ("val", cards.held_out_rows(quickstart.SCORED))):
        assert [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()] == rows


def test_the_commands_it_prints_run(tuned, lab, monkeypatch):
    folder, out = tuned
    monkeypatch.chdir(folder)
    commands = [shlex.split(line) for line in out.splitlines() if "scripts/" in line]
    generate = next(words for words in commands if "scripts/generate.py" in words)
    done = lab.run("generate", *generate[2:])
    assert done.code == 0, done.err
    answer = next(line for line in done.out.splitlines() if line.startswith("tuned:"))
    row = next(row for row in cards.held_out_rows() if quickstart.story(row) == generate[-1])
    assert cards.is_right(answer.removeprefix("tuned:"), row)
    export = next(words for words in commands if "scripts/export.py" in words)
    assert lab.run("export", *export[2:]).code == 0
    merged = lab.run("generate", export[export.index("--out") + 1], "--prompt", generate[-1])
    assert cards.is_right(merged.out, row)


def test_a_quick_start_can_be_resumed_without_its_scores(tuned, lab, monkeypatch):
    monkeypatch.chdir(tuned[0])
    config = load_config("runs/quickstart-1/config.resolved.toml", [], print)
    assert config.data.path == "runs/quickstart-1/data/train.jsonl"
    done = lab.run("finetune", "--resume", "runs/quickstart-1")
    assert done.code == 0, done.err
    assert "score " not in done.out


def test_runs_are_numbered_and_a_wrong_setting_leaves_nothing_behind(lab, monkeypatch):
    monkeypatch.chdir(lab.folder)
    monkeypatch.setattr(quickstart, "SCORED", 2)
    one = ("train.max_steps=1", "train.batch_size=1", "eval.sample_prompts=[]")
    assert lab.run("finetune", *one).code == 0
    assert lab.run("finetune", "--check").code == 0
    assert lab.run("finetune", *one).code == 0
    assert lab.run("finetune", "train.max_step=1").code == 2
    assert sorted(p.name for p in (lab.folder / "runs").iterdir()) == ["quickstart-1", "quickstart-2"]
