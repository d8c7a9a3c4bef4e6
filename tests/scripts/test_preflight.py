"""The report and the plan: numbers that a person relies on."""

import json
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from peft_core.backend import as_device
from peft_core.dtypes import as_dtype
from peft_core.errors import ConfigError
from peft_core.safetensors_io import load_file, save_file
from run import preflight
from run.base import compute_dtype, load_tokenizer, lora_config, prompt_ids, stop_ids
from run.config import DataSection, LoraSection, ModelSection, TrainSection
from run.rows import load_rows, make_plan, warmup_steps
from run.tiny import write_tiny_model


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


def test_weights_come_from_the_headers(lab):
    weights = preflight.Weights.of([lab.base / "model.safetensors"])
    assert weights.n_bytes == 4 * weights.n_parameters and weights.dtypes == ["float32"]


def test_memory_grows_with_what_it_depends_on():
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "vocab_size": 1000}
    config = SimpleNamespace(
        **shape, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    )
    weights = preflight.Weights(1000, 4000, ["float32"])

    def estimate(**more):
        return preflight.estimate_memory(
            config, weights, preflight.Work(**{"trainable": 500, "tokens": 1000, "rank": 8, **more})
        )

    plain = estimate()
    assert plain.activations == 2 * estimate(tokens=500).activations
    assert plain.activations > estimate(half=True).activations > plain.activations / 2  # the residual stream stays
    assert estimate(recompute=True).activations < plain.activations / 3
    assert estimate(dropout=True).activations > plain.activations < estimate(rank=64).activations
    assert estimate(eval_tokens=100_000).activations > plain.activations == estimate(eval_tokens=1000).activations
    assert plain.adapter == 8000 and plain.weights == 4000 and estimate(stored_bytes=2).weights == 2000
    assert estimate(packed=True, half=True).weights > 2 * plain.weights
    assert estimate(packed=True, half=True).activations < estimate(half=True).activations
    assert estimate(stored_bytes=2).logits > plain.logits == 4 * 512 * 1000
    assert estimate(process_bytes=10**9).total == plain.total + 10**9
    assert plain.line(10**12).endswith("-- fits")
    assert "DOES NOT FIT into the 1.0 MB that are free; lower train.batch_size" in plain.line(10**6)
    assert "fit" not in plain.line(None).lower().replace("estimate", "")


def wide_base(folder, dtype, hidden, layers, vocabulary):
    """A base with large layers or a large vocabulary."""
    write_tiny_model(folder, hidden=hidden, layers=layers)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "vocab_size": vocabulary, "max_position_embeddings": 4096, "torch_dtype": dtype})
    )
    tensors = dict(load_file(folder / "model.safetensors"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.resize(tensors[name], (vocabulary, hidden))
    save_file({name: t.astype(as_dtype(dtype)) for name, t in tensors.items()}, folder / "model.safetensors")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the peak of a process")
@pytest.mark.parametrize(
    ("base", "rows", "words"),
    [
        (("float32", 256, 6, 71), (8, 400), []),
        (("float32", 256, 6, 71), (8, 400), ["lora.lora_dropout=0.1", "lora.r=64"]),
        (("float32", 256, 6, 71), (8, 400), ["train.gradient_checkpointing=true"]),
        (("bfloat16", 256, 6, 71), (8, 400), ["model.compute_dtype=bfloat16"]),
        (("bfloat16", 1024, 6, 71), (1, 64), ["model.compute_dtype=bfloat16"]),
        (("bfloat16", 512, 2, 40_000), (2, 200), []),
        (("bfloat16", 512, 2, 40_000), (2, 400), ["model.dtype=float32"]),
        (("float32", 32, 1, 71), (1, 8), []),
    ],
    ids=str,
)
def test_the_estimate_lies_above_the_measured_peak_and_not_far(tmp_path, base, rows, words):
    wide_base(tmp_path / "base", *base)
    ids = np.random.default_rng(0).integers(0, 71, rows).tolist()
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in ids))
    root = Path(__file__).parents[2]
    command = [sys.executable, root / "scripts" / "finetune.py", "--dry-run", f"model.path={tmp_path / 'base'}",
               f"data.path={tmp_path / 'd.jsonl'}", f"output.output_dir={tmp_path / 'out'}", "train.max_steps=2",
               f"train.batch_size={rows[0]}", *words]  # fmt: skip
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    estimate, peak = (float(re.search(rf"{word} (\d+) MB", done.stdout)[1]) for word in ("estimate", "peak"))
    assert peak <= estimate <= 1.4 * peak, done.stdout


def test_available_memory_is_a_plausible_number():
    found = preflight.available_memory()
    assert found is None or 10**7 < found < 10**14


def test_a_whole_alpha_is_written_as_an_integer():
    assert isinstance(lora_config(LoraSection(lora_alpha=32), "m").lora_alpha, int)
    assert lora_config(LoraSection(lora_alpha=1.5), "m").lora_alpha == 1.5


def test_compute_dtype():
    cpu, gpu = as_device("cpu"), as_device("cuda:0")
    auto, half = ModelSection(path="m"), ModelSection(path="m", compute_dtype="bfloat16")
    assert compute_dtype(auto, cpu) is None and str(compute_dtype(auto, gpu)) == "bfloat16"
    assert str(compute_dtype(half, cpu)) == "bfloat16"


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
