"""One source text, executed twice: with torch and with peft_core under the name ``torch``; weights come from NumPy.

A source defines ``run(arrays)`` and returns what is compared: nested lists, dicts, Tensors, arrays and numbers.
"""

import warnings

import numpy as np
import pytest

import peft_core

theirs = pytest.importorskip("torch")
pytestmark = pytest.mark.reference

COMMON = """
class ReLU(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.relu(x)


def net(arrays, dropout=0.0):
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 5))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p[...] = torch.tensor(arrays[name])
    return model


def weights(model):
    return {name: p.detach() for name, p in model.named_parameters()}
"""


def arrays():
    rng = np.random.default_rng(0)
    shapes = {"0.weight": (16, 12), "0.bias": (16,), "3.weight": (5, 16), "3.bias": (5,)}
    found = {name: (0.4 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    found["x"] = rng.standard_normal((60, 12)).astype(np.float32)
    found["y"] = rng.integers(0, 5, 60)
    return found


def executed(source, torch):
    names = {"torch": torch, "np": np}
    exec(compile(COMMON + source, "<source>", "exec"), names)
    return names["run"](arrays())


def both(source):
    return executed(source, peft_core), executed(source, theirs)


def plain(value):
    if isinstance(value, theirs.Tensor):
        value = value.detach()
        return value.float().numpy() if value.dtype == theirs.bfloat16 else value.numpy()
    return value.detach().numpy() if isinstance(value, peft_core.Tensor) else value


def assert_same(ours, reference, rel, path="result"):
    if isinstance(reference, dict):
        assert ours.keys() == reference.keys(), path
        for name in reference:
            assert_same(ours[name], reference[name], rel, f"{path}[{name!r}]")
    elif isinstance(reference, list | tuple):
        assert len(ours) == len(reference), path
        for i, (a, b) in enumerate(zip(ours, reference, strict=True)):
            assert_same(a, b, rel, f"{path}[{i}]")
    elif isinstance(reference, theirs.Tensor | np.ndarray | float):
        if isinstance(reference, theirs.Tensor):
            assert str(ours.dtype) == str(reference.dtype).removeprefix("torch."), path
        a, b = np.asarray(plain(ours), np.float64), np.asarray(plain(reference), np.float64)
        assert a.shape == b.shape, path
        assert np.linalg.norm(a - b) <= rel * max(np.linalg.norm(b), 1e-30), path
    else:
        assert ours == reference, path


ACCUMULATION = """
import copy


def run(arrays):
    model = net(arrays)
    head = list(model[3].parameters())
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.01, weight_decay=0.1)
    optimizer.add_param_group({"params": head, "lr": 0.03, "betas": (0.8, 0.99)})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12, eta_min=1e-4)
    x, y = torch.tensor(arrays["x"]), torch.tensor(arrays["y"])
    losses, norms, rates = [], [], []
    optimizer.zero_grad()
    for step in range(24):
        rows = slice(10 * (step % 6), 10 * (step % 6) + 10)
        loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows]) / 2
        loss.backward()
        losses.append(loss.detach())
        if step % 2:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            rates.append(scheduler.get_last_lr())
    saved = optimizer.state_dict()
    other = net(arrays)
    again = torch.optim.Adam([{"params": list(other[0].parameters())}, {"params": list(other[3].parameters())}])
    again.load_state_dict(copy.deepcopy(saved))  # torch shares the memory of what it loads
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters()):
            p[...] = q
    for one in (model, other):
        torch.nn.functional.cross_entropy(one(x), y).backward()
    optimizer.step()
    again.step()
    same = all(np.array_equal(p.detach().numpy(), q.detach().numpy())
               for p, q in zip(model.parameters(), other.parameters()))
    layout = [[group["params"] for group in saved["param_groups"]], sorted(saved["state"]), sorted(saved["state"][3])]
    return losses, norms, rates, weights(model), same, layout, [g["lr"] for g in again.param_groups]
"""


def test_gradient_accumulation_with_groups_a_schedule_and_a_reload():
    ours, reference = both(ACCUMULATION)
    assert_same(ours, reference, 3e-6)
    assert ours[4] and float(ours[0][-1]) < float(ours[0][0])


SCALER = """
def run(arrays):
    model = net(arrays)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=GROWTH, backoff_factor=0.3, growth_interval=4)
    x, y = torch.tensor(arrays["x"]), torch.tensor(arrays["y"])
    trace, dtypes, steps = [], [], []
    for step in range(50):
        optimizer.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            output = model(x)
        with torch.amp.autocast("cpu", enabled=False):
            plain = model(x)
        dtypes.append([str(output.dtype).removeprefix("torch."), str(plain.dtype).removeprefix("torch.")])
        loss = torch.nn.functional.cross_entropy(output.float(), y)
        scaler.scale(loss).backward()
        if step in BAD:
            with torch.no_grad():
                model[0].weight.grad[1, 2] = BAD[step]
        before = [p.detach().numpy().copy() for p in model.parameters()]
        if step % 3 == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        moved = not np.array_equal(before[0], model[0].weight.detach().numpy())
        trace.append((scaler.get_scale(), moved, scaler.state_dict()["_growth_tracker"]))
        steps.append(loss.detach())
    restored = torch.amp.GradScaler("cpu")
    restored.load_state_dict(scaler.state_dict())
    try:
        scaler.scale(loss.detach())
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
    except RuntimeError:
        twice = "refused"
    return trace, dtypes, twice, restored.state_dict(), steps
"""


@pytest.mark.parametrize("growth", [2.0, 1.7])
def test_autocast_and_grad_scaler_with_planted_infinities(growth):
    bad = "{5: float('inf'), 6: float('nan'), 7: -float('inf'), 20: float('inf'), 33: float('nan'), 48: float('inf')}"
    ours, reference = both(SCALER.replace("GROWTH", repr(growth)).replace("BAD", bad))
    assert ours[:4] == reference[:4]
    assert [moved for _, moved, _ in ours[0]].count(False) == 6 and len({scale for scale, _, _ in ours[0]}) > 10
    assert_same(ours[4], reference[4], 2e-2)  # the products of the two round to bfloat16 in different orders
    assert float(ours[4][-1]) < 0.8 * float(ours[4][0])


SCHEDULERS = """
def run(arrays):
    L = torch.optim.lr_scheduler
    makers = [
        lambda o: L.LambdaLR(o, lambda t: 0.95 ** t),
        lambda o: L.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.5]),
        lambda o: L.StepLR(o, step_size=7, gamma=0.5),
        lambda o: L.MultiStepLR(o, [3, 3, 30], gamma=0.3),
        lambda o: L.ExponentialLR(o, 0.97),
        lambda o: L.ConstantLR(o, factor=0.3, total_iters=9),
        lambda o: L.ConstantLR(o),
        lambda o: L.LinearLR(o, start_factor=0.1, end_factor=0.6, total_iters=20),
        lambda o: L.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=30),
        lambda o: L.CosineAnnealingLR(o, T_max=50),
        lambda o: L.CosineAnnealingLR(o, T_max=13, eta_min=0.002),
        lambda o: L.SequentialLR(o, [L.LinearLR(o, 0.01, total_iters=10), L.CosineAnnealingLR(o, 40)], [10]),
        lambda o: L.SequentialLR(o, [L.ConstantLR(o, 0.1, 30), L.StepLR(o, 5), L.LambdaLR(o, lambda t: 0.9 ** t)],
                                 milestones=[8, 30]),
        lambda o: L.SequentialLR(o, [L.StepLR(o, 5), L.LinearLR(o)], milestones=[0]),
    ]
    found = []
    for make in makers + ["two"]:
        p = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        first, second = list(p[0].parameters()), list(p[1].parameters())
        o = torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.7}], lr=0.1)
        o.param_groups[0]["lr"] = 0.2
        if make == "two":
            schedulers = [L.CosineAnnealingLR(o, 9, 0.01), L.LinearLR(o, 0.5, 1.0, 20), L.StepLR(o, 11)]
        else:
            schedulers = [make(o)]
        rates = [[list(s.get_last_lr()) for s in schedulers]]
        for step in range(50):
            o.step()
            for s in schedulers:
                s.step()
            rates.append([list(s.get_last_lr()) for s in schedulers] + [[g["lr"] for g in o.param_groups]])
            if step == 24 and make != "two":  # continue from a saved state
                saved, groups = schedulers[0].state_dict(), [g["lr"] for g in o.param_groups]
                schedulers = [make(o)]
                schedulers[0].load_state_dict(saved)
                for g, lr in zip(o.param_groups, groups):
                    g["lr"] = lr
        found.append(rates)
    return found
"""


def test_schedulers_over_fifty_steps():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own deprecated call inside SequentialLR
        ours, reference = both(SCHEDULERS)
    for i, (a, b) in enumerate(zip(ours, reference, strict=True)):
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-14, err_msg=f"scheduler {i}, step {step}")


def test_a_scheduler_continues_from_the_state_of_torch():
    def made(torch):
        optimizer = torch.optim.SGD([torch.tensor([1.0], requires_grad=True)], lr=0.3)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30, 0.01)

    (_, ours), (optimizer, reference) = made(peft_core), made(theirs)
    for _ in range(10):
        optimizer.step()
        reference.step()
    ours.load_state_dict(reference.state_dict())
    ours.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    for _ in range(10):
        optimizer.step()
        reference.step()
        ours.step()
    np.testing.assert_allclose(ours.get_last_lr(), reference.get_last_lr(), rtol=1e-12)


