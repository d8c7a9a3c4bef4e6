"""A run that was saved, loaded into new objects and continued ends on the same bits as one that was not."""

import json
import os
import re

import numpy as np
import pytest

from peft_core import manual_seed, random, tensor
from peft_core.errors import FileError
from peft_core.nn import Dropout, Linear, Module
from peft_core.optim import SGD, AdamW, schedule
from peft_core.random import Generator
from peft_core.train import TrainState, fit
from peft_core.training_state import load_training_state, save_training_state


class Net(Module):
    """A frozen base and two trainable layers behind dropout."""

    def __init__(self, width=8, bias=True):
        generator = Generator(3)
        self.base = Linear(4, width, generator=generator)
        self.base.requires_grad_(False)
        self.drop = Dropout(0.3)
        self.a = Linear(width, 5, bias=bias, generator=generator)
        self.b = Linear(5, 3, generator=generator)

    def forward(self, x):
        h = self.a(self.drop(self.base(x)))
        return self.b(self.drop(h * h))


def loss_fn(model, batch):
    x, y = batch
    difference = model(tensor(x)) - y
    return (difference * difference).sum(), len(x)


def micro_batch(i):
    rng = np.random.default_rng(i)
    n = 2 + i % 7
    return rng.normal(size=(n, 4)).astype(np.float32), rng.normal(size=(n, 3)).astype(np.float32)


STEPS = [[micro_batch(3 * i), micro_batch(3 * i + 1), micro_batch(3 * i + 2)] for i in range(20)]


def adamw(net):
    return AdamW([p for p in net.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)


def momentum(net):
    return SGD([p for p in net.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


class Run:
    """One process' worth of objects; ``stop_after`` counts micro-batches."""

    def __init__(self, make_optimizer=adamw, seed=5):
        manual_seed(seed)
        self.net = Net()
        self.optimizer = make_optimizer(self.net)
        self.state, self.losses = TrainState(), []

    def report(self, r):
        self.losses.append((r.step, r.loss, r.lr, r.grad_norm))

    def go(self, stop_after=10**9):
        done = iter(range(stop_after))
        self.state = fit(self.net, STEPS, loss_fn, self.optimizer, schedule=schedule("cosine", 20, 3),
                         max_grad_norm=1.0, state=self.state, on_step=self.report,
                         should_stop=lambda: next(done, None) is None)  # fmt: skip
        return self

    def bits(self):
        moments = {(i, k): np.asarray(v).tobytes() for i, s in self.optimizer.state_dict()["state"].items()
                   for k, v in s.items()}  # fmt: skip
        return {n: p.data.tobytes() for n, p in self.net.named_parameters()}, moments, random.get_state()


def resumed(folder, make_optimizer, *stops):
    run = Run(make_optimizer).go(stops[0])
    for stop in [*stops[1:], 10**9]:
        save_training_state(folder, run.net, run.optimizer, run.state, {"losses": run.losses})
        run = Run(make_optimizer, seed=99)  # new objects, another random state, other starting values
        for p in run.net.parameters():
            if p.requires_grad:
                p.data += 1
        run.state, extra = load_training_state(folder, run.net, run.optimizer)
        run.losses = extra["losses"]
        run.go(stop)
    return run


@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
@pytest.mark.parametrize("stops", [(30,), (31,), (29,), (0, 1, 1, 1, 20), (60,)])
def test_continued_equals_uninterrupted(tmp_path, make_optimizer, stops):
    whole = Run(make_optimizer).go()
    expected = whole.bits()
    continued = resumed(tmp_path / "state", make_optimizer, *stops)
    assert continued.bits() == expected
    assert continued.losses == whole.losses and len(whole.losses) == 20
    assert continued.state == whole.state == TrainState(step=20)


@pytest.mark.parametrize("lost", ["gradient", "random", "moments", "progress"])
def test_the_comparison_sees_what_is_lost(tmp_path, lost):
    expected = Run().go().bits()
    run = Run().go(31)
    save_training_state(tmp_path / "s", run.net, run.optimizer, run.state)
    run = Run(seed=99)
    run.state, _ = load_training_state(tmp_path / "s", run.net, run.optimizer)
    if lost == "gradient":
        run.net.a.weight.grad = None
    elif lost == "random":
        manual_seed(99)
    elif lost == "moments":
        run.optimizer.state.clear()
    else:
        run.state.n_labelled += 1
    assert run.go().bits() != expected


def test_gradients_are_saved_in_mid_step_only(tmp_path):
    run = Run().go(31)
    save_training_state(tmp_path / "s", run.net, run.optimizer, run.state)
    other = Run()
    load_training_state(tmp_path / "s", other.net, other.optimizer)
    assert other.net.a.weight.grad.data.tobytes() == run.net.a.weight.grad.data.tobytes()
    run.go(2)
    save_training_state(tmp_path / "s", run.net, run.optimizer, run.state)
    load_training_state(tmp_path / "s", other.net, other.optimizer)
    assert all(p.grad is None for p in other.net.parameters())


def test_extra_comes_back_as_it_was(tmp_path):
    run = Run()
    extra = {"best": 0.1 + 0.2, "inf": float("inf"), "none": None, "flag": True, "text": "é", "t": (1, (2, "x")),
             "list": [1, [2.5]], "a/b": np.arange(3), "a": {"b": np.float32([1, 2])}, "n": np.int64(7)}  # fmt: skip
    save_training_state(tmp_path / "s", run.net, run.optimizer, run.state, extra)
    _, back = load_training_state(tmp_path / "s", run.net, run.optimizer)
    assert back.pop("a/b").tolist() == [0, 1, 2] and back.pop("a")["b"].tolist() == [1, 2]
    assert back == {k: v for k, v in extra.items() if k not in {"a/b", "a"}}
    assert type(back["t"]) is tuple and type(back["n"]) is int


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"f": {1, 2}}, r"extra/f is a set; expected numbers, texts, lists, tuples, dicts and arrays"),
        ({"d": {1: 2}}, r"extra/d has the keys \[1\]; expected texts that do not start with '\$'"),
    ],
)
def test_extra_that_cannot_be_stored(tmp_path, extra, text):
    run = Run()
    with pytest.raises(FileError, match=text):
        save_training_state(tmp_path / "s", run.net, run.optimizer, run.state, extra)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------- what does not fit


