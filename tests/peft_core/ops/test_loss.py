import sys
import tracemalloc

import numpy as np
import pytest

from peft_core import Tensor, autocast, bfloat16, no_grad
from peft_core.dtypes import as_dtype
from peft_core.kernels import tiles_supported, use_kernels
from peft_core.ops.loss import cross_entropy, cross_entropy_rows, head_loss
from support.cases import Case, every, relative_error

module = sys.modules["peft_core.ops.loss"]
needs_tiles = pytest.mark.skipif(not tiles_supported(), reason="numba compiles no tiles here")
HALF, FULL = ("bfloat16", "float16"), ("float32", "float64")


def reference(logits, targets, *, ignore_index=-100, reduction="mean"):
    """-log of the target's softmax, one row at a time, in float64."""
    losses = np.zeros(targets.shape)
    for at in np.ndindex(*targets.shape):
        if targets[at] != ignore_index:
            z = logits[at] - logits[at].max()
            losses[at] = -np.log(np.exp(z[targets[at]]) / np.exp(z).sum())
    if reduction == "none":
        return losses
    return losses.sum() / ((targets != ignore_index).sum() if reduction == "mean" else 1)


def head_reference(h, w, targets, *, ignore_index=-100, chunk=None):
    labelled = targets != ignore_index  # what stands at other rows is not even looked at
    return reference(h[labelled] @ w.T, targets[labelled], reduction="sum")


def labelled(rng, n, classes, ignore=-100):
    targets = rng.integers(0, classes, size=n)
    targets.reshape(-1)[1::3] = ignore
    return targets


def logits(*shape, ignore=-100):
    return lambda rng: [2 * rng.normal(size=shape), labelled(rng, shape[:-1], shape[-1], ignore)]


def head(n, classes, width):
    return lambda rng: [rng.normal(size=(n, width)), rng.normal(size=(classes, width)), labelled(rng, n, classes)]


def both(name, fn, inputs, **more):
    """A row for full precision and one for half, whose loss is float32."""
    return [
        Case(name, fn, inputs=inputs, dtypes=FULL, formulas=(cross_entropy_rows,), **more),
        Case(f"{name}_half", fn, inputs=inputs, dtypes=HALF, out="float32", formulas=(cross_entropy_rows,), **more),
    ]


def losses(name, inputs, **params):
    more = {"reference": reference, "params": params, "retains": {0, 1}}
    return both(name, cross_entropy, inputs, **more)


def work_size(a):
    return max(a.itemsize, 4)


def kept_for_h(h, w, targets):
    n = int((targets != -100).sum())
    return n * 8 + n * h.shape[1] * work_size(h)


def kept_for_w(h, w, targets):
    return int((targets != -100).sum()) * 8 + w.size * work_size(h)


def kept_for_both(h, w, targets):
    return kept_for_h(h, w, targets) + w.size * work_size(h)


HEAD = dict(
    reference=head_reference,
    retains={(0, 1): set(), (0,): set(), (1,): set()},
    extra_bytes={(0, 1): kept_for_both, (0,): kept_for_h, (1,): kept_for_w},
    slack=3,  # the products round too
)
CASES = [
    *losses("cross_entropy", logits(7, 11)),
    *losses("cross_entropy_wide", logits(5, 100)),
    *losses("cross_entropy_cube", logits(2, 3, 5), reduction="sum"),
    *losses("cross_entropy_none", logits(7, 40), reduction="none"),
    *losses("cross_entropy_ignore", logits(7, 11, ignore=3), ignore_index=3),
    *both("head_loss", head_loss, head(9, 21, 6), **HEAD),
    *both("head_loss_chunks", head_loss, head(9, 21, 6), params={"chunk": 4}, **HEAD),
    Case("head_loss_bf16_base", head_loss, inputs=head(9, 21, 6), params={"chunk": 4}, fixed={1: "bfloat16"},
         grads=(0,), dtypes=("float32",), formulas=(cross_entropy_rows,),
         **HEAD | dict(retains=set(), extra_bytes=kept_for_h)),
    Case("head_loss_autocast", head_loss, inputs=head(9, 21, 6), autocast="bfloat16", dtypes=("float32",),
         formulas=(cross_entropy_rows,), **HEAD),
]  # fmt: skip


