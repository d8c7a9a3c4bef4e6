"""The benchmark on the tiny shape: what it counts, that it tells models apart, its JSON. No times are asserted."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest

import bench
from adapters.lora import LoraLinear
from peft_core import ops, tape
from run import bench_compare as compare
from run.bench_count import flops_per_step
from run.bench_files import write_files
from run.bench_ours import check
from run.bench_profile import Profile
from run.bench_work import SHAPES, TARGETS, Spec, batches, n_tokens
from transformer import from_pretrained
from transformer.attention import Attention

TINY = ["--shape", "tiny", "--workload", "dense-2x16", "--steps", "2", "--rank", "4"]


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> Spec:
    found = Spec("check", str(tmp_path_factory.mktemp("bench")), workload="gsm8k-2", rank=4)
    write_files(found)
    return found


def outcome(argv, capsys) -> dict:
    code = bench.main(argv)
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out.strip().splitlines()[-1])


# ------------------------------------------------------------------------------------------------ what is counted


def test_flops_of_a_row_by_hand(spec):
    model = from_pretrained(spec.base)
    linears = [p.numel() for name, p in model.named_parameters() if name.split(".")[-2] in TARGETS]
    wide = [sum(p.shape) for name, p in model.named_parameters() if name.split(".")[-2] in TARGETS]
    head, (row,) = model.lm_head.weight.numel(), batches("dense-1x5", 256, 1)[0]
    ids, labels = row[0], [-100, -100, *row[1][2:]]  # targets of tokens 1, 2 and 3
    scores = 1 + 2 + 3 + 4 + 5  # keys that the queries see
    attention = 3.5 * 2 * 2 * scores * 64 * 2  # q k^T and p v, 4 heads of 16, 2 layers
    want = 4 * 5 * sum(linears) + 4 * 3 * head + 6 * 5 * 8 * sum(wide) + attention
    assert flops_per_step("tiny", [(ids, labels)], 8) == want


def test_flops_of_a_known_workload():
    rows = batches("dense-4x512", SHAPES["smollm2-135m"].vocab, 1)[0]
    assert flops_per_step("smollm2-135m", rows, 16) == pytest.approx(1.29e12, rel=0.01)


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


# ------------------------------------------------------------------------------------------------ the same work


def without_attention(monkeypatch):
    monkeypatch.setattr(Attention, "forward", lambda self, x, norm, place: x + self.o_proj(self.q_proj(norm(x))))


def without_rope(monkeypatch):
    def still(qkv, *, cos, sin, right=ops.rotary_attention, **kw):
        return right(qkv, cos=np.ones_like(cos), sin=np.zeros_like(sin), **kw)

    monkeypatch.setattr(ops, "rotary_attention", still)


def with_a_wrong_scale(monkeypatch):
    def parts(self, right=LoraLinear.parts):
        weight, bias, terms = right(self)
        return weight, bias, tuple((a, b, 1.1 * scale) for a, b, scale in terms)

    monkeypatch.setattr(LoraLinear, "parts", parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("broken", [without_attention, without_rope, with_a_wrong_scale])
def test_another_model_is_told_apart(spec, broken, dtype, monkeypatch):
    right = check(spec)
    logits = np.load(spec.logits)
    assert right["logits_std"] >= 1 and len(right["norms"]) == 28 and min(right["norms"].values()) > 0
    ours = check(replace(spec, dtype=dtype))
    same = np.load(replace(spec, dtype=dtype).logits)
    assert compare.same_work(ours, right, (same, logits), dtype) == []
    broken(monkeypatch)
    other = check(replace(spec, dtype=dtype))
    complaints = compare.same_work(other, right, (np.load(replace(spec, dtype=dtype).logits), logits), dtype)
    assert any("gradient of model.layers" in text for text in complaints)


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


def test_generation_and_start_up(capsys):
    made = outcome([*TINY, "--what", "generate", "--new-tokens", "4"], capsys)
    assert set(made["tokens_per_s_by_rows"]) == {"1", "8"} and len(made["answers"]["8"]) == 8
    assert {"import_s", "load_s", "first_logits_s", "peak_rss_mb"} <= set(outcome([*TINY, "--what", "startup"], capsys))


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
def test_beside_the_peer(dtype, capsys):
    argv = [*TINY, "--dtype", dtype, "--peer", "hf-peft", "--peer-settings", dtype]
    found = outcome(argv, capsys)
    assert set(found["peer"]) == {dtype, f"{dtype}+malloc"} and set(found["ratios"]) == {dtype, "best"}
    assert found["same_work"]["gradients"] == 28
    assert found["losses"] == pytest.approx(found["peer"][dtype]["losses"], rel=1e-5 if dtype == "float32" else 1e-2)
