"""Tests of the tests: each check must fail when what it looks for is planted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from peft_core import op
from peft_core.kernels import formula
from support import cases
from support.cases import Case


def normal(rng: np.random.Generator) -> list:
    return [rng.normal(size=(3, 4)), rng.normal(size=(3, 4))]


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a * b


@op
def right(a: Any, b: Any) -> Any:
    return a * b, (lambda gy: gy * b, lambda gy: gy * a)


@op
def wrong_vjp(a: Any, b: Any) -> Any:
    return a * b, (lambda gy: gy * b, lambda gy: gy * b)


@op
def slightly_wrong_vjp(a: Any, b: Any) -> Any:
    return a * b, (lambda gy: gy * b * a.dtype.type(1.001), lambda gy: gy * a)


@op
def shape_trap(a: Any, b: Any) -> Any:
    return a * b, (lambda gy: (gy * b).reshape(a.shape), lambda gy: gy * a)


@op
def promotes(a: Any, b: Any) -> Any:
    return a * b * np.float64(1), (lambda gy: gy * b, lambda gy: gy * a)


@op
def gradient_promotes(a: Any, b: Any) -> Any:
    return a * b, (lambda gy: gy * b * np.float64(1), lambda gy: gy * a)


@op
def writes_input(a: Any, b: Any) -> Any:
    y = a * b
    a += 1
    return y, (lambda gy: gy * b, lambda gy: gy * a)


@op
def writes_gy(a: Any, b: Any) -> Any:
    def gb(gy: Any) -> Any:
        gy *= a
        return gy

    return a * b, (lambda gy: gy * b, gb)


@op
def flattens_memory(a: Any, b: Any) -> Any:
    y = a.ravel(order="K").reshape(a.shape) * b
    return y, (lambda gy: gy * b, lambda gy: gy * a)


@op
def swallows_nan(a: Any, b: Any) -> Any:
    return np.nan_to_num(a) * b, (lambda gy: gy * b, lambda gy: gy * a)


@op
def swallows_nan_in_gy(a: Any, b: Any) -> Any:
    return a * b, (lambda gy: np.nan_to_num(gy) * b, lambda gy: gy * a)


@op
def forgets_acc(a: Any, b: Any) -> Any:
    def vjp(gy: Any, acc: list) -> tuple:
        if acc[0] is not None:
            acc[0] += gy * b
        return gy * b, gy * a

    return a * b, vjp


@op
def overwrites_acc(a: Any, b: Any) -> Any:
    def vjp(gy: Any, acc: list) -> tuple:
        if acc[0] is None:
            return gy * b, gy * a
        return np.multiply(gy, b, out=acc[0]), gy * a

    return a * b, vjp


@op
def keeps_a_copy(a: Any, b: Any) -> Any:
    copy = a.copy()
    return a * b, (lambda gy: gy * b, lambda gy: gy * copy)


@op
def wrong_value(a: Any, b: Any) -> Any:
    return a * b * a.dtype.type(1.0001), (lambda gy: gy * b, lambda gy: gy * a)


ROW = Case("mul", right, normal, product, retains={0, 1})


@pytest.mark.parametrize("check", cases.CHECKS)
def test_a_right_op_passes_every_check(check: Callable) -> None:
    check(ROW, "float32")


@pytest.mark.parametrize(
    ("check", "fn", "text"),
    [
        (cases.check_value, wrong_value, "relative error"),
        (cases.check_value, promotes, "output float64, expected float32"),
        (cases.check_gradient, wrong_vjp, "along a direction"),
        (cases.check_gradient, slightly_wrong_vjp, "along a direction"),
        (cases.check_gradient, gradient_promotes, "gradient 0 is float64"),
        (cases.check_purity, writes_input, "an input was written to"),
        (cases.check_purity, writes_gy, "gy was written to"),
        (cases.check_strided, flattens_memory, "another value for strided inputs"),
        (cases.check_nonfinite, swallows_nan, "comes out elsewhere"),
        (cases.check_nonfinite, swallows_nan_in_gy, "is swallowed"),
        (cases.check_accumulation, forgets_acc, "was written to but not returned"),
        (cases.check_accumulation, overwrites_acc, "is not added to"),
        (cases.check_retention, keeps_a_copy, "retains"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_planted_fault_is_found(check: Callable, fn: Callable, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check(replace(ROW, fn=fn), "float32")


def test_the_shape_trap_is_found() -> None:
    """Naming a.shape in the vjp keeps a alive although b is frozen."""
    with pytest.raises(AssertionError, match="retains"):
        cases.check_retention(replace(ROW, fn=shape_trap, retains={(0,): {1}}), "float32")
    cases.check_retention(replace(ROW, retains={(0,): {1}}), "float32")


def test_an_undeclared_saving_is_found() -> None:
    with pytest.raises(AssertionError, match="declared"):
        cases.check_retention(replace(ROW, retains={0}), "float32")
    with pytest.raises(AssertionError, match="0 bytes retained besides, declared 4"):
        cases.check_retention(replace(ROW, extra_bytes=lambda a, b: 4), "float32")


def test_double_rounding_of_half_types_is_found() -> None:
    @op
    def rounds_twice(a: Any, b: Any) -> Any:
        return (a * b) * b / b, (lambda gy: gy * b, lambda gy: gy * a)

    with pytest.raises(AssertionError, match="relative error"):
        cases.check_value(replace(ROW, fn=rounds_twice), "bfloat16")


def _half(x: np.ndarray) -> tuple:
    return (x * np.float32(0.5),)


def test_a_kernel_that_disagrees_is_found() -> None:
    half = formula(_half)

    @half.cpu(out=lambda x: (np.empty_like(x),))
    def _(t, T, x, y):  # type: ignore[no-untyped-def]
        for i in range(x.shape[0] * t // T, x.shape[0] * (t + 1) // T):
            y[i] = x[i] * np.float32(0.501)

    @op
    def halved(x: Any) -> Any:
        return half(x)[0], (lambda gy: half(gy)[0],)

    row = Case("half", halved, lambda rng: [rng.normal(size=9)], lambda x: x / 2, formulas=(half,))
    with pytest.raises(AssertionError, match="kernel and formula differ"):
        cases.check_kernel(row, "float32")


def test_a_kernel_that_does_not_compile_is_found(capfd: Any) -> None:
    half = formula(_half)

    @half.cpu(out=lambda x: (np.empty_like(x),))
    def _(t, T, x, y):  # type: ignore[no-untyped-def]
        y[0] = x.no_such_attribute

    @op
    def halved(x: Any) -> Any:
        return half(x)[0], (lambda gy: half(gy)[0],)

    row = Case("half", halved, lambda rng: [rng.normal(size=9)], lambda x: x / 2, formulas=(half,))
    with pytest.raises(AssertionError, match="does not compile"):
        cases.check_kernel(row, "float32")


def test_two_rows_of_one_name_are_an_error() -> None:
    with pytest.raises(AssertionError, match="two rows have one name"):
        cases.every([ROW, ROW])
