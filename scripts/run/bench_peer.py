"""One measurement of transformers + peft (extra "bench"): the same files, rows and optimizer, their own stock path."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from run.bench_count import best_rate, decode_rate, peak_mb
from run.bench_work import LEARNING_RATE, Row, Spec, result


def load_base(spec: Spec) -> Any:
    """The base, in eval mode."""
    torch.set_num_threads(spec.threads)
    torch.set_float32_matmul_precision("medium" if spec.dtype == "medium" else "highest")
    dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
    return LlamaForCausalLM.from_pretrained(spec.base, dtype=dtype).eval()


def load(spec: Spec, *, trainable: bool = True) -> Any:
    """The base with its adapter."""
    model = PeftModel.from_pretrained(load_base(spec), spec.adapter, is_trainable=trainable)
    if spec.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model


def padded(rows: list[Row]) -> dict[str, Any]:
    """A rectangle filled up on the right, as the stock collator makes it."""
    width = max(len(ids) for ids, _ in rows)

    def fill(lists: Any, value: int) -> Any:
        return torch.tensor([[*values, *[value] * (width - len(values))] for values in lists])

    return {
        "input_ids": fill((ids for ids, _ in rows), 0),
        "attention_mask": fill(([1] * len(ids) for ids, _ in rows), 0),
        "labels": fill((labels for _, labels in rows), -100),
    }


def measure_steps(spec: Spec) -> dict[str, Any]:
    """Seconds and losses of each training step, and this process's peak memory."""
    model = load(spec).train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.0
    )
    seconds, losses = [], []
    for inputs in map(padded, spec.batches()):
        start = time.perf_counter()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
        seconds.append(time.perf_counter() - start)
    peak = peak_mb()  # before anything else needs memory
    return result(
        spec, seconds=seconds, losses=losses, peak_rss_mb=peak, gemm=torch_peak(spec), torch=torch.__version__
    )


def check(spec: Spec) -> dict[str, Any]:
    """The logits of a probe row, left in a file, and the norm of every adapter's gradient on the first batch."""
    model = load(spec)
    batch = spec.batches()[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([batch[0][0][:32]])).logits[0].float().numpy()
    np.save(spec.logits, logits)
    loss = model.train()(**padded(batch)).loss
    loss.backward()
    norms = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            path, half = name.removeprefix("base_model.model.").removesuffix(".default.weight").rsplit(".lora_", 1)
            norms[f"{path}.{half}"] = 0.0 if p.grad is None else float(p.grad.double().norm())
    return result(spec, norms=norms, loss=loss.item(), logits_std=float(logits.std()))


def measure_generation(spec: Spec) -> dict[str, Any]:
    """Tokens a second with a key/value cache, for 1 and 8 rows at a time."""
    model, rates, answers = load(spec, trainable=False).eval(), {}, {}
    for rows in (1, 8):
        asked = torch.tensor(spec.prompts(rows))

        def answer(n: int, asked: Any = asked) -> Any:
            out = model.generate(
                input_ids=asked, attention_mask=torch.ones_like(asked), max_new_tokens=n, min_new_tokens=n,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            return out[:, asked.shape[1] :].tolist()

        rates[str(rows)] = round(decode_rate(answer, rows, spec.new_tokens), 2)
        answers[str(rows)] = answer(4)
    return result(spec, tokens_per_s_by_rows=rates, answers=answers, peak_rss_mb=peak_mb())


def measure_load(spec: Spec) -> dict[str, Any]:
    """Seconds until the base is there, memory then, and seconds until the first logits."""
    start = time.perf_counter()
    model = load_base(spec)
    loaded, peak = time.perf_counter() - start, peak_mb()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    first = time.perf_counter() - start
    return result(spec, load_s=round(loaded, 4), peak_rss_mb=peak, first_logits_s=round(first, 4))


def torch_peak(spec: Spec) -> dict[str, Any]:
    """The GEMM rate of torch in the setting's dtype."""
    n = 256 if spec.shape == "tiny" else 2048
    dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
    a = torch.randn(n, n).to(dtype)
    return {"of": f"torch {spec.dtype}", "gflops": best_rate(lambda: a @ a, n)}


MEASURES = {"step": measure_steps, "check": check, "generate": measure_generation, "startup": measure_load}
