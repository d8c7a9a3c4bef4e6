"""The tape: how a function of arrays becomes a differentiable function of Tensors.  Read this file first.

    @op
    def mul(a, b):
        return a * b, (lambda gy: gy * b, lambda gy: gy * a)

An op returns its value and, per positional input, a function from the gradient of the value to the gradient of that
input (its vjp). Only the vjps whose input wants a gradient are kept, and a closure keeps alive only the names that it
mentions: a frozen weight therefore lets go of the activation by itself, which is why LoRA needs little memory.

Rules:
1. A Node points at Nodes or leaf Tensors, never at an intermediate Tensor, or every activation would stay alive.
2. An op that takes ``needs`` is told in the forward which inputs want a gradient (all False when nothing is recorded).
3. Gradients that share work come from one joint vjp ``(gy, acc) -> tuple``. ``acc[i]`` is the gradient that has
   already arrived at input i, or None; the op may add into it and return it, so a residual stream costs no extra pass.
4. The tape owns an array if nobody else can see it. Only owned arrays are added into; a leaf's gradient is always its.

First order only: gradients are plain arrays. (One vjp per argument: Maclaurin, "Modeling, inference and optimization
with composable differentiable procedures", 2016, chapter 4.)
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from .errors import GraphError
from .tensor import Tensor

_recording: contextvars.ContextVar[bool] = contextvars.ContextVar("recording", default=True)


def is_grad_enabled() -> bool:
    """True where ops are recorded."""
    return _recording.get()


class _Recording:
    """Context manager and decorator: record ops (True) or not (False)."""

    def __init__(self, mode: bool) -> None:
        self.mode = mode
        self._tokens: list[contextvars.Token] = []

    def __enter__(self) -> None:
        self._tokens.append(_recording.set(self.mode))

    def __exit__(self, *exc: object) -> None:
        _recording.reset(self._tokens.pop())

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with _Recording(self.mode):
                return function(*args, **kwargs)

        return inside


class no_grad(_Recording):
    """Nothing inside is recorded; leaves may be written to."""

    def __init__(self) -> None:
        super().__init__(False)


class enable_grad(_Recording):
    """Ops inside are recorded again, within a no_grad."""

    def __init__(self) -> None:
        super().__init__(True)


class set_grad_enabled(_Recording):
    """Record ops from here on (True) or not (False); as a context manager, until its end."""

    def __init__(self, mode: bool) -> None:
        super().__init__(mode)
        self._before = _recording.get()
        _recording.set(mode)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        _recording.set(self._before)

    def __call__(self, function: Callable) -> Callable:
        _recording.set(self._before)  # as a decorator it is about the function alone
        return super().__call__(function)


class Node:
    """One recorded op.  ``edges``: per input a Node, a leaf Tensor, or None where no gradient is wanted."""

    __slots__ = ("__weakref__", "edges", "name", "vjp")

    def __init__(self, name: str, edges: list, vjp: Callable | None) -> None:
        self.name, self.edges, self.vjp = name, edges, vjp

    def __repr__(self) -> str:
        return f"<{self.name} backward>"


def op(function: Callable) -> Callable[..., Tensor]:
    """Turn ``function(*arrays, **params[, needs]) -> (y, vjps)`` into a function of Tensors.

    Positional arguments are arrays or Tensors, keyword arguments are parameters.  ``vjps`` is a tuple of ``gy -> g``,
    one per positional input (None: not differentiable), or one joint ``(gy, acc) -> tuple``; None where no input is
    differentiable.  Gradients must have the dtype of their input.
    """
    wants_needs = "needs" in inspect.signature(function).parameters

    @functools.wraps(function)
    def apply(*inputs: Any, **params: Any) -> Tensor:
        if _recording.get():
            needs = tuple(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        else:
            needs = (False,) * len(inputs)
        if wants_needs:
            params["needs"] = needs
        y, vjps = function(*[t.data if isinstance(t, Tensor) else t for t in inputs], **params)
        if vjps is None or not any(needs):
            return Tensor(y)
        edges = [(t.grad_fn or t) if need else None for t, need in zip(inputs, needs, strict=True)]
        vjp = vjps if callable(vjps) else _separate(vjps, needs)
        return Tensor._recorded(y, Node(function.__name__, edges, vjp))

    return apply


def _separate(vjps: tuple, needs: tuple[bool, ...]) -> Callable:
    kept = [vjp if need else None for vjp, need in zip(vjps, needs, strict=True)]
    del vjps  # the closure below must not see the dropped ones: they hold what it is our point to free

    def joint(gy: Any, acc: list) -> list:
        return [None if vjp is None else vjp(gy) for vjp in kept]

    return joint


def _order(root: Node) -> Iterator[Node]:
    """Nodes from ``root`` towards the leaves, every node after all its users; no recursion, so depth is no limit."""
    users: Counter[Node] = Counter()
    stack = [root]
    while stack:
        node = stack.pop()
        users[node] += 1
        if users[node] == 1:
            stack += [e for e in node.edges if isinstance(e, Node)]
    ready = [root]
    while ready:
        node = ready.pop()
        yield node
        for e in node.edges:
            if isinstance(e, Node):
                users[e] -= 1
                if not users[e]:
                    ready.append(e)


def _root(array: Any) -> int:
    """Identity of the memory behind an array, through all its views."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return id(array)


