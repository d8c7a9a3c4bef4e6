"""Let a model answer:  python scripts/generate.py MODEL [--adapter DIR] [--prompt TEXT] [--compare]

Without --prompt: a conversation on the terminal (/reset forgets it, /quit or end of input leaves).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters import load_adapter, set_active
from peft_core.amp import autocast
from peft_core.dtypes import dtype_name
from peft_core.errors import ConfigError, DataError
from run import base
from run.errors import run_page
from run.stream import Stream
from transformer.generate import generate
from transformer.load import from_pretrained
from transformer.tokenizer import Tokenizer


class Speaker:
    """A model with its tokenizer and the sampling settings of this page."""

    def __init__(self, args: argparse.Namespace) -> None:
        directory = base.find_base(args.model)
        source = Path(args.adapter) if args.adapter and (Path(args.adapter) / "tokenizer.json").is_file() else directory
        self.args = args
        self.tokenizer: Tokenizer = base.load_tokenizer(source, args.chat_template)
        self.stop_ids = base.stop_ids(directory, self.tokenizer)
        device = base.open_device(args.device)
        self.model: Any = from_pretrained(directory, dtype=args.dtype, device=device)
        stored = {dtype_name(p.dtype) for p in self.model.parameters()}
        self.precision = base.compute_dtype("auto", device, stored)  # as finetune.py chooses it
        self.names: list[str] = []
        if args.adapter:
            load_adapter(self.model, args.adapter, "tuned")
            self.names = ["tuned"]
        self.model.eval()

    def say(self, ids: list[int], *, tuned: bool = True) -> str:
        """Stream an answer to ``ids`` and return it; ``tuned`` False: without the adapter."""
        args, stream = self.args, Stream(self.tokenizer)
        if self.names:
            set_active(self.model, self.names if tuned else [])
        with autocast(self.precision):
            generate(
                self.model, [ids], max_new_tokens=args.max_new_tokens, do_sample=args.temperature > 0,
                temperature=args.temperature or 1.0, top_k=args.top_k, top_p=args.top_p, seed=args.seed,
                eos_token_id=self.stop_ids, on_token=stream.take,
            )  # fmt: skip
        return stream.end()


def page(argv: Sequence[str]) -> int:
    """Answer the prompts, or talk."""
    args = parse(argv)
    if args.compare and not args.adapter:
        raise ConfigError("--compare needs an adapter to compare with the base; expected --adapter DIR. Add it.")
    speaker = Speaker(args)
    if not args.prompt:
        return talk(speaker)
    for text in args.prompt:
        ids = base.prompt_ids(speaker.tokenizer, text, raw=args.raw)
        if args.compare:
            print("base:  ", end=" ", flush=True)
            speaker.say(ids, tuned=False)
            print("tuned: ", end=" ", flush=True)
        elif len(args.prompt) > 1:
            print(f"> {text}")
        speaker.say(ids)
    return 0


def talk(speaker: Speaker) -> int:
    """A conversation until the input ends; without a chat template each line is continued on its own."""
    chat = speaker.tokenizer.chat_template is not None and not speaker.args.raw
    messages: list[dict[str, str]] = []
    while True:
        print("> ", end="", flush=True)
        line = _typed()
        text = line.strip()
        if not line or text == "/quit":
            print()
            return 0
        if not text or text == "/reset":
            messages = []
            continue
        messages.append({"role": "user", "content": text})
        ids = base.chat_ids(speaker.tokenizer, messages) if chat else speaker.tokenizer.encode(text)
        if speaker.args.compare:
            print("base:  ", end=" ", flush=True)
            speaker.say(ids, tuned=False)
            print("tuned: ", end=" ", flush=True)
        messages.append({"role": "assistant", "content": speaker.say(ids)})


def _typed() -> str:
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the line typed is not {error.encoding} text (byte 0x{error.object[error.start]:02x}); expected text in "
            f"{error.encoding}. Convert it, or set the locale to the encoding it has."
        ) from error


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, their ranges checked."""
    parser = argparse.ArgumentParser(
        prog="generate.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a model directory, or a hub id in the local cache")
    parser.add_argument("--adapter", metavar="DIR", help="a folder with adapter_config.json")
    parser.add_argument("--prompt", metavar="TEXT", action="append", help="may be given several times")
    parser.add_argument("--compare", action="store_true", help="the base's answer beside the tuned one")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument("--chat-template", metavar="FILE", help="a jinja file instead of the model's own template")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the most likely token each time")
    parser.add_argument("--top-k", type=int, help="choose among the k most likely tokens")
    parser.add_argument("--top-p", type=float, help="choose among the most likely tokens that make up this probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--debug", action="store_true", help="tracebacks for expected errors too")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1 or args.temperature < 0:
        parser.error("--max-new-tokens is at least 1 and --temperature at least 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code (see scripts/run/errors.py)."""
    return run_page(page, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
