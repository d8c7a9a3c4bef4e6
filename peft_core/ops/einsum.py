"""einsum: sums of products over named dimensions, as transposes and matrix products."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..backend import Array, xp_of
from ..tape import op
from ..tensor import Tensor
from .common import rounded
from .linear import factor, product_dtype

_ELLIPSIS = [chr(0x100 + i) for i in range(64)]  # labels for the dimensions that "..." stands for, the last one first


def einsum(subscripts: str, *operands: Any) -> Tensor:
    """The sum of products that ``subscripts`` describes, as in "bqhd,bkhd->bhqk"; operands may come as one list.

    A label that the output lacks is summed over; one that an operand repeats takes its diagonal; "..." stands for
    leading dimensions that broadcast, as sizes of 1 do.  Without "->" the output has the labels that appear once, in
    alphabetical order.  Operands are multiplied from left to right; dtype as in matmul.
    Retains, for the gradient of an operand, the others.  Raises TypeError or ValueError.
    """
    if not isinstance(subscripts, str):
        raise TypeError(
            f"einsum got a {type(subscripts).__name__} first; expected the subscripts, such as 'ij,jk->ik'."
        )
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    labels, out = _parsed(subscripts, [x.shape for x in operands])
    return _einsum(*operands, labels=labels, out=out)


@op
def _einsum(*arrays: Array, labels: list[str], out: str) -> Any:
    xp, dtype = xp_of(*arrays), product_dtype(*arrays)
    sizes = _sizes(labels, [a.shape for a in arrays])
    y = _contracted(*_factors(arrays, labels, sizes, dtype), out, xp)
    vjps = tuple(
        _gradient([a for j, a in enumerate(arrays) if j != i], [n for j, n in enumerate(labels) if j != i], out,
                  (x.shape, x.dtype, labels[i]), sizes, dtype)
        for i, x in enumerate(arrays)
    )  # fmt: skip
    return rounded(y, dtype, xp), vjps


def _factors(arrays: Sequence, labels: list[str], sizes: dict[str, int], dtype: Any) -> tuple[list, list[str]]:
    simple = [_simple(a, names, sizes) for a, names in zip(arrays, labels, strict=True)]
    return [factor(a, dtype) for a, _ in simple], [names for _, names in simple]


def _gradient(others: list, labels: list[str], out: str, given: tuple, sizes: dict[str, int], dtype: Any) -> Callable:
    """gy, contracted with the ``others``, spread over what ``given`` (shape, dtype, labels) alone summed."""
    shape, x_dtype, names = given
    mine = "".join(dict.fromkeys(c for c, n in zip(names, shape, strict=True) if n == sizes[c]))

    def gx(gy: Array) -> Array:
        xp = xp_of(gy)
        arrays, found = _factors((gy, *others), [out, *labels], sizes, dtype)
        present = "".join(c for c in mine if any(c in k for k in found))
        g = rounded(_contracted(arrays, found, present, xp), x_dtype, xp)
        g = xp.broadcast_to(g.reshape([sizes[c] if c in present else 1 for c in mine]), [sizes[c] for c in mine])
        if mine == names:
            return g
        full = xp.zeros(shape, x_dtype)
        _simple(full, names, sizes)[0][...] = g
        return full

    return gx


# ---------------------------------------------------------------------------------------------- contraction


def _simple(x: Array, names: str, sizes: dict[str, int]) -> tuple[Array, str]:
    """A view of ``x`` with every label once and none that is broadcast from size 1."""
    strides: dict[str, int] = {}
    for c, n, stride in zip(names, x.shape, x.strides, strict=True):
        if n == sizes[c]:
            strides[c] = strides.get(c, 0) + stride
    if len(strides) == x.ndim:
        return x, names
    tricks = xp_of(x).lib.stride_tricks
    view = tricks.as_strided(x, shape=[sizes[c] for c in strides], strides=list(strides.values()))
    return view, "".join(strides)


def _contracted(arrays: list, labels: list[str], out: str, xp: Any) -> Array:
    """The arrays multiplied from left to right; each label is summed as soon as nothing later has it."""
    (x, *rest), (names, *others) = arrays, labels
    for n, (y, theirs) in enumerate(zip(rest, others, strict=True)):
        x, names = _product(x, names, y, theirs, {*out, *"".join(others[n + 1 :])}, xp)
    x, names = _summed(x, names, set(out))
    return x.transpose([names.index(c) for c in out])


def _product(a: Array, la: str, b: Array, lb: str, wanted: set[str], xp: Any) -> tuple[Array, str]:
    """a and b multiplied, summed over what is not ``wanted``: one batched matrix product."""
    a, la = _summed(a, la, wanted | set(lb))
    b, lb = _summed(b, lb, wanted | set(la))
    batch = [c for c in la if c in lb and c in wanted]
    inner = [c for c in la if c in lb and c not in wanted]
    left, right = [c for c in la if c not in lb], [c for c in lb if c not in la]
    size = {**dict(zip(la, a.shape, strict=True)), **dict(zip(lb, b.shape, strict=True))}

    def count(names: list[str]) -> int:
        return math.prod(size[c] for c in names)

    a = a.transpose([la.index(c) for c in batch + left + inner]).reshape(count(batch), count(left), count(inner))
    b = b.transpose([lb.index(c) for c in batch + inner + right]).reshape(count(batch), count(inner), count(right))
    names = batch + left + right
    return (a @ b).reshape([size[c] for c in names]), "".join(names)


def _summed(x: Array, names: str, wanted: set[str]) -> tuple[Array, str]:
    axes = tuple(i for i, c in enumerate(names) if c not in wanted)
    return (x.sum(axis=axes) if axes else x), "".join(c for c in names if c in wanted)


# ---------------------------------------------------------------------------------------------- reading the subscripts


def _parsed(subscripts: str, shapes: list[tuple]) -> tuple[list[str], str]:
    """One label per dimension of each operand, and the output's, with "..." spelled out."""
    text = subscripts.replace(" ", "")
    given, arrow, result = text.partition("->")
    parts = given.split(",")
    if len(parts) != len(shapes):
        raise ValueError(f"einsum {subscripts!r} names {len(parts)} operands and got {len(shapes)}; expected as many.")
    strange = set(text.replace("...", "").replace("->", "").replace(",", "")) - set(string.ascii_letters)
    if strange:
        raise ValueError(
            f"einsum {subscripts!r} contains {''.join(sorted(strange))!r}; expected letters, ',', '->', '...'."
        )
    labels = [_spelled(part, len(shape), subscripts) for part, shape in zip(parts, shapes, strict=True)]
    hidden = "".join(reversed(_ELLIPSIS[: max((sum(c in _ELLIPSIS for c in names) for names in labels), default=0)]))
    if arrow:
        out = result.replace("...", hidden)
    else:
        counts = Counter("".join(labels))
        out = hidden + "".join(sorted(c for c, n in counts.items() if n == 1 and c not in hidden))
    wrong = [c for c, n in Counter(out).items() if n > 1 or not any(c in names for names in labels)]
    if wrong:
        raise ValueError(f"einsum {subscripts!r} puts {wrong[0]!r} into its output; expected each label of the output "
                         "once there and in some operand.")  # fmt: skip
    return labels, out


def _spelled(part: str, ndim: int, subscripts: str) -> str:
    n = ndim - len(part.replace("...", ""))
    if n < 0 or (n > 0 and "..." not in part):
        raise ValueError(f"einsum {subscripts!r} gives {part!r} to an operand with {ndim} dimensions; "
                         "expected a label for each.")  # fmt: skip
    return part.replace("...", "".join(reversed(_ELLIPSIS[:n])))


def _sizes(labels: list[str], shapes: list[tuple]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for names, shape in zip(labels, shapes, strict=True):
        for c, n in zip(names, shape, strict=True):
            if sizes.setdefault(c, n) != n and 1 not in (n, sizes[c]):
                raise ValueError(f"einsum label {c if c.isascii() else '...'!r} has sizes {sizes[c]} and {n}; "
                                 "expected one size, or 1.")  # fmt: skip
            sizes[c] = n if sizes[c] == 1 else sizes[c]
    return sizes
