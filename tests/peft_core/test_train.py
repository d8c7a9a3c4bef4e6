"""The loop against the same loop written out in float64, and its promises about weighting, stopping and refusing."""

import inspect
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from peft_core import compute_dtype, is_grad_enabled, ops, tensor
from peft_core.errors import ConfigError, DataError, DivergedError
from peft_core.nn import Dropout, Linear, Module
from peft_core.optim import SGD, AdamW, schedule
from peft_core.random import Generator
from peft_core.train import EvalResult, TrainState, evaluate, fit
from peft_core.workspace import workspace


@dataclass
class Rows:
    """Some rows of different lengths as one flat batch; the mean square error of each is over its labelled tokens."""

    x: np.ndarray  # (N, 4)
    y: np.ndarray  # (N, 3)
    mask: np.ndarray  # (N,)
    rows: list[int] = field(default_factory=list)

    @property
    def n_tokens(self):
        return len(self.x)


class Net(Module):
    def __init__(self, p=0.0):
        generator = Generator(3)
        self.a = Linear(4, 8, generator=generator)
        self.drop = Dropout(p)
        self.b = Linear(8, 3, generator=generator)

    def forward(self, x):
        h = self.a(x)
        return self.b(self.drop(h * h))


def loss_fn(model, batch):
    difference = model(tensor(batch.x)) - batch.y
    return (difference * difference * batch.mask[:, None]).sum(), int(batch.mask.sum())


