"""The table of ops: one row (a Case) states what an op computes and keeps; the checks below run over every row.

    CASES = [
        Case("mul", ops.mul, inputs=lambda rng: [rng.normal(size=(3, 4)), rng.normal(size=4)],
             reference=lambda a, b: a * b, retains={0, 1}),
        Case("rms_norm", ops.rms_norm, params={"eps": 1e-5}, inputs=..., reference=rms_norm_f64, retains={0, 1},
             extra_bytes=lambda x, w: len(x) * 4, formulas=(norm._rms_forward, norm._rms_backward)),
    ]

    @every(CASES)
    def test_case(check, case, dtype):
        check(case, dtype)

``every`` multiplies rows x dtypes x CHECKS. A row whose ``formulas`` have fused kernels runs float32 twice, with
kernels and without ("-formula"). Comparisons are by norm, ||y - ref|| / ||ref||, with a bound for one rounding.
"""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, autocast, no_grad
from peft_core.dtypes import as_dtype, is_float
from peft_core.kernels import Formula, use_kernels

ALL = ("float32", "float64", "bfloat16", "float16")
ROUNDING = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2.0**-9, "float16": 2.0**-11}


@dataclass(frozen=True)
class Case:
    """One row.

    fn          the op under test: called as ``fn(*tensors, **params)``, returns one Tensor
    inputs      ``rng -> list of float64 (or integer, bool) arrays``; float arrays are cast to the dtype under test
    reference   the formula in plain float64 NumPy, written independently: ``reference(*arrays, **params)``
    retains     what backward may keep alive when all of ``grads`` train: input positions, and "y" for the output;
                or a dict {(positions that train): such a set}; None for a function made of several ops (not checked)
    extra_bytes ``(*arrays) -> bytes`` of statistics kept besides (or a dict like ``retains``)
    params      keyword arguments of fn and reference
    grads       positions that have a gradient; by default every float input
    dtypes      dtypes under test
    fixed       {position: dtype} of inputs that do not follow the dtype under test (a frozen bfloat16 weight)
    out         expected dtype of the output; by default the dtype under test
    autocast    compute dtype that the op runs under
    formulas    the ``kernels.Formula`` objects behind it: their kernels must compile, run, and agree with the formula
    slack       factor on the bounds, for ops that cannot round only once
    nonfinite   False where NaN or inf in the inputs legitimately disappears (say why beside the row)
    """

    name: str
    fn: Callable[..., Tensor]
    inputs: Callable[[np.random.Generator], list]
    reference: Callable[..., np.ndarray]
    retains: Collection | dict | None = ()
    extra_bytes: Callable[..., int] | dict | None = None
    params: dict = field(default_factory=dict)
    grads: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ALL
    fixed: dict[int, str] = field(default_factory=dict)
    out: str | None = None
    autocast: str | None = None
    formulas: tuple[Formula, ...] = ()
    slack: float = 1.0
    nonfinite: bool = True

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(self.name.encode()))

    def arrays(self, dtype: str) -> list[np.ndarray]:
        """Inputs in the dtype under test."""
        given = [np.asarray(a) for a in self.inputs(self.rng())]
        return [
            a.astype(as_dtype(self.fixed.get(i, dtype))) if is_float(a.dtype) else a.copy() for i, a in enumerate(given)
        ]

    def trained(self, arrays: list[np.ndarray]) -> tuple[int, ...]:
        return tuple(i for i, a in enumerate(arrays) if is_float(a.dtype)) if self.grads is None else self.grads

    def bound(self, dtype: str) -> float:
        """One rounding in the coarsest dtype that takes part."""
        taking_part = [dtype, *self.fixed.values(), *([self.autocast] if self.autocast else [])]
        return 1.3 * self.slack * max(ROUNDING[d] for d in taking_part)

    def run(self, arrays: list[np.ndarray], grads: Collection[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """The output, and the input Tensors of which those at ``grads`` require a gradient."""
        tensors = [Tensor(a, requires_grad=i in grads) for i, a in enumerate(arrays)]
        with ExitStack() as stack:
            if self.autocast:
                stack.enter_context(autocast(self.autocast))
            return self.fn(*tensors, **self.params), tensors

    def backward(self, arrays: list[np.ndarray], gy: np.ndarray | None = None) -> tuple[np.ndarray, dict, np.ndarray]:
        """(y, {position: gradient}, gy); gy is random and has the dtype of y unless given."""
        grads = self.trained(arrays)
        y, tensors = self.run(arrays, grads)
        if gy is None:
            gy = np.asarray(np.random.default_rng(7).normal(size=y.shape)).astype(y.dtype)
        if grads:
            y.backward(gy)
        return y.data, {i: tensors[i]._grad for i in grads}, gy

    def expected(self, arrays: list[np.ndarray]) -> np.ndarray:
        """The reference on the same (already rounded) numbers in float64."""
        return np.asarray(self.reference(*[_f64(a) for a in arrays], **self.params))


def _f64(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) if is_float(a.dtype) else a


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """||a - b|| / ||b||, both widened to float64; shapes must be equal."""
    a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
    assert a.shape == b.shape, f"shape {a.shape}, expected {b.shape}"
    if np.isnan(a).any() or np.isnan(b).any():
        return float("inf")
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) if a.size else 0.0


# ------------------------------------------------------------------------------------------- the checks


def check_value(case: Case, dtype: str) -> None:
    """The value agrees with the float64 reference; the output has the stated dtype and is an array."""
    arrays = case.arrays(dtype)
    y, _ = case.run(arrays)
    assert isinstance(y, Tensor) and isinstance(y.data, np.ndarray), f"{type(y.data)} is not an array"
    expected = case.expected(arrays)
    out = as_dtype(case.out or dtype) if is_float(expected.dtype) else expected.dtype
    assert y.dtype == out, f"{case.name}: output {y.dtype}, expected {out}"
    error = relative_error(y.data, expected)
    assert error <= case.bound(dtype), f"{case.name} {dtype}: relative error {error:.2e} > {case.bound(dtype):.2e}"


def check_gradient(case: Case, dtype: str) -> None:
    """Each gradient, along one random direction, agrees with a central difference of the reference in float64."""
    arrays = case.arrays(dtype)
    _, grads, gy = case.backward(arrays)
    wide, rng, step = [_f64(a) for a in arrays], np.random.default_rng(11), 1e-5
    for i, g in grads.items():
        assert g is not None, f"{case.name}: no gradient arrived at input {i}"
        assert g.dtype == arrays[i].dtype, f"{case.name}: gradient {i} is {g.dtype}, its input {arrays[i].dtype}"
        assert g.shape == arrays[i].shape, f"{case.name}: gradient {i} has shape {g.shape}, its input {arrays[i].shape}"
        v = rng.normal(size=g.shape)
        ends = [case.reference(*wide[:i], wide[i] + s * step * v, *wide[i + 1 :], **case.params) for s in (1, -1)]
        numeric = float(((ends[0] - ends[1]) * gy.astype(np.float64)).sum() / (2 * step))
        analytic = float((g.astype(np.float64) * v).sum())
        scale = max(float(np.linalg.norm(g.astype(np.float64))), 1e-3 * float(np.linalg.norm(gy.astype(np.float64))))
        bound = max(3 * case.bound(dtype), 1e-7) * scale  # a rounding error along a direction: three deviations
        assert abs(numeric - analytic) <= bound, (
            f"{case.name} {dtype}: gradient {i} along a direction is {analytic:.8g}, numerically {numeric:.8g}"
        )


def check_purity(case: Case, dtype: str) -> None:
    """Neither forward nor backward writes into inputs or gy; the gradients share no memory with them or each other."""
    arrays = case.arrays(dtype)
    before = [a.tobytes() for a in arrays]
    gy = np.asarray(np.random.default_rng(7).normal(size=case.run(arrays)[0].shape)).astype(case.run(arrays)[0].dtype)
    kept = gy.tobytes()
    _, grads, _ = case.backward(arrays, gy)
    assert [a.tobytes() for a in arrays] == before, f"{case.name}: an input was written to"
    assert gy.tobytes() == kept, f"{case.name}: gy was written to"
    found = list(grads.values())
    for n, g in enumerate(found):
        for other in [gy, *arrays, *found[:n]]:
            assert not np.shares_memory(g, other), f"{case.name}: a leaf's gradient shares memory"


def check_strided(case: Case, dtype: str) -> None:
    """Non-contiguous inputs and a non-contiguous gy give what contiguous ones do."""
    arrays = case.arrays(dtype)
    y, grads, gy = case.backward(arrays)
    for layout in (_every_other, _column_order):
        y2, grads2, _ = case.backward([layout(a) for a in arrays], layout(gy))
        bound = max(case.bound(dtype), 1e-6)
        assert relative_error(y2, y) <= bound, f"{case.name}: another value for strided inputs"
        for i in grads:
            assert relative_error(grads2[i], grads[i]) <= bound, f"{case.name}: another gradient {i} for strided inputs"


def _every_other(a: np.ndarray) -> np.ndarray:
    if not a.ndim:
        return a
    wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)
    wide[..., ::2] = a
    return wide[..., ::2]


