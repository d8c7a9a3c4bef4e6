"""What is counted and what is clocked: arithmetic of a LoRA step, GEMM rates, decoding, memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from run.bench_work import SHAPES, Row, Spec


def flops_per_step(shape: str, rows: list[Row], rank: int) -> int:
    """Floating-point operations that a LoRA step cannot avoid, all seven projections adapted.

    Per frozen linear 4 x parameters x tokens: forward and the gradient of its input, none of its weight.
    The head the same over its labelled tokens only.  Adapters 6 x tokens x rank x (in + out): forward, gradients of
    input and of A and B.  Attention 3.5 x its forward, which is 4 x heads x head_dim a pair of query and key it sees.
    Recomputed activations, padding, norms and elementwise work are not counted: they are no progress.
    """
    s = SHAPES[shape]
    lengths = [len(ids) for ids, _ in rows]
    tokens = sum(lengths)
    labelled = sum(label != -100 for _, labels in rows for label in labels[1:])
    sizes = s.linears().values()
    frozen = 4 * tokens * s.layers * sum(o * i for o, i in sizes) + 4 * labelled * s.vocab * s.width
    adapters = 6 * tokens * rank * s.layers * sum(o + i for o, i in sizes)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    attention = 14 * pairs * s.heads * s.head_dim * s.layers  # 3.5 * 4
    return frozen + adapters + attention


def best_rate(product: Callable[[], object], n: int, tries: int = 5) -> float:
    """GFLOP/s of ``product()``, a product of n x n matrices: the fastest of several."""
    product()
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best / 1e9


def numpy_peak(spec: Spec) -> dict[str, Any]:
    """The float32 GEMM rate of NumPy's BLAS."""
    import numpy as np

    n = 256 if spec.shape == "tiny" else 2048
    a = np.random.default_rng(0).standard_normal((n, n), np.float32)
    out = np.empty_like(a)
    return {"of": "numpy float32", "gflops": best_rate(lambda: np.matmul(a, a, out=out), n)}


def decode_rate(answer: Callable[[int], object], rows: int, new_tokens: int) -> float:
    """Tokens a second after the first one: ``answer(n)`` makes n tokens a row; the prompts' own time cancels."""

    def seconds(n: int) -> float:
        start = time.perf_counter()
        answer(n)
        return time.perf_counter() - start

    seconds(2)  # kernels, caches
    first, all_of_them = (min(seconds(n) for _ in range(2)) for n in (1, new_tokens + 1))
    return rows * new_tokens / max(all_of_them - first, 1e-9)


def peak_mb() -> int:
    """The largest resident memory this process has had, in MiB."""
    from peft_core.backend import peak_rss_bytes  # late: start-up is measured too

    return round(peak_rss_bytes() / 2**20)
