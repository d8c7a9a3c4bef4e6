from typing import Any

import numpy as np
import pytest

from peft_core import Tensor, autocast, ops
from support.cases import Case, every


def row(subscripts: str, *shapes: tuple[int, ...], **other: Any) -> Case:
    """A row whose reference is NumPy's einsum; each operand's gradient needs all the others."""
    positions = range(len(shapes))
    name = f"einsum {subscripts} {len(shapes[0])}d"
    return Case(name, lambda *xs: ops.einsum(subscripts, *xs), lambda rng: [rng.normal(size=s) for s in shapes],
                lambda *xs: np.einsum(subscripts, *xs), retains=set(positions) if len(shapes) > 1 else (),
                slack=2, **other)  # fmt: skip


CASES = [
    row("ij,jk->ik", (3, 4), (4, 5)),
    row("bqhd,bkhd->bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
    row("bhqk,bkhd->bqhd", (2, 2, 3, 5), (2, 5, 2, 4)),
    row("i,j->ij", (3,), (4,)),
    row("i,i->", (5,), (5,)),
    row("ij->ji", (3, 4)),
    row("ij->", (3, 4)),
    row("ijk->j", (2, 3, 4)),
    row("ii->i", (4, 4)),
    row("ii", (4, 4)),
    row("iij,j->i", (3, 3, 4), (4,)),
    row("ij,kj", (3, 4), (5, 4)),
    row("ij,k->i", (3, 4), (5,)),
    row("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
    row("ij,ik,il->jkl", (3, 2), (3, 4), (3, 2)),
    row("...ij,...jk->...ik", (2, 3, 4), (4, 5)),
    row("...d,d", (2, 3, 4), (4,)),
    row("b...d,d->b...", (2, 3, 4), (4,)),
    row("bi,bi->bi", (3, 4), (3, 4)),
    row("...i->...", (2, 1, 3)),
]


@every(CASES)
def test_case(check: Any, case: Case, dtype: str) -> None:
    check(case, dtype)


def test_sizes_of_one_broadcast() -> None:
    a, b = Tensor(np.full((1, 3), 2.0), True), Tensor(np.arange(6.0).reshape(2, 3), True)
    y = ops.einsum("ij,ij->i", a, b)
    assert y.tolist() == [6, 24]
    y.backward(np.ones(2))
    assert a.grad is not None and b.grad is not None
    assert a.grad.tolist() == [[3, 5, 7]] and b.grad.tolist() == [[2, 2, 2]] * 2


def test_operands_may_come_as_a_list_and_autocast_holds() -> None:
    x = np.ones((2, 2), np.float32)
    assert ops.einsum("ij, jk -> ik", [x, x]).tolist() == [[2, 2], [2, 2]]
    with autocast("bfloat16"):
        assert str(ops.einsum("ij,jk->ik", x, x).dtype) == "bfloat16"


@pytest.mark.parametrize(
    ("subscripts", "shapes", "error", "text"),
    [
        ("ij,jk->ik", [(2, 2)], ValueError, "names 2 operands and got 1; expected as many"),
        ("ij->i", [(2, 2, 2)], ValueError, "gives 'ij' to an operand with 3 dimensions; expected a label for each"),
        ("i,i->i", [(2,), (3,)], ValueError, "einsum label 'i' has sizes 2 and 3; expected one size, or 1"),
        ("i->ij", [(2,)], ValueError, "puts 'j' into its output; expected each label of the output once"),
        ("i->ii", [(2,)], ValueError, "puts 'i' into its output"),
        ("i1->i", [(2, 2)], ValueError, "contains '1'; expected letters"),
        (3, [(2,)], TypeError, "einsum got a int first; expected the subscripts"),
    ],
)
def test_errors(subscripts: Any, shapes: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        ops.einsum(subscripts, *(np.ones(s) for s in shapes))
