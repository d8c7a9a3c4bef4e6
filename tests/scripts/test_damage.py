"""What is broken outside of the program: damaged weights, and directories that the system refuses."""

import os
from pathlib import Path

import numpy as np
import pytest

from peft_core.errors import ConfigError, FileError
from peft_core.safetensors_io import load_file, save_file
from run.cards import write_rows
from run.rundir import RunDir, next_numbered
from support.tiny_run import tiny_rows

NAME = "model.layers.0.mlp.up_proj.weight"


def check(done, code: int, *texts: str) -> None:
    """The page ended with ``code`` and one block that holds ``texts``."""
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    for text in texts:
        assert text in done.err, done.err


def damage(base: Path, value: float = np.nan) -> Path:
    """One number of the base becomes ``value``; returns the file."""
    file = base / "model.safetensors"
    tensors = {name: np.array(t) for name, t in load_file(file).items()}
    tensors[NAME][3, 3] = value
    save_file(tensors, file)
    return file


# ---------------------------------------------------------------------- weights that are not finite


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_damaged_base_is_named_and_leaves_the_folder_free(lab, validated, overwrite):
    file = damage(lab.own_base())
    data = {} if validated else {"val_path": None}
    flags = ["--overwrite"] if overwrite else []
    done = lab.finetune(*flags, data=data)
    first = "the validation loss is nan at step 0" if validated else "the loss is nan in step 1, micro-batch 1 of 2"
    check(done, 6, f"diverged: {first}", "learning rate has no part in it", f"{NAME} of {file}: download it again.")
    assert "Lower" not in done.err and "float16" not in done.err and "warm-up" not in done.err
    assert [p.name for p in lab.run_dir.iterdir()] == ["run.lock"]  # nothing that counts as a run
    lab.settings["model"]["path"] = str(lab.base)
    assert lab.finetune(data=data).code == 0


def test_a_failure_after_the_first_step_keeps_the_records(lab, monkeypatch):
    import run.job

    calls = [0]

    def loss(model, batch):
        calls[0] += model.training
        total, n = model.loss(batch)
        return (total * float("nan") if calls[0] == 4 else total), n

    monkeypatch.setattr(run.job.Job, "loss", staticmethod(loss))
    done = lab.finetune(output={"save_steps": 5}, log={"logging_steps": 1})
    check(done, 6, "in step 2", "No checkpoint was written yet: the base model is step 0.", "Lower the learning rate")
    assert [r["step"] for r in lab.records()] == [0, 1]


def test_rows_are_named_once(lab, monkeypatch):
    import run.job

    monkeypatch.setattr(run.job.Job, "loss", staticmethod(lambda model, batch: (model.loss(batch)[0] * np.nan, 1)))
    write_rows(lab.data, tiny_rows(1))
    done = lab.finetune(data={"path": [str(lab.data)] * 3, "val_path": None})
    check(done, 6, f"Rows of this step: {lab.data}:1. All weights of the base are finite: look at the rows.")


def test_generate_stops_at_logits_that_are_not_finite(lab):
    damage(base := lab.own_base())
    for words in ([], ["--temperature", "1"], ["--temperature", "1", "--top-k", "3"]):
        done = lab.run("generate", base, "--prompt", "count on", "--max-new-tokens", "4", *words)
        check(done, 6, "diverged: ", "logits of prompt 0 are NaN or infinite at new token 1", "expected finite logits.")


def test_export_refuses_a_damaged_base_also_without_verify(lab):
    assert lab.finetune().code == 0
    file, out = damage(lab.own_base(), np.inf), lab.folder / "merged"
    for words in ([], ["--verify"], ["--dtype", "bfloat16"]):
        done = lab.run("export", lab.run_dir / "adapter", "--base", file.parent, "--to", "merged", "--out", out, *words)
        check(done, 4, f"model error: {NAME} of {file} holds NaN or infinity; expected finite weights.")
    assert not out.exists()


# ---------------------------------------------------------------------- output_dir


def test_a_file_in_the_way(lab):
    (lab.folder / "plain").write_text("x")
    below = lab.folder / "plain" / "run" / "one"
    done = lab.finetune(output={"output_dir": str(below)})
    check(
        done,
        2,
        f"config error: output_dir {below} lies below {lab.folder / 'plain'}, which is a file; expected a folder",
    )


def refusing(monkeypatch, name, refuses, error):
    """``name`` of os raises ``error`` for the paths that ``refuses``: root may do everything, chmod shows nothing."""
    real = getattr(os, name)

    def call(path, *args, **options):
        if refuses(str(path)):
            raise OSError(*error, str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, name, call)


def test_a_parent_that_may_not_be_written_to(lab, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(lab.folder) and real(path, mode))
    done = lab.finetune()
    check(done, 2, f"config error: output_dir {lab.run_dir} cannot be used (no permission to write into {lab.folder});")
    assert "model " not in done.out  # before anything is read


@pytest.mark.parametrize("error", [(13, "Permission denied"), (30, "Read-only file system"), (28, "No space left")])
def test_a_folder_that_cannot_be_made(lab, monkeypatch, error):
    refusing(monkeypatch, "mkdir", lambda path: path == str(lab.run_dir), error)
    text = f"config error: output_dir {lab.run_dir} cannot be used ({error[1]}); expected a folder that may be written"
    check(lab.finetune(), 2, text, "Free space, change its permissions, or use another output_dir.")


