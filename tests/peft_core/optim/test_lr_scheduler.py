import copy
import math

import numpy as np
import pytest

from peft_core.errors import ConfigError
from peft_core.nn import Parameter
from peft_core.optim import SGD, lr_scheduler
from peft_core.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
    StepLR,
)


def optimizer(*rates):
    return SGD([{"params": [Parameter(np.zeros(1, np.float32))], "lr": lr} for lr in rates or (0.5,)])


def rates(scheduler, steps):
    found = [scheduler.get_last_lr()[0]]
    for _ in range(steps):
        scheduler.step()
        assert scheduler.get_last_lr() == [g["lr"] for g in scheduler.optimizer.param_groups]
        found.append(scheduler.get_last_lr()[0])
    return found


@pytest.mark.parametrize(("make", "curve"), [
    (lambda o: LambdaLR(o, lambda t: 1 / (1 + t)), lambda t: 1 / (1 + t)),
    (lambda o: StepLR(o, 3, 0.5), lambda t: 0.5 ** (t // 3)),
    (lambda o: MultiStepLR(o, [2, 5, 5], 0.5), lambda t: [1, 1, 0.5, 0.5, 0.5][t] if t < 5 else 0.125),
    (lambda o: ExponentialLR(o, 0.9), lambda t: 0.9**t),
    (lambda o: ConstantLR(o, 0.25, 4), lambda t: 0.25 if t < 4 else 1),
    (lambda o: ConstantLR(o, 0.0, 4), lambda t: 0 if t < 4 else 1),
    (lambda o: LinearLR(o, 0.1, 0.7, 6), lambda t: 0.1 + 0.1 * min(t, 6)),
    (lambda o: LinearLR(o, 1.0, 0.0, 5), lambda t: 1 - min(t, 5) / 5),
    (lambda o: CosineAnnealingLR(o, 7), lambda t: (1 + math.cos(math.pi * t / 7)) / 2),
    (lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 4), CosineAnnealingLR(o, 10)], [4]),
     lambda t: 0.1 + 0.9 * t / 4 if t < 4 else (1 + math.cos(math.pi * (t - 4) / 10)) / 2),
    (lambda o: SequentialLR(o, [ConstantLR(o, 0.5, 99), LambdaLR(o, lambda t: 0.1 * t), ExponentialLR(o, 0.5)], [2, 6]),
     lambda t: 0.5 if t < 2 else 0.1 * (t - 2) if t < 6 else 0.5 ** (t - 6)),
])  # fmt: skip
def test_the_formula(make, curve):
    np.testing.assert_allclose(rates(make(optimizer(0.5)), 40), [0.5 * curve(t) for t in range(41)], atol=1e-15)


def test_a_floor_groups_and_several_schedulers_on_one_optimizer():
    o = optimizer(0.5, 0.1)
    first, second = CosineAnnealingLR(o, 10, eta_min=0.05), None
    for _ in range(5):
        first.step()
    np.testing.assert_allclose(first.get_last_lr(), [0.275, 0.075])
    o = optimizer(0.5)
    first, second = ExponentialLR(o, 0.9), StepLR(o, 2, 0.5)
    for _ in range(4):
        first.step()
        second.step()
    np.testing.assert_allclose(o.param_groups[0]["lr"], 0.5 * 0.9**4 * 0.25)
    o.param_groups[0]["lr"] = 0.2  # a later change by hand is kept as the rate to multiply
    first.step()
    np.testing.assert_allclose(o.param_groups[0]["lr"], 0.18)


def test_the_initial_rate_is_the_one_when_the_first_scheduler_was_made():
    o = optimizer(0.5)
    o.param_groups[0]["lr"] = 0.3
    assert ConstantLR(o, 0.5, 2).base_lrs == [0.3] and o.param_groups[0]["lr"] == 0.15
    assert ExponentialLR(o, 0.5).base_lrs == [0.3]
    saved = o.state_dict()
    again = optimizer(9.0)
    again.load_state_dict(saved)
    assert ExponentialLR(again, 0.5).base_lrs == [0.3]


