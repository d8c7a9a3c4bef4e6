"""Every expected error: its exit code, its one block of text, and no traceback."""

import json
import shlex
import shutil

import numpy as np
import pytest

from peft_core import errors as core
from peft_core.safetensors_io import load_file, save_file
from run import errors
from support.tiny_run import tiny_rows


def check(done, code: int, *texts: str) -> None:
    """The page ended with ``code`` and one block that holds ``texts``."""
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    for text in texts:
        assert text in done.err, done.err


# ---------------------------------------------------------------------- classes to codes


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (core.ConfigError("x"), "config error", 2),
        (core.DataError("x"), "data error", 3),
        (core.FileError("x"), "file error", 4),
        (core.ModelError("x"), "model error", 4),
        (core.AdapterError("x"), "adapter error", 4),
        (core.OutOfMemoryError("x"), "out of memory", 5),
        (MemoryError("x"), "out of memory", 5),
        (core.DivergedError("x"), "diverged", 6),
        (core.ExportError("x"), "export error", 7),
    ],
)
def test_each_class_has_its_code(error, kind, code, capsys):
    def page(argv):
        raise error

    assert errors.run_page(page, []) == code
    assert capsys.readouterr().err == f"{kind}: x\n"


def test_a_bug_keeps_its_traceback_and_interrupts_their_codes(capsys):
    def bug(argv):
        raise KeyError("oops")

    assert errors.run_page(bug, []) == 1
    assert "Traceback" in (err := capsys.readouterr().err) and "This is a bug" in err

    def stopped(argv):
        raise errors.Interrupted(15)

    def keyboard(argv):
        raise KeyboardInterrupt

    assert (errors.run_page(stopped, []), errors.run_page(keyboard, [])) == (143, 130)


def test_debug_shows_the_traceback_of_an_expected_error(lab):
    done = lab.finetune("--debug", data={"path": "nowhere.jsonl"})
    assert done.code == 3 and "Traceback" in done.err and "data error: nowhere.jsonl does not exist" in done.err


# ---------------------------------------------------------------------- 2: usage and config


def test_unknown_key(lab):
    lab.settings["train"]["gradient_accumulation_step"] = 4
    check(
        lab.finetune(),
        2,
        f"config error: {lab.config}:",
        "unknown key 'train.gradient_accumulation_step'. Did you mean",
    )


def test_targets_that_match_nothing(lab):
    done = lab.finetune(lora={"target_modules": ["query_key_value"]})
    check(
        done,
        2,
        "config error: lora.target_modules ['query_key_value'] matches no linear layer of LlamaForCausalLM",
        "q_proj",
        "down_proj",
    )
    assert not lab.run_dir.exists()


def test_a_device_that_is_not_there(lab):
    check(lab.finetune("--device", "tpu"), 2, "config error: --device tpu: device 'tpu' is not known")


def test_a_chat_template_that_cannot_be_read(lab):
    done = lab.finetune(model={"chat_template": "no.jinja"})
    check(done, 2, "model.chat_template 'no.jinja' cannot be read", "expected the path of a jinja file")


def test_more_warmup_than_steps(lab):
    check(lab.finetune(train={"warmup_steps": 6}), 2, "train.warmup_steps is 6 and the run has 6 steps; expected fewer")


def test_output_dir_is_a_file(lab):
    lab.run_dir.write_text("x")
    check(lab.finetune(), 2, "is a file; expected a folder. Use another output_dir.")