def _column_order(a: np.ndarray) -> np.ndarray:
    return np.array(a, order="F")  # asfortranarray gives a 0-d array an axis


def check_retention(case: Case, dtype: str) -> None:
    """Arrays reachable from the node's closures are those that the row declares, to the byte."""
    if case.retains is None:
        return
    arrays = case.arrays(dtype)
    everything = case.trained(arrays)
    rows = case.retains if isinstance(case.retains, dict) else {everything: case.retains}
    for trained, retains in rows.items():
        if not trained:
            continue
        y, tensors = case.run(arrays, trained)
        assert y.grad_fn is not None, f"{case.name}: nothing was recorded"
        owned = {id(_root(t.data)): i for i, t in enumerate(tensors)} | {id(_root(y.data)): "y"}
        if _root(y.data) is _root(tensors[0].data):
            owned[id(_root(y.data))] = 0  # a view of its input
        reached = {id(a): a for a in map(_root, reachable_arrays(y.grad_fn.vjp))}
        names = {owned[i] for i in reached if i in owned}
        assert names == set(retains), f"{case.name} ({trained} train): retains {names}, declared {set(retains)}"
        rest = sum(a.nbytes for i, a in reached.items() if i not in owned)
        extra = case.extra_bytes.get(trained) if isinstance(case.extra_bytes, dict) else case.extra_bytes
        allowed = extra(*arrays) if extra else 0
        assert rest == allowed, f"{case.name} ({trained} train): {rest} bytes retained besides, declared {allowed}"


