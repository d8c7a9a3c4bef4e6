"""generate.py: prompts, comparison, conversation, streaming."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from run.base import load_tokenizer
from run.cards import write_rows
from run.stream import Stream
from support.tiny_run import tiny_rows, write_tiny_model

PROMPT = "count on from 20 to 24 please"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base and an adapter, trained long enough to answer differently from the base."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_model(folder / "base")
    write_rows(folder / "rows.jsonl", tiny_rows(1000, seed=1))
    import finetune

    config = folder / "run.toml"
    config.write_text(
        f'model.path = "{folder / "base"}"\ndata.path = "{folder / "rows.jsonl"}"\noutput.output_dir = "{folder}"\n'
        "lora = { r = 32, lora_alpha = 64 }\ntrain = { max_steps = 40, batch_size = 16, learning_rate = 5e-3 }\n"
    )
    assert finetune.main([str(config)]) == 0
    return folder


def ask(lab, trained, *argv):
    return lab.run("generate", trained / "base", "--max-new-tokens", "8", *argv)


def test_an_answer_and_its_repetition(lab, trained):
    first = ask(lab, trained, "--adapter", trained / "adapter", "--prompt", PROMPT)
    assert first.code == 0, first.err
    assert (
        first.out.strip() and first.out == ask(lab, trained, "--adapter", trained / "adapter", "--prompt", PROMPT).out
    )


def test_compare_prints_base_beside_tuned(lab, trained):
    both = ask(lab, trained, "--adapter", trained / "adapter", "--compare", "--prompt", PROMPT).out.splitlines()
    plain = ask(lab, trained, "--prompt", PROMPT).out.strip()
    tuned = ask(lab, trained, "--adapter", trained / "adapter", "--prompt", PROMPT).out.strip()
    assert plain != tuned, "the case shows nothing"
    assert [line.split(None, 1)[0] for line in both] == ["base:", "tuned:"]
    assert both[0].split(":", 1)[1].strip() == plain and both[1].split(":", 1)[1].strip() == tuned


def test_raw_skips_the_template(lab, trained):
    prompt = ("--adapter", trained / "adapter", "--prompt", PROMPT)
    assert ask(lab, trained, *prompt, "--raw").out != ask(lab, trained, *prompt).out


def test_sampling_follows_the_seed(lab, trained):
    def sampled(seed):
        return ask(
            lab, trained, "--prompt", PROMPT, "--temperature", "2", "--seed", seed, "--top-k", "50", "--top-p", "0.99"
        ).out

    assert sampled(1) == sampled(1) and len({sampled(s) for s in range(4)}) > 1


def test_several_prompts_are_named(lab, trained):
    out = ask(lab, trained, "--prompt", PROMPT, "--prompt", "count back from 9 to 5 please").out
    assert out.startswith(f"> {PROMPT}\n") and "\n> count back from 9 to 5 please\n" in out


def test_conversation(lab, trained, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n/reset\n\n{PROMPT}\n/quit\nnever\n"))
    done = ask(lab, trained, "--adapter", trained / "adapter")
    assert done.code == 0, done.err
    answers = [line.removeprefix("> ") for line in done.out.splitlines() if line.strip("> ")]
    single = ask(lab, trained, "--adapter", trained / "adapter", "--prompt", PROMPT).out.strip()
    assert answers[0].strip() == single and answers[1].strip("> ") == single and len(answers) == 2


def test_a_conversation_remembers_its_turns(lab, trained, monkeypatch):
    import generate

    seen = []
    monkeypatch.setattr(generate.Speaker, "say", lambda self, ids, tuned=True: seen.append(len(ids)) or "7 8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n{PROMPT}\n"))
    assert ask(lab, trained).code == 0
    assert seen[1] > 2 * seen[0]


def test_errors(lab, trained):
    done = ask(lab, trained, "--compare", "--prompt", PROMPT)
    assert done.code == 2 and "--compare needs an adapter to compare with the base; expected --adapter DIR." in done.err
    done = ask(lab, trained, "--adapter", lab.folder, "--prompt", PROMPT)
    assert done.code == 4 and "adapter_config.json does not exist" in done.err
    done = lab.run("generate", lab.folder / "none", "--prompt", PROMPT)
    assert done.code == 4 and "does not exist" in done.err
    for wrong in (("--temperature", "-1"), ("--max-new-tokens", "0")):
        with pytest.raises(SystemExit) as stopped:
            lab.run("generate", trained / "base", *wrong)
        assert stopped.value.code == 2


def test_a_prompt_of_other_bytes_is_an_error_of_data(lab, trained, monkeypatch):
    for argv in (("--prompt", "caf\udce9"), ("--raw", "--prompt", "caf\udce9")):
        done = ask(lab, trained, *argv)
        assert done.code == 3 and "caf'; expected whole characters" in done.err
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    done = ask(lab, trained)
    assert done.code == 3 and "the line typed is not utf-8 text" in done.err and "expected text in utf-8. " in done.err


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_that_is_no_id_is_an_error_of_the_model(lab, name):
    file = lab.own_base() / name
    config = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**config, "eos_token_id": ["a"]}))
    done = lab.run("generate", lab.folder / "base", "--prompt", "a")
    assert done.code == 4 and f"{name}: eos_token_id is ['a']; expected a token id, a list of them, or null" in done.err
    done = lab.finetune("--check")
    assert done.code == 4 and f"{name}: eos_token_id is ['a']" in done.err


def test_as_a_program(trained):
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(root / "scripts" / "generate.py"), str(trained / "base"), "--prompt", PROMPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_a_stream_waits_for_whole_characters():
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode("utf-8", errors="replace")

    out = io.StringIO()
    stream = Stream(Bytes(), out)
    states = []
    for byte in "aé€".encode():
        stream.take(0, byte)
        states.append(out.getvalue())
    assert states == ["a", "a", "aé", "aé", "aé", "aé€"]
    assert stream.end() == "aé€" and out.getvalue() == "aé€\n"


def test_the_tokenizer_of_the_adapter_counts(trained):
    assert load_tokenizer(trained / "adapter").chat_template == load_tokenizer(trained / "base").chat_template
