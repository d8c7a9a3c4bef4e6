"""A stopped run continues bit for bit: a new process, in mid-epoch and mid-accumulation, dropout on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Two epochs and a bit of 6 steps, 4 micro-batches each.
EXACT = {
    "lora": {"lora_dropout": 0.2},
    "train": {"max_steps": 14, "batch_size": 1, "gradient_accumulation_steps": 4},
    "eval": {"eval_steps": 3, "sample_prompts": ["count back from 20 to 17 please"], "max_new_tokens": 4},
    "output": {"save_steps": 5},
}


def result(lab, folder: Path) -> dict:
    return {
        "metrics": lab.records(folder),
        "samples": (folder / "samples.jsonl").read_text(),
        **{name: (folder / name / "adapter_model.safetensors").read_bytes() for name in ("adapter", "adapter_last")},
    }


@pytest.fixture
def whole(lab):
    """What the run gives when nobody stops it."""
    folder = lab.folder / "whole"
    sections = {**EXACT, "output": {**EXACT["output"], "output_dir": str(folder)}}
    assert lab.finetune(**sections).code == 0
    return result(lab, folder)


def stop_after(monkeypatch, micro_batches: int, signum=signal.SIGINT) -> None:
    """Send a real signal to this process from inside the micro-batch with this number."""
    import run.job

    done = [0]
    loss = run.job.Job.loss

    def counted(model, batch):
        if model.training:
            done[0] += 1
            if done[0] == micro_batches:
                os.kill(os.getpid(), signum)
        return loss(model, batch)

    monkeypatch.setattr(run.job.Job, "loss", staticmethod(counted))


@pytest.mark.parametrize(("micro_batches", "name"), [(30, "step-7.micro-2"), (28, "step-7"), (1, "step-0.micro-1")])
def test_resume_is_exact(lab, whole, monkeypatch, micro_batches, name):
    with monkeypatch.context() as patch:
        stop_after(patch, micro_batches)
        stopped = lab.finetune(**EXACT)
    assert stopped.code == 130
    assert f"checkpoint {lab.run_dir / 'checkpoints' / name}" in stopped.err and "--resume" in stopped.err
    assert not (lab.run_dir / "adapter_last").exists()
    resumed = lab.finetune("--resume", **EXACT)
    assert resumed.code == 0, resumed.err
    assert result(lab, lab.run_dir) == whole


def test_resume_from_an_older_checkpoint_rewinds_the_records(lab, whole):
    assert lab.finetune(**EXACT).code == 0
    older = lab.run_dir / "checkpoints" / "step-10"
    assert lab.finetune("--resume", older, **EXACT).code == 0
    assert result(lab, lab.run_dir) == whole


def test_two_stops(lab, whole, monkeypatch):
    for micro_batches, argv in ((9, ()), (10, ("--resume",))):
        with monkeypatch.context() as patch:
            stop_after(patch, micro_batches)
            assert lab.finetune(*argv, **EXACT).code == 130
    assert lab.finetune("--resume", **EXACT).code == 0
    assert result(lab, lab.run_dir) == whole


def test_a_difference_in_dropout_would_be_seen(lab, whole):
    """The test of these tests: another seed gives another adapter."""
    sections = {**EXACT, "train": {**EXACT["train"], "seed": 7}}
    assert lab.finetune(**sections).code == 0
    assert result(lab, lab.run_dir) != whole


def command(lab, *argv, **sections) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "finetune.py"), str(lab.write(**sections)), *argv]


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_killed_process_continues_in_a_new_one(lab, signum, code):
    slow = {
        **EXACT,
        "train": {**EXACT["train"], "max_steps": 60},
        "eval": {"eval_steps": 20},
        "log": {"logging_steps": 1},
    }
    folder = lab.folder / "whole"
    assert lab.finetune(**{**slow, "output": {"output_dir": str(folder)}}).code == 0
    process = subprocess.Popen(
        command(lab, **slow), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step     4/60"):
            break
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err and "Continue with: python scripts/finetune.py" in err
    # The printed way to continue: the resolved config of the run, without the file it was started with.
    resolved = lab.run_dir / "config.resolved.toml"
    done = subprocess.run(
        [*command(lab, **slow)[:2], str(resolved), "--resume"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert lab.records() == lab.records(folder)
    for name in ("adapter", "adapter_last"):
        ours, theirs = (d / name / "adapter_model.safetensors" for d in (lab.run_dir, folder))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_second_signal_ends_at_once(lab):
    slow = {"train": {"max_steps": 100000, "batch_size": 24, "gradient_accumulation_steps": 2}}
    process = subprocess.Popen(
        command(lab, **slow), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step     2/"):
            break
    process.send_signal(signal.SIGINT)
    time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (130, 143)


def test_resume_with_changed_settings_names_them(lab):
    assert lab.finetune().code == 0
    done = lab.finetune("--resume", train={"learning_rate": 1e-3, "seed": 5})
    assert done.code == 2
    assert "train.learning_rate was 0.01 and is 0.001; train.seed was 42 and is 5" in done.err
    assert lab.finetune("--resume", log={"logging_steps": 1}).code == 0  # nothing that touches a weight


NOT_EXACT = "sums are rounded otherwise from here on, so the run is no longer bit for bit the one without interruption"


def test_what_only_rounds_otherwise_may_change_at_a_whole_step(lab, monkeypatch):
    monkeypatch.setattr("run.job.rss_bytes", lambda: 0)  # that of this process has grown when the second run begins
    assert lab.finetune().code == 0
    expected, older = lab.records(), lab.run_dir / "checkpoints" / "step-4"
    facts = json.loads((lab.run_dir / "preflight.json").read_text())["memory"]
    budget = f"{int(facts['total'] - facts['activations'] / 2)}B"
    for train, said in (
        ({"memory_budget": budget}, f"train.memory_budget was 'auto' and is '{budget}'"),
        ({"gradient_checkpointing": True}, "train.gradient_checkpointing was 'auto' and is True"),
    ):
        assert lab.finetune("--overwrite").code == 0
        done = lab.finetune("--resume", older, train=train)
        assert done.code == 0, done.err
        (line,) = (line for line in done.out.splitlines() if NOT_EXACT in line)
        assert line == f"resume   {said}: {NOT_EXACT}"
        passes = [
            json.loads((lab.run_dir / f"checkpoints/step-{n}/state.json").read_text())["extra"]["passes"]
            for n in (4, 6)
        ]
        assert passes[0] != passes[1] and passes[1]["recompute"] is ("gradient_checkpointing" in train)
        for ours, theirs in zip(lab.records(), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        # The run goes on as it does now: with its resolved settings, and exactly.
        done = lab.run("finetune", lab.run_dir / "config.resolved.toml", "--resume")
        assert done.code == 0 and NOT_EXACT not in done.out, done.err


def test_a_changed_budget_that_changes_no_pass_is_exact(lab):
    assert lab.finetune().code == 0
    expected = lab.records()
    done = lab.finetune("--resume", lab.run_dir / "checkpoints" / "step-4", train={"memory_budget": "900GB"})
    assert done.code == 0 and NOT_EXACT not in done.out and lab.records() == expected


def test_in_the_middle_of_a_step_nothing_may_change(lab, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 30)
        assert lab.finetune(**EXACT).code == 130
    done = lab.finetune("--resume", **{**EXACT, "train": {**EXACT["train"], "gradient_checkpointing": True}})
    where = lab.run_dir / "checkpoints" / "step-7.micro-2"
    text = (
        f"{where} lies 2 passes into a step and train.gradient_checkpointing was 'auto' and is True; expected the same "
    )
    assert done.code == 2 and text in done.err
    assert "Set them back, or resume a checkpoint of a whole step (a folder step-N) with --resume PATH." in done.err


def test_resume_with_changed_data_gives_both_hashes(lab):
    assert lab.finetune().code == 0
    saved = json.loads((lab.run_dir / "checkpoints" / "step-6" / "state.json").read_text())["extra"]["fingerprint"]
    lines = lab.data.read_text().splitlines()
    lab.data.write_text("\n".join(lines[:-1]) + "\n")
    done = lab.finetune("--resume")
    assert done.code == 3 and "the training rows are not those" in done.err
    assert saved["train_rows"][:16] in done.err and "now; expected the same" in done.err


def test_resume_with_another_base(lab):
    base = lab.own_base()
    assert lab.finetune().code == 0
    file = base / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    done = lab.finetune("--resume")
    assert done.code == 3 and "the base weights are not those" in done.err


def test_resume_needs_only_the_run(lab, whole, monkeypatch):
    for where in (lab.run_dir, lab.run_dir / "checkpoints" / "step-7.micro-2"):
        with monkeypatch.context() as patch:
            stop_after(patch, 30)
            assert lab.finetune("--overwrite", **EXACT).code == 130
        assert lab.run("finetune", "--resume", where).code == 0
        assert result(lab, lab.run_dir) == whole


def test_resume_without_a_checkpoint(lab):
    done = lab.finetune("--resume")
    assert done.code == 2 and "holds no checkpoint to resume" in done.err
    done = lab.finetune("--resume", lab.folder)
    assert done.code == 2 and "is not a checkpoint; expected a folder step-N" in done.err
    done = lab.run("finetune", "--resume")
    assert done.code == 2 and "--resume without CONFIG needs a PATH" in done.err


def test_a_damaged_checkpoint_is_an_error_of_files(lab):
    assert lab.finetune().code == 0
    (lab.run_dir / "checkpoints" / "step-6" / "state.json").write_text("{")
    done = lab.finetune("--resume")
    assert done.code == 4 and "is not a readable checkpoint" in done.err
