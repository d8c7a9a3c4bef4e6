"""The report before the first step: what will be trained on what, and whether it fits into memory."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import Any

from run.config import RunConfig
from run.memory import Memory, Weights, available_memory
from run.progress import count
from run.rows import Plan, Rows


@dataclass
class Report:
    """The lines, and the same facts for preflight.json."""

    lines: list[str]
    facts: dict[str, Any]

    def add(self, word: str, *lines: str) -> None:
        """One part: its word in front of the first line, the others below it."""
        self.lines += [f"{word if not i else '':<8} {line}" for i, line in enumerate(lines)]

    def json(self) -> str:
        """The text of preflight.json."""
        return json.dumps(self.facts, indent=2, ensure_ascii=False, default=str) + "\n"


def start_report(
    config: RunConfig, model_config: Any, weights: Weights, rows: Rows, plan: Plan, started: str
) -> Report:
    """What can be said before any weight is loaded."""
    report = Report([], {"started": started})
    name = (model_config.architectures or [model_config.model_type])[0]
    tied = "tied embeddings, " if model_config.tie_word_embeddings else ""
    stored = config.model.dtype if config.model.dtype != "auto" else "/".join(weights.dtypes)
    report.add(
        "model",
        f"{name}, {model_config.num_hidden_layers} layers, {count(weights.n_parameters)} params, {tied}"
        f"{stored} frozen base, float32 adapter",
    )
    lora = config.lora
    scale = lora.lora_alpha / (lora.r**0.5 if lora.use_rslora else lora.r)
    names = lora.target_modules if isinstance(lora.target_modules, str) else " ".join(lora.target_modules)
    report.add("lora", f"r={lora.r} alpha={lora.lora_alpha:g} (scale {scale:.2f}) on {names}")
    data = rows.train.report
    first, *others = data.lines()
    report.add("data", f"{first}: {rows.split}", *others, *longer_rows(rows, model_config.max_position_embeddings))
    report.add("plan", plan.line(config.train))
    report.add("example", data.example_where + ", trained text between >> and <<", *_shortened(data.example))
    report.facts |= {
        "model": {"name": name, "parameters": weights.n_parameters, "bytes": weights.n_bytes, "dtypes": weights.dtypes},
        "data": {
            **{key: value for key, value in vars(data).items()},
            "train": len(rows.train),
            "val": len(rows.val or []),
        },
        "plan": {
            "steps": len(plan.steps),
            "epochs": plan.epochs,
            "warmup": plan.warmup,
            "tokens_per_step": plan.tokens_per_step,
            "longest_micro_batch": plan.longest_micro,
        },
    }
    return report


def longer_rows(rows: Rows, positions: int | None) -> list[str]:
    """One line if rows are longer than the base was made for: it runs, and answers worse and worse beyond."""
    every = [*rows.train, *(rows.val or ())]
    n = sum(len(ids) > positions for ids, _ in every) if positions else 0
    if not n:
        return []
    return [
        f"WARNING: {n:,} of {len(every):,} rows are longer than the {positions:,} positions the base was made for "
        f"(max_position_embeddings). Set data.max_seq_length={positions}, or expect poor results there."
    ]


def add_adapter_facts(report: Report, config: RunConfig, injected: Any, n_layers: int) -> None:
    """Replace the lora line by one with the layers that were found."""
    kinds = {path.rsplit(".", 1)[-1] for path in injected.paths}
    share = 100 * injected.trainable / max(1, injected.total)
    where = next(i for i, line in enumerate(report.lines) if line.startswith("lora "))
    head = report.lines[where].split(" on ")[0]
    whole = f", {len(injected.whole)} tensors whole" if injected.whole else ""
    report.lines[where] = (
        f"{head} on {len(kinds)} kinds of module, {len(injected.paths)} in {n_layers} layers{whole} -> "
        f"{count(injected.trainable)} trainable ({share:.1f} %)"
    )
    report.facts["lora"] = {"trainable": injected.trainable, "total": injected.total, "modules": injected.paths}


def add_memory(report: Report, memory: Memory, how: str) -> None:
    """The estimate and ``how`` the steps are computed to stay within it, before the example."""
    available = available_memory()
    where = next(i for i, line in enumerate(report.lines) if line.startswith("example "))
    report.lines[where:where] = [f"{'memory':<8} {memory.line(available)}", f"{'':<8} {how}"]
    report.facts["memory"] = {**vars(memory), "total": memory.total, "available": available, "how": how}


def _shortened(text: str, limit: int = 320) -> list[str]:
    shown = text if len(text) <= limit else text[: limit // 2] + " ... " + text[-limit // 2 :]
    return [f"  {line}" for part in shown.splitlines() or [""] for line in textwrap.wrap(part, 110) or [""]]
