"""One fine-tuning run in the order of the page that calls it; each method uses what the one before made."""

from __future__ import annotations

import math
import shlex
import sys
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from adapters import inject_adapter, save_adapter
from peft_core import random
from peft_core.amp import autocast
from peft_core.backend import peak_rss_bytes, rss_bytes
from peft_core.checkpoint import checkpoint_files, parse_size
from peft_core.dtypes import as_dtype, dtype_name, float32
from peft_core.errors import ConfigError, DivergedError, OutOfMemoryError, expect, some
from peft_core.files import atomic_dir, atomic_write
from peft_core.kernels import tiles_supported
from peft_core.optim import AdamW, schedule
from peft_core.train import EvalResult, TrainState, evaluate, fit
from peft_core.training_state import load_training_state
from run import base, memory, preflight, resume
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
        self.started = datetime.now().isoformat(timespec="seconds")
        self.checkpoint: Path | None = None
        self.rounding: list[str] = []  # what a resumed run changed of how steps are computed
        self.overwrite = False
        self.state = TrainState()

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
        self.weights = memory.Weights.of(self.files)
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
            self.rounding = resume.check_same_run(self.extra, now_print, self.checkpoint)

    def show_check(self) -> int:
        """--check: the report so far."""
        print("\n".join(self.report.lines))
        print("check    done: no weights were loaded, nothing was written")
        return 0

    def load_base(self) -> None:
        """The frozen model."""
        self.process_bytes = rss_bytes()
        model = self.config.model
        self.model = from_pretrained(self.base_dir, dtype=model.dtype, device=self.device)
        stored = self.weights.dtypes if model.dtype == "auto" else [model.dtype]
        name = (
            model.compute_dtype if self.checkpoint is None else self.extra["compute_dtype"]
        )  # not another CPU's "auto"
        self.precision = base.compute_dtype(name, self.device, stored)

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
        """How steps are cut into passes, the memory estimate, and the report on the screen."""
        train, plan = self.config.train, self.plan
        auto = train.memory_budget == "auto"
        budget = (memory.available_memory() or math.inf) * 0.9 if auto else parse_size(train.memory_budget)
        first = min(plan.longest_micro, memory.PASS_TOKENS if self.device.type == "cpu" else plan.longest_micro)
        again = None if train.gradient_checkpointing == "auto" else train.gradient_checkpointing
        self.passes = memory.plan_passes(self._memory, first, plan.longest_row, budget, again)
        if self.checkpoint is not None and not self.rounding:  # other passes would round otherwise
            self.passes = memory.Passes(**self.extra["passes"])
        self.memory = self._memory(self.passes)
        needs = f"{size(self.memory.total)} in passes of one row"
        needs += ", recomputing activations" if self.passes.recompute else ""
        expect(auto or self.memory.total <= budget, ConfigError,
               f"train.memory_budget is {train.memory_budget} and the run needs {needs}",
               expected="a budget that holds that",
               fix="Raise it, or lower data.max_seq_length or lora.r.")  # fmt: skip
        plan.steps = plan.steps.with_passes(self.passes.tokens)
        self.model.gradient_checkpointing = self.passes.recompute
        preflight.add_memory(self.report, self.memory, self.passes.line(plan.longest_pass(self.passes.tokens)))
        print("\n".join(self.report.lines), flush=True)

    def _memory(self, passes: memory.Passes) -> memory.Memory:
        stored, dtype = self.config.model.dtype, self.precision or float32
        work = memory.Work(
            self.injected.trainable,
            self.plan.longest_pass(passes.tokens),
            max([self.config.lora.r, *self.config.lora.rank_pattern.values()]),
            max((batch.n_tokens for batch in self.rows.val_batches(passes.tokens)), default=0),
            passes.recompute,
            self.precision is not None,
            self.device.type == "cpu" and tiles_supported(dtype),
            self.config.lora.lora_dropout > 0,
            None if stored == "auto" else as_dtype(stored).itemsize,
            self.process_bytes,
        )
        return memory.estimate_memory(self.model_config, self.weights, work)

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
        extra = None
        if self.checkpoint is None:
            self.run.open_new(self.overwrite)
            atomic_write(self.run.preflight, self.report.json())
        else:
            self.state, extra = load_training_state(self.checkpoint, self.model, self.optimizer)
        if self.checkpoint is None or self.rounding:  # the printed way to continue reads this file
            atomic_write(
                self.run.config, "# The settings of this run, defaults and command line included.\n" + to_toml(config)
            )
        val = self.rows.val_batches(self.passes.tokens)
        each = max(1, round(plan.steps_per_epoch))
        self.session = Session(
            config,
            self.run,
            self.model,
            self.optimizer,
            self.state,
            len(plan.steps),
            plan.steps_per_epoch,
            every_eval=config.eval.eval_steps or each,
            every_save=config.output.save_steps or each,
            fingerprint=self.fingerprint,
            started=self.started,
            passes=asdict(self.passes),
            compute_dtype=dtype_name(self.precision or float32),
            stop=self.stop,
            save_adapter=self.save_adapter,
            evaluate=(lambda: self.evaluate(val)) if val else None,
            sample=self.sample if config.eval.sample_prompts else None,
        )
        if extra is not None:
            self.session.restore(extra)
            print(
                f"resume   {self.checkpoint}: step {self.state.step} of {len(plan.steps)}"
                + (f", {self.state.micro} micro-batches into the next" if self.state.micro else "")
            )
            if asdict(self.passes) != extra["passes"]:
                print(
                    f"resume   {'; '.join(self.rounding)}: sums are rounded otherwise from here on, so the run is no "
                    "longer bit for bit the one without interruption"
                )
        elif val:
            try:
                self.session.run_evaluation(0)
            except DivergedError as error:
                raise DivergedError(f"{error} {self._damaged_base()}") from error

    def has_begun(self) -> bool:
        """Whether there is anything of this run that can be continued or read."""
        return self.state.step > 0 or bool(self.run.checkpoints())

    def train(self) -> None:
        """fit(), and what has to be said if it ends early."""
        session = self.session
        self.stop.training = True
        try:
            self._fit(self.plan.steps, session.state, on_step=session.on_step, should_stop=session.should_stop)
        except DivergedError as error:
            there = self._last_checkpoint() if self.has_begun() else self._damaged_base()
            raise DivergedError(f"{error} {self._rows_of_step()} {there}") from error
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
        with autocast(self.precision):
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

    def _damaged_base(self) -> str:
        """Before the first step the weights are as they were read: where they are damaged, by file."""
        found = base.damaged_tensors(self.base_dir)
        if not found:
            also = "" if self.precision is None else ", and try model.compute_dtype=float32"
            return f"All weights of the base are finite: look at the rows{also}."
        return f"NaN or infinity stands in {some(found)}: download it again. Nothing was written."

    def _rows_of_step(self) -> str:
        step = min(self.session.state.step, len(self.plan.steps) - 1)
        chosen = [self.rows.train.where(int(n)) for part in self.plan.steps.row_indices(step) for n in part]
        return f"Rows of this step: {some(chosen)}."  # one row of the file can make several samples: named once

    def _out_of_memory(self, error: Exception) -> str:
        there, step = self.run.checkpoints(), self.session.state.step
        tries = []
        if self.passes.tokens > self.plan.longest_row:
            half = replace(self.passes, tokens=max(self.plan.longest_row, self.passes.tokens // 2))
            between = (self._memory(half).total + self.memory.total) / 2  # another process is not of the same size
            tries.append(f"train.memory_budget={math.ceil(between / 1e6)}MB (smaller passes, the same step)")
        if not self.passes.recompute:
            less = self._memory(replace(self.passes, recompute=True))
            tries.append(
                f"train.gradient_checkpointing=true (estimate {size(less.total)} instead of {size(self.memory.total)})"
            )
        shorter = f"data.max_seq_length={max(2, self.config.data.max_seq_length // 2)} (another run)"
        on = f" Continue with: {self._command()} --resume {tries[0].split()[0]}" if there and tries else ""
        return (
            f"out of memory at step {step + 1} ({str(error) or 'an allocation failed'}; "
            f"peak {size(peak_rss_bytes())}). Last good checkpoint: {there[-1] if there else 'step 0'}. "
            f"Try, in this order: {'; '.join([*tries, shorter])}.{on}"
        )
