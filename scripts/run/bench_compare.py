"""Runs measurements, each in a process of its own, and says what they mean beside each other."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from peft_core.errors import PeftCoreError
from run.bench_count import flops_per_step
from run.bench_work import PROGRAMS, WARM_UP, Spec, n_tokens

OURS, PEER = PROGRAMS
SETTINGS = ("float32", "medium", "bfloat16")  # the peer's
FORCED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # a forced core type halves NumPy's speed
MALLOC = {  # keeps glibc from returning freed memory to the system: eager torch then faults far fewer pages
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
NORM_LIMIT = {"float32": 0.01, "bfloat16": 0.05}  # relative, of each adapter gradient's norm
LOGITS_LIMIT = {"float32": 0.001, "bfloat16": 0.1}  # root mean square of the difference / standard deviation


class BenchError(PeftCoreError):
    """A measuring process failed, or two programs did not do the same work."""


def environment(spec: Spec) -> dict[str, str]:
    """The environment of a measuring process: no forced BLAS settings, allocator settings only where asked for."""
    env = {k: v for k, v in os.environ.items() if k not in FORCED and k not in MALLOC}
    scripts = Path(__file__).parents[1]
    paths = [str(scripts), str(scripts.parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return env | (MALLOC if spec.malloc else {}) | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def measure(spec: Spec) -> dict[str, Any]:
    """One measurement in a new process.  Raises BenchError with its last lines if it fails."""
    command = [sys.executable, "-m", "run.bench_worker", spec.to_json()]
    done = subprocess.run(command, env=environment(spec), capture_output=True, text=True)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-12:])
        hint = " Install the extra 'bench'." if "ModuleNotFoundError" in last else ""
        raise BenchError(
            f"measuring {spec.what} of {spec.program} ended with code {done.returncode}; expected 0.{hint}\n{last}"
        )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return summed_up(spec, found) if spec.what == "step" else found


def summed_up(spec: Spec, found: dict[str, Any]) -> dict[str, Any]:
    """The medians over the steps after the warm-up, and the arithmetic done, beside what was measured."""
    steps, seconds = spec.batches()[WARM_UP:], found.pop("seconds")[WARM_UP:]
    flops = [flops_per_step(spec.shape, rows, spec.rank) for rows in steps]
    rates = [f / s / 1e9 for f, s in zip(flops, seconds, strict=True)]
    speeds = [n_tokens(rows) / s for rows, s in zip(steps, seconds, strict=True)]
    gemm, gflops = found.pop("gemm"), statistics.median(rates)
    return found | {
        "step_s": round(statistics.median(seconds), 4),
        "tokens_per_s": round(statistics.median(speeds), 1),
        "flops_per_step": round(statistics.mean(flops)),
        "gflops": round(gflops, 1),
        "gemm_peak_gflops": round(gemm["gflops"], 1),
        "gemm_peak_of": gemm["of"],
        "share_of_peak": round(gflops / gemm["gflops"], 3),
    }


def same_work(ours: dict[str, Any], peer: dict[str, Any], logits: tuple[Any, Any], dtype: str) -> list[str]:
    """What shows that two programs did not do the same work; empty if nothing does.

    Losses prove little: on random weights a model without attention has nearly the same. Compared are the norm of
    every adapter's gradient and the logits of a probe row, which spread by at least 1.
    """
    complaints = []
    if set(ours["norms"]) != set(peer["norms"]):
        odd = sorted(set(ours["norms"]) ^ set(peer["norms"]))
        complaints.append(f"{len(odd)} gradients are on one side only, such as {odd[0]}")
    for name in sorted(set(ours["norms"]) & set(peer["norms"])):
        a, b = ours["norms"][name], peer["norms"][name]
        if not abs(a - b) <= NORM_LIMIT[dtype] * abs(b):
            complaints.append(f"gradient of {name}: norm {a:.6g}, the peer's {b:.6g}")
    a, b = (np.asarray(x, np.float64) for x in logits)
    if a.shape != b.shape:
        return [*complaints, f"logits of shape {a.shape}, the peer's {b.shape}"]
    if b.std() < 1:
        complaints.append(f"logits spread by {b.std():.3g}, less than 1: too little to tell models apart")
    apart = float(np.sqrt(np.mean((a - b) ** 2)) / b.std())
    if not apart <= LOGITS_LIMIT[dtype]:
        complaints.append(f"logits of the probe row are {apart:.3g} standard deviations apart")
    return complaints


def check(spec: Spec) -> dict[str, Any]:
    """Runs both programs on the first batch.  Raises BenchError where they do not do the same work."""
    sides = [replace(spec, what="check", program=program) for program in PROGRAMS]
    found = [measure(side) for side in sides]
    logits = tuple(np.load(side.logits) for side in sides)
    complaints = same_work(found[0], found[1], logits, spec.dtype)
    if complaints:
        shown = "\n  ".join(complaints[:10])
        raise BenchError(f"the two programs do not do the same work ({len(complaints)} differences):\n  {shown}")
    ours, peer = (f["norms"] for f in found)
    return {
        "gradients": len(ours),
        "largest_norm_difference": max(abs(ours[k] - peer[k]) / abs(peer[k]) for k in ours),
        "logits_apart": float(np.sqrt(np.mean((logits[0] - logits[1]) ** 2)) / logits[1].std()),
        "logits_std": found[1]["logits_std"],
        "losses": [f["loss"] for f in found],
    }


def alternate(spec: Spec, settings: tuple[str, ...], rounds: int, say: Any) -> dict[str, Any]:
    """Ours and the peer in turn: all of the peer's settings once, then its best one until ``rounds`` are done.

    The result is our run of median speed, with the peer's runs of median speed by setting, and the ratios.
    """
    work = check(spec)
    say(f"same work: {work['gradients']} gradients within {work['largest_norm_difference']:.2e}, "
        f"logits within {work['logits_apart']:.2e} of their spread {work['logits_std']:.2f}")  # fmt: skip
    ours: list[dict[str, Any]] = []
    peer: dict[str, list[dict[str, Any]]] = {}
    todo = [(dtype, malloc) for dtype in settings for malloc in (False, True)]
    for number in range(rounds):
        for dtype, malloc in todo:
            ours.append(measure(replace(spec, program=OURS)))
            say(line(ours[-1]))
            name = dtype + ("+malloc" if malloc else "")
            peer.setdefault(name, []).append(measure(replace(spec, program=PEER, dtype=dtype, malloc=malloc)))
            say(line(peer[name][-1]))
        if number == 0:
            best = max(todo, key=lambda t: peer[t[0] + ("+malloc" if t[1] else "")][0]["tokens_per_s"])
            todo = [best]
    own, others = middle(ours), {name: middle(runs) for name, runs in peer.items()}
    own |= highest_peak(own, [run for run in others.values() if run["dtype"] == spec.dtype])
    return own | {"peer": others, "ratios": ratios(own, others, settings), "same_work": work}


def highest_peak(own: dict[str, Any], peer: list[dict[str, Any]]) -> dict[str, Any]:
    """Our share of the fastest GEMM that either program showed in our dtype: NumPy has none in bfloat16."""
    best = max([own, *peer], key=lambda run: run["gemm_peak_gflops"])
    return {key: best[key] for key in ("gemm_peak_gflops", "gemm_peak_of")} | {
        "share_of_peak": round(own["gflops"] / best["gemm_peak_gflops"], 3)
    }


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of median speed."""
    return sorted(runs, key=lambda r: r["tokens_per_s"])[(len(runs) - 1) // 2]


def ratios(own: dict[str, Any], peer: dict[str, dict[str, Any]], settings: tuple[str, ...]) -> dict[str, Any]:
    """Our speed and peak memory over the peer's, by its dtype and for its fastest setting.

    Each time the peer's better figure counts, with or without the allocator's settings.
    """
    found = {}
    groups = {dtype: [run for run in peer.values() if run["dtype"] == dtype] for dtype in settings}
    fastest = max(peer.values(), key=lambda r: r["tokens_per_s"])
    for name, runs in (groups | {"best": groups[fastest["dtype"]]}).items():
        speed, memory = max(r["tokens_per_s"] for r in runs), min(r["peak_rss_mb"] for r in runs)
        found[name] = {
            "tokens_per_s": round(own["tokens_per_s"] / speed, 3),
            "peak_rss": round(own["peak_rss_mb"] / memory, 3),
        }
    return found


def line(run: dict[str, Any]) -> str:
    """One measurement of steps on one line."""
    name = run["dtype"] + ("+malloc" if run["malloc"] else "")
    return (
        f"{run['program']:<10} {run['workload']:<14} {name:<16} r={run['rank']:<4} {run['tokens_per_s']:>9.1f} tok/s  "
        f"{run['step_s']:>8.3f} s/step  {run['peak_rss_mb']:>6} MB  {run['gflops']:>7.1f} GFLOP/s "
        f"({run['share_of_peak']:.0%} of {run['gemm_peak_of']})"
    )
