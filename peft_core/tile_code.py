"""The register tile of ``tiles.py`` in LLVM's words, cut to the registers of the CPU that numba compiles for.

Sums stay in registers while the summed dimension goes by, so a CPU with fewer or shorter registers gets smaller blocks:
the tile that kernels call is then a function that calls one block after another. Where no instruction multiplies pairs
of bf16, the halves of each word are widened to float32: those of the right operand in registers, which all rows of a
block share; those of the left one ahead of the blocks, row by row into memory, because in registers each element would
take an instruction for every few products, and on most CPUs in the place of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

CHUNK = 128  # words of the summed dimension between two loads of the sums: 48 columns of them stay in the first cache


@dataclass(frozen=True)
class Machine:
    """What a CPU has for products: vector ``registers`` of ``lanes`` float32; ``bf16``: AVX512-BF16."""

    lanes: int
    registers: int
    bf16: bool = False

    def block(self, rows: int, columns: int, half: bool) -> tuple[int, int]:
        """The part of a tile that the registers hold and that loads least for a product.

        A vector of the right operand counts twice, for it stays in a register meanwhile.
        """

        def fits(r: int, c: int) -> bool:
            vectors = c // self.lanes
            right = vectors * (2 if half and not self.bf16 else 1)  # words, and the halves that they are widened to
            return rows % r == 0 and columns % c == 0 and r * vectors + right + 1 <= self.registers

        sizes = [(r, c) for r in range(1, rows + 1) for c in range(self.lanes, columns + 1, self.lanes) if fits(r, c)]
        return max(sizes, key=lambda size: size[0] * size[1] / (size[0] + 2 * size[1] // self.lanes))


def machine_of(triple: str, cpu: str, features: str) -> Machine:
    """The machine that numba compiles for, from the three texts by which its cache on disk tells machines apart."""
    has = set(features.split(","))
    if triple.startswith(("aarch64", "arm64")):
        return Machine(4, 32)
    if "+avx512f" in has:
        return Machine(16, 32, "+avx512bf16" in has)
    if "+avx2" in has and "+fma" in has:
        return Machine(8, 16)
    return Machine(4, 14)  # SSE has 16, but without a multiply-add a product passes through one of its own


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VF, VI, VH = ir.VectorType(F32, 16), ir.VectorType(I32, 16), ir.VectorType(I16, 16)
VB = ir.VectorType(_BFloat(), 16)


def _int(n: int) -> ir.Constant:
    return ir.Constant(I64, n)


def load(b: ir.IRBuilder, pointer: Any, align: int = 4) -> Any:
    """The value at a pointer that is aligned to ``align`` bytes at least."""
    value = b.load(pointer)
    value.align = align
    return value


def widen(b: ir.IRBuilder, words: Any, upper: int) -> Any:
    """The lower or the upper bf16 of a word, or of each word of a vector, as float32."""
    vector = isinstance(words.type, ir.VectorType)
    kind: Any = ir.VectorType(F32, words.type.count) if vector else F32

    def constant(n: int) -> ir.Constant:
        return ir.Constant(words.type, [n] * words.type.count if vector else n)

    return b.bitcast(b.and_(words, constant(0xFFFF0000)) if upper else b.shl(words, constant(16)), kind)


def round_bf16(b: ir.IRBuilder, x: Any, machine: Machine) -> Any:
    """The bf16 bits <16 x i16> of <16 x float>, to nearest even; NaN stays NaN.

    In integers where no instruction does it: there LLVM would call a function that nobody has.
    """
    if machine.bf16:
        return b.bitcast(b.fptrunc(x, VB), VH)

    def constant(n: int) -> ir.Constant:
        return ir.Constant(VI, [n] * 16)

    u = b.bitcast(x, VI)
    high = b.lshr(u, constant(16))
    nearest = b.lshr(b.add(u, b.add(b.and_(high, constant(1)), constant(0x7FFF))), constant(16))
    nan = b.icmp_unsigned(">", b.and_(u, constant(0x7FFFFFFF)), constant(0x7F800000))
    return b.trunc(b.select(nan, b.or_(high, constant(0x40)), nearest), VH)


# ------------------------------------------------------------------------------------------------ a block in registers


def _phi(b: ir.IRBuilder, *incoming: tuple) -> Any:
    phi = b.phi(incoming[0][0].type)
    for value, block in incoming:
        phi.add_incoming(value, block)
    return phi


def _broadcast(b: ir.IRBuilder, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), None))


@dataclass(frozen=True)
class _Product:
    """How words are multiplied: float32, pairs of bf16 by one instruction, or widened, half after half.

    Widened, the left operand is float32: the lower halves of ``CHUNK`` words, then the upper ones.
    """

    machine: Machine
    half: bool

    @property
    def widened(self) -> bool:
        return self.half and not self.machine.bf16

    @property
    def left(self) -> ir.Type:
        return I32 if self.half and not self.widened else F32

    def steps(self, b: ir.IRBuilder, sums: list, a_rows: list, w: Any, ldw: Any, kk: Any) -> list:
        """The sums after one more word of the summed dimension."""
        lanes, vectors = self.machine.lanes, len(sums) // len(a_rows)
        vector = ir.VectorType(I32 if self.half else F32, lanes)
        row = b.bitcast(b.gep(w, [b.mul(kk, ldw)]), vector.as_pointer())
        words = [load(b, b.gep(row, [_int(j)])) for j in range(vectors)]
        for upper in range(2 if self.widened else 1):
            ws = [widen(b, x, upper) for x in words] if self.widened else words
            at = b.add(kk, _int(CHUNK)) if upper else kk
            out = []
            for i, a_row in enumerate(a_rows):
                one = _broadcast(b, load(b, b.gep(a_row, [at])), lanes)
                out += [self._add(b, total, one, x) for total, x in zip(sums[i * vectors :], ws, strict=False)]
            sums = out
        return sums

    def _add(self, b: ir.IRBuilder, total: Any, one: Any, x: Any) -> Any:
        """total + one x."""
        sums = total.type
        if self.half and not self.widened:
            pairs = ir.VectorType(_BFloat(), 2 * self.machine.lanes)
            kind, name = ir.FunctionType(sums, [sums, pairs, pairs]), "llvm.x86.avx512bf16.dpbf16ps.512"
            operands = [total, b.bitcast(one, pairs), b.bitcast(x, pairs)]
        else:  # a multiply-add where there is one
            kind, name = ir.FunctionType(sums, [sums] * 3), f"llvm.fmuladd.v{self.machine.lanes}f32"
            operands = [one, x, total]
        return b.call(cgutils.get_or_insert_function(b.module, kind, name), operands)


def _loop(b: ir.IRBuilder, sums: list, edges: tuple, k0: Any, k1: Any, by: int, step: Callable) -> list:
    """sums after steps k0, k0 + by .. k1 (at least one).  ``edges``: the blocks before, of and after the loop."""
    before, block, after = edges
    b.position_at_end(block)
    kk = _phi(b, (k0, before))
    rolling = [_phi(b, (s, before)) for s in sums]
    out = rolling
    for u in range(by):
        out = step(out, b.add(kk, _int(u)))
    following = b.add(kk, _int(by))
    kk.add_incoming(following, block)
    for phi, value in zip(rolling, out, strict=True):
        phi.add_incoming(value, block)
    b.cbranch(b.icmp_signed("<", following, k1), block, after)
    return out


def _write_block(fn: ir.Function, product: _Product, rows: int, columns: int) -> None:
    """The body: load or zero the sums, two steps a turn, one more if k is odd, store."""
    b = ir.IRBuilder(fn.append_basic_block("entry"))
    a, lda, w, ldw, k, c, ldc, add = fn.args
    lanes = product.machine.lanes
    vector = ir.VectorType(F32, lanes)
    a_rows = [b.gep(a, [b.mul(lda, _int(i))]) for i in range(rows)]
    places = [b.gep(c, [b.add(b.mul(ldc, _int(i)), _int(j))]) for i in range(rows) for j in range(0, columns, lanes)]
    places = [b.bitcast(p, vector.as_pointer()) for p in places]
    entry = b.block
    old, start, main, mid, tail, done = (
        b.append_basic_block(n) for n in ("load", "start", "main", "mid", "tail", "done")
    )
    b.cbranch(b.icmp_signed("!=", add, _int(0)), old, start)
    b.position_at_end(old)
    loaded = [load(b, p) for p in places]
    b.branch(start)
    b.position_at_end(start)
    first = [_phi(b, (ir.Constant(vector, None), entry), (value, old)) for value in loaded]
    even = b.and_(k, _int(-2))
    b.cbranch(b.icmp_signed(">", even, _int(0)), main, mid)

    def step(sums: list, kk: Any) -> list:
        return product.steps(b, sums, a_rows, w, ldw, kk)

    turned = _loop(b, first, (start, main, mid), _int(0), even, 2, step)
    b.position_at_end(mid)
    between = [_phi(b, (x, start), (y, main)) for x, y in zip(first, turned, strict=True)]
    b.cbranch(b.icmp_signed("<", even, k), tail, done)
    last = _loop(b, between, (mid, tail, done), even, k, 1, step)
    b.position_at_end(done)
    sums = [_phi(b, (x, mid), (y, tail)) for x, y in zip(between, last, strict=True)]
    for place, value in zip(places, sums, strict=True):
        b.store(value, place).align = 4
    b.ret_void()


# ------------------------------------------------------------------------------------------------ a tile of blocks


def _widen_rows(b: ir.IRBuilder, a: Any, lda: Any, k: Any, rows: int, out: Any) -> None:
    """k words of each row as float32: row i at out[2 CHUNK i], the upper halves CHUNK further on."""
    with cgutils.for_range(b, k) as loop:
        for i in range(rows):
            word = load(b, b.gep(a, [b.add(b.mul(lda, _int(i)), loop.index)]))
            for upper in (0, 1):
                place = b.add(_int((2 * i + upper) * CHUNK), loop.index)
                b.store(widen(b, word, upper), b.gep(out, [place])).align = 4


def _write_blocks(fn: ir.Function, product: _Product, rows: int, columns: int) -> None:
    """The body: for CHUNK words of the summed dimension at a time (once for none), every block of the tile."""
    b = ir.IRBuilder(fn.append_basic_block("entry"))
    a, lda, w, ldw, k, c, ldc, add = fn.args
    n_rows, n_columns = product.machine.block(rows, columns, product.half)
    block = _function(fn.module, product, n_rows, n_columns, "block")
    floats = b.alloca(F32, rows * 2 * CHUNK) if product.widened else None
    entry, loop, done = b.block, b.append_basic_block("chunk"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    k0 = _phi(b, (_int(0), entry))
    left = b.sub(k, k0)
    depth = b.select(b.icmp_signed("<", left, _int(CHUNK)), left, _int(CHUNK))
    again = b.select(b.icmp_signed(">", k0, _int(0)), _int(1), add)
    rows_at, columns_at = b.gep(a, [k0]), b.gep(w, [b.mul(k0, ldw)])
    if floats is not None:
        _widen_rows(b, rows_at, lda, depth, rows, floats)
        rows_at, lda = floats, _int(2 * CHUNK)
    for j in range(0, columns, n_columns):
        for i in range(0, rows, n_rows):
            b.call(block, [b.gep(rows_at, [b.mul(lda, _int(i))]), lda, b.gep(columns_at, [_int(j)]), ldw, depth,
                           b.gep(c, [b.add(b.mul(ldc, _int(i)), _int(j))]), ldc, again])  # fmt: skip
    following = b.add(k0, _int(CHUNK))
    k0.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, k), loop, done)
    b.position_at_end(done)
    b.ret_void()


def _function(module: ir.Module, product: _Product, rows: int, columns: int, what: str) -> ir.Function:
    """The function of a tile or a block; one copy a module, not one a call: compile time."""
    name = f"peft_core_{what}_{rows}x{columns}_{'bf16' if product.half else 'float32'}"
    found = module.globals.get(name)
    if found is not None:
        return found
    whole = what == "block" or (
        product.machine.block(rows, columns, product.half) == (rows, columns) and not product.widened
    )
    word = I32 if product.half else F32
    left = product.left if what == "block" else word
    kind = [left.as_pointer(), I64, word.as_pointer(), I64, I64, F32.as_pointer(), I64, I64]
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), kind), name)
    fn.linkage = "internal"
    fn.attributes.add("noinline")
    (_write_block if whole else _write_blocks)(fn, product, rows, columns)
    return fn


def tile_function(module: ir.Module, machine: Machine, half: bool, rows: int, columns: int) -> ir.Function:
    """(a, lda, w, ldw, k, c, ldc, add): c[rows, columns] = a[rows, k] w[k, columns], plus c if ``add``, in a module.

    Pointers to words (``half``: uint32, else float32) and to float32 for c; counts and strides are int64.
    """
    return _function(module, _Product(machine, half), rows, columns, "tile")
