"""fit(): the one training loop; evaluate(): the loss without training.

A loss function is ``loss_fn(model, batch) -> (loss_sum, n_labelled)``: the sum of the losses of the labelled tokens,
and their number. Nothing is divided before all micro-batches of a step are in, so that how a step is split changes
rounding only, and a long row weighs by its tokens.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .allocator import keep_freed_memory
from .amp import autocast
from .backend import all_finite, xp_of
from .dtypes import as_dtype, float16
from .errors import ConfigError, DataError, DivergedError, expect, some
from .nn import Module
from .optim import Optimizer, clip_grad_norm_
from .tape import no_grad
from .tensor import Tensor

LossFunction = Callable[[Any, Any], tuple[Tensor, int]]


@dataclass
class TrainState:
    """How far a run is: ``step`` optimizer steps done, and ``micro`` micro-batches of the next one.

    The sums are over those micro-batches: ``loss_sum`` over ``n_labelled`` labelled of ``tokens`` tokens. With the
    gradients so far, the optimizer's state and the random state it says all that is needed to continue.
    """

    step: int = 0
    micro: int = 0
    loss_sum: float = 0.0
    n_labelled: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: ``step`` counts from 1, ``loss`` is per labelled token, ``grad_norm`` is before clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    n_labelled: int
    n_tokens: int
    step_time_s: float


@dataclass(frozen=True)
class EvalResult:
    """``loss`` per labelled token, and exp(loss)."""

    loss: float
    n_labelled: int
    perplexity: float


def fit(
    model: Module,
    steps: Sequence[Sequence[Any]],
    loss_fn: LossFunction,
    optimizer: Optimizer,
    *,
    schedule: Callable[[int], float] | None = None,
    max_grad_norm: float | None = None,
    autocast_dtype: Any = None,
    state: TrainState | None = None,
    on_step: Callable[[StepReport], object] | None = None,
    should_stop: Callable[[], object] | None = None,
) -> TrainState:
    """Train on ``steps[i]``, the micro-batches of step i: gradient = sum over them / labelled tokens of the step.

    ``schedule(i)`` scales each group's "initial_lr".  ``state`` continues a run and is updated in place.
    ``should_stop()`` is asked before each micro-batch; the state then returned continues in mid-step, with the
    gradients so far in ``.grad``.  A batch may have ``n_tokens`` (else its labelled tokens count), and ``rows``, the
    numbers by which errors name its rows.  Raises DataError for a step without labelled tokens and DivergedError for a
    NaN or infinity, before a parameter is touched; ConfigError where optimizer or state do not belong to the model.
    """
    state = TrainState() if state is None else state
    _check_start(model, optimizer, state)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    precision = contextlib.nullcontext() if autocast_dtype is None else autocast(autocast_dtype)
    with keep_freed_memory(), _mode(model, training=True):
        while state.step < len(steps):
            started, batches = time.perf_counter(), steps[state.step]
            while state.micro < len(batches):
                if should_stop is not None and should_stop():
                    return state
                batch = batches[state.micro]
                with precision:
                    loss_sum, n_labelled = loss_fn(model, batch)
                value = float(loss_sum.item())
                _check_loss(value, model, state, batches, autocast_dtype)
                if n_labelled:
                    loss_sum.backward()
                state.micro += 1
                state.loss_sum += value
                state.n_labelled += int(n_labelled)
                state.tokens += int(getattr(batch, "n_tokens", n_labelled))
            _check_labels(state, batches)
            for p in parameters:
                if p._grad is not None:
                    p._grad /= state.n_labelled
            norm = clip_grad_norm_(parameters, math.inf if max_grad_norm is None else max_grad_norm)
            _check_gradients(norm, model, state, batches, autocast_dtype)
            factor = 1.0 if schedule is None else schedule(state.step)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
            report = _report(state, optimizer, norm, time.perf_counter() - started)
            state.step, state.micro, state.loss_sum, state.n_labelled, state.tokens = state.step + 1, 0, 0.0, 0, 0
            if on_step is not None:
                on_step(report)
    return state


def evaluate(model: Module, batches: Iterable[Any], loss_fn: LossFunction, *, autocast_dtype: Any = None) -> EvalResult:
    """Loss per labelled token over all batches, in eval mode and without recording; the modes are restored after.

    A NaN or infinite loss is returned as it is.  Raises DataError if no token is labelled.
    """
    loss_sum, n_labelled = 0.0, 0
    precision = contextlib.nullcontext() if autocast_dtype is None else autocast(autocast_dtype)
    with _mode(model, training=False), no_grad(), precision:
        for batch in batches:
            value, n = loss_fn(model, batch)
            loss_sum += float(value.item())
            n_labelled += n
    expect(n_labelled > 0, DataError, "the evaluation data has 0 labelled tokens", expected="at least 1",
           fix=_NO_LABELS)  # fmt: skip
    loss = loss_sum / n_labelled
    return EvalResult(loss, n_labelled, math.inf if loss > 709 else math.exp(loss))  # exp(710) overflows


@contextlib.contextmanager
def _mode(model: Module, training: bool) -> Iterator[None]:
    """Train or eval mode; after it every module has its own mode again, whatever was raised."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag


