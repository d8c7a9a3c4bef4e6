"""recompute: give up a block's activations in the forward and make them again in backward.

One block's activations exist at a time, for the price of a second forward. (Chen et al., "Training deep nets with
sublinear memory cost", arXiv:1604.06174, section 4.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from . import random, tape
from .amp import autocast, compute_dtype
from .errors import GraphError
from .nn.module import Module
from .tensor import Tensor


def recompute(
    block: Callable[..., Any], *inputs: Any, parameters: Iterable[Tensor] | None = None, traced: bool = False
) -> Tensor:
    """``block(*inputs)``, without keeping what it computes: backward runs it again.

    ``block``: a Module, a method of one, or a function, returning one Tensor; ``inputs``: Tensors, or anything else,
    handed through. What the block trains has to be known: ``parameters``, by default those of the Module. They are
    inputs of the node, so that a block with trainable parameters over a frozen embedding trains. ``traced`` finds what
    a function trains in what its first run reads; that run then holds the activations of this block until it ends.

    The rerun sees what the forward saw: the default generator's state, the compute dtype of autocast, which parameters
    were trainable, and of every module the attributes its class names in ``forward_state``; all are put back after.
    Retains the inputs. Gradients are those without recompute, bit for bit where each input is read once (a gradient
    that has already arrived is added to in place); else the order of a sum, and so its rounding, may differ.

    Raises GraphError if the block returns something else than one Tensor, or in backward if it depends on a Tensor that
    requires grad and is neither an input nor one of the parameters.
    """
    module = next((o for o in (block, getattr(block, "__self__", None)) if isinstance(o, Module)), None)
    given = list(module.parameters() if parameters is None and module is not None else parameters or ())
    trained = list({id(p): p for p in given if p.requires_grad}.values())
    sources = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if not tape.is_grad_enabled() or not (trained or sources or traced):
        return block(*inputs)

    seen = _Seen(module, given)
    # new leaves over the same arrays: keeping the Tensors would keep what computed them
    again = [Tensor(t.data, t.requires_grad) if isinstance(t, Tensor) else t for t in inputs]
    inner = [t for t in again if isinstance(t, Tensor) and t.requires_grad]
    with tape.set_grad_enabled(traced):
        y = block(*(again if traced else inputs))
    if not isinstance(y, Tensor):
        raise GraphError(f"recompute: the block returned a {type(y).__name__}; expected one Tensor. "
                         "Let the block return one Tensor, and compute what else is wanted outside of it.")  # fmt: skip
    if traced:
        known = {id(t) for t in [*inner, *trained]}
        trained += [leaf for leaf in _leaves(y.grad_fn) if id(leaf) not in known]
        if not (trained or sources):
            return y
    leaves = inner + trained

    def vjp(gy: Any, acc: list) -> list:
        store = {id(leaf): arrived for leaf, arrived in zip(leaves, acc, strict=True) if arrived is not None}
        with seen, tape.enable_grad():
            out = block(*again)
        if out.grad_fn is not None:
            _refuse_strangers(out.grad_fn, {id(t) for t in [*leaves, *given]})
            tape.backprop(out.grad_fn, gy, leaves=store)
        elif any(out is leaf for leaf in leaves):  # the block handed an input through
            if id(out) in store:
                store[id(out)] += gy
            else:
                store[id(out)] = gy
        return [store.get(id(leaf)) for leaf in leaves]

    edges = [t.grad_fn or t for t in sources] + trained
    return Tensor._recorded(y.data, tape.Node("recompute", edges, vjp))


class _Seen:
    """What a forward depends on besides its inputs: taken down when made, put in force inside ``with``."""

    def __init__(self, module: Module | None, parameters: list[Tensor]) -> None:
        self.generator, self.compute = random.get_state(), autocast(compute_dtype())
        modules = module.modules() if module is not None else ()
        # copies: a list of active adapters may be changed in place
        self.values: list[tuple[Any, str, Any]] = [
            (m, name, copy.copy(getattr(m, name))) for m in modules for name in m.forward_state
        ]
        self.values += [(p, "requires_grad", p.requires_grad) for p in parameters]

    def __enter__(self) -> None:
        self._generator_now = random.get_state()
        self._now = [(owner, name, getattr(owner, name)) for owner, name, _ in self.values]
        self._put(self.values)
        random.set_state(self.generator)
        self.compute.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.compute.__exit__(*exc)
        random.set_state(self._generator_now)
        self._put(self._now)

    @staticmethod
    def _put(values: list[tuple[Any, str, Any]]) -> None:
        for owner, name, value in values:
            if getattr(owner, name) is not value:
                setattr(owner, name, value)


def _leaves(root: tape.Node | None) -> list[Tensor]:
    """The leaves that the graph below ``root`` sends gradients to, each once."""
    found: dict[int, Tensor] = {}
    stack, met = [root] if root is not None else [], {root}
    while stack:
        for edge in stack.pop().edges:
            if not isinstance(edge, tape.Node):
                if edge is not None:
                    found[id(edge)] = edge
            elif edge not in met:
                met.add(edge)
                stack.append(edge)
    return list(found.values())


def _refuse_strangers(root: tape.Node, known: set[int]) -> None:
    """Raise if the graph of a rerun reaches a leaf that is not the block's: its gradient would be lost."""
    for leaf in _leaves(root):
        if id(leaf) not in known:
            raise GraphError(
                f"recompute: the block depends on a Tensor of shape {leaf.shape} that requires grad but is neither "
                "an input nor a parameter of the block; expected all of them to be known. "
                "Pass it as an input, or in parameters=."
            )
