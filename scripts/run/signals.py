"""Ctrl-C and SIGTERM: the first asks the run to stop at a good place, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType

from run.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, remembers the first signal in ``signum``; outside of ``training`` it stops the page right away."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.training = False  # True once stopping without a checkpoint would lose work
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        try:
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        except ValueError:  # only the main thread may set handlers; elsewhere nobody can press Ctrl-C
            self._before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            os._exit(128 + signum)
        self.signum = signum
        if not self.training:
            raise Interrupted(signum)
        # os.write, because a print may be interrupted by the very signal that asks for this one.
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nstopping after this micro-batch; once more: at once\n"
        )

    def __bool__(self) -> bool:
        return self.signum is not None
