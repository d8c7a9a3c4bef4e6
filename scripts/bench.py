"""Measure the speed and memory of LoRA:  python scripts/bench.py --shape smollm2-135m --workload dense-4x512

Base weights and adapters are random; each measurement runs in a process of its own, and the last line of output is one
JSON object.  --peer hf-peft (extra "bench") runs transformers + peft in turn, on the same files and rows, after a
check that both do the same work.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from peft_core.kernels import available_cpus
from run import bench_compare as compare
from run.bench_profile import show
from run.bench_work import SHAPES, WHATS, Spec, batches
from run.errors import run_page

POINTS = {"length": (128, 256, 512, 1024, 2048, 4096, 8192), "rank": (4, 8, 16, 32, 64, 128, 256)}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, their ranges checked."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--what", choices=WHATS, default="step", help="length, rank: steps over a range")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--workload", default="dense-4x512", help="dense-ROWSxLENGTH or gsm8k-ROWS")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true", help="recompute each layer in backward")
    parser.add_argument("--pass-tokens", type=int, default=1024, help="tokens of one pass: a step is cut between rows")
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one to warm up")
    parser.add_argument("--profile", action="store_true", help="time by op, forward and backward")
    parser.add_argument("--peer", choices=("hf-peft",), help="measure transformers + peft in turn")
    parser.add_argument("--peer-settings", default=",".join(compare.SETTINGS), help="which of its dtypes are tried")
    parser.add_argument("--rounds", type=int, default=1, help="with --peer: how often its best setting is measured")
    parser.add_argument("--points", help="lengths or ranks instead of the usual ones, as 4,8,16")
    parser.add_argument("--new-tokens", type=int, default=64, help="with --what generate")
    parser.add_argument("--files", metavar="DIR", help="keep the weights here, for the next call with this shape and "
                        "dtype (default: a temporary folder)")  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="tracebacks for expected errors too")
    args = parser.parse_args(argv)
    args.peer_settings = tuple(args.peer_settings.split(","))
    if min(args.rank, args.pass_tokens, args.steps, args.rounds, args.new_tokens) < 1:
        parser.error("--rank, --pass-tokens, --steps, --rounds and --new-tokens are at least 1")
    if not set(args.peer_settings) <= set(compare.SETTINGS):
        parser.error(f"--peer-settings is a list of {', '.join(compare.SETTINGS)}")
    try:
        batches(args.workload, 8, 1)
        args.points = tuple(map(int, args.points.split(","))) if args.points else POINTS.get(args.what, ())
    except ValueError as error:
        parser.error(str(error))
    return args


def page(argv: Sequence[str]) -> int:
    """Write the weights, measure, print."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = f"{args.files}/{args.shape}-{args.dtype}" if args.files else scratch
        spec = Spec(
            args.what, folder, shape=args.shape, workload=args.workload, dtype=args.dtype, rank=args.rank,
            checkpointing=args.checkpointing, pass_tokens=args.pass_tokens, steps=args.steps, profile=args.profile,
            new_tokens=args.new_tokens, threads=available_cpus(),
        )  # fmt: skip
        measures = {"step": steps, "length": points, "rank": points, "generate": beside, "startup": beside}
        print(json.dumps(measures[args.what](spec, args)))
    return 0


def say(text: str) -> None:
    """A line of progress, at once."""
    print(text, flush=True)


def steps(spec: Spec, args: argparse.Namespace) -> dict[str, Any]:
    """One workload, alone or in turn with the peer."""
    compare.measure(replace(spec, what="files"))
    plain = replace(spec, profile=False)
    if args.peer:
        found = compare.alternate(plain, args.peer_settings, args.rounds, say)
        for name, ratio in found["ratios"].items():
            say(f"against {name:<10} {ratio['tokens_per_s']:>7.2f} x tokens/s  {ratio['peak_rss']:>6.3f} x peak memory")
    else:
        found = compare.measure(plain)
        say(compare.line(found))
    if spec.profile:  # a run of its own: a stopwatch around every op costs time
        found["profile"] = compare.measure(spec)["profile"]
        say(show(found["profile"]))
    return found


def points(spec: Spec, args: argparse.Namespace) -> dict[str, Any]:
    """The cost of a step against the length of one row, or against the rank."""
    runs = []
    for n in args.points:
        at = {"workload": f"dense-1x{n}"} if args.what == "length" else {"rank": n}
        runs.append(steps(replace(spec, what="step", **at), args) | {args.what: n})
    return {"program": compare.OURS, "what": args.what, "shape": spec.shape, "dtype": spec.dtype, "points": runs}


def beside(spec: Spec, args: argparse.Namespace) -> dict[str, Any]:
    """Generation or start-up, alone or with the peer in each setting once."""
    base_mb = compare.measure(replace(spec, what="files"))["base_mb"]
    found = compare.measure(spec) | {"base_mb": base_mb}
    if args.peer:
        found["peer"] = {
            dtype: compare.measure(replace(spec, program=args.peer, dtype=dtype)) for dtype in args.peer_settings
        }
    for run in (found, *found.get("peer", {}).values()):
        say("  ".join(f"{k} {v}" for k, v in run.items() if k not in ("answers", "peer")))
    if args.what == "generate" and args.peer:
        same = {dtype: run["answers"] == found["answers"] for dtype, run in found["peer"].items()}
        say(f"the first tokens are the peer's: {same}")
        found["same_answers"] = same
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code (see scripts/run/errors.py)."""
    return run_page(page, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
