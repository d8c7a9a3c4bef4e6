"""The sandbox that a model's chat template runs in: a template comes with a download, so it is an untrusted program.

jinja2's own sandbox keeps it away from Python's insides. Here is what keeps it from taking the machine's memory or
time: one budget for each rendering, spent by every step of a loop and by every call, filter and operator with the size
of what goes in and comes out, and a look ahead at the few operations whose result can be far larger than that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_RENDERED_CHARACTERS = 20_000_000  # of the result, and of any value on the way to it
MAX_LOOP_STEPS = 1_000_000
MAX_WORK = 200_000_000  # characters and elements that all operations of one rendering take and give
_ELEMENT = 20  # characters that an element of a container counts for besides its own: it costs memory and time too
MAX_SECONDS = 60.0  # far more than the other limits leave room for: a last resort


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self.steps = self.work = 0
        self.ends = time.monotonic() + MAX_SECONDS

    def step(self, n: int = 1) -> None:
        """``n`` steps of a loop, or calls.  Raises SecurityError beyond the limit."""
        self.steps += n
        if self.steps > MAX_LOOP_STEPS:
            raise SecurityError(f"more than {MAX_LOOP_STEPS:,} loop steps are not allowed")
        if time.monotonic() > self.ends:
            raise SecurityError(f"more than {MAX_SECONDS:.0f} seconds are not allowed")

    def spend(self, *values: Any) -> None:
        """The sizes of ``values``, containers counted through and through.  Raises SecurityError beyond the limit."""
        for value in values:
            if value is None or type(value) in _SMALL:
                continue
            size = len(value) if type(value) is str else weigh(value, MAX_RENDERED_CHARACTERS)
            if size > MAX_RENDERED_CHARACTERS:
                raise SecurityError(f"a value of more than {MAX_RENDERED_CHARACTERS:,} characters is not allowed")
            self.work += size
        if self.work > MAX_WORK:
            raise SecurityError(f"operations on more than {MAX_WORK:,} characters are not allowed")


_SMALL = (bool, int, float)
_budget: ContextVar[Budget] = ContextVar("chat template budget")


@contextmanager
def one_rendering() -> Iterator[None]:
    """A new budget for what is rendered inside."""
    token = _budget.set(Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def weigh(value: Any, limit: int) -> int:
    """Characters in ``value``, an element of a container as 20: one object in two places counts twice, as in its text.

    The count ends soon after ``limit``, because a few small lists that hold each other can stand for a huge text.
    """
    if isinstance(value, str):
        return len(value)
    total, waiting = 0, [value]
    while waiting and total <= limit:
        one = waiting.pop()
        if type(one) is str or isinstance(one, bytes):
            total += len(one) + 1
        elif one is None or type(one) in _SMALL:
            total += 1
        elif isinstance(one, Mapping):
            total += _ELEMENT * (len(one) + 1)
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, Collection):
            total += _ELEMENT * (len(one) + 1)
            waiting += () if isinstance(one, range) else one
        elif isinstance(one, Namespace):
            waiting += object.__getattribute__(one, "_Namespace__attrs").values()
    return total


# ---------------------------------------------------------------------- operations that give far more than they take


_AHEAD = {
    "center", "ljust", "rjust", "zfill", "indent", "expandtabs", "tojson", "batch", "slice", "wordwrap", "urlize",
    "translate", "replace", "join", "format", "format_map",
}  # fmt: skip


def _look_ahead(name: str, value: Any, given: list[Any]) -> None:
    """Refuse a filter or a method of text, called ``name``, whose result would be too large, before it is made."""
    if name not in _AHEAD:
        return
    size, numbers = weigh(value, MAX_RENDERED_CHARACTERS), [abs(x) for x in given if type(x) is int]
    texts = [x for x in given if isinstance(x, str)]
    widest, longest = max(numbers, default=0), max(map(len, texts), default=0)
    result = 0
    if name in ("center", "ljust", "rjust", "zfill"):
        result = max(widest, size)
    elif name in ("indent", "expandtabs", "tojson"):
        result = (size + 1) * max(widest, longest, 1)
    elif name in ("batch", "slice"):
        result = size + widest * (longest + 1)
    elif name in ("wordwrap", "urlize"):
        result = (size + 1) * (longest + 1)
    elif name == "translate":
        result = (size + 1) * (sum(weigh(x, MAX_RENDERED_CHARACTERS) for x in given) + 1)
    elif name == "replace" and len(texts) >= 2:
        result = size + (str(value).count(texts[0]) if texts[0] else size + 1) * len(texts[1])
    elif name == "join":
        # As a filter the value holds the parts, as a method it is what stands between them.
        parts, between = (given[0], value) if isinstance(value, str) and given else (value, texts[0] if texts else "")
        result = (len(parts) if isinstance(parts, Collection) else 0) * len(between)
    elif name in ("format", "format_map") and re.search(r"\{[^{}]*(\{|\d{4})", str(value)):
        raise SecurityError("a field width of more than three digits is not allowed")
    if name == "format":
        _check_percent(value)
    if result > MAX_RENDERED_CHARACTERS:
        raise SecurityError(f"{name} with a result of up to {result:,} characters is not allowed")


def _check_percent(left: Any) -> None:
    if isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\*|\d{4})", left):
        raise SecurityError("a field width of more than three digits is not allowed")


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks ahead and spends; a filter that is handed the environment first gets it as before."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        before, (value, *given) = args[:skip], args[skip:]
        value, *given = map(_held, (value, *given))
        more = [*given, *kwargs.values()]
        budget.spend(value, *more)
        _look_ahead(name, value, more)
        result = function(*before, value, *given, **kwargs)
        budget.spend(result)
        return result

    return bounded


def _held(value: Any) -> Any:
    """A list for a generator, such as ``messages | map(...)``: what nobody has looked at cannot be weighed."""
    return list(value) if isinstance(value, GeneratorType) else value


def _concatenated(parts: list[Any]) -> str:
    """``a ~ b ~ c``; both sides are in ``parts``, which has been paid for."""
    return "".join(map(str, parts))


def _ticked(nothing: Any, size: int) -> str:
    """One step of a loop whose body writes ``size`` characters of its own."""
    budget = _budget.get()
    budget.step()
    budget.work += size
    budget.spend("")
    return ""


class _Watched(NodeTransformer):
    """Makes two things visible to the budget for which jinja2 offers no hook: loops, and ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        tick = nodes.Filter(nodes.Const(None), "_ticked", [nodes.Const(size)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_concatenated", [], [], None, None).set_lineno(node.lineno)


# ---------------------------------------------------------------------- the environment


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}``: some templates mark answers with it; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which also stops a private attribute at once, and counts."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # The stock answer is an undefined value that prints as nothing: an attack would pass for an empty string.
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Watched().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for size, times in ((left, right), (right, left)):
                # "times" is rarely a bool and then harmless; a list counts with what stands in it
                if isinstance(size, str | list | tuple) and isinstance(times, int):
                    n = weigh(size, MAX_RENDERED_CHARACTERS) * times
                    if n > MAX_RENDERED_CHARACTERS:
                        raise SecurityError(f"a repetition that makes {n:,} characters is not allowed")
        elif operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise SecurityError(f"the power {right} is not allowed")
        elif operator == "%":
            _check_percent(left)
        budget = _budget.get()
        budget.spend(left, right)
        result = super().call_binop(context, operator, left, right)
        if type(result) is int and result.bit_length() > 4096:
            raise SecurityError("a number of more than 4,096 bits is not allowed")
        budget.spend(result)
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        # jinja2 wraps str.format, and the method is under it; anything else may have any attribute but a __self__.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None) if callable(__obj) else None
        budget.step()
        args = tuple(map(_held, args))
        given = [*args, *kwargs.values()]
        budget.spend(*given)
        if getattr(__obj, "__name__", "") == "strftime":
            _check_percent(given[0] if given else "")
        if isinstance(owner, str | bytes):
            budget.spend(owner)
            _look_ahead(__obj.__name__, owner, given)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.spend(result)
        return result


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, and non-ASCII text: the model would be trained on the escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    # Subtraction instead of len(): the length of range(10**30) does not fit into len().
    _budget.get().step(max(0, (numbers.stop - numbers.start) // numbers.step) + 1)
    return numbers


@pass_context  # with it jinja2 works nothing out while compiling
def _shown(context: Any, value: Any) -> Any:
    """What ``{{ value }}`` writes, also into a block that a variable keeps."""
    _budget.get().spend(value)
    return value


@lru_cache(maxsize=16)
def compiled(template: str) -> jinja2.Template:
    """The template in the environment that Hugging Face templates are written for; render it in ``one_rendering()``."""
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        finalize=_shown,
        optimized=False,  # constants are worked out while rendering too: there they cost
    )
    environment.filters |= {"tojson": _tojson, "_ticked": _ticked, "_concatenated": _concatenated}
    own = ("_ticked",)
    environment.filters = {
        name: function if name in own else _bounded(name, function) for name, function in environment.filters.items()
    }
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise_exception, "range": _range}
    return environment.from_string(template)
