"""One measurement of this library, by the calls that a user makes: from_pretrained, load_adapter, fit, generate."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from adapters import load_adapter, lora_layers
from peft_core import dtypes
from peft_core.amp import autocast
from peft_core.optim import AdamW
from peft_core.tape import no_grad
from peft_core.train import StepReport, fit
from run.bench_count import decode_rate, numpy_peak, peak_mb
from run.bench_profile import Profile
from run.bench_work import LEARNING_RATE, WARM_UP, Spec, result
from transformer import Batch, from_pretrained
from transformer.generate import generate
from transformer.sampling import Steps


def load(spec: Spec, *, trainable: bool = True) -> Any:
    """The base with its adapter."""
    model = from_pretrained(spec.base)
    load_adapter(model, spec.adapter, trainable=trainable)
    model.gradient_checkpointing = spec.checkpointing
    return model


def compute_dtype(spec: Spec) -> Any:
    """What fit() computes products in, as scripts/finetune.py chooses it."""
    return dtypes.bfloat16 if spec.dtype == "bfloat16" else None


def loss_of(model: Any, batch: Batch) -> Any:
    """(sum of losses, labelled tokens) of a batch."""
    return model.loss(batch)


def measure_steps(spec: Spec) -> dict[str, Any]:
    """Seconds and losses of each training step, and this process's peak memory."""
    model = load(spec)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.0)
    rows = [row for batch in spec.batches() for row in batch]
    steps = Steps(rows, len(rows) // (spec.steps + WARM_UP), num_epochs=1, shuffle=False,
                  max_tokens_per_pass=spec.pass_tokens)  # fmt: skip
    reports: list[StepReport] = []
    profile = Profile()
    watched = contextlib.ExitStack()

    def on_step(report: StepReport) -> None:
        reports.append(report)
        if spec.profile and len(reports) == 1:  # the warm-up is over
            watched.enter_context(profile)
            optimizer.step = profile.timed("AdamW", "update", optimizer.step)  # type: ignore[method-assign]

    with watched:
        fit(model, steps, loss_of, optimizer, autocast_dtype=compute_dtype(spec), on_step=on_step)
    peak = peak_mb()  # before anything else needs memory
    seconds = [r.step_time_s for r in reports]
    table = profile.table(sum(seconds[1:]), len(seconds) - 1) if spec.profile else None
    return result(
        spec, seconds=seconds, losses=[round(r.loss, 5) for r in reports], peak_rss_mb=peak,
        gemm=numpy_peak(spec), **({"profile": table} if table else {}),
    )  # fmt: skip


def check(spec: Spec) -> dict[str, Any]:
    """The logits of a probe row, left in a file, and the norm of every adapter's gradient on the first batch."""
    model = load(spec)
    batch = spec.batches()[0]
    probe = batch[0][0][:32]
    with autocast(compute_dtype(spec)):
        with no_grad():
            logits = model(np.array([probe])).logits.data[0].astype(np.float32)
        np.save(spec.logits, logits)
        loss, n_labelled = model.train().loss(Batch.from_rows(batch))
        loss.backward()
    norms = {
        f"{path}.{name}": 0.0 if p.grad is None else float(np.linalg.norm(p.grad.data.astype(np.float64))) / n_labelled
        for path, layer in lora_layers(model).items()
        for name, p in layer.adapters["default"].named_parameters()
    }
    return result(spec, norms=norms, loss=float(loss.item()) / n_labelled, logits_std=float(logits.std()))


def measure_generation(spec: Spec) -> dict[str, Any]:
    """Tokens a second with a key/value cache, for 1 and 8 rows at a time."""
    model, rates, answers = load(spec, trainable=False), {}, {}
    with autocast(compute_dtype(spec)):
        for rows in (1, 8):
            asked = spec.prompts(rows)

            def answer(n: int, asked: Any = asked) -> Any:
                return generate(model, asked, max_new_tokens=n, eos_token_id=())

            rates[str(rows)] = round(decode_rate(answer, rows, spec.new_tokens), 2)
            answers[str(rows)] = answer(4)
    return result(spec, tokens_per_s_by_rows=rates, answers=answers, peak_rss_mb=peak_mb())


def measure_load(spec: Spec) -> dict[str, Any]:
    """Seconds until the base is there, memory then, and seconds until the first logits."""
    start = time.perf_counter()
    model = from_pretrained(spec.base)
    loaded, peak = time.perf_counter() - start, peak_mb()
    with no_grad(), autocast(compute_dtype(spec)):
        model(np.array([[1, 2, 3]]))
    first = time.perf_counter() - start
    return result(spec, load_s=round(loaded, 4), peak_rss_mb=peak, first_logits_s=round(first, 4))


MEASURES = {"step": measure_steps, "check": check, "generate": measure_generation, "startup": measure_load}
