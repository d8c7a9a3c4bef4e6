"""The memory estimate against measured peaks, and how steps are cut so that a run stays within its budget."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from peft_core.dtypes import as_dtype
from peft_core.safetensors_io import load_file, save_file
from run import memory
from run.memory import Memory, Passes, plan_passes
from support.tiny_run import write_tiny_model


def test_weights_come_from_the_headers(lab):
    weights = memory.Weights.of([lab.base / "model.safetensors"])
    assert weights.n_bytes == 4 * weights.n_parameters and weights.dtypes == ["float32"]


def test_memory_grows_with_what_it_depends_on():
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "vocab_size": 1000}
    config = SimpleNamespace(
        **shape, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    )
    weights = memory.Weights(1000, 4000, ["float32"])

    def estimate(**more):
        return memory.estimate_memory(
            config, weights, memory.Work(**{"trainable": 500, "tokens": 1000, "rank": 8, **more})
        )

    plain = estimate()
    assert plain.activations == 2 * estimate(tokens=500).activations
    assert plain.activations > estimate(half=True).activations > plain.activations / 2  # the residual stream stays
    assert estimate(recompute=True).activations < plain.activations / 3
    assert estimate(dropout=True).activations > plain.activations < estimate(rank=64).activations
    assert estimate(eval_tokens=100_000).activations > plain.activations == estimate(eval_tokens=1000).activations
    assert plain.adapter == 8000 and plain.weights == 4000 and estimate(stored_bytes=2).weights == 2000
    assert estimate(packed=True).weights == 2 * estimate(packed=True, half=True).weights == 2.2 * 4000  # twice, padded
    assert estimate(packed=True, half=True, stored_bytes=4).weights == 4400 + 4000  # what is not mapped stays beside
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
    for _ in ("kernels are compiled and kept on disk, which takes memory of its own", "they are there"):
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    estimate, peak = (float(re.search(rf"{word} (\d+) MB", done.stdout)[1]) for word in ("estimate", "peak"))
    assert peak <= estimate <= 1.4 * peak, done.stdout


def test_available_memory_is_a_plausible_number():
    found = memory.available_memory()
    assert found is None or 10**7 < found < 10**14


def estimate(passes):
    return Memory(100, 0, 0, passes.tokens * (1 if passes.recompute else 4), 0)


@pytest.mark.parametrize(("budget", "recompute", "expected"), [
    (1e9, None, (1000, False)), (2100, None, (500, False)), (1100, None, (250, False)), (901, None, (200, False)),
    (899, None, (500, True)), (310, None, (200, True)), (10, None, (200, True)),
    (1e9, True, (1000, True)), (899, False, (200, False)), (899, True, (500, True)),
])  # fmt: skip
def test_smaller_passes_come_before_recomputation(budget, recompute, expected):
    assert plan_passes(estimate, 1000, 200, budget, recompute) == Passes(*expected)


def test_a_row_is_never_cut():
    assert plan_passes(estimate, 1000, 3000, 10, None) == Passes(1000, True)  # the row is a pass whatever is asked


def test_a_budget_cuts_the_steps_and_changes_no_loss(lab, monkeypatch):
    monkeypatch.setattr("run.job.rss_bytes", lambda: 0)  # that of this process has grown when the second run begins

    def losses(**train):
        done = lab.finetune("--overwrite", train={"max_steps": 3, "batch_size": 4, **train})
        assert done.code == 0, done.err
        facts = json.loads((lab.run_dir / "preflight.json").read_text())
        return facts["memory"], [line["loss"] for line in lab.records() if "loss" in line]

    free, expected = losses()
    assert "activations are kept" in free["how"]
    tight, found = losses(memory_budget=int(free["total"] - free["activations"] / 2))
    assert tight["total"] < free["total"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("budget", ["-1GB", "two", "0"])
def test_a_budget_that_is_none(lab, budget):
    done = lab.finetune(train={"memory_budget": budget})
    assert done.code == 2 and f"train.memory_budget is '{budget}'; expected bytes, or a text such as" in done.err


def test_a_budget_that_cannot_be_kept(lab):
    done = lab.finetune(train={"memory_budget": "1MB"})
    assert done.code == 2
    assert "train.memory_budget is 1MB and the run needs" in done.err and "recomputing activations" in done.err
