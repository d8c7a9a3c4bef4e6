"""What is measured: shapes of public models, rows of tokens, and the Spec that one measuring process is given."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LENGTHS = Path(__file__).parents[2] / "configs" / "bench" / "gsm8k_lengths.json"
PROGRAMS = ("peft-core", "hf-peft")
WHATS = ("step", "generate", "startup", "length", "rank")
LEARNING_RATE = 2e-4
WARM_UP = 1  # steps that compile kernels and touch memory for the first time
PROMPT = 32  # tokens that are continued with --what generate

Row = tuple[list[int], list[int]]  # input_ids and labels, unshifted, -100 where no loss is taken


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: vocabulary, width, feed-forward width, layers, query heads, key heads.

    ``family``: its model_type, which says how its parts are named and stored.  ``positions``: the longest row that its
    config.json names; a workload with a longer one raises it.
    """

    vocab: int
    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    tied: bool
    family: str = "llama"
    positions: int = 8192

    @property
    def head_dim(self) -> int:
        """K."""
        return self.width // self.heads

    @property
    def layout(self) -> Any:
        """The transformer's description of the family."""
        from transformer.families import FAMILIES  # late: start-up is measured too

        return FAMILIES[self.family]

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each linear of a layer, by the path within the layer."""
        stack, d, f, kv = self.layout.stack, self.width, self.inner, self.groups * self.head_dim
        wide = (d, kv, kv) if len(stack.qkv) == 3 else (d + 2 * kv,)
        attention = dict(zip(stack.qkv, ((n, d) for n in wide), strict=True)) | {stack.attention_out: (d, d)}
        mlp = dict.fromkeys(stack.mlp_in, (f, d)) | {stack.mlp_out: (d, f)}
        parts = {stack.attention: attention, stack.mlp: mlp}
        return {f"{part}.{name}": size for part, sizes in parts.items() for name, size in sizes.items()}

    def layer_path(self, layer: int) -> str:
        """Where a layer's parts are in the model, a dot at the end."""
        return f"{self.layout.stack.decoder}.{self.layout.stack.layers}.{layer}."


SHAPES = {
    "smollm2-135m": Shape(49152, 576, 1536, 30, 9, 3, True),
    "smollm2-360m": Shape(49152, 960, 2560, 32, 15, 5, True),
    "tinyllama-1.1b": Shape(32000, 2048, 5632, 22, 32, 4, False),
    "gpt2-124m": Shape(50257, 768, 3072, 12, 12, 12, True, "gpt2", 1024),
    "tiny": Shape(256, 64, 128, 2, 4, 2, True),
    "tiny-gpt2": Shape(256, 64, 256, 2, 4, 4, True, "gpt2", 64),
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
        """``rows`` prompts, to be continued."""
        return [ids for ids, _ in batches(f"dense-{rows}x{PROMPT}", SHAPES[self.shape].vocab, 1)[0]]

    @property
    def positions(self) -> int:
        """The longest row that the base has to take: of the shape, of the workload, or of what is generated."""
        longest = max(len(ids) for rows in self.batches() for ids, _ in rows)
        return max(SHAPES[self.shape].positions, longest, PROMPT + self.new_tokens + 1)

    @property
    def gemm_size(self) -> int:
        """n of the n x n product whose rate is the peak: large, except where only a test asks."""
        return 2048 if SHAPES[self.shape].width > 64 else 256

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