def _report(state: TrainState, optimizer: Optimizer, norm: float, seconds: float) -> StepReport:
    loss, lr = state.loss_sum / state.n_labelled, optimizer.param_groups[0]["lr"]
    return StepReport(state.step + 1, loss, lr, norm, state.n_labelled, state.tokens, seconds)


def _check_start(model: Module, optimizer: Optimizer, state: TrainState) -> None:
    """The optimizer holds every trainable parameter; gradients are there exactly if the state is in mid-step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = {id(p) for p in parameters}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    expect(not left, ConfigError, f"{len(left)} trainable parameters are not in the optimizer ({some(left)})",
           expected="all of them, or they would silently stay as they are",
           fix="Build the optimizer after inject(), or freeze them with requires_grad_(False).")  # fmt: skip
    if state.micro == 0:
        optimizer.zero_grad()  # what an earlier use of the model left behind belongs to no step of this run
        return
    expect(state.n_labelled == 0 or any(p._grad is not None for p in parameters), ConfigError,
           f"the state is in step {state.step + 1} after {state.micro} micro-batches, but no parameter has a gradient",
           expected="the gradients so far in .grad",
           fix="Continue with the same model, or from load_training_state().")  # fmt: skip


def _check_loss(value: float, model: Module, state: TrainState, batches: Sequence[Any], precision: Any) -> None:
    if math.isfinite(value):
        return
    rows = getattr(batches[state.micro], "rows", None)
    which = "" if rows is None else f" (rows {some(rows)})"
    expect(False, DivergedError,
           f"the loss is {value} in step {state.step + 1}, micro-batch {state.micro + 1} of {len(batches)}{which}",
           expected="a finite loss", fix=_cure("forward", model, state, precision))  # fmt: skip


def _check_labels(state: TrainState, batches: Sequence[Any]) -> None:
    expect(state.micro == len(batches), DataError,
           f"step {state.step + 1} has {len(batches)} micro-batches, but {state.micro} of them are done already",
           expected="the same steps as when the run was stopped", fix="Keep data, seed and batch sizes.")  # fmt: skip
    expect(state.n_labelled > 0, DataError,
           f"step {state.step + 1} has 0 labelled tokens in its {len(batches)} micro-batches", expected="at least 1",
           fix=_NO_LABELS)  # fmt: skip


def _check_gradients(norm: float, model: Module, state: TrainState, batches: Sequence[Any], precision: Any) -> None:
    if math.isfinite(norm):
        return
    bad = [name for name, p in model.named_parameters()
           if p._grad is not None and not bool(xp_of(p._grad).isfinite(p._grad).all())]  # fmt: skip
    rows = [r for batch in batches for r in getattr(batch, "rows", None) or ()]
    which = f", rows {some(rows)}" if rows else ""
    expect(False, DivergedError,
           f"the gradient norm is {norm} in step {state.step + 1} (micro-batches 1 to {len(batches)}{which}), "
           f"in {some(bad) if bad else 'the sum over all parameters'}",
           expected="a finite norm", fix=_cure("backward", model, state, precision))  # fmt: skip


_NO_LABELS = "Are all labels masked (-100), or all rows cut before their answer? Raise the maximal length."


def not_finite(model: Module) -> list[str]:
    """The names of the parameters that hold NaN or infinity."""
    return [name for name, p in model.named_parameters() if not all_finite(p.data)]


def _cure(part: str, model: Module, state: TrainState, precision: Any) -> str:
    """What to do: before the first step the settings are innocent; float16 is to blame only where it is used."""
    narrow = precision is not None and as_dtype(precision) == float16
    if state.step > 0:
        return (
            "No parameter was changed by this step. Lower the learning rate, add warm-up steps, set max_grad_norm"
            + (", or compute in bfloat16 or float32 instead of float16." if narrow else ".")
        )
    bad = not_finite(model)
    if bad:
        why = f"NaN or infinity stands in {some(bad)}. Check the files that they come from."
    elif narrow:
        why = "compute in bfloat16 or float32 instead of float16."
    else:
        why = "all parameters are finite, so look at the rows, the loss function and the largest weights."
    return f"The very first {part} is not finite already, so the learning rate has no part in it: {why}"
