"""Fine-tune a model with LoRA:  python scripts/finetune.py [CONFIG] [section.key=value ...]

Without CONFIG: the quick start, on a small pretrained model in configs/quickstart; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from peft_core.errors import ConfigError
from run.config import RunConfig
from run.config_file import Note, load_config, override_names, to_toml
from run.errors import run_page
from run.job import Job
from run.quickstart import quickstart_config, show_scores
from run.rundir import RunDir
from run.signals import StopRequest


def page(argv: Sequence[str]) -> int:
    """RunConfig -> from_pretrained -> inject -> batches -> fit -> save."""
    args = parse(argv)
    with StopRequest() as stop, ExitStack() as stack:
        config = read_config(args, stack)
        if args.print_config:
            print(to_toml(config), end="")
            return 0
        job = Job(config, RunDir(config.output.output_dir), args.device, stop)
        if not (args.check or args.dry_run):
            job.claim(args.resume, args.overwrite)

        job.read_data()
        if args.check:
            return job.show_check()
        job.load_base()
        job.inject()
        job.plan_memory()
        if args.dry_run:
            return job.try_one_step()
        stack.enter_context(job.run.locked())
        with job.run.given_back_unless(job.has_begun):
            job.begin()
            job.train()
            job.save()
        if args.quick_start:
            show_scores(job)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; CONFIG and the section.key=value pairs may stand in any order."""
    parser = argparse.ArgumentParser(
        prog="finetune.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="[CONFIG] [section.key=value ...]", help="a TOML file; settings on top"
    )
    parser.add_argument("--check", action="store_true", help="read the data, render, mask, report; load no weights")
    parser.add_argument("--dry-run", action="store_true", help="--check, memory and time estimate, one real step")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="PATH", help="continue from the last (or this) checkpoint"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the run in output_dir")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--debug", action="store_true", help="tracebacks for expected errors too")
    args = parser.parse_intermixed_args(argv)
    if args.resume and "=" in args.resume and not Path(args.resume).exists():
        args.words.append(args.resume)  # "--resume train.seed=1": argparse cannot know that this is no path
        args.resume = ""
    args.overrides = [word for word in args.words if "=" in word]
    files = [word for word in args.words if "=" not in word]
    if len(files) > 1:
        parser.error(f"expected one CONFIG and section.key=value pairs, got {' '.join(files)}")
    args.config, args.output_dir, args.quick_start = files[0] if files else None, None, False
    if args.resume is not None and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    return args


def read_config(args: argparse.Namespace, stack: ExitStack) -> RunConfig:
    """The RunConfig of the file, of the run to resume, or of a new quick start."""

    def note(text: str) -> None:
        print(text, file=sys.stderr)

    if args.config is not None:
        return load_config(args.config, args.overrides, note)
    if args.resume:
        return load_config(resolved_config(Path(args.resume)), args.overrides, note)
    if args.resume is not None:
        raise ConfigError("--resume without CONFIG needs a PATH; expected a run such as runs/quickstart-1. Add it.")
    if own := sorted(override_names(args.overrides) & {"model.path", "data.path"}):
        return own_config(args.overrides, note, own)
    scratch, made = None, list[Path]()
    if args.check or args.dry_run or args.print_config:  # these leave nothing behind
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    else:
        stack.push(lambda kind, error, trace: remove_unstarted(made, args.output_dir) if kind else None)
    config = quickstart_config(args.overrides, note, scratch, made.append)
    args.output_dir, args.quick_start = config.output.output_dir, True
    return config


def own_config(overrides: list[str], note: Note, own: list[str]) -> RunConfig:
    """The config of the command line alone: with a model or data of one's own nothing of the quick start fits."""
    try:
        return load_config(None, overrides, note)
    except ConfigError as error:
        raise ConfigError(
            f"{error} Without CONFIG, {' and '.join(own)} on the command line means a run of your own and not the "
            "quick start: model.path, data.path and output.output_dir have to be there."
        ) from error


def remove_unstarted(folders: list[Path], output_dir: str | None) -> None:
    """Take a failed quick start's folder away, unless its run has something that can be continued."""
    for folder in folders:
        if not RunDir(output_dir or folder).in_use():
            shutil.rmtree(folder, ignore_errors=True)


def resolved_config(path: Path) -> Path:
    """config.resolved.toml of the run that ``path`` (a run or one of its checkpoints) belongs to."""
    for folder in (path, path.parent.parent):
        if (folder / "config.resolved.toml").is_file():
            return folder / "config.resolved.toml"
    return path / "config.resolved.toml"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code (see scripts/run/errors.py)."""
    return run_page(page, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
