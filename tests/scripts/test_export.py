"""export.py: what it writes computes what base and adapter compute, or nothing is written."""

import json

import numpy as np
import pytest

from adapters import load_adapter
from peft_core.safetensors_io import load_file, save_file
from peft_core.tape import no_grad
from transformer import from_pretrained

IDS = np.arange(40).reshape(2, 20) % 60


@pytest.fixture
def adapter(lab):
    """A trained adapter of the lab's base."""
    assert lab.finetune(train={"learning_rate": 0.05}).code == 0
    return lab.run_dir / "adapter"


def logits(base, adapter=None) -> np.ndarray:
    model = from_pretrained(base)
    if adapter is not None:
        load_adapter(model, adapter)
    with no_grad():
        return model(IDS).logits.numpy().astype(np.float64)


def test_merged_computes_the_same_without_an_adapter(lab, adapter):
    out = lab.folder / "merged"
    done = lab.run("export", adapter, "--to", "merged", "--out", out, "--verify")
    assert done.code == 0, done.err
    tuned, plain = logits(lab.base, adapter), logits(lab.base)
    assert np.abs(tuned - plain).max() > 0.1, "the adapter does nothing: the case shows nothing"
    np.testing.assert_allclose(logits(out), tuned, atol=1e-4)
    assert "merged   7 of 7 adapted weights changed; rounding lost 0.00% of the adapter's update" in done.out
    assert "verify   logits differ by" in done.out and f"wrote    {out}" in done.out
    assert {p.name for p in out.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    told = lab.run("generate", out, "--prompt", "count on from 9 to 12 please", "--max-new-tokens", "4")
    assert told.code == 0, told.err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_merged_to_half_precision_reports_what_rounding_lost(lab, adapter, dtype):
    out = lab.folder / "merged"
    done = lab.run("export", adapter, "--to", "merged", "--out", out, "--dtype", dtype, "--verify")
    assert done.code == 0, done.err
    assert "rounding lost 0.00%" not in done.out
    assert str(load_file(out / "model.safetensors")["lm_head.weight"].dtype) == dtype
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype


def test_merged_in_shards(lab, adapter):
    out = lab.folder / "merged"
    assert lab.run("export", adapter, "--to", "merged", "--out", out, "--max-shard-size", "20KB", "--verify").code == 0
    assert len(list(out.glob("model-*.safetensors"))) > 1


def test_peft_form(lab, adapter):
    assert lab.finetune("--overwrite", lora={"use_rslora": True, "alpha_pattern": {}}).code == 0
    out = lab.folder / "peft"
    done = lab.run("export", adapter, "--to", "peft", "--out", out, "--verify")
    assert done.code == 0, done.err
    assert json.loads((out / "adapter_config.json").read_text())["use_rslora"] is False
    np.testing.assert_allclose(logits(lab.base, out), logits(lab.base, adapter), atol=1e-4)


def test_verification_fails_on_a_wrong_merge_and_leaves_nothing(lab, adapter, monkeypatch):
    import export

    real = export.merge_directory

    def wrong(base, adapter, out, **options):
        report = real(base, adapter, out, **options)
        tensors = {k: np.array(v) for k, v in load_file(out / "model.safetensors").items()}
        tensors["model.layers.0.mlp.up_proj.weight"] *= 1.05
        save_file(tensors, out / "model.safetensors")
        return report

    monkeypatch.setattr(export, "merge_directory", wrong)
    out = lab.folder / "merged"
    done = lab.run("export", adapter, "--to", "merged", "--out", out, "--verify")
    assert done.code == 7 and "export error: the exported result does not compute what base and adapter do" in done.err
    assert not out.exists() and not [p for p in lab.folder.iterdir() if "merged" in p.name]


def test_verification_fails_on_a_merge_that_did_nothing(lab, adapter, monkeypatch):
    """At bfloat16 the limit alone could be wider than a small adapter's effect."""
    import export

    def nothing(base, adapter, out, **options):
        adapter = lab.run_dir / "adapter"
        tensors = load_file(adapter / "adapter_model.safetensors")
        idle = lab.folder / "idle"
        idle.mkdir()
        (idle / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
        # Only one matrix keeps a change, so small that nobody sees it.
        save_file(
            {k: np.array(v) * (1e-6 if "lora_B" in k else 1) for k, v in tensors.items()},
            idle / "adapter_model.safetensors",
        )
        report = real(base, idle, out, **{**options, "dtype": "float32"})
        report.lost = 0.01
        return report

    real = export.merge_directory
    monkeypatch.setattr(export, "merge_directory", nothing)
    monkeypatch.setattr("run.verify.LIMITS", {"float32": 1e9})
    out = lab.folder / "merged"
    assert lab.run("export", adapter, "--to", "merged", "--out", out, "--verify").code == 7
    assert not out.exists()


@pytest.mark.parametrize("target", ["gguf", "ollama"])
def test_what_is_not_built_is_refused(lab, target):
    with pytest.raises(SystemExit) as stopped:
        lab.run("export", lab.folder, "--to", target, "--out", lab.folder / "x")
    told = lab.capsys.readouterr().err
    assert (
        stopped.value.code == 2 and f"--to: {target} is not supported yet; expected merged or peft. Use --to m" in told
    )


def test_help_lists_what_works(lab):
    with pytest.raises(SystemExit):
        lab.run("export", "--help")
    told = lab.capsys.readouterr().out
    assert "--to {merged,peft}" in told and "gguf" not in told.lower() and "ollama" not in told.lower()


def test_errors(lab, adapter):
    done = lab.run("export", adapter, "--to", "merged", "--out", lab.run_dir)
    assert done.code == 2 and "is not empty; expected a new folder" in done.err
    done = lab.run("export", lab.folder / "none", "--to", "merged", "--out", lab.folder / "x")
    assert done.code == 4 and "adapter error: " in done.err
    done = lab.run("export", adapter, "--to", "merged", "--out", lab.folder / "x", "--base", lab.folder / "none")
    assert done.code == 4 and "model error: " in done.err
    done = lab.run("export", adapter, "--to", "merged", "--out", lab.folder / "x", "--max-shard-size", "big")
    assert done.code == 2 and "max_shard_size is 'big'" in done.err
    assert not (lab.folder / "x").exists()


def test_the_base_comes_from_the_adapter_or_the_command_line(lab, adapter):
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text())
    for name, text in ((None, "names no base model"), ("gone", "the base 'gone' that")):
        file.write_text(json.dumps({**settings, "base_model_name_or_path": name}))
        done = lab.run("export", adapter, "--to", "merged", "--out", lab.folder / "x")
        assert done.code == 2 and text in done.err and "Add --base DIR." in done.err
    assert lab.run("export", adapter, "--to", "merged", "--out", lab.folder / "x", "--base", lab.base).code == 0
