"""Schedulers under torch's names: objects that write each group's "lr" as steps go by.

Every scheduler here is a curve f(t) of the step t: the rate is floor + (initial - floor) f(t). It is applied as a
ratio, f(t) / f(t - 1), to the rate that stands in the group, so that several schedulers on one optimizer multiply.
(``schedule`` is the plain function for fit(); it needs no state.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, expect
from .optimizer import Optimizer


class LRScheduler:
    """Base of the schedulers.  Subclasses define ``curve(t)``, or ``get_lr()`` from ``base_lrs`` and ``last_epoch``.

    Creating one writes the rate of step ``last_epoch`` + 1 (0 by default) into the groups; ``step()`` goes to the next,
    after ``optimizer.step()``. ``base_lrs`` are the groups' "initial_lr", noted here where no scheduler has before.
    Raises TypeError for something that is not an Optimizer and ConfigError where a run is continued (``last_epoch``
    of 0 or more) with a group that has no "initial_lr".
    """

    floor = 0.0  # what the curve ends at when it is 0

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(self).__name__} got a {type(optimizer).__name__}; expected an Optimizer.")
        self.optimizer = optimizer
        for i, group in enumerate(optimizer.param_groups):
            if last_epoch == -1:
                group.setdefault("initial_lr", group["lr"])
            expect("initial_lr" in group, ConfigError, f"group {i} has no 'initial_lr', and last_epoch is {last_epoch}",
                   expected="the optimizer's saved state", fix="Call optimizer.load_state_dict() first.")  # fmt: skip
        self.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        self.last_epoch = last_epoch
        self._start()

    def curve(self, t: int) -> float:
        """The factor at step ``t``.  For subclasses."""
        raise NotImplementedError(f"{type(self).__name__} defines neither curve() nor get_lr(); expected one of them.")

    def get_lr(self) -> list[float]:
        """The rates at ``last_epoch``, from those in the groups."""
        t, now = self.last_epoch, [group["lr"] for group in self.optimizer.param_groups]
        before, after = self.curve(t - 1) if t > 0 else 1.0, self.curve(t)
        if before == after:
            return now
        if before == 0:  # nothing left to multiply
            return [lr + (base - self.floor) * after for lr, base in zip(now, self.base_lrs, strict=True)]
        return [self.floor + (lr - self.floor) * (after / before) for lr in now]

    def get_last_lr(self) -> list[float]:
        """The rates written last, one per group."""
        return list(self._last_lr)

    def step(self) -> None:
        """Go to the next step and write its rates."""
        self.last_epoch += 1
        self._write(self.get_lr())

    def _start(self) -> None:
        """The first step; a continued run finds the rates in the groups."""
        self.last_epoch += 1
        own = type(self).get_lr is not LRScheduler.get_lr
        current = [group["lr"] for group in self.optimizer.param_groups]
        self._write(self.get_lr() if own or self.last_epoch == 0 else current)

    def _restart(self) -> None:
        """Step 0 now, from the initial rates, whatever stands in the groups."""
        self.last_epoch = 0
        own = type(self).get_lr is not LRScheduler.get_lr
        self._write(self.get_lr() if own else [self.floor + (b - self.floor) * self.curve(0) for b in self.base_lrs])

    def _write(self, rates: Sequence[float]) -> None:
        groups = self.optimizer.param_groups
        expect(len(rates) == len(groups), ConfigError, f"{type(self).__name__} has {len(rates)} rates",
               expected=f"one for each of the {len(groups)} groups",
               fix="Add parameter groups before the scheduler is made.")  # fmt: skip
        for group, lr in zip(groups, rates, strict=True):
            group["lr"] = lr
        self._last_lr = list(rates)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer, under torch's names."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state_dict()`` of a scheduler of this class; names that this one has not are left out."""
        vars(self).update({k: v for k, v in state.items() if k in vars(self) and k != "optimizer"})


class LambdaLR(LRScheduler):
    """initial * lr_lambda(t); ``lr_lambda``: a function, or one per group.  Not a ratio: it overwrites the rate."""

    def __init__(self, optimizer: Optimizer, lr_lambda: Any, last_epoch: int = -1) -> None:
        n_groups = len(getattr(optimizer, "param_groups", ()))
        several = isinstance(lr_lambda, list | tuple)
        self.lr_lambdas: list[Callable[[int], float]] = list(lr_lambda) if several else [lr_lambda] * n_groups
        expect(len(self.lr_lambdas) == n_groups, ConfigError, f"lr_lambda has {len(self.lr_lambdas)} functions",
               expected=f"one for each of the {n_groups} groups")  # fmt: skip
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The rates at ``last_epoch``."""
        return [base * f(self.last_epoch) for base, f in zip(self.base_lrs, self.lr_lambdas, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """As of every scheduler, without functions; objects that can be called are saved by their attributes."""
        saved = [None if hasattr(f, "__code__") else dict(getattr(f, "__dict__", {})) for f in self.lr_lambdas]
        return {**super().state_dict(), "lr_lambdas": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state_dict()``; the functions stay those this scheduler was made with."""
        super().load_state_dict({name: value for name, value in state.items() if name != "lr_lambdas"})
        for function, attributes in zip(self.lr_lambdas, state.get("lr_lambdas", ()), strict=False):
            if attributes:
                vars(function).update(attributes)


