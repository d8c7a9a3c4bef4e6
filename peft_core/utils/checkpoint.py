"""Recomputing activations under the names of ``torch.utils.checkpoint``: a face over peft_core.recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError, expect
from ..nn.module import Module
from ..recompute import recompute
from ..tensor import Tensor

__all__ = ["checkpoint", "checkpoint_sequential"]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Any = None,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``function(*args, **kwargs)`` without keeping what it computes: backward runs it again, with the same dropout.

    ``function``: a Module, or any function that returns one Tensor; what it trains is found in its first run. Random
    state and the dtype of autocast are always those of the first run, whatever ``preserve_rng_state``, and parameters
    train whatever ``use_reentrant``. Raises ConfigError for ``context_fn``, ``determinism_check`` and ``debug``, and
    GraphError, as recompute, for a function that returns something else than one Tensor.
    """
    for name, given in (("context_fn", context_fn), ("debug", debug)):
        expect(not given, ConfigError, f"checkpoint({name}=...) is not supported", expected=f"no {name}")
    expect(determinism_check in {"default", "none"}, ConfigError,
           f"checkpoint(determinism_check={determinism_check!r}) is not supported", expected="'default' or 'none'",
           fix="The rerun always sees the random state of the first run.")  # fmt: skip
    traced = not isinstance(getattr(function, "__self__", function), Module)
    if not kwargs:
        return recompute(function, *args, traced=traced)
    n, names = len(args), list(kwargs)

    def block(*values: Any) -> Any:  # Tensors among the keyword arguments are inputs like the others
        return function(*values[:n], **dict(zip(names, values[n:], strict=True)))

    return recompute(block, *args, *kwargs.values(), traced=True)


def checkpoint_sequential(functions: Any, segments: int, input: Any, use_reentrant: bool | None = None) -> Tensor:
    """The functions (or the modules of a Sequential) one after the other, in ``segments`` recomputed parts.

    Raises ConfigError for a number of segments that is not between 1 and that of functions.
    """
    parts = list(functions)
    expect(1 <= segments <= len(parts), ConfigError, f"checkpoint_sequential of {len(parts)} functions in {segments}",
           expected=f"between 1 and {len(parts)} segments")  # fmt: skip
    size = len(parts) // segments
    for i in range(segments):
        input = checkpoint(_chain(parts[i * size : (i + 1) * size if i < segments - 1 else len(parts)]), input)
    return input


def _chain(parts: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for part in parts:
            x = part(x)
        return x

    return run
