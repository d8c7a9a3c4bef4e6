"""What a person sees while training: one line per ``logging_steps``, and a bar on a terminal only."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from tqdm import tqdm


@dataclass
class Interval:
    """Sums since the last printed line; part of a checkpoint, so that a resumed run prints the same numbers."""

    loss_sum: float = 0.0
    n_labelled: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, loss_sum: float, n_labelled: int, tokens: int, seconds: float) -> None:
        """Count one optimizer step."""
        self.loss_sum += loss_sum
        self.n_labelled += n_labelled
        self.tokens += tokens
        self.seconds += seconds

    @property
    def loss(self) -> float:
        """Mean loss per trained token, in nats."""
        return self.loss_sum / max(1, self.n_labelled)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; floats survive JSON exactly."""
        return asdict(self)


class Screen:
    """Lines to ``stream``, beside a progress bar if it is a terminal."""

    def __init__(self, total: int, start: int = 0, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.total, self.done, self.first = total, start, start
        self.began_s = time.perf_counter()
        self.bar = None
        if self.stream.isatty():
            self.bar = tqdm(total=total, initial=start, file=self.stream, unit="step", dynamic_ncols=True, leave=False)

    def line(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        if self.bar is None:
            print(text, file=self.stream, flush=True)
        else:
            self.bar.write(text, file=self.stream)

    def advance(self, step: int) -> None:
        """``step`` optimizer steps are done."""
        if self.bar is not None:
            self.bar.update(step - self.done)
        self.done = step

    def eta_s(self) -> float:
        """Seconds until the end at the pace since this process began to train."""
        here = self.done - self.first
        return (time.perf_counter() - self.began_s) / here * (self.total - self.done) if here else math.nan

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def clock(seconds: float) -> str:
    """ "1:02:03", "4:05", or "?" for a time nobody knows."""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def size(n_bytes: float) -> str:
    """Bytes in decimal units: "1.1 GB", "350 MB"."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.1f} GB"
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e7 else f"{n_bytes / 1e6:.1f} MB"


def count(n: float) -> str:
    """Numbers of parameters: "134.5M", "4.9M", "260.0k"."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= limit:
            return f"{n / limit:.1f}{unit}"
    return str(int(n))