def check_nonfinite(case: Case, dtype: str) -> None:
    """NaN and inf planted in the inputs come out where they do in the reference; NaN in gy reaches every gradient."""
    if not case.nonfinite:
        return
    with np.errstate(all="ignore"):
        for bad in (np.nan, np.inf):
            clean = case.arrays(dtype)
            for i, a in enumerate(clean):
                if not is_float(a.dtype) or not a.size:
                    continue
                arrays = [b.copy() for b in clean]
                arrays[i].reshape(-1)[a.size // 2] = bad
                y = case.run(arrays)[0].data
                if is_float(y.dtype):
                    same = np.isfinite(_f64(y)) == np.isfinite(case.expected(arrays))
                    assert same.all(), f"{case.name}: {bad} in input {i} comes out elsewhere than in the reference"
        arrays = case.arrays(dtype)
        y = case.run(arrays)[0]
        for i, g in case.backward(arrays, np.full(y.shape, np.nan, y.dtype))[1].items():
            assert np.isnan(_f64(g)).any(), f"{case.name}: NaN in gy is swallowed on the way to input {i}"


def check_accumulation(case: Case, dtype: str) -> None:
    """A joint vjp that is handed gradients already there adds into them, or returns its own apart from them."""
    arrays = case.arrays(dtype)
    trained = case.trained(arrays)
    if not trained or case.retains is None:
        return
    plain, gy = case.backward(arrays)[1:]
    y, tensors = case.run(arrays, trained)
    positions = [next((i for i in trained if tensors[i] is edge), None) for edge in y.grad_fn.edges]
    acc = [None if i is None else np.ones_like(arrays[i]) for i in positions]
    for i, mine, g in zip(positions, acc, y.grad_fn.vjp(gy, list(acc)), strict=True):
        if i is None or positions.count(i) > 1:
            continue
        into = g is mine
        expected = _f64(plain[i]) + 1 if into else _f64(plain[i])
        assert relative_error(g, expected) <= 2 * max(case.bound(dtype), 1e-6), f"{case.name}: acc[{i}] is not added to"
        assert into or (_f64(mine) == 1).all(), f"{case.name}: acc[{i}] was written to but not returned"


def check_no_grad(case: Case, dtype: str) -> None:
    """Under no_grad nothing is recorded and the value is the same to the bit."""
    arrays = case.arrays(dtype)
    with no_grad():
        y, _ = case.run(arrays, case.trained(arrays))
    assert y.grad_fn is None and not y.requires_grad
    assert y.data.tobytes() == case.run(arrays, case.trained(arrays))[0].data.tobytes()


def check_kernel(case: Case, dtype: str) -> None:
    """Each fused kernel compiles, really runs, and agrees with its formula, forward and backward."""
    if not case.formulas or dtype != "float32":
        return
    arrays = case.arrays(dtype)
    with use_kernels(True):
        y, grads, gy = case.backward(arrays)
    for f in case.formulas:
        assert f.kernel is not None and not f.kernel.broken, f"{case.name}: the kernel of {f.__name__} does not compile"
        assert f.kernel._known, f"{case.name}: the kernel of {f.__name__} never ran"
    with use_kernels(False):
        y2, grads2, _ = case.backward(arrays, gy)
    bound = case.bound(dtype)
    assert relative_error(y, y2) <= bound, f"{case.name}: kernel and formula differ by {relative_error(y, y2):.2e}"
    for i in grads:
        error = relative_error(grads[i], grads2[i])
        assert error <= 3 * bound, f"{case.name}: gradient {i} of kernel and formula differ by {error:.2e}"


CHECKS = (check_value, check_gradient, check_purity, check_strided, check_retention, check_nonfinite,
          check_accumulation, check_no_grad, check_kernel)  # fmt: skip


def every(cases: list[Case]) -> Callable:
    """Parametrise ``test(check, case, dtype)`` over CHECKS x rows x dtypes (x kernels on and off)."""
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), f"two rows have one name: {sorted(n for n in names if names.count(n) > 1)}"
    return pytest.mark.parametrize(("check", "case", "dtype"), list(_combinations(cases)))