def _writable(array: Any) -> bool:
    """False for a broadcast view, which must not be added into (CuPy's flags do not say)."""
    return getattr(array.flags, "writeable", True) and 0 not in array.strides


class _Arrived:
    """Gradients on their way: node -> (array, owned by the tape), and the leaves' own, in ``leaves`` or on the leaf."""

    def __init__(self, leaves: dict[int, Any] | None) -> None:
        self.nodes: dict[Node, tuple[Any, bool]] = {}
        self.leaves = leaves

    def get(self, edge: Any) -> tuple[Any, bool]:
        if isinstance(edge, Node):
            return self.nodes.get(edge, (None, False))
        return (edge._grad if self.leaves is None else self.leaves.get(id(edge))), True

    def put(self, edge: Any, gradient: Any, owned: bool) -> None:
        if isinstance(edge, Node):
            self.nodes[edge] = gradient, owned
        elif self.leaves is None:
            edge._grad = gradient
        else:
            self.leaves[id(edge)] = gradient

    def add(self, edge: Any, gradient: Any, fresh: bool) -> None:
        """Add ``gradient``; ``fresh`` says that no other holder of its memory exists."""
        old, mine = self.get(edge)
        if old is None:
            if isinstance(edge, Tensor) and not fresh:
                gradient, fresh = gradient.copy(), True
            self.put(edge, gradient, fresh)
        elif mine:
            old += gradient
        else:
            self.put(edge, old + gradient, True)


def backprop(root: Node, gy: Any, leaves: dict[int, Any] | None = None) -> None:
    """Send ``gy`` from ``root`` to the leaves, freeing the graph on the way.

    A leaf's gradient is added to its ``.grad``, or to ``leaves[id(leaf)]`` where a dict is given (recompute).
    ``gy`` is read-only.  Raises GraphError if a part of the graph was used up by an earlier backward.
    """
    arrived = _Arrived(leaves)
    arrived.put(root, gy, False)
    for node in _order(root):
        gy, owned = arrived.nodes.pop(node, (None, False))
        if gy is None:  # every user of this node sent no gradient
            continue
        if node.vjp is None:
            raise GraphError(
                f"backward reached {node.name!r} a second time; expected one backward per graph: its saved values "
                "are freed on the way. Run the forward again, or add the losses and call backward once."
            )
        acc = []
        for e in node.edges:
            old, mine = arrived.get(e) if e is not None else (None, False)
            acc.append(old if mine else None)
        gradients = node.vjp(gy, acc)
        node.vjp = None
        sharers = Counter(
            _root(g) for e, g in zip(node.edges, gradients, strict=True) if e is not None and g is not None
        )
        source = _root(gy)
        for e, g, into in zip(node.edges, gradients, acc, strict=True):
            if e is None or g is None or g is into:  # nothing wanted, nothing sent, or added in place already
                continue
            memory = _root(g)
            arrived.add(e, g, sharers[memory] == 1 and (owned or memory != source) and _writable(g))