@pytest.fixture
def saved(tmp_path):
    run = Run().go(31)
    save_training_state(tmp_path / "s", run.net, run.optimizer, run.state)
    return tmp_path / "s"


def refused(folder, net, optimizer, text):
    before = [p.data.tobytes() for p in net.parameters()], random.get_state(), optimizer.state_dict()["state"]
    with pytest.raises(FileError, match=text) as caught:
        load_training_state(folder, net, optimizer)
    assert str(folder) in str(caught.value) and "expected" in str(caught.value)
    assert ([p.data.tobytes() for p in net.parameters()], random.get_state(), optimizer.state_dict()["state"]) == before


def test_all_mismatches_are_in_one_error(saved):
    net = Net(width=6, bias=False)
    net.base.weight.requires_grad_(True)
    text = (r"fit this run: a\.bias is in the state and not trained here; a\.weight is float32 \(5, 8\) in the "
            r"state and float32 \(5, 6\) here; base\.weight is trained here and not in the state; "
            r"the optimizer had a\.bias and has it not here; the optimizer has base\.weight and had it not then; "
            r"expected the parameters and the optimizer that it was saved with\. Build model, adapter")  # fmt: skip
    refused(saved, net, adamw(net), text)


def test_another_optimizer_or_order(saved):
    net = Net()
    refused(saved, net, momentum(net), r"does not fit this run: the optimizer was AdamW and is SGD; expected the param")
    backwards = AdamW([p for p in net.parameters() if p.requires_grad][::-1])
    refused(saved, net, backwards, r"the optimizer had its parameters in another order or in other groups")
    groups = AdamW([{"params": net.a.parameters()}, {"params": net.b.parameters()}])
    refused(saved, net, groups, r"the optimizer had its parameters in another order or in other groups")
    net.a.weight.data = net.a.weight.data.astype(np.float64)
    refused(saved, net, adamw(net), r"a\.weight is float32 \(5, 8\) in the state and float64 \(5, 8\) here")