CHECKPOINT = """
def run(arrays):
    results = []
    for use in ("plain", "module", "closure", "sequential"):
        model = net(arrays, dropout=DROPOUT)
        torch.manual_seed(3)
        x = torch.tensor(arrays["x"])
        y = torch.tensor(arrays["y"])
        if use == "plain":
            output = model(x)
        elif use == "module":
            output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        elif use == "closure":
            output = torch.utils.checkpoint.checkpoint(lambda t, k: model(t) * k, x, 1.0, use_reentrant=False)
        else:
            output = torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False)
        loss = torch.nn.functional.cross_entropy(output, y)
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    bits = [all(np.array_equal(np.asarray(g[name]), np.asarray(results[0][1][name])) for name in g)
            for _, g in results]
    return bits, results
"""


def test_checkpointed_layers():
    import torch.utils.checkpoint  # noqa: F401  torch imports it only when asked

    ours, reference = both(CHECKPOINT.replace("DROPOUT", "0.0"))
    assert ours[0] == [True] * 4
    assert_same(ours[1], reference[1], 3e-6)
    ours, reference = both(CHECKPOINT.replace("DROPOUT", "0.5"))  # masks differ between the two, not within one
    assert ours[0] == reference[0] == [True] * 4


LOADER = """
def run(arrays):
    from_torch = torch.utils.data

    class Rows(from_torch.Dataset):
        def __len__(self):
            return 23

        def __getitem__(self, i):
            if i == 99:
                raise KeyError(i)
            return {"x": torch.tensor(arrays["x"][i]), "i": i, "f": i / 2, "name": str(i), "pair": (i, np.float32(i))}

    fixed = [batch for batch in from_torch.DataLoader(Rows(), batch_size=4, num_workers=WORKERS, pin_memory=False)]
    short = [b["i"] for b in from_torch.DataLoader(Rows(), 4, drop_last=True, num_workers=WORKERS)]
    orders = []
    for seed in (5, 5, 6):
        loader = from_torch.DataLoader(Rows(), 4, shuffle=True, generator=torch.Generator().manual_seed(seed))
        orders.append([[i for b in loader for i in b["i"].tolist()] for _ in range(2)])
    facts = [orders[0] == orders[1], orders[0] == orders[2], orders[0][0] == orders[0][1],
             [sorted(o) == list(range(23)) for group in orders for o in group], len(loader)]
    pairs = from_torch.TensorDataset(torch.tensor(arrays["x"]), torch.tensor(arrays["y"]))
    x, y = next(iter(from_torch.DataLoader(pairs, batch_size=8)))
    lists = list(from_torch.DataLoader(Rows(), 9, collate_fn=lambda rows: [r["i"] for r in rows]))
    split = [len(part) for part in from_torch.random_split(Rows(), [0.7, 0.3])]
    try:
        list(from_torch.DataLoader(Rows(), sampler=[1, 99], num_workers=WORKERS))
        error = None
    except KeyError:
        error = "KeyError"
    return fixed, short, facts, [x, y], lists, split, error
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers):
    source = LOADER.replace("WORKERS", str(workers))
    reference = executed(LOADER.replace("WORKERS", "0"), theirs)
    assert_same(executed(source, peft_core), reference, 0.0)
    assert reference[2] == [True, False, False, [True] * 6, 6]
