"""pretrain.py: the committed run begins as it says, a stopped run continues exactly, the result is readable."""

import itertools
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import pretrain
from peft_core.safetensors_io import load_file
from run.stories import document
from run.story_check import new_sentences, sampled_sentences
from run.story_model import SHAPE, SPECIAL, StorySteps, markup, plain_texts, random_model, train_tokenizer
from transformer import AutoModelForCausalLM, AutoTokenizer

HOME = Path(__file__).parents[2] / "configs" / "quickstart"
SMALL = {**SHAPE, "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


@pytest.fixture(scope="module")
def small_tokenizer():
    return train_tokenizer(60, 400)


@pytest.fixture
def small(monkeypatch, small_tokenizer):
    """The page on a one-layer model with documents by twos."""
    monkeypatch.setattr(pretrain, "SHAPE", SMALL)
    monkeypatch.setattr(pretrain, "DOCUMENTS", 2)
    monkeypatch.setattr(pretrain, "train_tokenizer", lambda: small_tokenizer)


def arguments(folder: Path, *more: str) -> list[str]:
    return ["--out", str(folder / "out" / "base"), "--work", str(folder / "work"), *more]


def test_the_tokenizer_is_a_round_trip(small_tokenizer):
    for text in [*plain_texts(5, 20), "Ümlaut, 日本, \n\t and 12 <|x|>"]:
        assert small_tokenizer.decode(small_tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert [small_tokenizer.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))


def test_a_chat_is_written_as_the_template_writes_it(tmp_path, small, small_tokenizer):
    assert pretrain.main(arguments(tmp_path, "--steps", "1")) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "base")
    chats = [made for made in (document(4, i) for i in range(30)) if not isinstance(made, str)]
    assert len(chats) > 10
    for made in chats:
        assert tokenizer.render(made) == markup(made)
    ids = tokenizer.encode("Ida ran.")
    assert ids[0] == tokenizer.bos_token_id == SPECIAL.index("<s>") and tokenizer.eos_token == "<|end|>"


def test_the_random_start_is_seeded_and_all_of_it_trains():
    one, same, other = (random_model(seed, SMALL) for seed in (0, 0, 1))
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert a.requires_grad and np.array_equal(a.data, b.data), name
        assert name.endswith("norm.weight") or not np.array_equal(a.data, c.data)


def test_the_rate_rises_stays_and_falls_and_its_start_knows_no_end():
    factors = [pretrain.rate(step, 1000) for step in range(1000)]
    assert factors[0] == 0.01 and factors[99:701] == [1.0] * 602 and factors[-1] < 0.01
    assert all(a >= b for a, b in itertools.pairwise(factors[99:]))
    assert factors[:701] == [pretrain.rate(step, 2000) for step in range(701)]