def test_output_dir_locked_by_another_process(lab):
    fcntl = pytest.importorskip("fcntl")
    lab.run_dir.mkdir()
    with open(lab.run_dir / "run.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        check(lab.finetune(), 2, "is in use by another process at this moment")


# ---------------------------------------------------------------------- 3: data


def test_a_bad_json_line(lab):
    lines = lab.data.read_text().splitlines()
    lines[2] = '{"messages": [}'
    lab.data.write_text("\n".join(lines))
    check(lab.finetune(), 3, f"data error: {lab.data}:3: not valid JSON", "at column")
    assert not lab.run_dir.exists()


def test_empty_data(lab):
    lab.data.write_text("")
    check(lab.finetune(), 3, f"data error: {lab.data} is empty")


def test_unknown_format(lab):
    lab.data.write_text('{"question": "a", "answer": "b"}\n')
    check(lab.finetune(), 3, 'Add: data.columns = { prompt = "question", completion = "answer" }')


def test_no_trained_token(lab):
    lab.data.write_text('{"messages": [{"role": "user", "content": "count on from 3"}]}\n')
    check(lab.finetune(), 3, "data error: ", "have no trained token")


def test_chat_rows_without_a_template(lab):
    base = lab.own_base()
    file = base / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    check(lab.finetune(), 3, "data error: ", "chat template", "model.chat_template")


# ---------------------------------------------------------------------- 4: files


def test_a_model_that_is_not_there(lab):
    check(lab.finetune(model={"path": "org/nothing"}), 4, "model error: org/nothing", "hf download org/nothing")


def test_no_weights(lab):
    base = lab.own_base()
    (base / "model.safetensors").unlink()
    check(lab.finetune(), 4, "model error: ", "model.safetensors")


def test_truncated_weights(lab):
    file = lab.own_base() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    check(lab.finetune(), 4, f"file error: {file}", "truncated")


def test_lfs_pointer(lab):
    file = lab.own_base() / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    check(lab.finetune(), 4, "Git LFS")


def test_missing_shard(lab):
    base = lab.own_base()
    first = "model-00001-of-00002.safetensors"
    (base / "model.safetensors").rename(base / first)
    names = list(load_file(base / first))
    table = dict.fromkeys(names, first) | {names[0]: "model-00002-of-00002.safetensors"}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    check(lab.finetune(), 4, "model error: ", "model-00002-of-00002.safetensors")


def test_wrong_shape(lab):
    file = lab.own_base() / "model.safetensors"
    tensors = {name: np.array(t) for name, t in load_file(file).items()}
    tensors["model.norm.weight"] = np.ones(7, np.float32)
    save_file(tensors, file)
    check(lab.finetune(), 4, "model error: ", "model.norm.weight", "7", "32")


def test_unknown_model_type(lab):
    file = lab.own_base() / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "mamba9"}))
    check(lab.finetune(), 4, "model error: ", "mamba9")


def test_a_damaged_generation_config(lab):
    file = lab.own_base() / "generation_config.json"
    file.write_text("[")
    check(lab.finetune(), 4, f"{file} is not valid JSON")


def test_no_tokenizer(lab):
    (lab.own_base() / "tokenizer.json").unlink()
    check(lab.finetune(), 4, "file error: ", "tokenizer.json")


def test_adapter_of_another_base(lab, tmp_path):
    from support.tiny_run import write_tiny_model

    assert lab.finetune().code == 0
    write_tiny_model(tmp_path / "wide", hidden=64, layers=1)
    done = lab.run("generate", tmp_path / "wide", "--adapter", lab.run_dir / "adapter", "--prompt", "count")
    check(done, 4, "adapter error: ", "(4, 32) in the file, (r, 64) in the model")


# ---------------------------------------------------------------------- 5: memory


