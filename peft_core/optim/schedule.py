"""Learning-rate schedules: functions from the step to a factor of the initial rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import ConfigError, expect

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")


def schedule(name: str, total_steps: int, warmup_steps: int = 0) -> Callable[[int], float]:
    """The function from the step (0 is the first) to a factor of the initial learning rate.

    "constant" is 1, whatever ``warmup_steps``. The others rise as step / warmup_steps, so that step 0 has rate 0; then
    "constant_with_warmup" stays at 1, "linear" falls to 0 at ``total_steps``, and "cosine" follows
    (1 + cos(pi * progress)) / 2 to 0 there (Loshchilov and Hutter, arXiv:1608.03983, equation 5, one cycle).
    The numbers are those of transformers' get_scheduler. Raises ConfigError for another name or negative steps.
    """
    expect(name in SCHEDULES, ConfigError, f"schedule {name!r} is not known", expected=f"one of {', '.join(SCHEDULES)}")
    expect(total_steps >= 0 and warmup_steps >= 0, ConfigError,
           f"total_steps is {total_steps}, warmup_steps {warmup_steps}", expected="numbers of at least 0")  # fmt: skip
    decay_steps = max(1, total_steps - warmup_steps)

    def factor(step: int) -> float:
        if name == "constant":
            return 1.0
        if step < warmup_steps:
            return step / warmup_steps
        if name == "linear":
            return max(0.0, (total_steps - step) / decay_steps)
        if name == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / decay_steps)))
        return 1.0

    return factor
