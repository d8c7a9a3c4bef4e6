"""What happens between two optimizer steps: lines, metrics, evaluation, best adapter, checkpoints, early stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft_core.backend import peak_rss_bytes, rss_bytes
from peft_core.errors import DivergedError
from peft_core.nn import Module
from peft_core.optim import Optimizer
from peft_core.train import EvalResult, StepReport, TrainState
from peft_core.training_state import save_training_state
from run.config import RunConfig
from run.progress import Interval, Screen, clock, size
from run.rundir import RunDir
from run.signals import StopRequest


@dataclass
class Session:
    """One run while it trains.  ``every_eval`` and ``every_save`` are in optimizer steps; ``state`` is fit()'s own."""

    config: RunConfig
    run: RunDir
    model: Module
    optimizer: Optimizer
    state: TrainState
    total: int
    steps_per_epoch: float
    every_eval: int
    every_save: int
    fingerprint: dict[str, Any]
    started: str
    passes: dict[str, Any]
    compute_dtype: str
    stop: StopRequest
    save_adapter: Callable[[Path], None]
    evaluate: Callable[[], EvalResult] | None = None
    sample: Callable[[], list[dict[str, str]]] | None = None
    interval: Interval = field(default_factory=Interval)
    best: dict[str, float] | None = None  # {"step", "val_loss"}
    first_loss: float | None = None  # validation loss of the base model
    last_loss: float | None = None
    waited: int = 0  # evaluations since the best one
    earlier_s: float = 0.0  # training time of earlier processes of this run
    began_s: float = field(default_factory=time.perf_counter)
    screen: Screen | None = None

    # ------------------------------------------------------------------ called by fit()

    def should_stop(self) -> bool:
        """A signal, or enough evaluations without a better one."""
        return bool(self.stop) or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        """Whether early stopping ended the run."""
        patience = self.config.eval.early_stopping_patience
        return patience is not None and self.waited >= patience

    def on_step(self, report: StepReport) -> None:
        """After each optimizer step."""
        screen = self.open_screen()
        screen.advance(report.step)
        self.interval.add(report.loss * report.n_labelled, report.n_labelled, report.n_tokens, report.step_time_s)
        last = report.step == self.total
        if last or report.step % self.config.log.logging_steps == 0:
            self._log(report)
        if self.evaluate and (last or report.step % self.every_eval == 0):
            self.run_evaluation(report.step)
        if last or self.stopped_early or report.step % self.every_save == 0:
            self.save_checkpoint()

    # ------------------------------------------------------------------ parts of a step

    def open_screen(self) -> Screen:
        """The screen, from the first step on: before, a bar would stand between the lines of the report."""
        if self.screen is None:
            self.screen = Screen(self.total, self.state.step)
        return self.screen

    def _log(self, report: StepReport) -> None:
        part, screen = self.interval, self.open_screen()
        speed = part.tokens / max(part.seconds, 1e-9)
        epoch = round(report.step / self.steps_per_epoch, 4)
        self.run.append(
            self.run.metrics,
            {
                "step": report.step,
                "epoch": epoch,
                "loss": part.loss,
                "lr": report.lr,
                "grad_norm": report.grad_norm,
                "tokens": part.tokens,
                "trained_tokens": part.n_labelled,
                "time_s": round(self.elapsed_s(), 3),
                "tokens_per_s": round(speed, 1),
                "memory_bytes": rss_bytes(),
            },
        )
        screen.line(
            f"step {report.step:>5}/{self.total}  loss {part.loss:.4f}  lr {report.lr:.2e}  "
            f"grad {report.grad_norm:.3f}  {speed:,.0f} tok/s  {size(rss_bytes())}  eta {clock(screen.eta_s())}"
        )
        self.interval = Interval()

    def run_evaluation(self, step: int) -> None:
        """Validation loss; the best adapter so far goes to adapter/; samples.  Raises DivergedError unless finite."""
        assert self.evaluate is not None
        began = time.perf_counter()
        result = self.evaluate()
        if not math.isfinite(result.loss):
            fix = (
                "Lower train.learning_rate, or add warm-up steps."
                if step
                else "Nothing was trained yet, so the learning rate has no part in it."
            )
            raise DivergedError(f"the validation loss is {result.loss} at step {step}; expected a finite number. {fix}")
        better = step > 0 and (self.best is None or result.loss < self.best["val_loss"])
        if step == 0:
            self.first_loss = result.loss
        elif better:
            self.best, self.waited = {"step": step, "val_loss": result.loss}, 0
            self.save_adapter(self.run.adapter)
        else:
            self.waited += 1
        self.last_loss = result.loss
        self.run.append(
            self.run.metrics,
            {
                "step": step,
                "val_loss": result.loss,
                "val_ppl": min(result.perplexity, 1e300),
                "best": better,
                "time_s": round(time.perf_counter() - began, 3),
            },
        )
        line = f"step {step:>5}  val loss {result.loss:.4f}  ppl {result.perplexity:.2f}"
        if step == 0:
            print(f"step 0   val loss {result.loss:.3f}  ppl {result.perplexity:.2f}   (base model, before training)")
        else:
            self.open_screen().line(line + ("  best so far" if better else ""))
        self._write_samples(step)

    def _write_samples(self, step: int) -> None:
        if self.sample is None:
            return
        for record in self.sample():
            self.run.append(self.run.samples, {"step": step, **record})
            if step:
                self.open_screen().line(f"sample   {_end(record['prompt'])!r} -> {record['text']!r}")

    # ------------------------------------------------------------------ to disk and back

    def save_checkpoint(self) -> Path:
        """Write a checkpoint that continues exactly here, then delete the oldest beyond save_total_limit."""
        path = self.run.checkpoint(self.state.step, self.state.micro)
        extra = {
            "fingerprint": self.fingerprint,
            "started": self.started,
            "passes": self.passes,
            "compute_dtype": self.compute_dtype,
            "interval": self.interval.to_dict(),
            "best": self.best,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "waited": self.waited,
            "sizes": self.run.sizes(),
            "elapsed_s": self.elapsed_s(),
            "total": self.total,
        }
        save_training_state(path, self.model, self.optimizer, self.state, extra)
        self.run.prune(self.config.output.save_total_limit)
        return path

    def restore(self, extra: dict[str, Any]) -> None:
        """Take back what ``save_checkpoint`` put into ``extra``; records of later steps are cut off."""
        self.interval = Interval(**extra["interval"])
        self.best, self.waited = extra["best"], extra["waited"]
        self.first_loss, self.last_loss = extra["first_loss"], extra["last_loss"]
        self.earlier_s = extra["elapsed_s"]
        self.run.rewind(extra["sizes"])

    def finish(self) -> None:
        """The adapter of the last step, which is also the best one if there was no validation."""
        self.save_adapter(self.run.adapter_last)
        if self.best is None:
            self.save_adapter(self.run.adapter)

    def close(self) -> None:
        """Take the progress bar away."""
        if self.screen is not None:
            self.screen.close()

    def elapsed_s(self) -> float:
        """Seconds of training, all processes of this run together."""
        return self.earlier_s + time.perf_counter() - self.began_s

    # ------------------------------------------------------------------ the end

    def summary(self) -> list[str]:
        """What came out: lines for the end of the run."""
        lines = []
        if self.best is not None and self.first_loss is not None:
            change = self.best["val_loss"] - self.first_loss
            lines.append(
                f"best     step {self.best['step']}  val loss {self.best['val_loss']:.4f}  "
                f"({change:+.4f} from {self.first_loss:.4f} at step 0)"
            )
            if change >= 0:
                lines.append("         the adapter is no better than the base model on the validation rows")
        if self.stopped_early:
            lines.append(
                f"stopped  at step {self.state.step} of {self.total}: {self.waited} evaluations without a better one"
            )
        lines.append(f"time     {clock(self.elapsed_s())}, peak memory {size(peak_rss_bytes())}")
        return lines


def _end(prompt: str, limit: int = 60) -> str:
    """A long prompt's last words, which tell it from others more often than its first."""
    return prompt if len(prompt) <= limit else "... " + prompt[-limit:].split(" ", 1)[-1]