def test_out_of_memory(lab, monkeypatch):
    import run.job

    def loss(model, batch):
        if model.training and run.job.Job.steps_left == 0:
            raise MemoryError("Unable to allocate 9 GiB")
        run.job.Job.steps_left -= model.training
        return model.loss(batch)

    monkeypatch.setattr("run.job.rss_bytes", lambda: 0)  # that of this process has grown when the second run begins
    monkeypatch.setattr(run.job.Job, "steps_left", 6, raising=False)
    monkeypatch.setattr(run.job.Job, "loss", staticmethod(loss))
    done = lab.finetune()
    last = lab.run_dir / "checkpoints" / "step-2"
    check(
        done,
        5,
        "out of memory at step 4 (Unable to allocate 9 GiB",
        f"Last good checkpoint: {last}. Try, in this order: train.memory_budget=",
        "MB (smaller passes, the same step); train.gradient_checkpointing=true (estimate",
        "data.max_seq_length=1024 (another run). Continue with: python scripts/finetune.py ",
    )
    assert done.err.startswith("out of memory at step 4")
    monkeypatch.setattr(run.job.Job, "steps_left", 10**6)
    command = shlex.split(done.err.split("Continue with: python ")[1])
    budget, config = command.pop(), lab.run_dir / "config.resolved.toml"
    assert command == ["scripts/finetune.py", str(config), "--resume"] and budget.startswith("train.memory_budget=")
    total = json.loads((lab.run_dir / "preflight.json").read_text())["memory"]["total"]
    megabytes = float(budget.removeprefix("train.memory_budget=").removesuffix("MB"))
    assert 0.8 * total < megabytes * 1e6  # what half a pass needs: the weights stay
    for setting in (budget, "train.gradient_checkpointing=true"):
        done = lab.run("finetune", config, "--resume", last, setting, "output.save_total_limit=9")
        assert done.code == 0, done.err


# ---------------------------------------------------------------------- 6: diverged


def test_a_loss_that_is_not_finite(lab, monkeypatch):
    import run.job

    calls = [0]

    def loss(model, batch):
        total, n = model.loss(batch)
        calls[0] += model.training
        return (total * float("nan") if calls[0] == 10 else total), n

    monkeypatch.setattr(run.job.Job, "loss", staticmethod(loss))
    done = lab.finetune()
    last = lab.run_dir / "checkpoints" / "step-4"
    check(
        done,
        6,
        "diverged: the loss is nan in step 5, micro-batch 2 of 2 (rows ",
        f"Rows of this step: {lab.data}:",
        f"Last finite checkpoint: {last}.",
    )
    assert last.is_dir() and all(np.isfinite(r.get("loss", 0)) for r in lab.records())
    tensors = load_file(last / "state.safetensors")
    assert all(np.isfinite(t).all() for t in tensors.values())
    monkeypatch.undo()
    assert lab.finetune("--resume").code == 0


def test_a_validation_loss_that_is_not_finite(lab, monkeypatch):
    import run.job

    def loss(model, batch):
        total, n = model.loss(batch)
        return (total if model.training else total * float("inf")), n

    monkeypatch.setattr(run.job.Job, "loss", staticmethod(loss))
    check(lab.finetune(), 6, "diverged: the validation loss is inf at step 0; expected a finite number.")


# ---------------------------------------------------------------------- nothing is half-written


def test_an_adapter_is_replaced_as_a_whole(lab, monkeypatch):
    import run.job

    assert lab.finetune().code == 0
    before = {p.name: p.read_bytes() for p in (lab.run_dir / "adapter").iterdir()}
    monkeypatch.setattr(
        run.job, "save_adapter", lambda model, folder, config: (folder / "half").write_text("x") and 1 / 0
    )
    shutil.rmtree(lab.run_dir / "checkpoints" / "step-6")
    assert lab.finetune("--resume").code == 1  # a planted bug
    assert {p.name: p.read_bytes() for p in (lab.run_dir / "adapter").iterdir()} == before
    assert not [p for p in lab.run_dir.iterdir() if "tmp" in p.name]


def test_a_full_disk_is_an_error_of_files(lab, monkeypatch):
    import os

    real = os.replace

    def full(a, b):
        if str(b).endswith("state.json"):
            raise OSError(28, "No space left on device")
        return real(a, b)

    monkeypatch.setattr(os, "replace", full)
    check(lab.finetune(), 4, "file error: ", "No space left on device")


def test_rows_are_made_by_a_rule():
    for row in tiny_rows(50, seed=3):
        words, numbers = row["messages"][0]["content"].split(), row["messages"][1]["content"].split()
        step = {"on": 1, "back": -1}[words[1]]
        start, end = int(words[3]), int(words[5])
        assert [int(n) for n in numbers] == list(range(start + step, end + step, step))