@every(CASES)
def test_case(check, case, dtype):
    check(case, dtype)


def make(n=40, classes=50, width=8, seed=0):
    h, w, targets = head(n, classes, width)(np.random.default_rng(seed))
    return h.astype(np.float32), w.astype(np.float32), targets


def run(h, w, targets, gy=None, **params):
    """(loss, gh, gw) of head_loss."""
    a, b = Tensor(h, requires_grad=True), Tensor(w, requires_grad=True)
    y = head_loss(a, b, targets, **params)
    y.backward(gy)
    return y.data, a._grad, b._grad


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 26, 27, 512])
def test_head_loss_equals_cross_entropy_of_the_logits(chunk, kernels):
    h, w, targets = make()
    with use_kernels(kernels):
        loss, gh, gw = run(h, w, targets, np.float32(2), chunk=chunk)
        z = Tensor(h @ w.T, requires_grad=True)
        expected = cross_entropy(z, targets, reduction="sum")
        expected.backward(np.float32(2))
    assert loss.dtype == np.float32 and loss.shape == () and relative_error(loss, expected.data) < 1e-6
    assert relative_error(gh, z._grad @ w) < 2e-6 and relative_error(gw, z._grad.T @ h) < 2e-6
    assert not gh[targets == -100].any() and gh[targets != -100].any(axis=1).all()


@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_panels_of_a_half_precision_head_do_not_change_the_result(compute, monkeypatch):
    h, w, targets = make()
    w = w.astype(bfloat16)
    with autocast(compute):
        whole = run(h, w, targets)
        monkeypatch.setattr(module, "PANEL", 7)
        panels = run(h, w, targets)
    wide = w.astype(np.float32)
    exact = run(h.astype(bfloat16).astype(np.float32) if compute else h, wide, targets)
    for a, b, c in zip(whole, panels, exact, strict=True):
        assert relative_error(a, b) < 1e-6 and relative_error(a, c) < (1e-6 if a.dtype == np.float32 else 2.0**-8)


@pytest.mark.parametrize("kernels", [True, False])
def test_no_labelled_row_gives_a_sum_of_zero_and_no_gradient(kernels):
    h, w, targets = make()
    targets[:] = -100
    with use_kernels(kernels):
        loss, gh, gw = run(h, w, targets)
    assert loss == 0 and loss.dtype == np.float32 and gh.shape == h.shape and not gh.any() and not gw.any()
    assert run(h[:0], w, targets[:0])[0] == 0


@pytest.mark.parametrize("kernels", [True, False])
def test_the_mean_over_no_labelled_row_is_nan_with_gradient_zero(kernels):
    z = Tensor(np.ones((3, 5), np.float32), requires_grad=True)
    with use_kernels(kernels):
        y = cross_entropy(z, np.full(3, -100))
        y.backward()
        assert np.isnan(y.data) and not z._grad.any()
        assert cross_entropy(z, np.full(3, -100), reduction="sum").data == 0


def test_evaluation_pays_for_no_gradient(monkeypatch):
    h, w, targets = make()
    calls = []
    monkeypatch.setattr(module, "_send_back", lambda *args: calls.append(args[4:]))
    with no_grad():
        head_loss(Tensor(h, requires_grad=True), Tensor(w, requires_grad=True), targets)
    head_loss(Tensor(h), Tensor(w), targets)
    assert not calls
    head_loss(Tensor(h, requires_grad=True), Tensor(w), targets)
    ((gh, gw),) = calls
    assert gh is not None and gw is None  # a frozen head gets no gradient of its own


def test_gradients_add_into_what_has_arrived():
    h, w, targets = make()
    x = Tensor(h, requires_grad=True)
    head_loss(x, w, targets).backward()
    once = x._grad.copy()
    head_loss(x, w, targets).backward(np.float32(2))
    assert relative_error(x._grad, 3 * once) < 1e-6


