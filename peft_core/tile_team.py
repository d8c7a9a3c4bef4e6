"""One call of a kernel shared with workers that are awake: what generation needs, where a call lasts microseconds.

Waking a thread takes longer than many a small product, and so does handing the interpreter's lock over. A kernel built
on ``share`` is called on the main thread alone and publishes its parts, a machine function with the address of its
arguments, in a few words of shared memory. Workers spin on these words outside the interpreter for a moment
(``serve``) before they go back to sleep. A part belongs to whoever claims it first, so the caller never waits for a
thread that has not begun: asleep, late or pushed aside by another process, its parts are done by the others. Which
thread does a part changes no number.

Imports numba at its top and is itself imported inside functions only, as tiles.py is.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .kernels import _ASLEEP, _QUIT
from .tile_parts import INLINE, kernel

# Places in the shared words (int64), each kind on cache lines of its own
_CLAIMS, _BODY, _BLOCK = 0, 1, 2  # call number, parts and next part in one word; the function; where its arguments are
_DONE = 16  # parts that are done
# _QUIT: workers shall leave.  _ASLEEP: how many have left by themselves.

_PARTS, _CALL = 1 << 10, 1 << 20  # within the word of claims: next part + parts * _PARTS + number of the call * _CALL
_IDLE = 300_000  # ticks, some 0.1 ms: what waking a worker would cost is about half of it
_PATIENCE = 50_000  # ticks of waiting before others are let on this CPU

_intrinsic: Any = intrinsic  # its annotation counts the typing context among a caller's arguments
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BODY_KIND = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64])  # part, parts, address of the arguments


def _word(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
    return b.gep(context.make_array(signature.args[0])(context, b, args[0]).data, [args[1]])


@_intrinsic
def _load(typing, team, i):
    def write(context, b, signature, args):
        return b.load_atomic(_word(context, b, signature, args), "acquire", 8)

    return types.int64(team, types.intp), write


@_intrinsic
def _store(typing, team, i, value):
    def write(context, b, signature, args):
        b.store_atomic(args[2], _word(context, b, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(team, types.intp, types.int64), write


@_intrinsic
def _add(typing, team, i, value):
    def write(context, b, signature, args):
        return b.atomic_rmw("add", _word(context, b, signature, args), args[2], "acq_rel")

    return types.int64(team, types.intp, types.int64), write


@_intrinsic
def _replace(typing, team, i, old, new):
    """Whether word i was ``old``, and is ``new`` now."""

    def write(context, b, signature, args):
        found = b.cmpxchg(_word(context, b, signature, args), args[2], args[3], "acq_rel", "acquire")
        return b.extract_value(found, 1)

    return types.boolean(team, types.intp, types.int64, types.int64), write


@_intrinsic
def _ticks(typing):
    """The clock of the processor, after the short pause that loops of waiting owe its other half."""

    def write(context, b, signature, args):
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"), [])
        clock = cgutils.get_or_insert_function(b.module, ir.FunctionType(_I64, []), "llvm.readcyclecounter")
        return b.call(clock, [])

    return types.int64(), write


@_intrinsic
def _let_others_run(typing):
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"

    def write(context, b, signature, args):
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(_I32, []), name), [])
        return context.get_dummy_value()

    return types.void(), write


@_intrinsic
def _run(typing, body, part, parts, block):
    def write(context, b, signature, args):
        b.call(b.inttoptr(args[0], _BODY_KIND.as_pointer()), [args[1], args[2], args[3]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), write


# ------------------------------------------------------------------------------------------------ a function as words


def _body(context: Any, module: ir.Module, compiled: Any, values: list, kinds: tuple) -> ir.Function:
    """A function of (part, parts, address) that reads its other arguments there and calls ``compiled`` with them."""
    name = f"team_{compiled.fndesc.mangled_name}"
    if name in module.globals:
        return module.globals[name]
    fn = ir.Function(module, _BODY_KIND, name)
    fn.linkage = "internal"
    b = ir.IRBuilder(fn.append_basic_block("entry"))
    held = ir.LiteralStructType([v.type for v in values]).as_pointer()
    block = b.inttoptr(fn.args[2], held)
    given = [b.load(cgutils.gep_inbounds(b, block, 0, i)) for i in range(len(values))]
    callee = context.declare_function(module, compiled.fndesc)
    context.call_conv.call_function(b, callee, types.none, kinds, [fn.args[0], fn.args[1], *given])
    b.ret_void()
    return fn


@_intrinsic
def _as_words(typing, part, arguments):
    """(address of a body that runs ``part(t, T, *arguments)``, address of the arguments in the caller's frame)."""
    kinds = (types.intp, types.intp, *arguments.types)
    part.get_call_type(typing, kinds, {})  # compiles it
    compiled = part.dispatcher.overloads[kinds]

    def write(context, b, signature, args):
        context.add_linking_libs([compiled.library])
        values = [b.extract_value(args[1], i) for i in range(len(arguments.types))]
        block = cgutils.alloca_once(b, ir.LiteralStructType([v.type for v in values]))
        for i, value in enumerate(values):
            b.store(value, cgutils.gep_inbounds(b, block, 0, i))
        fn = _body(context, b.module, compiled, values, kinds)
        return context.make_tuple(b, signature.return_type, [b.ptrtoint(fn, _I64), b.ptrtoint(block, _I64)])

    return types.UniTuple(types.int64, 2)(part, arguments), write


# ------------------------------------------------------------------------------------------------ calls


@njit(**INLINE)
def _claim(team):
    """Do one part that nobody has begun; False if there is none."""
    word = _load(team, _CLAIMS)
    parts, part = word % _CALL // _PARTS, word % _PARTS
    if part >= parts:
        return False
    body, block = _load(team, _BODY), _load(team, _BLOCK)
    if _replace(team, _CLAIMS, word, word + 1):  # then they were of this call: with a part to do it could not end
        _run(body, part, parts, block)
        _add(team, _DONE, 1)
    return True


@njit(**INLINE)
def share(team, parts, part, arguments):
    """Run ``part(t, parts, *arguments)``, a ``@kernel`` of that kind, for each t, with the team."""
    body, block = _as_words(part, arguments)
    call = _load(team, _CLAIMS) // _CALL + 1
    _store(team, _BODY, body)
    _store(team, _BLOCK, block)
    _store(team, _DONE, 0)
    _store(team, _CLAIMS, call * _CALL + parts * _PARTS)
    while _claim(team):
        pass
    start = _ticks()
    while _load(team, _DONE) < parts:
        if _ticks() - start > _PATIENCE:
            _let_others_run()


@kernel
def serve(t, T, team):
    """A worker's time awake: parts of every call, until it is told to leave or no call has come for a while."""
    seen, last = _load(team, _CLAIMS), _ticks()
    while _load(team, _QUIT) == 0:
        now = _ticks()
        word = _load(team, _CLAIMS)
        if word != seen:
            seen, last = word, now
            while _claim(team):
                pass
        elif now - last > _IDLE:
            _add(team, _ASLEEP, 1)
            return