def test_what_the_optimizer_refuses_is_a_file_error(saved, monkeypatch):
    from peft_core.errors import ConfigError

    def no(self, state):
        raise ConfigError("moments of the wrong shape; expected equal shapes.")

    monkeypatch.setattr(AdamW, "load_state_dict", no)
    net = Net()
    refused(saved, net, adamw(net), r"does not fit this run: moments of the wrong shape; expected equal shapes")


# ---------------------------------------------------------------------- damage


def test_every_truncation_and_flip_is_noticed(saved):
    rng = np.random.default_rng(0)
    net = Net()
    optimizer = adamw(net)
    for name in ("state.json", "state.safetensors"):
        path = saved / name
        good = path.read_bytes()
        for i in range(60):
            bad = bytearray(good)
            at = int(rng.integers(0, len(good)))
            if i % 2:
                del bad[at:]
            else:
                bad[at] ^= 1 << int(rng.integers(0, 7))
            if name == "state.json" and bad.split() == good.split():
                continue  # the line end at the end of the file is no content
            path.write_bytes(bad)
            with pytest.raises(FileError):
                load_training_state(saved, net, optimizer)
        path.write_bytes(good)
    load_training_state(saved, net, optimizer)


def rewritten(folder, change, digest=True):
    from peft_core.training_state import _digest

    rest = json.loads((folder / "state.json").read_text())
    change(rest)
    rest["sha256"] = _digest(rest) if digest else rest["sha256"]
    (folder / "state.json").write_text(json.dumps(rest))


def test_the_texts_of_damage(saved):
    net = Net()
    optimizer = adamw(net)
    refused(saved / "x", net, optimizer, r"state\.json could not be read \(No such file or directory\); expected a")
    rewritten(saved, lambda rest: rest["progress"].update(step=3), digest=False)
    refused(saved, net, optimizer, r"state\.json was changed or damaged after it was written; expected the content")
    rewritten(saved, lambda rest: rest["progress"].pop("step"))
    refused(saved, net, optimizer, r"is not a complete training state \(KeyError\('step'\)\); expected all of its")
    rewritten(saved, lambda rest: rest.update(version=99))
    refused(saved, net, optimizer, r"state\.json has version 99; expected 1\. Continue with the version of this")
    (saved / "state.json").write_text("[]")
    refused(saved, net, optimizer, r'state\.json is not a training state; expected an object with "version"')
    (saved / "state.json").write_text("{")
    refused(saved, net, optimizer, r"state\.json is damaged \(.*\); expected a JSON object\. Use an older state")


def test_the_texts_of_damaged_arrays(saved):
    net = Net()
    with open(saved / "state.safetensors", "ab") as file:
        file.write(b"1")
    refused(saved, net, adamw(net), r"state\.safetensors was changed or damaged after it was written; expected the")
    (saved / "state.safetensors").unlink()
    refused(saved, net, adamw(net), r"state\.safetensors is missing; expected it next to state\.json")


def test_saving_removes_no_strangers_files_and_fails_whole(saved, monkeypatch):
    run = Run()
    before = (saved / "state.json").read_bytes()
    monkeypatch.setattr("peft_core.training_state.atomic_write", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_training_state(saved, run.net, run.optimizer, run.state)
    assert (saved / "state.json").read_bytes() == before and os.listdir(saved.parent) == ["s"]
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(FileError, match=re.escape(f"{saved} holds other files; expected a new directory or an older")):
        save_training_state(saved, run.net, run.optimizer, run.state)
    assert (saved / "notes.txt").read_text() == "mine"
