"""One fine-tuning run in the order of the page that calls it; each method uses what the one before made."""

from __future__ import annotations

import shlex
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from adapters import inject_adapter, save_adapter
from peft_core import random
from peft_core.backend import peak_rss_bytes
from peft_core.checkpoint import checkpoint_files
from peft_core.errors import ConfigError, DivergedError, OutOfMemoryError
from peft_core.files import atomic_dir, atomic_write
from peft_core.optim import AdamW, schedule
from peft_core.train import EvalResult, TrainState, evaluate, fit
from peft_core.training_state import load_training_state
from run import base, preflight, resume
from run.config import RunConfig
from run.config_file import to_toml
from run.errors import Interrupted, classify
from run.progress import clock, size
from run.rows import Plan, Rows, load_rows, make_plan
from run.rundir import RunDir
from run.session import Session
from run.signals import StopRequest
from transformer.config import ModelConfig
from transformer.generate import generate
from transformer.load import from_pretrained


class Job:
    """The pieces of a run: config, rows, plan, model, optimizer, session."""

    def __init__(self, config: RunConfig, run: RunDir, device: str, stop: StopRequest) -> None:
        self.config, self.run, self.stop = config, run, stop
        self.device = base.open_device(device)
        self.precision = base.compute_dtype(config.model, self.device)
        self.started = datetime.now().isoformat(timespec="seconds")
        self.checkpoint: Path | None = None
        self.overwrite = False

    # ------------------------------------------------------------------ output_dir

    def claim(self, resume_from: str | None, overwrite: bool) -> None:
        """Refuse a used output_dir early, before minutes of loading; nothing is deleted yet."""
        self.overwrite = overwrite
        if resume_from is None:
            self.run.check_free(overwrite)
            return
        given = resume_from if resume_from and Path(resume_from).resolve() != self.run.path.resolve() else None
        self.checkpoint = self.run.find_checkpoint(given)
        self.extra = resume.read_extra(self.checkpoint)
        self.started = self.extra["started"]  # a template may print the date: the rows must come out the same

    # ------------------------------------------------------------------ data and base

    def read_data(self) -> None:
        """Tokenizer, rows, plan, and the report that needs no weights."""
        config = self.config
        self.base_dir = base.find_base(config.model.path)
        self.model_config = ModelConfig.from_pretrained(self.base_dir)
        self.files = [Path(file) for file in checkpoint_files(self.base_dir)]
        self.weights = preflight.Weights.of(self.files)
        self.tokenizer = base.load_tokenizer(self.base_dir, config.model.chat_template)
        self.stop_ids = base.stop_ids(self.base_dir, self.tokenizer)
        seed, now = config.train.seed, datetime.fromisoformat(self.started)
        self.rows: Rows = load_rows(config.data, self.tokenizer, seed=seed, stop_ids=self.stop_ids, now=now)
        self.plan: Plan = make_plan(self.rows.train, config.train, config.data.shuffle)
        self.report = preflight.start_report(
            config, self.model_config, self.weights, self.rows, self.plan, self.started
        )
        val = self.rows.val.hash() if self.rows.val is not None else ""
        now_print = resume.fingerprint(config, self.rows.train.hash(), val, resume.base_hash(self.files))
        self.fingerprint = now_print
        if self.checkpoint is not None:
            resume.check_same_run(self.extra["fingerprint"], now_print, self.checkpoint)

    def show_check(self) -> int:
        """--check: the report so far."""
        print("\n".join(self.report.lines))
        print("check    done: no weights were loaded, nothing was written")
        return 0

    def load_base(self) -> None:
        """The frozen model."""
        model = self.config.model
        self.model = from_pretrained(self.base_dir, dtype=model.dtype, device=self.device)
        self.recompute = self.config.train.gradient_checkpointing is True  # "auto" is off
        if self.recompute:
            self.model.gradient_checkpointing_enable()

    def inject(self) -> None:
        """The adapter, its random start drawn from the seed, and its optimizer."""
        train = self.config.train
        self.lora = base.lora_config(self.config.lora, self.config.model.path)
        random.manual_seed(train.seed)
        try:
            self.injected = inject_adapter(self.model, self.lora)
        except ConfigError as error:
            word = str(error).split(" ", 1)[0]
            raise ConfigError(f"lora.{error}" if word in type(self.config.lora).model_fields else str(error)) from error
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = AdamW(trained, lr=train.learning_rate, weight_decay=train.weight_decay)
        preflight.add_adapter_facts(self.report, self.config, self.injected, self.model_config.num_hidden_layers)

    def plan_memory(self) -> None:
        """The memory estimate, and the report on the screen."""
        item = 4 if self.precision is None else 2
        self.memory = preflight.estimate_memory(
            self.model_config, self.weights, self.injected.trainable, self.plan.longest_micro, self.recompute, item
        )
        preflight.add_memory(self.report, self.memory)
        print("\n".join(self.report.lines), flush=True)

    # ------------------------------------------------------------------ training

    @staticmethod
    def loss(model: Any, batch: Any) -> Any:
        """(sum of losses, labelled tokens) of a batch."""
        return model.loss(batch)

    def _fit(self, steps: Any, state: TrainState, **hooks: Any) -> None:
        train = self.config.train
        fit(
            self.model,
            steps,
            self.loss,
            self.optimizer,
            schedule=schedule(train.lr_scheduler_type, len(self.plan.steps), self.plan.warmup),
            max_grad_norm=train.max_grad_norm or None,
            autocast_dtype=self.precision,
            state=state,
            **hooks,
        )

    def try_one_step(self) -> int:
        """--dry-run: one real step, its time and memory; nothing is written."""
        began = time.perf_counter()
        reports: list[Any] = []
        self._fit(self.plan.steps[:1], TrainState(), on_step=reports.append)
        seconds = time.perf_counter() - began
        total = seconds * len(self.plan.steps)
        print(
            f"dry run  1 step: loss {reports[0].loss:.4f}, {seconds:.2f} s (the first step also compiles kernels), "
            f"peak {size(peak_rss_bytes())}; at this pace {clock(total)} for {len(self.plan.steps)} steps; "
            "nothing was written"
        )
        return 0

    def begin(self) -> None:
        """Open the run directory, put a checkpoint back, measure the base model."""
        config, plan = self.config, self.plan
        state, extra = TrainState(), None
        if self.checkpoint is None:
            self.run.open_new(self.overwrite)
            atomic_write(
                self.run.config, "# The settings of this run, defaults and command line included.\n" + to_toml(config)
            )
            atomic_write(self.run.preflight, self.report.json())
        else:
            state, extra = load_training_state(self.checkpoint, self.model, self.optimizer)
        val = self.rows.val_batches()
        each = max(1, round(plan.steps_per_epoch))
        self.session = Session(
            config,
            self.run,
            self.model,
            self.optimizer,
            state,
            len(plan.steps),
            plan.steps_per_epoch,
            every_eval=config.eval.eval_steps or each,
            every_save=config.output.save_steps or each,
            fingerprint=self.fingerprint,
            started=self.started,
            stop=self.stop,
            save_adapter=self.save_adapter,
            evaluate=(lambda: self.evaluate(val)) if val else None,
            sample=self.sample if config.eval.sample_prompts else None,
        )
        if extra is not None:
            self.session.restore(extra)
            print(
                f"resume   {self.checkpoint}: step {state.step} of {len(plan.steps)}"
                + (f", {state.micro} micro-batches into the next" if state.micro else "")
            )
        elif val:
            self.session.run_evaluation(0)

    def train(self) -> None:
        """fit(), and what has to be said if it ends early."""
        session = self.session
        self.stop.training = True
        try:
            self._fit(self.plan.steps, session.state, on_step=session.on_step, should_stop=session.should_stop)
        except DivergedError as error:
            raise DivergedError(f"{error} {self._rows_of_step()} {self._last_checkpoint()}") from error
        except Exception as error:
            if (classify(error) or ("", 0))[0] != "out of memory":
                raise
            raise OutOfMemoryError(self._out_of_memory(error)) from error
        finally:
            session.close()
            self.stop.training = False
        if self.stop and session.state.step < session.total and not session.stopped_early:
            path = session.save_checkpoint()
            assert self.stop.signum is not None
            raise Interrupted(
                self.stop.signum,
                f"step {session.state.step} of {session.total}, checkpoint {path}. "
                f"Continue with: {self._command()} --resume",
            )

    def evaluate(self, batches: list[Any]) -> EvalResult:
        """Loss on the validation rows."""
        return evaluate(self.model, batches, self.loss, autocast_dtype=self.precision)

    def sample(self) -> list[dict[str, str]]:
        """What the model answers to eval.sample_prompts, greedily."""
        prompts = self.config.eval.sample_prompts
        ids = [base.prompt_ids(self.tokenizer, text) for text in prompts]
        out = generate(self.model, ids, max_new_tokens=self.config.eval.max_new_tokens, eos_token_id=self.stop_ids)
        return [{"prompt": p, "text": self.tokenizer.decode(new)} for p, new in zip(prompts, out, strict=True)]

    # ------------------------------------------------------------------ results

    def save_adapter(self, directory: Path) -> None:
        """The adapter and the tokenizer's files, as a whole."""
        with atomic_dir(directory, replace=True) as folder:
            save_adapter(self.model, folder, self.lora)
            self.tokenizer.save_pretrained(folder)

    def save(self) -> None:
        """The last adapter, and what to do next."""
        self.session.finish()
        adapter = self.run.adapter
        print("\n".join(self.session.summary()))
        print(f"files    {adapter} (best), {self.run.adapter_last}, {self.run.metrics}")
        print("next", *(f"  {shlex.join(words)}" for words in self._next_commands()), sep="\n")

    def _next_commands(self) -> list[list[str]]:
        """Ready to paste, whatever stands in a path or a prompt."""
        adapter, model, python = str(self.run.adapter), self.config.model.path, Path(sys.executable).name
        ask = (self.config.eval.sample_prompts or ["Hello"])[0]
        rank = str(max(16, self.config.lora.r))
        merged = str(self.run.path / "merged")
        return [
            [python, "scripts/generate.py", model, "--adapter", adapter, "--compare", "--prompt", ask],
            [python, "scripts/export.py", adapter, "--to", "merged", "--out", merged, "--verify"],
            ["vllm", "serve", model, "--enable-lora", "--max-lora-rank", rank, "--lora-modules", f"tuned={adapter}"],
        ]

    # ------------------------------------------------------------------ texts

    def _command(self) -> str:
        device = "" if self.device.type == "cpu" else f" --device {self.device}"
        return f"python scripts/finetune.py {shlex.quote(str(self.run.config))}{device}"

    def _last_checkpoint(self) -> str:
        there = self.run.checkpoints()
        return (
            f"Last finite checkpoint: {there[-1]}."
            if there
            else "No checkpoint was written yet: the base model is step 0."
        )

    def _rows_of_step(self) -> str:
        step = min(self.session.state.step, len(self.plan.steps) - 1)
        rows = [self.rows.train.where(int(n)) for part in self.plan.steps.row_indices(step) for n in part]
        return f"Rows of this step: {', '.join(rows[:4])}{f' and {len(rows) - 4} more' if len(rows) > 4 else ''}."

    def _out_of_memory(self, error: Exception) -> str:
        there, step = self.run.checkpoints(), self.session.state.step
        tries = []
        if not self.recompute:
            less = preflight.estimate_memory(
                self.model_config,
                self.weights,
                self.injected.trainable,
                self.plan.longest_micro,
                True,
                4 if self.precision is None else 2,
            )
            tries.append(
                f"train.gradient_checkpointing=true (estimate {size(less.total)} instead of {size(self.memory.total)})"
            )
        rows = self.plan.rows_per_micro or 0
        if rows > 1:
            tries.append(
                f"train.batch_size={rows // 2} train.gradient_accumulation_steps={2 * self.plan.accumulation} "
                "(half the activations, the same step)"
            )
        tries.append(f"data.max_seq_length={max(2, self.config.data.max_seq_length // 2)}")
        return (
            f"out of memory at step {step + 1} ({str(error) or 'an allocation failed'}; "
            f"peak {size(peak_rss_bytes())}). "
            f"Last good checkpoint: {there[-1] if there else 'step 0'}. Try, in this order: {'; '.join(tries)}."
        )