def test_a_scheduler_of_ones_own():
    class Own(LRScheduler):
        def get_lr(self):
            return [base / (self.last_epoch + 1) for base in self.base_lrs]

    assert rates(Own(optimizer(1.0)), 3) == [1, 1 / 2, 1 / 3, 1 / 4]
    o = optimizer(1.0)
    assert rates(SequentialLR(o, [ConstantLR(o, 1.0), Own(o)], [2]), 4) == [1, 1, 1, 1 / 2, 1 / 3]
    with pytest.raises(NotImplementedError, match=r"LRScheduler defines neither curve\(\) nor get_lr\(\)"):
        LRScheduler(optimizer())


class Halving:
    def __init__(self):
        self.rate = 0.5

    def __call__(self, t):
        return self.rate**t


@pytest.mark.parametrize("make", [
    lambda o: CosineAnnealingLR(o, 20, 0.01),
    lambda o: LambdaLR(o, [lambda t: 0.9**t]),
    lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=4), StepLR(o, 3)], [4]),
])  # fmt: skip
def test_state_continues(make):
    whole, o = rates(make(optimizer()), 12), optimizer()
    first = make(o)
    rates(first, 6)
    saved, saved_optimizer = copy.deepcopy(first.state_dict()), copy.deepcopy(o.state_dict())
    assert "optimizer" not in saved and saved["last_epoch"] == 6
    again = optimizer(7.0)
    second = make(again)
    again.load_state_dict(saved_optimizer)
    second.load_state_dict(saved)
    assert rates(second, 6) == whole[6:]


def test_a_callable_object_is_saved_and_last_epoch_continues():
    first = LambdaLR(optimizer(), Halving())
    first.lr_lambdas[0].rate = 0.25
    second = LambdaLR(optimizer(), Halving())
    second.load_state_dict(first.state_dict())
    assert second.lr_lambdas[0].rate == 0.25
    o = optimizer()
    one = StepLR(o, 2, 0.5)
    rates(one, 4)
    two = StepLR(o, 2, 0.5, last_epoch=3)  # the rate of step 4 stands in the group already
    assert two.last_epoch == 4 and rates(two, 2) == [0.125, 0.125, 0.0625]


@pytest.mark.parametrize(("make", "text"), [
    (lambda o: StepLR(o, 0), "step_size is 0; expected a number above 0."),
    (lambda o: CosineAnnealingLR(o, 0), "T_max is 0; expected a number of steps above 0."),
    (lambda o: ConstantLR(o, 1.5), "factor is 1.5; expected a number in [0, 1]."),
    (lambda o: LinearLR(o, 0.0), "start_factor is 0.0; expected a number in (0, 1]."),
    (lambda o: LinearLR(o, 0.5, 2), "end_factor is 2; expected a number in [0, 1]."),
    (lambda o: LambdaLR(o, [abs, abs]), "lr_lambda has 2 functions; expected one for each of the 1 groups."),
    (lambda o: StepLR(o, 1, last_epoch=3),
     "group 0 has no 'initial_lr', and last_epoch is 3; expected the optimizer's saved state. Call"),
    (lambda o: SequentialLR(o, [StepLR(o, 1)], [3]),
     "SequentialLR got 1 schedulers and 1 milestones; expected one milestone less than schedulers."),
    (lambda o: SequentialLR(o, [StepLR(optimizer(), 1)], []),
     "scheduler 0 of SequentialLR belongs to another optimizer; expected the same one."),
    (lambda o: SequentialLR(o, [SequentialLR(o, [StepLR(o, 1)], [])], []),
     "scheduler 0 of SequentialLR is itself a SequentialLR; expected a plain scheduler. Put its"),
    (lambda o: SequentialLR(o, [StepLR(o, 1)], [], last_epoch=2), "SequentialLR(last_epoch=2) is not supported"),
    (lambda o: SequentialLR(o, [StepLR(o, 1)], []).load_state_dict({"_schedulers": []}),
     "the saved state has 0 schedulers; expected 1."),
])  # fmt: skip
def test_wrong_settings(make, text):
    with pytest.raises(ConfigError) as info:
        make(optimizer())
    assert str(info.value).startswith(text)


def test_a_group_that_came_later_and_something_that_is_no_optimizer():
    o = optimizer()
    scheduler = LambdaLR(o, lambda t: 1.0)
    o.add_param_group({"params": [Parameter(np.zeros(1, np.float32))]})
    with pytest.raises(ValueError):
        scheduler.step()
        lr_scheduler.StepLR(o, 1)
    with pytest.raises(TypeError, match="StepLR got a int; expected an Optimizer"):
        StepLR(3, 1)