def test_scaled_losses_keep_small_gradients_in_float16():
    h, w, targets = make(width=4)
    h, w = np.zeros_like(h), w * 1e-4  # gradients of about 1e-6: below float16's normal numbers
    half = [a.astype(np.float16) for a in (h, w)]
    got = run(*half, targets, np.float32(2.0**14))[1]
    exact = run(*(a.astype(np.float32) for a in half), targets)[1]
    assert relative_error(got.astype(np.float32) / 2**14, exact) < 2.0**-10


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 3, 47])
def test_bad_numbers_come_out(at, bad, kernels):
    h, w, targets = make(classes=49)
    z = (h @ w.T).astype(np.float32)
    z[4, at] = bad
    with use_kernels(kernels), np.errstate(invalid="ignore"):
        x = Tensor(z, requires_grad=True)
        y = cross_entropy(x, np.where(targets == -100, 1, targets), reduction="none")
        y.backward(np.ones(40, np.float32))
        assert np.isnan(y.data[4]) and np.isfinite(np.delete(y.data, 4)).all()
        assert np.isnan(x._grad[4]).all() and np.isfinite(np.delete(x._grad, 4, axis=0)).all()
        h[1] = bad  # row 1 has no label: the head does not look at it
        assert targets[1] == -100 and np.isfinite(head_loss(h, w, targets).data)
        h[0] = bad
        assert np.isnan(head_loss(h, w, targets).data)


@pytest.mark.parametrize("kernels", [True, False])
def test_large_logits_do_not_overflow(kernels):
    z = np.array([[1e4, -1e4, 0], [3e4, 3e4, -3e4]], np.float32)
    with use_kernels(kernels):
        got = cross_entropy(z, np.array([1, 0]), reduction="none").data
    assert relative_error(got, np.array([2e4, np.log(2)])) < 1e-6


def test_a_read_only_array_is_accepted_and_the_kernel_survives():
    z = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    expected = reference(z.astype(np.float64), np.arange(4))
    z.flags.writeable = False
    assert relative_error(cross_entropy(z, np.arange(4)).data, expected) < 1e-6
    assert not cross_entropy_rows.kernel.broken


def test_logits_are_held_for_one_chunk_at_a_time():
    h, w, targets = make(n=600, classes=3000)
    head_loss(h, w, targets, chunk=32)
    tracemalloc.start()
    with no_grad():
        head_loss(h, w, targets, chunk=32)
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert top < 3 * 32 * 3000 * 4, top  # a chunk, and one more in the plain formula; all logits are 600 x 3000


def frozen(n, classes, width, seed=0, stored=bfloat16):
    """h float32, a read-only head, bfloat16 unless said otherwise, and targets."""
    h, w, targets = make(n, classes, width, seed)
    w = w.astype(stored)
    w.flags.writeable = False
    return h, w, targets


def frozen_run(h, w, targets, gy=None, dtype="bfloat16", **params):
    x = Tensor(h, requires_grad=True)
    with autocast(dtype):
        y = head_loss(x, w, targets, **params)
    y.backward(gy)
    return y.data, x._grad


@needs_tiles
@pytest.mark.parametrize(("dtype", "slack"), [("bfloat16", 3e-3), ("float32", 1e-6)])  # bf16 rounds the slopes
@pytest.mark.parametrize("stored", [bfloat16, np.float32])
@pytest.mark.parametrize("n, classes, width", [(37, 1000, 63), (150, 49, 64), (5, 49153, 40), (1, 47, 1), (40, 48, 50)])
@pytest.mark.parametrize("chunk", [1, 20, 512])
def test_tiles_agree_with_float64(n, classes, width, chunk, stored, dtype, slack):
    h, w, targets = frozen(n, classes, width, stored=stored)
    targets[0] = classes - 1
    loss, gh = frozen_run(h, w, targets, np.float32(2), dtype, chunk=chunk)
    x = Tensor(h.astype(as_dtype(dtype)).astype(np.float64), requires_grad=True)
    expected = head_loss(x, w.astype(as_dtype(dtype)).astype(np.float64), targets)
    expected.backward(np.float64(2))
    assert loss.dtype == gh.dtype == np.float32
    assert relative_error(loss, expected.data) < 2e-6
    assert relative_error(gh, x._grad) < slack + classes**0.5 * 2**-24  # a sum over classes in float32
    assert not gh[targets == -100].any()


