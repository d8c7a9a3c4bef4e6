"""Time by op, forward and backward, for the length of a ``with`` block; outside of it no op is slower for it."""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from peft_core import tape


class Profile:
    """Context manager that times the function inside every op, and every vjp that is recorded meanwhile.

    ``rows`` is (op, "forward" | "backward" | other) -> [seconds, calls]; the seconds are an op's own: what runs inside
    a vjp as an op of its own (recompute) is counted there.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
        self._inner: list[float] = [0.0]  # seconds of the timed calls inside each open one

    def timed(self, name: str, phase: str, function: Callable) -> Callable:
        """``function``, its time added to a row."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                row = self.rows[name, phase]
                row[0] += seconds - self._inner.pop()
                row[1] += 1
                self._inner[-1] += seconds

        return inside

    def __enter__(self) -> Profile:
        self._before = [(cell, cell.cell_contents) for cell in _op_cells()]
        for cell, function in self._before:
            cell.cell_contents = self.timed(function.__name__, "forward", function)
        self._node = tape.Node
        tape.Node = self._timed_node()  # type: ignore[misc]
        return self

    def __exit__(self, *exc: object) -> None:
        tape.Node = self._node  # type: ignore[misc]
        for cell, function in self._before:
            cell.cell_contents = function

    def _timed_node(self) -> type[tape.Node]:
        timed = self.timed

        class TimedNode(tape.Node):
            __slots__ = ()

            def __init__(self, name: str, edges: list, vjp: Callable | None) -> None:
                super().__init__(name, edges, None if vjp is None else timed(name, "backward", vjp))

        return TimedNode

    def table(self, total_s: float, steps: int) -> list[dict[str, Any]]:
        """Rows of milliseconds and calls a step, the slowest first; the last is what no op accounts for."""
        found = sorted(self.rows.items(), key=lambda item: -item[1][0])
        lines = [_line(name, phase, s, calls, total_s, steps) for (name, phase), (s, calls) in found]
        rest = total_s - sum(s for s, _ in self.rows.values())
        return [*lines, _line("(between ops)", "", rest, 0, total_s, steps)]


def _line(name: str, phase: str, seconds: float, calls: float, total_s: float, steps: int) -> dict[str, Any]:
    return {
        "op": name.strip("_"),
        "phase": phase,
        "ms": round(1e3 * seconds / steps, 3),
        "calls": round(calls / steps, 1),
        "share": round(seconds / total_s, 4) if total_s else 0.0,
    }


def _op_cells() -> Iterator[Any]:
    """Where each op keeps its function: a cell that ``tape.op`` closes over, so that it can be replaced in place."""
    code = tape.op(lambda: None).__code__  # type: ignore[attr-defined]
    seen = set()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("peft_core", "adapters", "transformer"):
            continue
        for value in list(vars(module).values()):
            if getattr(value, "__code__", None) is code and id(value) not in seen:
                seen.add(id(value))
                yield value.__closure__[code.co_freevars.index("function")]


def show(table: list[dict[str, Any]]) -> str:
    """The table as lines of text."""
    lines = [f"{'op':<24}{'phase':<10}{'ms/step':>10}{'calls':>8}{'share':>8}"]
    lines += [f"{r['op']:<24}{r['phase']:<10}{r['ms']:>10.2f}{r['calls']:>8.0f}{r['share']:>8.1%}" for r in table]
    return "\n".join(lines)