def test_a_used_folder_that_cannot_be_cleared(lab, monkeypatch):
    assert lab.finetune().code == 0
    refusing(monkeypatch, "unlink", lambda path: path.endswith("metrics.jsonl"), (13, "Permission denied"))
    check(lab.finetune("--overwrite"), 2, f"config error: output_dir {lab.run_dir} cannot be used (Permission denied)")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_disk_that_is_full_while_training(tmp_path):
    run = RunDir(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        FileError, match=r"metrics.jsonl could not be written \(No space left on device\); expected a file"
    ):
        run.append(run.metrics, {"step": 1})


def test_the_place_of_numbered_folders(tmp_path):
    (tmp_path / "runs").write_text("x")
    with pytest.raises(ConfigError, match=r"output_dir .*runs cannot be used \(File exists\)"):
        next_numbered(tmp_path / "runs", "quickstart")


def test_any_path_that_the_system_refuses_is_no_bug(lab, monkeypatch):
    real = Path.read_bytes

    def refused(self):
        if self == lab.data:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", refused)
    check(lab.finetune(), 4, f"file error: {lab.data}: Permission denied; expected a path that exists, may be read and")


# ---------------------------------------------------------------------- settings without CONFIG


@pytest.fixture
def here(lab, monkeypatch):
    monkeypatch.chdir(lab.folder)
    return lab


def test_a_model_and_data_of_ones_own_are_not_the_quick_start(here):
    words = [f"model.path={here.base}", f"data.train_path={here.data}", "train.epochs=1", "lora.r=2"]
    done = here.run("finetune", *words)
    check(done, 2, "config error: command line: output.output_dir is missing; expected a folder such as",
          "Without CONFIG, data.path and model.path on the command line means a run of your own")  # fmt: skip
    done = here.run("finetune", "data.train_path=train.jsonl")
    check(
        done, 2, "command line: model.path is missing", "model.path, data.path and output.output_dir have to be there."
    )
    done = here.run("finetune", *words, "output.output_dir=out", "train.batch_size=8")
    assert done.code == 0 and "quick start" not in done.out and "1 epochs = 3 steps" in done.out, done.err
    assert not (here.folder / "runs").exists()


@pytest.mark.parametrize(
    ("word", "gone", "section"),
    [
        ("train.epochs=0.1", "max_steps", "train"),
        ("data.val_size=0.1", "val_path", "data"),
        ("train.max_tokens_per_step=4000", "batch_size", "train"),
    ],
)
def test_a_setting_takes_the_place_of_the_quick_starts_own(here, word, gone, section):
    import tomllib

    done = here.run("finetune", word, "--print-config")
    assert done.code == 0, done.err
    assert gone not in tomllib.loads(done.out[done.out.index("[model]") :])[section]


def test_a_quick_start_that_fails_leaves_no_folder(here, monkeypatch):
    import run.job

    done = here.run("finetune", "lora.target_modules=['nothing']")
    assert done.code == 2 and not list((here.folder / "runs").iterdir())
    monkeypatch.setattr(run.job.Job, "loss", staticmethod(lambda model, batch: (model.loss(batch)[0] * np.nan, 1)))
    assert here.run("finetune").code == 6 and not list((here.folder / "runs").iterdir())
    monkeypatch.setattr(run.job.Job, "save", lambda job: 1 / 0)
    monkeypatch.setattr(run.job.Job, "loss", staticmethod(lambda model, batch: model.loss(batch)))
    assert here.run("finetune", "train.max_steps=1", "eval.sample_prompts=[]").code == 1
    assert (here.folder / "runs" / "quickstart-1" / "checkpoints" / "step-1").is_dir()  # this one can be continued


# ---------------------------------------------------------------------- messages


def test_rows_held_out_of_a_single_row(lab):
    write_rows(lab.data, tiny_rows(1))
    for size in (0.05, 1, 0.9):
        done = lab.finetune(data={"val_path": None, "val_size": size})
        check(
            done,
            2,
            f"data.val_size is {size}, and there is 1 row to divide; expected at least 2 rows, one for each side",
        )


def test_early_stopping_with_nothing_held_out(lab):
    done = lab.finetune(data={"val_path": None, "val_size": 0}, eval={"early_stopping_patience": 2})
    check(
        done,
        2,
        "is set without validation rows (data.val_size is 0); expected data.val_path or a larger data.val_size.",
    )
    done = lab.finetune("--check", data={"val_path": None, "val_size": 0})
    assert "val 0 (data.val_size is 0)" in done.out


def test_verification_speaks_of_shares(lab):
    assert lab.finetune().code == 0
    done = lab.run("export", lab.run_dir / "adapter", "--to", "merged", "--out", lab.folder / "m", "--verify")
    assert done.code == 0
    told = float(done.out.split("the adapter moves them by ")[1].split()[0])
    from run.verify import _base_and_tuned

    plain, tuned = _base_and_tuned(lab.base, lab.run_dir / "adapter")
    assert told == pytest.approx(np.linalg.norm(tuned - plain) / np.linalg.norm(plain), rel=0.1)