def _combinations(cases: list[Case]) -> Iterator[Any]:
    for case in cases:
        for dtype in case.dtypes:
            for check in CHECKS:
                name = f"{case.name}-{dtype}-{check.__name__.removeprefix('check_')}"
                if check is not check_kernel:
                    yield pytest.param(check, case, dtype, id=name)
                    if case.formulas and dtype == "float32":
                        yield pytest.param(_without_kernels(check), case, dtype, id=f"{name}-formula")
                elif case.formulas and dtype == "float32":
                    yield pytest.param(check, case, dtype, id=name)


def _without_kernels(check: Callable) -> Callable:
    @functools.wraps(check)
    def run(case: Case, dtype: str) -> None:
        with use_kernels(False):
            check(case, dtype)

    return run


# ------------------------------------------------------------------------------------------- what a closure keeps


def _root(a: np.ndarray) -> np.ndarray:
    while isinstance(getattr(a, "base", None), np.ndarray):
        a = a.base
    return a


def reachable_arrays(thing: Any) -> list[np.ndarray]:
    """Every array that ``thing`` (a vjp, a container, a Tensor) keeps alive, globals aside."""
    found: list[np.ndarray] = []
    seen: set[int] = set()
    stack = [thing]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            found.append(item)
        elif isinstance(item, types.FunctionType):
            stack += [cell.cell_contents for cell in item.__closure__ or () if not _is_empty(cell)]
            stack += [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
        elif isinstance(item, types.MethodType):
            stack += [item.__func__, item.__self__]
        elif isinstance(item, functools.partial):
            stack += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, Tensor):
            stack.append(item.data)
        elif hasattr(item, "__dict__") and not isinstance(item, type | types.ModuleType | Formula):
            stack += vars(item).values()
    return found


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