@needs_tiles
def test_tiles_run_where_the_head_is_read_only_and_frozen(monkeypatch):
    calls = []
    inner = module._on_tiles
    monkeypatch.setattr(module, "_on_tiles", lambda *args: calls.append(args[-1]) or inner(*args))
    h, w, targets = frozen(40, 50, 8)
    frozen_run(h, w, targets)
    with no_grad(), autocast("bfloat16"):
        head_loss(Tensor(h, requires_grad=True), w, targets)
    assert calls == [True, False]  # evaluation forms no gradient
    frozen_run(h, w.copy(), targets)
    with autocast("bfloat16"):
        head_loss(h, Tensor(w, requires_grad=True), targets)
    with use_kernels(False):
        frozen_run(h, w, targets)
    assert len(calls) == 2
    head_loss(h, w, targets)  # float32
    assert len(calls) == 3


def test_without_tiles_the_formula_gives_the_same(monkeypatch):
    h, w, targets = frozen(40, 1000, 50)
    on = frozen_run(h, w, targets)
    monkeypatch.setenv("PEFT_CORE_TILES", "off")
    off = frozen_run(h, w, targets)
    assert relative_error(on[0], off[0]) < 2e-6 and relative_error(on[1], off[1]) < 3e-3


@pytest.mark.parametrize("tiles", ["on", "off"])
def test_no_labelled_row_gives_nothing(tiles, monkeypatch):
    monkeypatch.setenv("PEFT_CORE_TILES", tiles)
    h, w, targets = frozen(9, 50, 8)
    loss, gh = frozen_run(h, w, targets * 0 - 100)
    assert loss == 0 and not gh.any()


@pytest.mark.parametrize("tiles", ["on", "off"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_shows_in_a_frozen_head(bad, tiles, monkeypatch):
    monkeypatch.setenv("PEFT_CORE_TILES", tiles)
    h, w, targets = frozen(40, 1000, 50)
    targets[:] = 7
    h[3, 5] = bad
    with np.errstate(all="ignore"):
        loss, gh = frozen_run(h, w, targets)
    assert np.isnan(loss) and np.isnan(gh[3]).any() and np.isfinite(np.delete(gh, 3, axis=0)).all()


@needs_tiles
def test_tiles_give_the_same_bits_each_time():
    arrays = frozen(200, 1000, 50)
    a, b = frozen_run(*arrays), frozen_run(*arrays)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("function", "error", "text"), [
    (lambda h, w, t: cross_entropy(h @ w.T, t, reduction="avg"), ValueError,
     "reduction='avg'; expected 'mean', 'sum' or 'none'"),
    (lambda h, w, t: cross_entropy(h @ w.T, t[1:]), ValueError, "targets of shape (39,); expected (40,)"),
    (lambda h, w, t: cross_entropy(h @ w.T, t + 50), IndexError, "cross_entropy got target"),
    (lambda h, w, t: cross_entropy(h @ w.T, t * 0 - 1), IndexError,
     "got target -1 for 50 classes; expected 0 to 49, or ignore_index=-100"),
    (lambda h, w, t: head_loss(h, w, t * 0 + 50), IndexError, "head_loss got target 50 for 50 classes"),
    (lambda h, w, t: head_loss(h, w, t[1:]), ValueError, "head_loss got targets of shape (39,)"),
    (lambda h, w, t: head_loss(h, w[:, 1:], t), ValueError, "h (40, 8), w (50, 7), chunk=512; expected h (N, D)"),
    (lambda h, w, t: head_loss(h, w, t, chunk=0), ValueError, "chunk=0; expected h (N, D), w (V, D) and a chunk"),
])  # fmt: skip
def test_errors_name_values_and_what_was_expected(function, error, text):
    with pytest.raises(error) as caught:
        function(*make())
    assert text in str(caught.value)


@pytest.mark.reference
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("any_label", [True, False])
def test_equals_torch(reduction, any_label):
    torch = pytest.importorskip("torch")
    h, w, targets = make()
    targets = targets if any_label else np.full_like(targets, -100)
    x, y = Tensor(h @ w.T, requires_grad=True), torch.tensor(h @ w.T, requires_grad=True)
    ours = cross_entropy(x, targets, reduction=reduction)
    theirs = torch.nn.functional.cross_entropy(y, torch.tensor(targets), reduction=reduction)
    gy = np.random.default_rng(1).normal(size=ours.shape)
    ours.backward(np.asarray(gy, np.float32))
    theirs.backward(torch.tensor(gy, dtype=torch.float32))
    np.testing.assert_allclose(ours.data, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x._grad, y.grad.numpy(), rtol=1e-5, atol=1e-6)
