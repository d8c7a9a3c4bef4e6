"""What a run needs in memory, estimated before it starts, and how its steps are cut so that it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft_core.dtypes import dtype_name
from peft_core.safetensors_io import SafeFile
from run.progress import size

PASS_TOKENS = 512  # of a pass on a CPU: larger ones take more memory and are at most a few percent faster
HEAD_CHUNK = 512  # rows whose logits exist at one time
HEAD_PANEL = 8192  # rows of the head that are widened at one time, two panels
KERNELS_BYTES = 150_000_000  # numba at work; compiling kernels for the first time may take as much again


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
    tokens: int  # of the largest pass
    rank: int
    eval_tokens: int = 0  # of the largest validation batch
    recompute: bool = False
    half: bool = False  # products in bfloat16
    packed: bool = False  # the frozen weights are packed for the tiles of the CPU
    dropout: bool = False
    stored_bytes: int | None = None  # of one weight as it is kept; None: mapped from the files
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
    whole for its product, the head by panels. Packed weights exist twice, for forward and backward, with some padding,
    in place of mapped ones and beside others; their kernels keep no norm's output and no gated product.
    """
    d, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    item = 2 if work.half else 4
    kept = 4 * (4 * d + 7 * work.rank) + item * (heads + 3 * f) + (4 * 4 * d if work.dropout else 0)
    passing = 4 * ((10 * d + 6 * f) if work.half and not work.packed else (6 * d + 3 * f))
    kept -= item * (2 * d if work.half else 2 * d + f) if work.packed else 0
    each = layers * 4 * d + kept if work.recompute else layers * kept
    activations = max(work.tokens * (each + passing), work.eval_tokens * passing)
    stored = weights.n_bytes if work.stored_bytes is None else weights.n_parameters * work.stored_bytes
    logits = 4 * min(max(work.tokens, work.eval_tokens), HEAD_CHUNK) * config.vocab_size
    if work.packed:
        table = 0 if config.tie_word_embeddings else config.vocab_size * d  # an embedding is only looked up
        beside = 2 * table if work.stored_bytes is None else stored
        stored = int(2.2 * item * (weights.n_parameters - table)) + beside
    elif stored < 4 * weights.n_parameters or work.half:
        activations += 4 * d * f
        logits += 3 * 4 * d * min(HEAD_PANEL, config.vocab_size)
    return Memory(work.process_bytes + KERNELS_BYTES, stored, 16 * work.trainable, activations, logits)


@dataclass(frozen=True)
class Passes:
    """How a step is computed: in passes of at most ``tokens`` tokens or one row, with or without recomputation."""

    tokens: int
    recompute: bool

    def line(self, longest: int) -> str:
        """The line of the report; ``longest``: tokens of the largest pass there is."""
        again = "activations are computed again in backward" if self.recompute else "activations are kept"
        return f"passes of at most {longest:,} tokens; {again}"


def plan_passes(
    estimate: Callable[[Passes], Memory], first: int, longest_row: int, budget: float, recompute: bool | None
) -> Passes:
    """The first of these that stays within ``budget`` bytes, or the last: ever smaller passes, then recomputation.

    ``first``: tokens of the first try, halved down to ``longest_row``, below which no pass gets smaller.
    ``recompute``: None leaves the choice.
    """
    sizes = [first]
    while sizes[-1] > longest_row:
        sizes.append(max(longest_row, sizes[-1] // 2))
    choices = [False, True] if recompute is None else [recompute]
    tries = [Passes(tokens, again) for again in choices for tokens in sizes]
    return next((passes for passes in tries if estimate(passes).total <= budget), tries[-1])


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
