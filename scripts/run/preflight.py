"""The report before the first step: what will be trained on what, and whether it fits into memory."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft_core.dtypes import dtype_name
from peft_core.safetensors_io import SafeFile
from run.config import RunConfig
from run.progress import count, size
from run.rows import Plan, Rows

HEAD_CHUNK = 512  # rows whose logits exist at one time
HEAD_PANEL = 8192  # rows of the head that are widened at one time, two panels
KERNELS_BYTES = 150_000_000  # numba and its compiler at work, which come with the first step


@dataclass(frozen=True)
class Weights:
    """The base's weights, as their files' headers describe them: no tensor is read."""

    n_parameters: int
    n_bytes: int
    dtypes: list[str]

    @classmethod
    def of(cls, files: list[Path]) -> Weights:
        """Add up the headers of ``files``."""
        parameters, n_bytes, names = 0, 0, []
        for file in map(SafeFile, files):
            for key in file:
                elements = 1
                for n in file.shape(key):
                    elements *= n
                parameters += elements
                n_bytes += elements * file.dtype(key).itemsize
                names.append(dtype_name(file.dtype(key)))
        return cls(parameters, n_bytes, sorted(set(names)))


@dataclass(frozen=True)
class Work:
    """What the memory of a run depends on, besides the model."""

    trainable: int  # parameters of the adapter
    tokens: int  # of the largest micro-batch
    rank: int
    eval_tokens: int = 0  # of the largest validation batch
    recompute: bool = False
    half: bool = False  # products in bfloat16
    packed: bool = False  # the frozen weights are packed for the bfloat16 tiles of the CPU
    dropout: bool = False
    stored_bytes: int | None = None  # of one weight as it is kept; None: as in the files
    process_bytes: int = 0  # of Python, libraries and rows, before any weight


@dataclass(frozen=True)
class Memory:
    """An estimate of the peak, in bytes."""

    process: float
    weights: float
    adapter: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.process + self.weights + self.adapter + self.activations + self.logits

    def line(self, available: int | None) -> str:
        """The line of the report.  ``available``: bytes that are free, or None."""
        verdict = ""
        if available is not None:
            verdict = " -- fits" if self.total < available else (
                f" -- DOES NOT FIT into the {size(available)} that are free; "
                "lower train.batch_size or data.max_seq_length"
            )  # fmt: skip
        return (
            f"estimate {size(self.total)} (weights {size(self.weights)}, adapter+Adam {size(self.adapter)}, "
            f"activations {size(self.activations)}, logits {size(self.logits)}, Python and libraries "
            f"{size(self.process)}){verdict}"
        )


def estimate_memory(config: Any, weights: Weights, work: Work) -> Memory:
    """Peak memory of a run, from what the tape keeps for a token, in numbers of 4 bytes unless products are bfloat16.

    A layer keeps the residual stream and its norm twice (4 D), q, k, v, the attention's output, gate, up and their
    product (3 F), and R numbers for each of 7 adapters; dropout keeps a masked input for each of q, k, v, gate, up.
    With recomputation a layer keeps D, and one layer at a time all of it. Backward works on some arrays of a layer at
    once: 6 D + 3 F numbers, and about twice that where bfloat16 is widened. A weight that is not float32 is widened
    whole for its product, the head by panels. Packed weights exist twice, for forward and backward, with some padding;
    their kernels keep the norms' outputs in bfloat16 and widen nothing.
    """
    d, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    item = 2 if work.half else 4
    kept = 4 * (4 * d + 7 * work.rank) + item * (heads + 3 * f) + (4 * 4 * d if work.dropout else 0)
    passing = 4 * ((10 * d + 6 * f) if work.half and not work.packed else (6 * d + 3 * f))
    kept -= 2 * 2 * d if work.packed else 0
    each = layers * 4 * d + kept if work.recompute else layers * kept
    activations = max(work.tokens * (each + passing), work.eval_tokens * passing)
    stored = weights.n_bytes if work.stored_bytes is None else weights.n_parameters * work.stored_bytes
    logits = 4 * min(max(work.tokens, work.eval_tokens), HEAD_CHUNK) * config.vocab_size
    if work.packed:
        table = 0 if config.tie_word_embeddings else 2 * config.vocab_size * d  # an embedding is only looked up
        stored = int(2.2 * (stored - table)) + table
    elif stored < 4 * weights.n_parameters or work.half:
        activations += 4 * d * f
        logits += 3 * 4 * d * min(HEAD_PANEL, config.vocab_size)
    return Memory(work.process_bytes + KERNELS_BYTES, stored, 16 * work.trainable, activations, logits)


def available_memory() -> int | None:
    """Bytes this process may still take: the machine's or the control group's, whichever is less; None if unknown."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass
    return min(found) if found else None


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


def add_memory(report: Report, memory: Memory) -> None:
    """The estimate, before the example."""
    available = available_memory()
    where = next(i for i, line in enumerate(report.lines) if line.startswith("example "))
    report.lines.insert(where, f"{'memory':<8} {memory.line(available)}")
    report.facts["memory"] = {**vars(memory), "total": memory.total, "available": available}


def _shortened(text: str, limit: int = 320) -> list[str]:
    shown = text if len(text) <= limit else text[: limit // 2] + " ... " + text[-limit // 2 :]
    return [f"  {line}" for part in shown.splitlines() or [""] for line in textwrap.wrap(part, 110) or [""]]