def row(i, length):
    rng = np.random.default_rng(i)
    x, y = (rng.normal(size=(length, d)).astype(np.float32) for d in (4, 3))
    mask = np.ones(length, np.float32)
    mask[: length // 3] = 0
    return Rows(x, y, mask, [i])


def joined(rows):
    return Rows(*(np.concatenate([getattr(r, k) for r in rows]) for k in ("x", "y", "mask")), [r.rows[0] for r in rows])


ROWS = [row(i, n) for i, n in enumerate([3, 17, 5, 2, 40, 9, 1, 23])]


def step_gradients(batches, normalise=None):
    """The gradients that the optimizer sees: SGD with rate 1 moves each parameter by minus its gradient."""
    net = Net()
    before = {name: p.data.copy() for name, p in net.named_parameters()}
    fit(net, [batches], normalise or loss_fn, SGD(net.parameters(), lr=1.0))
    return {name: before[name] - p.data for name, p in net.named_parameters()}


def distance(a, b):
    return max(np.linalg.norm(a[k] - b[k]) / np.linalg.norm(b[k]) for k in a)


def test_micro_batches_change_rounding_only():
    whole = step_gradients([joined(ROWS)])
    assert distance(step_gradients(ROWS), whole) < 1e-6
    assert distance(step_gradients([joined(ROWS[:3]), joined(ROWS[3:])]), whole) < 1e-6


def test_the_comparison_sees_a_mean_of_means():
    def mean_of_rows(model, batch):  # the fault of gradient accumulation: every micro-batch weighs the same
        loss, n = loss_fn(model, batch)
        return loss * (1 / n), 1

    assert distance(step_gradients(ROWS, mean_of_rows), step_gradients([joined(ROWS)])) > 1e-2


def test_gradient_is_that_of_the_mean_over_labelled_tokens():
    """The gradient of b.bias by hand: 2 * mean over labelled tokens of (prediction - y)."""
    net, all_rows = Net(), joined(ROWS)
    w = {name: p.data.astype(np.float64) for name, p in net.named_parameters()}
    h = all_rows.x @ w["a.weight"].T + w["a.bias"]
    difference = h * h @ w["b.weight"].T + w["b.bias"] - all_rows.y
    expected = 2 * (difference * all_rows.mask[:, None]).sum(0) / all_rows.mask.sum()
    np.testing.assert_allclose(step_gradients(ROWS)["b.bias"], expected, rtol=1e-5)


def test_the_loss_falls_and_reports_are_right():
    net, reports = Net(), []
    optimizer = AdamW(net.parameters(), lr=0.02)
    rate = schedule("linear", 30, 3)
    state = fit(net, [ROWS[:2], ROWS[2:]] * 15, loss_fn, optimizer, schedule=rate, on_step=reports.append)
    assert state == TrainState(step=30)
    assert [r.step for r in reports] == list(range(1, 31))
    np.testing.assert_allclose([r.lr for r in reports], [0.02 * rate(i) for i in range(30)], rtol=0)
    assert (reports[0].n_labelled, reports[0].n_tokens) == (2 + 12, 20)
    assert all(r.step_time_s > 0 and r.grad_norm > 0 for r in reports)
    first = evaluate(Net(), ROWS, loss_fn).loss
    assert np.mean([r.loss for r in reports[-4:]]) < 0.7 * first
    assert reports[0].loss == pytest.approx(evaluate(Net(), ROWS[:2], loss_fn).loss, rel=1e-6)
    assert all(p.grad is None for p in net.parameters())


def test_clipping_is_by_the_norm_of_the_divided_gradient():
    net, reports = Net(), []
    before = [p.data.copy() for p in net.parameters()]
    fit(net, [ROWS], loss_fn, SGD(net.parameters(), lr=1.0), max_grad_norm=0.5, on_step=reports.append)
    moved = math.sqrt(sum(((p.data - b) ** 2).sum() for p, b in zip(net.parameters(), before, strict=True)))
    assert reports[0].grad_norm > 0.6 and moved == pytest.approx(0.5, rel=1e-4)


def test_old_gradients_belong_to_no_step():
    net = Net()
    clean = step_gradients(ROWS)
    for p in net.parameters():
        p.grad = np.full(p.shape, 7.0, np.float32)
    before = {name: p.data.copy() for name, p in net.named_parameters()}
    fit(net, [ROWS], loss_fn, SGD(net.parameters(), lr=1.0))
    assert {k: (before[k] - p.data).tobytes() for k, p in net.named_parameters()} == {
        k: g.tobytes() for k, g in clean.items()
    }


# ---------------------------------------------------------------------- stopping


def test_stop_between_micro_batches_and_continue():
    def run(stops):
        net, losses, calls = Net(), [], iter(range(10**6))
        optimizer, state = AdamW(net.parameters(), lr=0.01), None
        for stop in stops:
            state = fit(net, [ROWS] * 3, loss_fn, optimizer, state=state, on_step=lambda r: losses.append(r.loss),
                        should_stop=lambda stop=stop: next(calls) == stop)  # fmt: skip
        return state, losses, [p.data.tobytes() for p in net.parameters()]

    state, losses, _ = run([5])
    assert (state.step, state.micro, losses) == (0, 5, []) and state.tokens == sum(r.n_tokens for r in ROWS[:5])
    assert run([5, 8, 17, -1]) == run([-1])  # a stop asks should_stop once more than the micro-batches it runs


def test_stop_before_anything():
    net = Net()
    assert fit(net, [ROWS], loss_fn, SGD(net.parameters(), lr=1.0), should_stop=lambda: True) == TrainState()


def test_state_in_mid_step_without_gradients():
    net = Net()
    with pytest.raises(ConfigError, match=r"state is in step 3 after 2 micro-batches, but no parameter has a grad"):
        fit(net, [ROWS] * 4, loss_fn, SGD(net.parameters()), state=TrainState(step=2, micro=2, n_labelled=9))


def test_state_of_other_data():
    net = Net()
    with pytest.raises(DataError, match=r"step 1 has 2 micro-batches, but 3 of them are done already; expected"):
        fit(net, [ROWS[:2]], loss_fn, SGD(net.parameters()), state=TrainState(micro=3))


# ---------------------------------------------------------------------- refusing


def weights(net):
    return [p.data.tobytes() for p in net.parameters()]


def unlabelled(i):
    return Rows(ROWS[i].x, ROWS[i].y, np.zeros_like(ROWS[i].mask), [i])


def test_no_labelled_token():
    net = Net()
    before = weights(net)
    with pytest.raises(DataError, match=r"step 1 has 0 labelled tokens in its 2 micro-batches; expected at least 1"):
        fit(net, [[unlabelled(0), unlabelled(1)]], loss_fn, AdamW(net.parameters()))
    with pytest.raises(DataError, match=r"step 1 has 0 labelled tokens in its 0 micro-batches"):
        fit(net, [[]], loss_fn, AdamW(net.parameters()))
    assert weights(net) == before
    assert distance(step_gradients([ROWS[1], unlabelled(2)]), step_gradients([ROWS[1]])) == 0  # one of several is fine


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite(value):
    net = Net()
    before = weights(net)
    bad = Rows(ROWS[4].x * np.float32(value), ROWS[4].y, ROWS[4].mask, [11, 12])
    text = r"the loss is nan in step 2, micro-batch 2 of 3 \(rows 11, 12\); expected a finite loss\. No parameter was"
    optimizer = AdamW(net.parameters(), lr=0.0, weight_decay=0.0)
    with np.errstate(all="ignore"), pytest.raises(DivergedError, match=text.replace("nan", "(nan|inf)")):
        fit(net, [ROWS[:2], [ROWS[0], bad, ROWS[1]]], loss_fn, optimizer)
    assert weights(net) == before


@pytest.mark.parametrize(("rows", "named"), [([0], ", rows 0"), (None, "")])
def test_a_gradient_that_is_not_finite(rows, named):
    def overflowing(model, batch):
        loss, n = loss_fn(model, batch)
        return loss + ops.sqrt(model.b.bias * 0.0).sum(), n  # 0 * (1 / sqrt(0)) in backward

    net = Net()
    before = weights(net)
    text = rf"gradient norm is nan in step 1 \(micro-batches 1 to 2{named}\), in b\.bias; expected a finite norm"
    with np.errstate(all="ignore"), pytest.raises(DivergedError, match=text):
        fit(net, [[replace(ROWS[0], rows=rows)] * 2], overflowing, AdamW(net.parameters()))
    assert weights(net) == before


@pytest.mark.parametrize(("precision", "advised"), [(None, False), ("bfloat16", False), ("float16", True)])
def test_float16_is_blamed_only_where_it_is_used(precision, advised):
    net = Net()
    bad = replace(ROWS[1], x=ROWS[1].x * np.float32(np.inf))
    for steps in ([[bad]], [[ROWS[0]], [bad]]):
        optimizer = AdamW(net.parameters(), lr=0.0, weight_decay=0.0)
        with np.errstate(all="ignore"), pytest.raises(DivergedError) as error:
            fit(net, steps, loss_fn, optimizer, autocast_dtype=precision)
        assert ("float16" in str(error.value).replace("bfloat16", "")) == advised
        assert ("Lower the learning rate" in str(error.value)) == (len(steps) == 2)


def test_before_the_first_step_the_parameter_is_named_and_not_the_learning_rate():
    net = Net()
    net.a.weight.data[0, 0] = np.nan
    text = (
        r"the loss is nan in step 1, micro-batch 1 of 2; expected a finite loss\. The very first forward is not finite "
        r"already, so the learning rate has no part in it: NaN or infinity stands in a\.weight\. Check the files"
    )
    batches = [replace(r, rows=None) for r in ROWS[:2]]
    with np.errstate(all="ignore"), pytest.raises(DivergedError, match=text):
        fit(net, [batches], loss_fn, AdamW(net.parameters()))
    net = Net()
    bad = replace(batches[0], x=batches[0].x * np.float32(np.nan))
    with (
        np.errstate(all="ignore"),
        pytest.raises(DivergedError, match=r"all parameters are finite, so look at the rows"),
    ):
        fit(net, [[bad]], loss_fn, AdamW(net.parameters()))


def test_trainable_parameters_outside_the_optimizer():
    net = Net()
    with pytest.raises(ConfigError, match=r"2 trainable parameters are not in the optimizer \(a\.weight, a\.bias\)"):
        fit(net, [ROWS], loss_fn, SGD(net.b.parameters()))
    net.a.requires_grad_(False)
    fit(net, [ROWS], loss_fn, SGD(net.b.parameters()))


# ---------------------------------------------------------------------- modes


def test_modes_are_restored_also_after_errors():
    net = Net(p=0.5)
    net.train()
    net.drop.eval()
    seen = []

    def watched(model, batch):
        seen.append((model.training, model.drop.training, is_grad_enabled(), compute_dtype()))
        if batch is None:
            raise KeyboardInterrupt
        return loss_fn(model, batch)

    def modes():
        return net.training, net.a.training, net.drop.training

    before = modes()
    fit(net, [[ROWS[0]]], watched, SGD(net.parameters()), autocast_dtype="bfloat16")
    assert modes() == before
    evaluate(net, [ROWS[0]], watched, autocast_dtype="bfloat16")
    assert modes() == before
    for call in (lambda: fit(net, [[None]], watched, SGD(net.parameters())), lambda: evaluate(net, [None], watched)):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert modes() == before == (True, True, False) and is_grad_enabled()
    assert [s[:3] for s in seen] == [(True, True, True), (False, False, False)] * 2
    assert [str(s[3]) for s in seen] == ["bfloat16", "bfloat16", "None", "None"]


def test_evaluate_weighs_by_tokens():
    net = Net(p=0.5)
    result = evaluate(net, ROWS, loss_fn)
    whole = evaluate(net, [joined(ROWS)], loss_fn)
    assert result.loss == pytest.approx(whole.loss, rel=1e-6) and result.n_labelled == whole.n_labelled
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    mean_of_means = np.mean([evaluate(net, [r], loss_fn).loss for r in ROWS])
    assert abs(mean_of_means - result.loss) > 1e-3 * result.loss


def test_evaluate_at_the_ends_of_the_range():
    def constant(value):
        return evaluate(Net(), [0], lambda model, batch: (tensor(value), 1))

    assert constant(1e6) == EvalResult(1e6, 1, math.inf)
    assert math.isnan(constant(math.nan).perplexity)
    with pytest.raises(DataError, match=r"the evaluation data has 0 labelled tokens; expected at least 1\. Are all"):
        evaluate(Net(), [unlabelled(0)], loss_fn)


def test_the_loop_stays_in_sight():
    assert len(inspect.getsource(fit).splitlines()) <= 60


def test_work_buffers_go_when_training_is_over():
    sizes = []

    def with_a_buffer(model, batch):
        with workspace:
            workspace.get("scratch", len(batch.x), 1000)
        return loss_fn(model, batch)

    net = Net()
    steps = [[row(0, 9)], [row(1, 30)]]
    optimizer = SGD(net.parameters(), lr=0.1)
    fit(net, steps, with_a_buffer, optimizer, on_step=lambda _: sizes.append(workspace._arrays["scratch"].nbytes))
    assert sizes[0] >= 9 * 4000 and sizes[1] >= 30 * 4000 and not workspace._arrays
