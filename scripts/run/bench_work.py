"""What is measured: shapes of public models, rows of tokens, and the Spec that one measuring process is given."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LENGTHS = Path(__file__).parents[2] / "configs" / "bench" / "gsm8k_lengths.json"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROGRAMS = ("peft-core", "hf-peft")
WHATS = ("step", "generate", "startup", "length", "rank")
LEARNING_RATE = 2e-4
WARM_UP = 1  # steps that compile kernels and touch memory for the first time

Row = tuple[list[int], list[int]]  # input_ids and labels, unshifted, -100 where no loss is taken


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-shaped model: vocabulary, width, feed-forward width, layers, query heads, key heads."""

    vocab: int
    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    tied: bool

    @property
    def head_dim(self) -> int:
        """K."""
        return self.width // self.heads

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each linear of a layer, by the path within the layer."""
        d, f, kv = self.width, self.inner, self.groups * self.head_dim
        sizes = ((d, d), (kv, d), (kv, d), (d, d), (f, d), (f, d), (d, f))
        return {f"{'mlp' if i > 3 else 'self_attn'}.{TARGETS[i]}": size for i, size in enumerate(sizes)}


SHAPES = {
    "smollm2-135m": Shape(49152, 576, 1536, 30, 9, 3, True),
    "smollm2-360m": Shape(49152, 960, 2560, 32, 15, 5, True),
    "tinyllama-1.1b": Shape(32000, 2048, 5632, 22, 32, 4, False),
    "tiny": Shape(256, 64, 128, 2, 4, 2, True),
}


@dataclass(frozen=True)
class Spec:
    """One measurement: all that its process has to know.

    what: "step", "check", "generate", "startup" or "files".  dtype: "float32", "bfloat16" or, for the peer,
    "medium" (float32 tensors, products in bfloat16).  ``directory`` holds base/ and adapter/.
    """

    what: str
    directory: str
    program: str = PROGRAMS[0]
    shape: str = "tiny"
    workload: str = "dense-4x512"
    dtype: str = "float32"
    rank: int = 16
    checkpointing: bool = False
    steps: int = 5
    profile: bool = False
    malloc: bool = False
    new_tokens: int = 64
    threads: int = 1
    pass_tokens: int | None = None

    @property
    def base(self) -> Path:
        """The model directory."""
        return Path(self.directory) / "base"

    @property
    def adapter(self) -> Path:
        """The adapter directory."""
        return Path(self.directory) / f"adapter-{self.rank}"

    @property
    def logits(self) -> Path:
        """Where a check leaves the probe row's logits."""
        return Path(self.directory) / f"logits-{self.program}-{self.dtype}.npy"

    def batches(self) -> list[list[Row]]:
        """The rows of each step, warm-up included."""
        return batches(self.workload, SHAPES[self.shape].vocab, self.steps + WARM_UP)

    def prompts(self, rows: int) -> list[list[int]]:
        """``rows`` prompts of 32 tokens, to be continued."""
        return [ids for ids, _ in batches(f"dense-{rows}x32", SHAPES[self.shape].vocab, 1)[0]]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Spec:
        """The inverse of to_json."""
        return Spec(**json.loads(text))


def batches(workload: str, vocab: int, count: int, seed: int = 0) -> list[list[Row]]:
    """``count`` batches of a workload.  Raises ValueError for a name that is none.

    dense-RxL: R rows of L tokens, each labelled.  gsm8k-R: R rows with the lengths of GSM8K's training set (a prompt
    without labels, an answer with), drawn at random: what instruction data looks like.
    """
    rng = random.Random(seed)
    dense, ragged = re.fullmatch(r"dense-(\d+)x(\d+)", workload), re.fullmatch(r"gsm8k-(\d+)", workload)
    if dense:
        rows, pairs = int(dense[1]), [(0, int(dense[2]))]
    elif ragged:
        rows, pairs = int(ragged[1]), json.loads(LENGTHS.read_text(encoding="utf-8"))
    else:
        raise ValueError(f"workload {workload!r} is not known; expected dense-ROWSxLENGTH or gsm8k-ROWS.")

    def row() -> Row:
        prompt, answer = rng.choice(pairs)
        ids = [rng.randrange(vocab) for _ in range(prompt + answer)]
        return ids, [-100] * prompt + ids[prompt:]

    return [[row() for _ in range(rows)] for _ in range(count)]


def n_tokens(rows: list[Row]) -> int:
    """The real tokens of a batch: no padding is counted."""
    return sum(len(ids) for ids, _ in rows)


def result(spec: Spec, **values: Any) -> dict[str, Any]:
    """The keys that every measurement begins with, and ``values``."""
    named = ("program", "what", "shape", "workload", "dtype", "rank", "checkpointing", "malloc")
    return {name: getattr(spec, name) for name in named} | values
