"""The benchmark on the tiny shapes: what it counts, that it tells models apart, its JSON. No times are asserted."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest

import bench
from adapters.lora import LoraLinear
from peft_core import ops, tape
from peft_core.safetensors_io import load_file
from run import bench_compare as compare
from run import bench_ours
from run.bench_count import flops_per_step
from run.bench_files import write_files
from run.bench_ours import check
from run.bench_profile import Profile
from run.bench_work import SHAPES, Spec, batches, n_tokens
from transformer import from_pretrained
from transformer.attention import Attention
from transformer.model import CausalLM

SMALL = ["--workload", "dense-2x16", "--steps", "2", "--rank", "4"]
TINY, TINY_GPT2 = (["--shape", shape, *SMALL] for shape in ("tiny", "tiny-gpt2"))
TARGETS = {  # the linears of a layer, all adapted
    "tiny": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "tiny-gpt2": {"c_attn", "c_proj", "c_fc"},
}
GRADIENTS = {"tiny": 28, "tiny-gpt2": 16}  # 2 layers, A and B of 7 linears or of 4


@pytest.fixture(scope="module")
def specs(tmp_path_factory) -> dict[str, Spec]:
    found = {
        shape: Spec("check", str(tmp_path_factory.mktemp(shape)), shape=shape, workload="gsm8k-2", rank=4)
        for shape in TARGETS
    }
    for spec in found.values():
        write_files(spec)
    return found


@pytest.fixture(scope="module")
def spec(specs) -> Spec:
    return specs["tiny"]


def outcome(argv, capsys) -> dict:
    code = bench.main(argv)
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out.strip().splitlines()[-1])


# ------------------------------------------------------------------------------------------------ what is counted


@pytest.mark.parametrize("shape", TARGETS)
def test_flops_of_a_row_by_hand(specs, shape):
    model = from_pretrained(specs[shape].base)
    adapted = [p for name, p in model.named_parameters() if name.split(".")[-2] in TARGETS[shape] and p.ndim == 2]
    linears, wide = [p.numel() for p in adapted], [sum(p.shape) for p in adapted]
    assert 2 * len(adapted) == GRADIENTS[shape]
    head, (row,) = model.lm_head.weight.numel(), batches("dense-1x5", 256, 1)[0]
    ids, labels = row[0], [-100, -100, *row[1][2:]]  # targets of tokens 1, 2 and 3
    scores = 1 + 2 + 3 + 4 + 5  # keys that the queries see
    attention = 3.5 * 2 * 2 * scores * 64 * 2  # q k^T and p v, 4 heads of 16, 2 layers
    want = 4 * 5 * sum(linears) + 4 * 3 * head + 6 * 5 * 8 * sum(wide) + attention
    assert flops_per_step(shape, [(ids, labels)], 8) == want


@pytest.mark.parametrize(("shape", "want"), [("smollm2-135m", 1.29e12), ("gpt2-124m", 1.108e12)])
def test_flops_of_a_known_workload(shape, want):
    rows = batches("dense-4x512", SHAPES[shape].vocab, 1)[0]
    assert flops_per_step(shape, rows, 16) == pytest.approx(want, rel=0.005)


def test_workloads():
    (dense,), (ragged,) = batches("dense-3x7", 50, 1), batches("gsm8k-4", 50, 1)
    assert [len(ids) for ids, _ in dense] == [7, 7, 7] and n_tokens(dense) == 21
    assert all(ids == labels and max(ids) < 50 for ids, labels in dense)
    assert len({len(ids) for ids, _ in ragged}) > 1
    for ids, labels in ragged:
        prompt = labels.count(-100)
        assert 0 < prompt < len(ids) and labels[prompt:] == ids[prompt:]
    assert batches("gsm8k-4", 50, 2)[0] == ragged  # the same for every program and number of steps


@pytest.mark.parametrize("argv", [["--workload", "dense-4"], ["--rank", "0"], ["--peer-settings", "fp8"],
                                  ["--what", "rank", "--points", "x"]])  # fmt: skip
def test_wrong_arguments_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        bench.parse(argv)
    assert "error:" in capsys.readouterr().err


def test_a_measuring_process_is_rid_of_forced_blas_settings(spec, monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    plain, tuned = compare.environment(spec), compare.environment(replace(spec, malloc=True))
    assert "OPENBLAS_CORETYPE" not in plain and "MALLOC_TOP_PAD_" not in plain
    assert tuned.items() - plain.items() == compare.MALLOC.items()
    assert os.environ["OPENBLAS_CORETYPE"] == "Haswell"


# ------------------------------------------------------------------------------------------------ the files


def test_gpt2_is_written_as_its_checkpoints_are(specs):
    spec = specs["tiny-gpt2"]
    config = json.loads((spec.base / "config.json").read_text())
    tensors = load_file(spec.base / "model.safetensors")
    assert config["model_type"] == "gpt2" and config["architectures"] == ["GPT2LMHeadModel"]
    assert config["attn_pdrop"] == config["resid_pdrop"] == config["embd_pdrop"] == 0
    assert len(tensors) == 4 + 2 * 12 and "lm_head.weight" not in tensors
    layer = {name.removeprefix("transformer.h.1."): x.shape for name, x in tensors.items() if ".h.1." in name}
    assert layer == {
        "ln_1.weight": (64,), "ln_1.bias": (64,), "ln_2.weight": (64,), "ln_2.bias": (64,),
        "attn.c_attn.weight": (64, 192), "attn.c_attn.bias": (192,),
        "attn.c_proj.weight": (64, 64), "attn.c_proj.bias": (64,),
        "mlp.c_fc.weight": (64, 256), "mlp.c_fc.bias": (256,),
        "mlp.c_proj.weight": (256, 64), "mlp.c_proj.bias": (64,),
    }  # fmt: skip
    assert json.loads((spec.adapter / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    a = load_file(spec.adapter / "adapter_model.safetensors")
    assert a["base_model.model.transformer.h.0.mlp.c_proj.lora_A.weight"].shape == (4, 256)


def test_learned_positions_follow_the_workload(tmp_path):
    """Whatever was written before: a table that is too long would count as memory."""

    def longest(workload: str, new_tokens: int = 4) -> int:
        spec = Spec("files", str(tmp_path), shape="tiny-gpt2", workload=workload, rank=4, new_tokens=new_tokens)
        write_files(spec)
        return len(load_file(spec.base / "model.safetensors")["transformer.wpe.weight"])

    assert [longest("dense-1x16"), longest("dense-1x300"), longest("dense-1x16")] == [64, 300, 64]
    assert longest("dense-1x16", new_tokens=40) == 32 + 40 + 1
    weights = tmp_path / "base" / "model.safetensors"
    os.utime(weights, (1, 1))
    assert longest("dense-2x8", new_tokens=40) == 73 and weights.stat().st_mtime == 1  # what is there will do


# ------------------------------------------------------------------------------------------------ the same work


def without_attention(monkeypatch):
    def values_alone(self, x, norm, place):
        first, out = getattr(self, self.stack.qkv[0]), getattr(self, self.stack.attention_out)
        return x + out(first(norm(x))[:, : x.shape[1]])

    monkeypatch.setattr(Attention, "forward", values_alone)


def without_rope(monkeypatch):
    def still(qkv, *, cos, sin, right=ops.rotary_attention, **kw):
        return right(qkv, cos=np.ones_like(cos), sin=np.zeros_like(sin), **kw)

    monkeypatch.setattr(ops, "rotary_attention", still)


def with_a_wrong_scale(monkeypatch):
    def parts(self, right=LoraLinear.parts):
        weight, bias, terms = right(self)
        return weight, bias, tuple((a, b, 1.1 * scale) for a, b, scale in terms)

    monkeypatch.setattr(LoraLinear, "parts", parts)


def without_learned_positions(monkeypatch):
    monkeypatch.setattr(CausalLM, "_positions", lambda self, positions, device: {"positions": 0 * positions})


def with_rms_norm(monkeypatch):
    monkeypatch.setattr(ops, "layer_norm", lambda x, w, b, *, eps: ops.add(ops.rms_norm(x, w, eps=eps), b))


def with_a_square_weight_turned(monkeypatch):
    def load(base, right=from_pretrained):
        model = right(base)
        weight = model.transformer.h[0].attn.c_proj.weight
        weight.data = weight.data.T
        return model

    monkeypatch.setattr(bench_ours, "from_pretrained", load)


FAULTS = [
    *(("tiny", fault) for fault in (without_attention, without_rope, with_a_wrong_scale)),
    *(("tiny-gpt2", fault) for fault in (without_attention, without_learned_positions, with_a_wrong_scale,
                                         with_rms_norm, with_a_square_weight_turned)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "broken"), FAULTS)
def test_another_model_is_told_apart(specs, shape, broken, dtype, monkeypatch):
    spec = specs[shape]
    right = check(spec)
    logits = np.load(spec.logits)
    assert right["logits_std"] >= 1 and len(right["norms"]) == GRADIENTS[shape] and min(right["norms"].values()) > 0
    ours = check(replace(spec, dtype=dtype))
    same = np.load(replace(spec, dtype=dtype).logits)
    assert compare.same_work(ours, right, (same, logits), dtype) == []
    broken(monkeypatch)
    other = check(replace(spec, dtype=dtype))
    complaints = compare.same_work(other, right, (np.load(replace(spec, dtype=dtype).logits), logits), dtype)
    assert any(f"gradient of {SHAPES[shape].layer_path(0)}" in text for text in complaints)


def test_narrow_logits_nan_and_missing_gradients_are_complaints():
    a, z = {"norms": {"x.A": 1.0}}, np.array([[-2.0, 2.0]])
    assert compare.same_work(a, a, (z, z), "float32") == []
    assert "less than 1" in compare.same_work(a, a, (z / 4, z / 4), "float32")[0]
    assert "apart" in compare.same_work(a, a, (z * np.nan, z), "float32")[0]
    assert "norm nan" in compare.same_work({"norms": {"x.A": float("nan")}}, a, (z, z), "float32")[0]
    assert "one side only" in compare.same_work({"norms": {}}, a, (z, z), "float32")[0]
    assert "shape" in compare.same_work(a, a, (z, z[0]), "float32")[0]


def test_ratios_take_the_peers_better_figure():
    def run(dtype, speed, memory):
        return {"dtype": dtype, "tokens_per_s": speed, "peak_rss_mb": memory}

    peer = {"float32": run("float32", 10, 100), "float32+malloc": run("float32", 20, 150),
            "bfloat16": run("bfloat16", 25, 80)}  # fmt: skip
    found = compare.ratios(run("float32", 50, 20), peer, ("float32", "bfloat16"))
    assert found["float32"] == {"tokens_per_s": 2.5, "peak_rss": 0.2}
    assert found["bfloat16"] == found["best"] == {"tokens_per_s": 2.0, "peak_rss": 0.25}


# ------------------------------------------------------------------------------------------------ the page


def test_steps(capsys, tmp_path):
    found = outcome([*TINY, "--profile", "--checkpointing", "--files", str(tmp_path)], capsys)
    keys = {"program", "tokens_per_s", "step_s", "peak_rss_mb", "losses", "flops_per_step", "gflops",
            "gemm_peak_gflops", "share_of_peak"}  # fmt: skip
    assert keys <= set(found) and found["program"] == "peft-core" and found["peak_rss_mb"] > 10
    assert len(found["losses"]) == 3 and all(np.isfinite(found["losses"]))
    timed = {(row["op"], row["phase"]) for row in found["profile"]}
    assert {("project", "forward"), ("project", "backward"), ("recompute", "backward"), ("AdamW", "update")} <= timed
    assert (tmp_path / "tiny-float32" / "base" / "model.safetensors").is_file()


def test_ranks_in_bfloat16(capsys):
    found = outcome([*TINY, "--what", "rank", "--points", "2,8", "--dtype", "bfloat16"], capsys)
    assert [point["rank"] for point in found["points"]] == [2, 8]
    assert found["points"][0]["flops_per_step"] < found["points"][1]["flops_per_step"]


def test_lengths_beyond_gpt2s_positions(capsys):
    found = outcome([*TINY_GPT2, "--what", "length", "--points", "16,200"], capsys)
    assert [point["workload"] for point in found["points"]] == ["dense-1x16", "dense-1x200"]
    assert all(np.isfinite(point["losses"]).all() for point in found["points"])


@pytest.mark.parametrize("tiny", [TINY, TINY_GPT2], ids=TARGETS)
def test_generation_and_start_up(tiny, capsys):
    made = outcome([*tiny, "--what", "generate", "--new-tokens", "4"], capsys)
    assert set(made["tokens_per_s_by_rows"]) == {"1", "8"} and len(made["answers"]["8"]) == 8
    assert {"import_s", "load_s", "first_logits_s", "peak_rss_mb"} <= set(outcome([*tiny, "--what", "startup"], capsys))


def test_a_failed_measurement_is_an_error_with_its_reason(tmp_path):
    with pytest.raises(compare.BenchError, match=r"code 1; expected 0(?s:.*)base does not exist"):
        compare.measure(Spec("step", str(tmp_path)))


def test_a_profile_leaves_no_trace(spec):
    node, before = tape.Node, check(spec)
    with Profile() as profile:
        inside = check(spec)
    assert tape.Node is node and inside["norms"] == before["norms"]
    calls = {key: row[1] for key, row in profile.rows.items()}
    check(spec)
    assert {key: row[1] for key, row in profile.rows.items()} == calls
    assert calls["rotary_attention", "backward"] == 2  # one a layer
    assert sum(row["share"] for row in profile.table(100.0, 1)) == pytest.approx(1, abs=0.01)


@pytest.mark.reference
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", TARGETS)
def test_beside_the_peer(shape, dtype, capsys):
    argv = ["--shape", shape, *SMALL, "--dtype", dtype, "--peer", "hf-peft", "--peer-settings", dtype]
    found = outcome(argv, capsys)
    assert set(found["peer"]) == {dtype, f"{dtype}+malloc"} and set(found["ratios"]) == {dtype, "best"}
    assert found["same_work"]["gradients"] == GRADIENTS[shape] and found["same_work"]["logits_std"] >= 1
    assert found["losses"] == pytest.approx(found["peer"][dtype]["losses"], rel=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.reference
@pytest.mark.parametrize("shape", TARGETS)
def test_answers_beside_the_peer(shape, capsys):
    argv = ["--shape", shape, *SMALL, "--what", "generate", "--new-tokens", "4", "--peer", "hf-peft"]
    assert outcome([*argv, "--peer-settings", "float32"], capsys)["same_answers"] == {"float32": True}
