"""Optimisers, clipping and schedules against torch and transformers: float32, 50 steps on the same gradients."""

import copy

import numpy as np
import pytest

from peft_core import kernels
from peft_core.nn import Parameter
from peft_core.optim import SGD, Adam, AdamW, clip_grad_norm_, schedule

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.reference

SHAPES = [(16, 33), (7,), (), (3, 4, 5)]


def make():
    rng = np.random.default_rng(0)
    values = [np.asarray(rng.standard_normal(s), np.float32) for s in SHAPES]
    return [Parameter(v.copy()) for v in values], [torch.nn.Parameter(torch.from_numpy(v.copy())) for v in values]


def groups(params, **other):
    return [{"params": params[:2]}, {"params": params[2:], **other}]


def set_gradients(step, ours, theirs):
    rng = np.random.default_rng(1000 + step)
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        g = np.asarray(rng.standard_normal(p.shape) * 10.0 ** (1 - i), np.float32)
        p.grad, q.grad = g.copy(), torch.from_numpy(g.copy())


def assert_close(ours, theirs, rel=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        a, b = np.asarray(getattr(a, "data", a), np.float64), b.detach().double().numpy()
        assert np.linalg.norm(a - b) <= rel * np.linalg.norm(b)


CASES = [
    (Adam, torch.optim.Adam, {}, {"lr": 0.02}),
    (Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3}, {"eps": 1e-6}),
    (AdamW, torch.optim.AdamW, {}, {"lr": 0.02}),
    (AdamW, torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.3}, {"eps": 1e-6}),
    (AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3}, {"weight_decay": 0.0}),
    (SGD, torch.optim.SGD, {"lr": 0.01}, {"lr": 0.2}),
    (SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.5}),
    (SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3}, {"weight_decay": 0.2}),
    (SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"lr": 0.02}),
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("our_class", "torch_class", "settings", "second"), CASES)
def test_fifty_steps(our_class, torch_class, settings, second, fused):
    ours, theirs = make()
    start = [p.data.copy() for p in ours]
    our_optimizer = our_class(groups(ours, **second), **settings)
    torch_optimizer = torch_class(groups(theirs, **second), **settings)
    rate = schedule("cosine", 50, 5)
    with kernels.use_kernels(fused):
        for step in range(50):
            set_gradients(step, ours, theirs)
            for a, b in zip(our_optimizer.param_groups, torch_optimizer.param_groups, strict=True):
                b["lr"] = b.setdefault("initial_lr", b["lr"]) * rate(step)
                a["lr"] = a.setdefault("initial_lr", a["lr"]) * rate(step)
            our_optimizer.step()
            torch_optimizer.step()
    assert_close(ours, theirs)
    assert all(np.linalg.norm(p.data - s) > 1e-4 * np.linalg.norm(s) for p, s in zip(ours, start, strict=True))
    mine, reference = our_optimizer.state_dict(), torch_optimizer.state_dict()
    for i, entries in mine["state"].items():
        assert entries.keys() == {name for name, value in reference["state"][i].items() if value is not None}
        for name, value in entries.items():
            assert_close([np.asarray(value)], [torch.as_tensor(reference["state"][i][name])], 2e-6)


def test_continues_from_a_state_of_torch():
    ours, theirs = make()
    torch_optimizer = torch.optim.AdamW(groups(theirs, lr=0.01), weight_decay=0.2)
    for step in range(10):
        set_gradients(step, ours, theirs)
        torch_optimizer.step()
    saved = copy.deepcopy(torch_optimizer.state_dict())
    for entries in saved["state"].values():
        entries.update({name: value.numpy() for name, value in entries.items()})
    our_optimizer = AdamW(groups(ours))
    our_optimizer.load_state_dict(saved)
    for p, q in zip(ours, theirs, strict=True):
        p.data[...] = q.detach().numpy()
    for step in range(10, 20):
        set_gradients(step, ours, theirs)
        our_optimizer.step()
        torch_optimizer.step()
    assert_close(ours, theirs)


@pytest.mark.parametrize("max_norm", [0.5, 20.0, 1e6])
def test_clip(max_norm):
    ours, theirs = make()
    set_gradients(0, ours, theirs)
    norm = clip_grad_norm_(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert abs(norm - expected.item()) <= 1e-6 * norm
    assert_close([p.grad for p in ours], [q.grad for q in theirs])


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(50, 0), (50, 7), (5, 5), (3, 6), (1, 0), (0, 0)])
def test_schedule(name, total, warmup):
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    factor = schedule(name, total, warmup)
    for step in range(total + 3):
        assert abs(factor(step) - scheduler.get_last_lr()[0]) < 1e-12, step
        optimizer.step()
        scheduler.step()
