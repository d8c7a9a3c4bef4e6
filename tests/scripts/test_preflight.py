"""The report and the plan: numbers that a person relies on."""

import json
from datetime import datetime

import pytest

from peft_core.backend import as_device
from peft_core.errors import ConfigError
from run import base as base_page
from run.base import compute_dtype, load_tokenizer, lora_config, prompt_ids, stop_ids
from run.config import DataSection, LoraSection, TrainSection
from run.rows import load_rows, make_plan, warmup_steps


@pytest.fixture
def rows(lab):
    return load_rows_of(lab)


def load_rows_of(lab):
    tokenizer = load_tokenizer(lab.base)
    data = DataSection(path=str(lab.data))
    return load_rows(data, tokenizer, seed=0, stop_ids=stop_ids(lab.base, tokenizer), now=datetime(2026, 1, 1)).train


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"batch_size": 4, "num_train_epochs": 3.0}, 18), ({"batch_size": 5, "num_train_epochs": 1.0}, 5),
        ({"batch_size": 4, "num_train_epochs": 0.5}, 3), ({"batch_size": 4, "num_train_epochs": 2.5}, 15),
        ({"batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2.0}, 8), ({"max_steps": 100}, 100),
    ],
)  # fmt: skip
def test_number_of_steps(rows, settings, steps):
    plan = make_plan(rows, TrainSection(**settings), shuffle=True)
    assert len(plan.steps) == steps
    assert abs(plan.epochs - steps / plan.steps_per_epoch) < 1e-9


def test_plan_line(rows):
    train = TrainSection(batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2.0)
    text = make_plan(rows, train, shuffle=True).line(train)
    assert (
        text.startswith("2 epochs = 6 steps; batch 4 x accum 2 = 8 rows (~") and "warmup 1; cosine from 0.0002" in text
    )
    train = TrainSection(max_tokens_per_step=64)
    assert "at most 64 tokens" in make_plan(rows, train, shuffle=True).line(train)


def test_warmup():
    assert warmup_steps(TrainSection(), 100) == 3
    assert warmup_steps(TrainSection(warmup_ratio=0.1), 858) == 86
    assert warmup_steps(TrainSection(warmup_steps=7), 100) == 7
    with pytest.raises(ConfigError, match=r"train.warmup_steps is 7 and the run has 7 steps; expected fewer"):
        warmup_steps(TrainSection(warmup_steps=7), 7)


def test_rows_beyond_the_positions_of_the_base_are_counted_once(lab):
    file = lab.own_base() / "config.json"
    lengths = [len(ids) for ids, _ in load_rows_of(lab)]
    limit = sorted(lengths)[len(lengths) // 2]
    n = sum(length > limit for length in lengths)
    assert 0 < n < len(lengths)
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": limit}))
    done = lab.finetune("--check", data={"val_path": None})
    text = f"WARNING: {n} of {len(lengths)} rows are longer than the {limit} positions the base was made for"
    assert done.out.count("WARNING") == 1 and text in done.out and f"data.max_seq_length={limit}" in done.out
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": max(lengths)}))
    assert "WARNING" not in lab.finetune("--check", data={"val_path": None}).out


def test_a_whole_alpha_is_written_as_an_integer():
    assert isinstance(lora_config(LoraSection(lora_alpha=32), "m").lora_alpha, int)
    assert lora_config(LoraSection(lora_alpha=1.5), "m").lora_alpha == 1.5


def test_compute_dtype(monkeypatch):
    cpu, gpu = as_device("cpu"), as_device("cuda:0")
    for has_tiles in (True, False):
        monkeypatch.setattr(base_page, "tiles_supported", lambda dtype, has_tiles=has_tiles: has_tiles)
        assert (str(compute_dtype("auto", cpu, ["bfloat16"])) == "bfloat16") == has_tiles
        assert compute_dtype("auto", cpu, ["bfloat16", "float32"]) is None
        assert str(compute_dtype("auto", gpu, ["float32"])) == "bfloat16"
        assert str(compute_dtype("bfloat16", cpu, ["float32"])) == "bfloat16"
        assert compute_dtype("float32", gpu, ["bfloat16"]) is None


def test_prompts_go_through_the_chat_template(lab):
    tokenizer = load_tokenizer(lab.base)
    text = tokenizer.decode(prompt_ids(tokenizer, "count on"), skip_special_tokens=False)
    assert text == "<|user|> count on <|end|> <|assistant|>"
    assert prompt_ids(tokenizer, "count on", raw=True) == tokenizer.encode("count on")


def test_ids_that_end_an_answer(lab):
    base = lab.own_base()
    tokenizer = load_tokenizer(base)
    (base / "generation_config.json").write_text('{"eos_token_id": [7, 4]}')
    assert stop_ids(base, tokenizer) == [7, 4]