def test_a_run_writes_a_readable_bfloat16_model(tmp_path, small, capsys):
    assert pretrain.main(arguments(tmp_path, "--steps", "60")) == 0
    out = capsys.readouterr().out
    assert "step    50/60  loss" in out and "done     " in out
    losses = json.loads((tmp_path / "out" / "pretrain_losses.json").read_text())
    assert len(losses) == 50 and losses[-1] < losses[0]
    assert all(str(t.dtype) == "bfloat16" for t in load_file(tmp_path / "out" / "base" / "model.safetensors").values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base")
    assert model.config.vocab_size == 400 and model.lm_head.weight is model.model.embed_tokens.weight
    facts = json.loads((tmp_path / "out" / "pretrain.json").read_text())
    assert facts["steps"] == 60 and facts["documents"] == 120 and facts["tokens"] > 10_000


def test_a_stopped_run_continues_exactly(tmp_path, small, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert pretrain.main(arguments(whole, "--steps", "12")) == 0
    monkeypatch.setattr(pretrain.StopRequest, "__bool__", lambda stop: stop.signum is not None)
    take = pretrain.Pretraining.take

    def stop_at_five(run, report):
        take(run, report)
        if report.step == 5:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(pretrain.Pretraining, "take", stop_at_five)
    assert pretrain.main(arguments(parts, "--steps", "12")) == 143
    assert "step 5 of 12. Continue with --resume." in capsys.readouterr().err
    monkeypatch.setattr(pretrain.Pretraining, "take", take)
    assert pretrain.main(arguments(parts, "--steps", "12", "--resume")) == 0
    a, b = (folder / "out" / "base" / "model.safetensors" for folder in (whole, parts))
    assert a.read_bytes() == b.read_bytes()


def test_another_length_is_taken_before_the_rate_falls_and_refused_after(tmp_path, small, capsys):
    run = pretrain.Pretraining(train_tokenizer(20, 300), 10, {**SMALL, "vocab_size": 300})
    run.run(3)
    run.save(tmp_path / "early")
    run.run(9)
    run.save(tmp_path / "late")
    longer = pretrain.Pretraining(run.backend, 20, {**SMALL, "vocab_size": 300})
    longer.restore(tmp_path / "early")
    assert longer.state.step == 3
    with pytest.raises(pretrain.ConfigError) as error:
        longer.restore(tmp_path / "late")
    assert str(error.value) == (
        f"--steps is 20, but the run in {tmp_path / 'late'} was planned for 10 and is at 9; expected 10: the learning "
        "rate depends on it by now. Give it, or start again without --resume."
    )


def test_new_sentences_are_those_that_no_document_has(tmp_path, small, capsys):
    known = next(iter(plain_texts(1, 1))).split(". ")[0] + "."
    assert list(new_sentences([known, "Nobody wrote this.", known], 5)) == ["Nobody wrote this."]
    assert pretrain.main(arguments(tmp_path, "--steps", "1")) == 0
    base = tmp_path / "out" / "base"
    found = sampled_sentences(AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base), 5)
    assert len(found) <= 5 and all(found)
    assert pretrain.check(base, 5) == 0
    out = capsys.readouterr().out
    assert "held-out loss " in out and "sentences" in out and "stand nowhere in the 2 documents" in out


def test_the_steps_end(small_tokenizer):
    steps = StorySteps(small_tokenizer, 3, 2)
    assert len(list(steps)) == len(steps) == 3
    assert [len(batch.cu_seqlens) - 1 for step in steps for batch in step] == [2, 2, 2]
    for outside in (3, -1):
        with pytest.raises(IndexError) as error:
            steps[outside]
        assert str(error.value) == f"step {outside} of 3; expected one from 0 to 2."


# ------------------------------------------------------------------------------------------------ the committed run


def test_the_first_losses_are_the_committed_ones():
    committed = json.loads((HOME / "pretrain_losses.json").read_text())
    assert len(committed) == pretrain.FIRST == 50
    backend = tokenizers.Tokenizer.from_file(str(HOME / "base" / "tokenizer.json"))
    run = pretrain.Pretraining(backend, pretrain.STEPS, SHAPE)
    run.run(pretrain.FIRST, on_step=run.take)
    assert run.losses == pytest.approx(committed, abs=1e-3)  # 0 on the machine it was made on, with 1 and 2 threads


def test_the_facts_of_the_committed_run_are_those_of_its_plan():
    facts = json.loads((HOME / "pretrain.json").read_text())
    assert facts["steps"] == pretrain.STEPS and facts["documents"] == pretrain.STEPS * pretrain.DOCUMENTS
    first = StorySteps(tokenizers.Tokenizer.from_file(str(HOME / "base" / "tokenizer.json")), 4, 16)
    per_document = sum(batch.n_tokens for step in first for batch in step) / 64
    assert facts["tokens"] == pytest.approx(per_document * facts["documents"], rel=0.05)


def test_the_committed_tokenizer_is_the_one_that_the_text_gives():
    committed = json.loads((HOME / "base" / "tokenizer.json").read_text())
    made = json.loads(train_tokenizer().to_str())
    assert made["model"]["vocab"] == committed["model"]["vocab"]
    assert made["model"]["merges"] == committed["model"]["merges"]
