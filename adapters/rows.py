"""A choice of adapter per row: rows that want the same adapter are computed together, then put back in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from adapters.inject import BASE, adapter_names, only_active
from peft_core import ops
from peft_core.backend import to_device, to_numpy
from peft_core.errors import ConfigError, expect
from peft_core.nn import Module
from peft_core.tensor import Tensor


def groups_of(model: Module, chosen: Sequence[str]) -> dict[str, list[int]]:
    """Adapter -> the rows that want it.  Raises ConfigError for unknown names and for a model that is training."""
    listed = not isinstance(chosen, str)
    expect(listed and chosen, ConfigError, f"adapter_names is {chosen!r}",
           expected=f"a list with one adapter, or {BASE!r}, for each row")  # fmt: skip
    known = [*adapter_names(model), BASE]
    unknown = sorted({str(name) for name in chosen if name not in known})
    expect(not unknown, ConfigError, f"adapter_names holds {unknown}", expected=f"names among {known}")
    expect(not model.training, ConfigError, "adapter_names was given while the model is training",
           expected="a choice per row at inference only", fix="Call eval() first.")  # fmt: skip
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(chosen):
        groups.setdefault(name, []).append(row)
    return groups


def call(model: Module, chosen: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``model(*args, **kwargs)``, row b with the adapter ``chosen[b]``; inputs and outputs have the rows in front.

    Returns what the model returns: a Tensor, or a dataclass of Tensors and None. Raises ConfigError for labels (one
    number for all rows belongs to no adapter) and where the number of rows differs.
    """
    groups = groups_of(model, chosen)
    inputs = [value for value in [*args, *kwargs.values()] if _n_rows(value) is not None]
    expect(any(_n_rows(value) == len(chosen) for value in inputs), ConfigError,
           f"adapter_names has {len(chosen)} entries and the inputs have {[_n_rows(value) for value in inputs]} rows",
           expected="a rectangle (B, ...) and one name for each row")  # fmt: skip
    expect(kwargs.get("labels") is None, ConfigError, "adapter_names and labels were both given",
           expected="no labels beside a choice per row", fix="Take the loss of the logits.")  # fmt: skip
    results = []
    for name, rows in groups.items():
        with only_active(model, [] if name == BASE else [name]):
            part = [_rows_of(value, rows, len(chosen)) for value in args]
            named = {key: _rows_of(value, rows, len(chosen)) for key, value in kwargs.items()}
            results.append(model(*part, **named))
    order = np.argsort([row for rows in groups.values() for row in rows])
    first = results[0]
    if isinstance(first, Tensor):
        return _joined(results, order)
    expect(dataclasses.is_dataclass(first), ConfigError,
           f"adapter_names was given and the model returns a {type(first).__name__}",
           expected="a Tensor, or a dataclass of Tensors")  # fmt: skip
    fields = {f.name: [getattr(result, f.name) for result in results] for f in dataclasses.fields(first)}
    return dataclasses.replace(first, **{
        name: _joined(parts, order) if isinstance(parts[0], Tensor) else parts[0] for name, parts in fields.items()
    })  # fmt: skip


def generate(model: Any, chosen: Sequence[str], input_ids: Any, options: dict[str, Any]) -> np.ndarray:
    """``model.generate(input_ids, **options)``, row b with the adapter ``chosen[b]``; shorter rows are filled up.

    A row gives the tokens that it gives alone with its adapter; with do_sample its stream keeps the row's number.
    """
    groups = groups_of(model, chosen)
    heard, n_rows = options.pop("on_token", None), len(chosen)
    results: dict[int, np.ndarray] = {}
    for name, rows in groups.items():
        named = {key: _rows_of(value, rows, n_rows) for key, value in options.items()}
        if options.get("do_sample"):
            named["row_numbers"] = rows
        if heard is not None:
            named["on_token"] = lambda row, token, rows=rows: heard(rows[row], token)
        with only_active(model, [] if name == BASE else [name]):
            new = model.generate(_rows_of(input_ids, rows, n_rows, required=True), **named)
        results.update(zip(rows, new, strict=True))
    out = np.full((n_rows, max(map(len, results.values()))), getattr(model, "padding_id", 0), np.int64)
    for row, tokens in results.items():
        out[row, : len(tokens)] = tokens
    return out


def _rows_of(value: Any, rows: list[int], n_rows: int, required: bool = False) -> Any:
    """The ``rows`` of a rectangle (B, ...); what is no rectangle is handed through, and so is one row for all."""
    found = _n_rows(value)
    if not required and (found is None or found == 1 != n_rows):
        return value
    expect(found == n_rows, ConfigError, f"adapter_names has {n_rows} entries for {found or 'no'} rows",
           expected="one for each row")  # fmt: skip
    return to_numpy(value.data if isinstance(value, Tensor) else np.asarray(value))[rows]


def _n_rows(value: Any) -> int | None:
    """B of a rectangle (B, ...), of lists too; None for anything else."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        return len(value)
    shape: tuple[int, ...] = getattr(value, "shape", ())
    return int(shape[0]) if len(shape) >= 2 else None


def _joined(parts: list[Tensor], order: np.ndarray) -> Tensor:
    whole = parts[0] if len(parts) == 1 else ops.concatenate(parts)
    return ops.getitem(whole, index=to_device(order, whole.device))
