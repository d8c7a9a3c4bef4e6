"""The page from config to adapter, in-process on a one-layer model."""

import json
import shlex
import tomllib

import numpy as np
import pytest

from adapters import LoraConfig
from peft_core.safetensors_io import load_file


def test_a_run_writes_everything_and_the_loss_falls(lab):
    done = lab.finetune(
        train={"max_steps": 12, "learning_rate": 0.05},
        eval={"eval_steps": 6, "sample_prompts": ["count on from 9 to 12 please"]},
    )
    assert done.code == 0, done.err
    names = {p.name for p in lab.run_dir.iterdir()}
    assert names >= {
        "config.resolved.toml",
        "metrics.jsonl",
        "samples.jsonl",
        "preflight.json",
        "checkpoints",
        "adapter",
        "adapter_last",
    }
    records = lab.records()
    losses = [r["loss"] for r in records if "loss" in r]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3
    evaluated = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    assert [step for step, _ in evaluated] == [0, 6, 12] and evaluated[2][1] < evaluated[0][1]
    assert json.loads((lab.run_dir / "preflight.json").read_text())["plan"]["steps"] == 12
    samples = [json.loads(line) for line in (lab.run_dir / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [0, 6, 12] and samples[0]["prompt"].startswith("count on")
    for word in ("model ", "lora ", "data ", "plan ", "memory ", "example ", "step 0 ", "best ", "time ", "next"):
        assert any(line.startswith(word) for line in done.out.splitlines()), word
    assert done.out.count("scripts/") == 2 and "vllm serve" in done.out  # three commands to paste
    assert ">>" in done.out and "<<" in done.out
    words = shlex.split(next(line for line in done.out.splitlines() if "scripts/generate.py" in line))
    assert words[-1] == "count on from 9 to 12 please"
    assert lab.run("generate", *words[2:]).code == 0  # the printed command runs
    words = shlex.split(next(line for line in done.out.splitlines() if "scripts/export.py" in line))
    assert lab.run("export", *words[2:]).code == 0


def test_the_adapter_is_in_pefts_layout_with_the_tokenizer(lab):
    assert lab.finetune().code == 0
    for name in ("adapter", "adapter_last"):
        folder = lab.run_dir / name
        assert {p.name for p in folder.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "chat_template.jinja",
            "tokenizer.json",
            "tokenizer_config.json",
        }
    tensors = load_file(lab.run_dir / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape == (4, 64)
    assert all(t.dtype == np.float32 for t in tensors.values()) and len(tensors) == 14
    written = json.loads((lab.run_dir / "adapter" / "adapter_config.json").read_text())
    assert written["lora_alpha"] == 8 and isinstance(written["lora_alpha"], int)
    assert LoraConfig.from_pretrained(lab.run_dir / "adapter").base_model_name_or_path == str(lab.base)


def test_the_best_adapter_is_that_of_the_lowest_validation_loss(lab):
    # A rate that soon makes the loss worse; constant, so that a shorter run takes the same steps.
    rough = {"learning_rate": 0.5, "lr_scheduler_type": "constant", "warmup_steps": 0}
    assert lab.finetune(train={**rough, "max_steps": 8}, eval={"eval_steps": 1}).code == 0
    losses = {r["step"]: r["val_loss"] for r in lab.records() if "val_loss" in r and r["step"]}
    best = min(losses, key=losses.get)
    assert best < 8, "the case does not show anything"
    assert [r["step"] for r in lab.records() if r.get("best")][-1] == best
    short = lab.folder / "short"
    assert lab.finetune(train={**rough, "max_steps": best}, output={"output_dir": str(short)}).code == 0
    weights = "adapter_model.safetensors"
    assert (lab.run_dir / "adapter" / weights).read_bytes() == (short / "adapter_last" / weights).read_bytes()
    assert (lab.run_dir / "adapter" / weights).read_bytes() != (lab.run_dir / "adapter_last" / weights).read_bytes()


def test_early_stopping(lab):
    done = lab.finetune(
        train={"max_steps": 30, "learning_rate": 2.0, "lr_scheduler_type": "constant"},
        eval={"eval_steps": 1, "early_stopping_patience": 2},
    )
    assert done.code == 0, done.err
    steps = [r["step"] for r in lab.records() if "val_loss" in r]
    best = [r["step"] for r in lab.records() if r.get("best")][-1]
    assert steps[-1] == best + 2 < 30
    assert "stopped  at step" in done.out and "2 evaluations without a better one" in done.out


def test_without_validation_the_last_adapter_is_the_best(lab):
    assert lab.finetune(data={"val_path": None}).code == 0
    first, last = (lab.run_dir / n / "adapter_model.safetensors" for n in ("adapter", "adapter_last"))
    assert first.read_bytes() == last.read_bytes()


def test_checkpoints_are_kept_up_to_the_limit(lab):
    assert lab.finetune(output={"save_total_limit": 2, "save_steps": 1}).code == 0
    assert {p.name for p in (lab.run_dir / "checkpoints").iterdir()} == {"step-5", "step-6"}


def test_accumulation_changes_rounding_only(lab):
    assert lab.finetune().code == 0
    split = lab.folder / "split"
    assert (
        lab.finetune(train={"batch_size": 4, "gradient_accumulation_steps": 1}, output={"output_dir": str(split)}).code
        == 0
    )
    one, other = ([r["loss"] for r in lab.records(folder) if "loss" in r] for folder in (lab.run_dir, split))
    assert one == pytest.approx(other, abs=1e-4) and len(one) == 3


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"gradient_checkpointing": True}},
        {"lora": {"lora_dropout": 0.1}},
        {"model": {"dtype": "bfloat16"}},
        {"train": {"batch_size": None, "max_tokens_per_step": 60}},
        {"train": {"max_steps": None, "num_train_epochs": 0.5}},
        {"data": {"val_path": None, "val_size": 0.25}},
        {"lora": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}},
        {"model": {"compute_dtype": "bfloat16"}},
        {"train": {"max_grad_norm": 0}},
    ],
    ids=str,
)
def test_settings_run(lab, sections):
    done = lab.finetune(**sections)
    assert done.code == 0, done.err


