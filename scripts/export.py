"""Make an adapter usable elsewhere:  python scripts/export.py ADAPTER --to merged|peft --out DIR [--verify]

merged: the base with the adapter inside, as a plain model directory.  peft: the adapter in the form that servers read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from adapters import LoraConfig, export_canonical, merge_directory
from peft_core.errors import ConfigError
from peft_core.files import atomic_dir
from run.base import find_base
from run.errors import run_page
from run.verify import verify_adapter, verify_merged


def page(argv: Sequence[str]) -> int:
    """Read the adapter, write the result aside, verify it there, move it into place."""
    args = parse(argv)
    out, config = Path(args.out), LoraConfig.from_pretrained(args.adapter)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"--out {out} is not empty; expected a new folder. Choose another.")
    base = base_of(args, config) if args.to == "merged" or args.verify else None
    with atomic_dir(out) as building:
        if args.to == "merged":
            assert base is not None
            report = merge_directory(base, args.adapter, building, dtype=args.dtype, max_shard_size=args.max_shard_size)
            print(f"merged   {report.n_changed} of {report.n_targets} adapted weights changed; "
                  f"rounding lost {report.lost:.2%} of the adapter's update")  # fmt: skip
            if args.verify:
                print("verify  ", verify_merged(base, Path(args.adapter), building, report.lost))
        else:
            written = export_canonical(args.adapter, building)
            print(f"peft     r={written.r} alpha={written.lora_alpha}, the form that PEFT and servers read")
            if args.verify:
                assert base is not None
                print("verify  ", verify_adapter(base, Path(args.adapter), building))
    print(f"wrote    {out}")
    return 0


def base_of(args: argparse.Namespace, config: LoraConfig) -> Path:
    """The base's directory: --base, else what the adapter says."""
    name = args.base or config.base_model_name_or_path
    if not name:
        raise ConfigError(
            f"{args.adapter} names no base model; expected base_model_name_or_path in its config. Add --base DIR."
        )
    try:
        return find_base(name)
    except OSError as error:
        if args.base:
            raise
        raise ConfigError(
            f"the base {name!r} that {args.adapter} names was not found ({error}) Add --base DIR."
        ) from error


def _target(name: str) -> str:
    if name in ("gguf", "ollama"):
        raise argparse.ArgumentTypeError(
            f"{name} is not supported yet; expected merged or peft. Use --to merged, and convert that."
        )
    return name


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="export.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder with adapter_config.json")
    parser.add_argument("--to", required=True, type=_target, choices=("merged", "peft"))
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--base", metavar="DIR", help="the base model (default: the one that the adapter names)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    parser.add_argument("--max-shard-size", default="5GB", help="largest weight file, such as 5GB")
    parser.add_argument(
        "--verify", action="store_true", help="load the result and compare its logits with the adapter's"
    )
    parser.add_argument("--debug", action="store_true", help="tracebacks for expected errors too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code (see scripts/run/errors.py)."""
    return run_page(page, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
