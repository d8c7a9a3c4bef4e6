"""Pretrain the quick start's base model on generated stories:  python scripts/pretrain.py [--out DIR] [--steps N]

Tokenizer, text and weights all follow from seeds. A stopped run continues with --resume.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from peft_core.errors import ConfigError
from peft_core.files import atomic_write
from peft_core.optim import AdamW
from peft_core.train import StepReport, TrainState, evaluate, fit
from peft_core.training_state import load_training_state, save_training_state
from run.errors import Interrupted, run_page
from run.progress import Interval, Screen, clock, count
from run.signals import StopRequest
from run.story_check import new_sentences, sampled_sentences
from run.story_model import SHAPE, StorySteps, random_model, train_tokenizer, write_tokenizer
from transformer.export import save_pretrained
from transformer.load import from_pretrained
from transformer.model import CausalLM
from transformer.tokenizer import AutoTokenizer

STEPS, DOCUMENTS, WARMUP, RATE, SEED = 4000, 16, 100, 3e-3, 0
FALL = 0.3  # share of the steps over which the learning rate falls
HELD_OUT_SEED, FIRST = 3, 50
HOME = Path("configs/quickstart")
FACTS = "pretrain.json"


def rate(step: int, total: int) -> float:
    """Factor of the learning rate: up over WARMUP steps, then 1, then down to 0 over the last FALL of the run.

    Until the fall begins nothing depends on ``total``: a run may be lengthened or shortened on the way.
    """
    return min(1.0, (step + 1) / WARMUP, (total - step) / (FALL * total))


def loss(model: CausalLM, batch: Any) -> Any:
    """(sum of losses, labelled tokens) of a batch."""
    return model.loss(batch)


class Pretraining:
    """One run: model, optimizer, its place in the text, its losses so far."""

    def __init__(self, backend: tokenizers.Tokenizer, n_steps: int, shape: dict[str, Any]) -> None:
        self.backend, self.state = backend, TrainState()
        self.model = random_model(SEED, shape)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=RATE, betas=(0.9, 0.98), weight_decay=0.1,
        )  # fmt: skip
        self.steps = StorySteps(backend, n_steps, DOCUMENTS)
        self.tokens, self.seconds, self.losses = 0, 0.0, list[float]()

    def run(self, n_steps: int, **hooks: Any) -> None:
        """fit() up to step ``n_steps``; the learning rate is planned for the whole run."""
        part = StorySteps(self.backend, min(n_steps, len(self.steps)), DOCUMENTS)
        fit(self.model, part, loss, self.optimizer, schedule=lambda step: rate(step, len(self.steps)),
            max_grad_norm=1.0, state=self.state, **hooks)  # fmt: skip

    def take(self, report: StepReport) -> None:
        """Count one step."""
        self.tokens += report.n_tokens
        self.seconds += report.step_time_s
        if report.step <= FIRST:
            self.losses.append(round(report.loss, 5))

    def save(self, folder: Path) -> None:
        """All that is needed to continue."""
        extra = {"tokens": self.tokens, "seconds": self.seconds, "losses": self.losses, "total": len(self.steps)}
        save_training_state(folder, self.model, self.optimizer, self.state, extra)

    def restore(self, folder: Path) -> None:
        """Continue where ``save`` was called.  Raises ConfigError if another number of steps comes too late."""
        self.state, extra = load_training_state(folder, self.model, self.optimizer)
        total, planned, done = len(self.steps), extra["total"], self.state.step
        if total != planned and done > (1 - FALL) * min(total, planned):
            raise ConfigError(
                f"--steps is {total}, but the run in {folder} was planned for {planned} and is at {done}; expected "
                f"{planned}: the learning rate depends on it by now. Give it, or start again without --resume."
            )
        self.tokens, self.seconds, self.losses = extra["tokens"], extra["seconds"], list(extra["losses"])


def page(argv: Sequence[str]) -> int:
    """Tokenizer -> random model -> fit -> a bfloat16 model directory."""
    args = parse(argv)
    if args.check:
        return check(args.out)
    backend = read_tokenizer(args.work)
    run = Pretraining(backend, args.steps, SHAPE)
    if args.resume:
        run.restore(args.work / "state")
    print(f"model    {count(run.model.num_parameters())} parameters, vocabulary {backend.get_vocab_size()}; step "
          f"{run.state.step} of {args.steps}, {DOCUMENTS} documents each", flush=True)  # fmt: skip
    with StopRequest() as stop:
        watch = Watch(run, args, stop)
        stop.training = True
        run.run(args.steps, on_step=watch.on_step, should_stop=lambda: bool(stop))
        stop.training = False
        if stop and run.state.step < args.steps:
            assert stop.signum is not None
            run.save(args.work / "state")
            raise Interrupted(stop.signum, f"step {run.state.step} of {args.steps}. Continue with --resume.")
    finish(run, args.out)
    return 0


class Watch:
    """What happens after a step: a line, the losses file, a state every few minutes."""

    def __init__(self, run: Pretraining, args: argparse.Namespace, stop: StopRequest) -> None:
        self.run, self.args, self.stop = run, args, stop
        self.screen, self.interval, self.saved_s = Screen(args.steps, run.state.step), Interval(), time.perf_counter()

    def on_step(self, report: StepReport) -> None:
        """After each optimizer step; ``state.step`` is already the number of steps done."""
        run, part = self.run, self.interval
        run.take(report)
        self.screen.advance(report.step)
        part.add(report.loss * report.n_labelled, report.n_labelled, report.n_tokens, report.step_time_s)
        if report.step == FIRST:
            atomic_write(self.args.out.parent / "pretrain_losses.json", json.dumps(run.losses) + "\n")
        if report.step % 50 == 0 or report.step == self.args.steps:
            self.screen.line(f"step {report.step:>5}/{self.args.steps}  loss {part.loss:.4f}  lr {report.lr:.2e}  "
                             f"{part.tokens / part.seconds:,.0f} tok/s  {run.tokens / 1e6:.2f} M tokens  "
                             f"eta {clock(self.screen.eta_s())}")  # fmt: skip
            self.interval = Interval()
        if time.perf_counter() - self.saved_s > self.args.save_every_s or report.step == self.args.steps:
            run.save(self.args.work / "state")
            self.saved_s = time.perf_counter()


def finish(run: Pretraining, out: Path) -> None:
    """Write the model directory, and what it cost beside it."""
    run.model.to("bfloat16")
    write_tokenizer(out, run.backend)
    save_pretrained(run.model, out)
    facts = {"parameters": run.model.num_parameters(), "steps": run.state.step, "documents": run.state.step * DOCUMENTS,
             "tokens": run.tokens, "seconds": round(run.seconds)}  # fmt: skip
    atomic_write(out.parent / FACTS, json.dumps(facts, indent=2) + "\n")
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"done     {out}: {size / 1e6:.2f} MB after {run.tokens / 1e6:.2f} M tokens in {clock(run.seconds)}")


def check(out: Path, n_sentences: int = 200) -> int:
    """--check: held-out loss of the model in ``out``, and how much of what it samples is new."""
    tokenizer, model = AutoTokenizer.from_pretrained(out), from_pretrained(out)
    batches = [batch for step in StorySteps(tokenizer.backend, 8, DOCUMENTS, HELD_OUT_SEED) for batch in step]
    result = evaluate(model, batches, loss)
    print(f"held-out loss {result.loss:.4f} per token, perplexity {result.perplexity:.2f}", flush=True)
    sampled = sampled_sentences(model, tokenizer, n_sentences)
    documents = json.loads((out.parent / FACTS).read_text(encoding="utf-8"))["documents"]
    fresh = list(new_sentences(sampled, documents))
    print(f"of {len(sampled)} sampled sentences {len(fresh)} stand nowhere in the {documents:,} documents, such as")
    print(*(f"  {sentence}" for sentence in fresh[:8]), sep="\n")
    return 0


def read_tokenizer(work: Path) -> tokenizers.Tokenizer:
    """The tokenizer of this run: trained at its start, read again where it continues."""
    file = work / "tokenizer" / "tokenizer.json"
    if not file.is_file():
        write_tokenizer(file.parent, train_tokenizer())
    return tokenizers.Tokenizer.from_file(str(file))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="pretrain.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HOME / "base", help="the model directory to write")
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain"), help="where a run can be continued from")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps (default: {STEPS})")
    parser.add_argument("--save-every-s", type=float, default=180, help="seconds between two saved states")
    parser.add_argument("--resume", action="store_true", help="continue the run in --work")
    parser.add_argument("--check", action="store_true", help="train nothing: measure the model in --out")
    parser.add_argument("--debug", action="store_true", help="tracebacks for expected errors too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code (see scripts/run/errors.py)."""
    return run_page(page, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