class StepLR(LRScheduler):
    """f(t) = gamma^floor(t / step_size)."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        expect(step_size > 0, ConfigError, f"step_size is {step_size}", expected="a number above 0")
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def curve(self, t: int) -> float:
        """The factor at step ``t``."""
        return self.gamma ** (t // self.step_size)


class MultiStepLR(LRScheduler):
    """f(t) = gamma^(number of ``milestones`` that are at most t)."""

    def __init__(
        self, optimizer: Optimizer, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def curve(self, t: int) -> float:
        """The factor at step ``t``."""
        return self.gamma ** bisect_right(self.milestones, t)


class ExponentialLR(LRScheduler):
    """f(t) = gamma^t."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def curve(self, t: int) -> float:
        """The factor at step ``t``."""
        return self.gamma**t


class ConstantLR(LRScheduler):
    """f(t) = ``factor`` before step ``total_iters``, then 1."""

    def __init__(
        self, optimizer: Optimizer, factor: float = 1.0 / 3, total_iters: int = 5, last_epoch: int = -1
    ) -> None:
        expect(0 <= factor <= 1, ConfigError, f"factor is {factor}", expected="a number in [0, 1]")
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def curve(self, t: int) -> float:
        """The factor at step ``t``."""
        return self.factor if t < self.total_iters else 1.0


class LinearLR(LRScheduler):
    """f(t) goes in a straight line from ``start_factor`` to ``end_factor`` at ``total_iters`` and stays there."""

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        expect(0 < start_factor <= 1, ConfigError, f"start_factor is {start_factor}", expected="a number in (0, 1]")
        expect(0 <= end_factor <= 1, ConfigError, f"end_factor is {end_factor}", expected="a number in [0, 1]")
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def curve(self, t: int) -> float:
        """The factor at step ``t``."""
        done = min(1.0, t / self.total_iters) if self.total_iters else float(t > 0)
        return self.start_factor + (self.end_factor - self.start_factor) * done


class CosineAnnealingLR(LRScheduler):
    """f(t) = (1 + cos(pi t / T_max)) / 2, from the initial rate to ``eta_min`` and, after T_max, back up.

    (Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", arXiv:1608.03983, equation 5.)
    """

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        expect(T_max > 0, ConfigError, f"T_max is {T_max}", expected="a number of steps above 0")
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    @property
    def floor(self) -> float:  # type: ignore[override]
        """The rate where the curve is 0."""
        return self.eta_min

    def curve(self, t: int) -> float:
        """The factor at step ``t``."""
        return (1 + math.cos(math.pi * t / self.T_max)) / 2


class SequentialLR(LRScheduler):
    """``schedulers[i]`` from step ``milestones[i - 1]`` on, each starting at its own step 0 from the initial rates.

    Raises ConfigError for schedulers of another optimizer, a SequentialLR among them, or a count of milestones that is
    not one less than that of schedulers.
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int], last_epoch: int = -1
    ) -> None:
        expect(last_epoch == -1, ConfigError, f"SequentialLR(last_epoch={last_epoch}) is not supported",
               expected="-1", fix="Load its state_dict() to continue.")  # fmt: skip
        expect(schedulers and len(milestones) == len(schedulers) - 1, ConfigError,
               f"SequentialLR got {len(schedulers)} schedulers and {len(milestones)} milestones",
               expected="one milestone less than schedulers")  # fmt: skip
        for i, part in enumerate(schedulers):
            expect(getattr(part, "optimizer", None) is optimizer, ConfigError,
                   f"scheduler {i} of SequentialLR belongs to another optimizer", expected="the same one")  # fmt: skip
            expect(not isinstance(part, SequentialLR), ConfigError,
                   f"scheduler {i} of SequentialLR is itself a SequentialLR", expected="a plain scheduler",
                   fix="Put its schedulers and milestones into this one.")  # fmt: skip
        self._schedulers, self._milestones = list(schedulers), list(milestones)
        super().__init__(optimizer, last_epoch)

    def _start(self) -> None:
        for part in self._schedulers:  # each wrote the rates when it was made
            part.last_epoch = -1
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        self.last_epoch = 0
        self._advance(bisect_right(self._milestones, 0), restart=True)

    def step(self) -> None:
        """Go to the next step and write its rates."""
        self.last_epoch += 1
        which = bisect_right(self._milestones, self.last_epoch)
        self._advance(which, restart=which > 0 and self._milestones[which - 1] == self.last_epoch)

    def _advance(self, which: int, restart: bool) -> None:
        part = self._schedulers[which]
        if restart:
            part._restart()
        else:
            part.step()
        self._last_lr = part.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Its own numbers, and the state of every scheduler."""
        return {**super().state_dict(), "_schedulers": [part.state_dict() for part in self._schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state_dict()``.  Raises ConfigError for another number of schedulers."""
        parts = state["_schedulers"]
        expect(len(parts) == len(self._schedulers), ConfigError, f"the saved state has {len(parts)} schedulers",
               expected=f"{len(self._schedulers)}")  # fmt: skip
        super().load_state_dict({name: value for name, value in state.items() if name != "_schedulers"})
        for part, saved in zip(self._schedulers, parts, strict=True):
            part.load_state_dict(saved)