def test_recomputation_gives_the_same_adapter(lab):
    assert lab.finetune().code == 0
    other = lab.folder / "other"
    assert lab.finetune(train={"gradient_checkpointing": True}, output={"output_dir": str(other)}).code == 0
    a, b = (load_file(d / "adapter_last" / "adapter_model.safetensors") for d in (lab.run_dir, other))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6)


def test_check_loads_no_weights_and_writes_nothing(lab, monkeypatch):
    import run.job

    monkeypatch.setattr(run.job, "from_pretrained", lambda *a, **k: pytest.fail("weights were loaded"))
    done = lab.finetune("--check")
    assert done.code == 0 and not lab.run_dir.exists()
    assert "end-of-turn token <|end|> is trained in 24/24 rows" in done.out and "24 rows (24 messages)" in done.out


def test_dry_run_takes_one_step_and_writes_nothing(lab):
    done = lab.finetune("--dry-run")
    assert done.code == 0 and not lab.run_dir.exists()
    assert "dry run  1 step: loss" in done.out and "memory   estimate" in done.out


def test_print_config(lab):
    done = lab.finetune("train.learning_rate=5e-4", "--print-config")
    values = tomllib.loads(done.out)
    assert done.code == 0 and values["train"]["learning_rate"] == 5e-4 and values["train"]["seed"] == 42
    assert not lab.run_dir.exists()


def test_arguments_in_any_order_and_two_configs(lab):
    assert lab.run("finetune", "--check", "train.seed=1", lab.write(), "lora.r=2").code == 0
    with pytest.raises(SystemExit) as stopped:
        lab.run("finetune", "a.toml", "b.toml")
    assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        lab.finetune("--resume", "--overwrite")
    assert stopped.value.code == 2


def test_a_used_output_dir_is_refused_and_overwrite_replaces_only_runs(lab):
    assert lab.finetune(train={"max_steps": 4}).code == 0
    note = lab.run_dir / "note.txt"
    note.write_text("mine")
    again = lab.finetune(train={"max_steps": 4})
    assert again.code == 2
    assert again.err.strip() == (
        f"config error: output_dir {lab.run_dir} already holds a run (step 4 of 4). "
        "Use --resume, --overwrite, or another output_dir."
    )
    assert lab.finetune("--overwrite", train={"max_steps": 2}).code == 0
    assert note.read_text() == "mine" and not (lab.run_dir / "checkpoints" / "step-4").exists()


def test_overwrite_deletes_nothing_if_the_new_run_cannot_start(lab):
    assert lab.finetune(train={"max_steps": 2}).code == 0
    before = (lab.run_dir / "metrics.jsonl").read_text()
    assert lab.finetune("--overwrite", data={"path": "nowhere.jsonl"}).code == 3
    assert (lab.run_dir / "metrics.jsonl").read_text() == before
