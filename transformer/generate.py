"""generate: continue rows of tokens, one token of every unfinished row at a time, with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from peft_core import ops
from peft_core.backend import to_device, to_numpy
from peft_core.errors import ConfigError, DataError, DivergedError, expect
from peft_core.random import mix64
from peft_core.tape import no_grad
from transformer.batch import Batch
from transformer.cache import KVCache
from transformer.model import CausalLM


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_token_id: int | Iterable[int] | None = None,
    on_token: Callable[[int, int], object] | None = None,
    use_cache: bool = True,
    row_numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt: the likeliest, or with ``do_sample`` drawn from softmax(logits / temperature).

    ``top_k``: only the k likeliest; ``top_p``: then only the smallest set of likeliest tokens with at least that much
    of the probability (Holtzman et al., arXiv:1904.09751, section 3.1).  ``seed``: each row has its own stream, made
    from the seed and the row's number (``row_numbers``: default 0, 1, ...); other rows do not change it.  A row ends
    with a token of ``eos_token_id`` (included; default: the model's own, () for none) or after ``max_new_tokens``.
    ``on_token(row, id)`` hears each token at once.  Runs in eval mode without recording.  ``use_cache=False`` runs the
    whole rows again for each token: slow, to compare with.  Raises ConfigError for settings and DataError for prompts
    that make no sense, DivergedError for logits that are not finite.
    """
    _check_settings(max_new_tokens, do_sample, temperature, top_k, top_p)
    rows = [_prompt(i, prompt) for i, prompt in enumerate(prompts)]
    stops = _stops(model, eos_token_id)
    numbers = range(len(rows)) if row_numbers is None else row_numbers
    expect(len(numbers) == len(rows), ConfigError, f"row_numbers has {len(numbers)} entries for {len(rows)} prompts",
           expected="one for each prompt")  # fmt: skip
    streams = [np.random.Generator(np.random.Philox(key=mix64(mix64(seed & _MASK) ^ row))) for row in numbers]
    new: list[list[int]] = [[] for _ in rows]
    if not rows or max_new_tokens == 0:
        return new

    def choose(row: int, logits: np.ndarray) -> int:  # logits (V,)
        _expect_finite(numbers[row], len(new[row]), logits)
        if not do_sample:
            return int(logits.argmax())
        return _draw(probabilities(logits, temperature, top_k, top_p), streams[row].random())

    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with no_grad():
            for row, token in _tokens(model, rows, max_new_tokens, stops, choose, use_cache):
                new[row].append(token)
                if on_token is not None:
                    on_token(row, token)
    finally:
        for module, flag in before:
            module.training = flag
    return new


_MASK = (1 << 64) - 1


def _tokens(
    model: CausalLM, rows: list[np.ndarray], max_new: int, stops: set[int], choose: Callable, use_cache: bool
) -> Iterable[tuple[int, int]]:
    """(row, token) in the order they are found; a row that is done takes part in no further step."""
    cache = KVCache(model.config, len(rows), max(map(len, rows)) + max_new - 1) if use_cache else None
    nothing = np.zeros(0, np.int64)
    fed, seen = list(rows), np.zeros(len(rows), np.int64)  # this step's tokens, and how many came before them
    active = list(range(len(rows)))
    for _ in range(max_new):
        batch = Batch.flat(fed, starts=seen)
        h = model.hidden(batch, cache)  # (N, D)
        last = to_device(batch.cu_seqlens[1:][active] - 1, h.device)
        logits = to_numpy(model.lm_head(ops.getitem(h, index=last)).data).astype(np.float32)  # (active, V)
        seen = seen + np.diff(batch.cu_seqlens) if use_cache else seen
        left = []
        for row, z in zip(active, logits, strict=True):
            token = choose(row, z)
            yield row, token
            fed[row] = np.array([token], np.int64) if use_cache else np.append(fed[row], token)
            if token not in stops:
                left.append(row)
            else:
                fed[row] = nothing
        active = left
        if not active:
            return


# ------------------------------------------------------------------------------------------------ one token


def probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> np.ndarray:
    """softmax(logits / temperature), cut to the top_k likeliest, then to the top_p nucleus.   (V,) -> (V,) float64.

    Tokens as likely as the k-th stay.
    """
    z = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        z = (z - z.max()) / temperature  # in this order: a tiny temperature then gives -inf, and never inf - inf
    if top_k is not None and top_k < len(z):
        z = np.where(z < np.partition(z, -top_k)[-top_k], -np.inf, z)
    p = np.exp(z)
    p /= p.sum()
    if top_p is not None and top_p < 1:
        order = np.argsort(-p, kind="stable")
        mass_before = np.cumsum(p[order]) - p[order]  # of the likelier ones
        p[order[mass_before >= top_p]] = 0
        p /= p.sum()
    return p


def _draw(p: np.ndarray, u: float) -> int:
    """The token at which the cumulative probability passes u in [0, 1)."""
    total = np.cumsum(p)
    return int(np.searchsorted(total, u * total[-1], side="right"))


# ------------------------------------------------------------------------------------------------ what was asked


def _check_settings(n: int, do_sample: bool, temperature: float, top_k: int | None, top_p: float | None) -> None:
    expect(n >= 0, ConfigError, f"max_new_tokens is {n}", expected="at least 0")
    expect(0 < temperature < float("inf"), ConfigError, f"temperature is {temperature}", expected="a number above 0",
           fix="For the likeliest token each time use do_sample=False.")  # fmt: skip
    expect(top_k is None or top_k >= 1, ConfigError, f"top_k is {top_k}", expected="at least 1, or None for all tokens")
    expect(top_p is None or 0 < top_p <= 1, ConfigError, f"top_p is {top_p}", expected="a number in (0, 1], or None")
    idle = not do_sample and (temperature != 1.0 or top_k is not None or top_p is not None)
    expect(not idle, ConfigError, "temperature, top_k or top_p is set without do_sample", expected="do_sample=True",
           fix="Without it the likeliest token is taken and these settings do nothing.")  # fmt: skip


def _expect_finite(row: int, step: int, logits: np.ndarray) -> None:
    """The likeliest of NaNs is token 0 and a draw among them an index past the end: neither is an answer."""
    bad = np.flatnonzero(~np.isfinite(logits))
    if len(bad):
        raise DivergedError(
            f"{len(bad)} of {len(logits)} logits of prompt {row} are NaN or infinite at new token {step + 1} (the "
            f"first is {logits[bad[0]]} for token {bad[0]}); expected finite logits. Base or adapter hold NaN or "
            "infinity, or numbers outgrew their dtype: look at the files, or load them as float32."
        )


def _prompt(row: int, ids: Any) -> np.ndarray:
    array = np.asarray(ids)
    expect(array.ndim == 1 and array.size > 0 and array.dtype.kind in "iu", DataError,
           f"prompt {row} has shape {array.shape} and dtype {array.dtype}",
           expected="a list of at least one token id", fix="An empty prompt starts with the BOS token.")  # fmt: skip
    return array.astype(np.int64)


def _stops(model: CausalLM, eos: int | Iterable[int] | None) -> set[int]:
    if eos is None:
        eos = model.generation_config.get("eos_token_id", model.config.eos_token_id)
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else {int(i) for i in eos}
