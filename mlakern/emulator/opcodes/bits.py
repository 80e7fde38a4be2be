"""Logic, shifts and bit fields (PTX ISA, "Logic and Shift Instructions", and the bit operations of
"Integer Arithmetic Instructions").
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.packed import lanewise
from mlakern.emulator.opcodes.table import BITS, opcode
from mlakern.emulator.program import Imm, Instruction
from mlakern.emulator.values import Value

_SIGNED_SHIFTS = {16: np.int16, 32: np.int32, 64: np.int64}


def _width(i: Instruction) -> int:
    kind = i.types[0]
    return 1 if kind == "pred" else int(kind[1:])


def _logic(name: str, scalar_predicate: str, template: str) -> None:
    @opcode(name, "d s s", f"pred {BITS}")
    def generate(e: Emitter, i: Instruction) -> None:
        width = _width(i)
        a, b = (e.read(operand, width) for operand in i.operands[1:])
        if width > 1:
            e.compute(i.operands[0], template, "u", a, b)
        else:
            a, b = truth(a), truth(b)
            e.predicate(i.operands[0], scalar_predicate if e.scalar(a, b) else template, "p", a, b)


def truth(value: Value) -> Value:
    """A predicate literal (0 or -1) as a predicate."""
    if value.kind == "i":
        return Value(1, "b", {"b": str(value.names["i"] != "0")})
    return value


_logic("and", "{0} and {1}", "{0} & {1}")
_logic("or", "{0} or {1}", "{0} | {1}")
_logic("xor", "{0} != {1}", "{0} ^ {1}")


@opcode("not", "d s", f"pred {BITS}")
def not_(e: Emitter, i: Instruction) -> None:
    width = _width(i)
    a = e.read(i.operands[1], width)
    if width > 1:
        e.compute(i.operands[0], "~{0}", "u", a)
    else:
        a = truth(a)
        e.predicate(i.operands[0], "not {0}" if a.scalar else "~{0}", "p", a)


@opcode("cnot", "d s", BITS)
def cnot(e: Emitter, i: Instruction) -> None:
    a = e.read(i.operands[1], _width(i))
    if a.scalar:
        e.set(i.operands[0], "i", f"int({e.get(a, 'i')} == 0)")
    else:
        e.set(i.operands[0], "u", f"({e.get(a, 'u')} == 0).astype({e.dtype('u', a.width)})")


def shift_left(a: Any, b: Any) -> Any:
    """Shift counts at and past the width give 0."""
    return np.where(b < 8 * a.itemsize, a << b.astype(a.dtype), a.dtype.type(0))


def shift_right(a: Any, b: Any) -> Any:
    """Unsigned: counts past the width give 0; signed: they give the sign."""
    bits = 8 * a.itemsize
    return (
        a >> np.minimum(b, bits - 1).astype(a.dtype)
        if a.dtype.kind == "i"
        else np.where(b < bits, a >> b.astype(a.dtype), a.dtype.type(0))
    )


@opcode("shl", "d s s", BITS)
def shl(e: Emitter, i: Instruction) -> None:
    width = _width(i)
    a, b = e.read(i.operands[1], width), e.read(i.operands[2], 32)
    count = i.operands[2]
    if e.scalar(a, b):
        code = f"({e.get(a, 'i')} << {e.get(b, 'i')}) & {(1 << width) - 1}"
        if not isinstance(count, Imm):
            code = f"{code} if {e.get(b, 'i')} < {width} else 0"
        e.set(i.operands[0], "i", code)
    elif isinstance(count, Imm) and count.value < width:
        by = Value(width, "i", {"i": str(count.value)})
        e.compute(i.operands[0], "{0} << {1}", "u", a, by)
    else:
        function = e.constant(shift_left)
        e.set(i.operands[0], "u", f"{function}({e.get(a, 'U')}, {e.get(b, 'u')})")


@opcode("shr", "d s s", f"{BITS} u16 u32 u64 s16 s32 s64")
def shr(e: Emitter, i: Instruction) -> None:
    width, signed = _width(i), i.types[0][0] == "s"
    a, b = e.read(i.operands[1], width), e.read(i.operands[2], 32)
    count = i.operands[2]
    form = "s" if signed else "u"
    if e.scalar(a, b):
        code = f"({e.get(a, 'j' if signed else 'i')} >> {e.get(b, 'i')}) & {(1 << width) - 1}"
        e.set(i.operands[0], "i", code)
    elif isinstance(count, Imm) and count.value < width:
        by = Value(width, "i", {"i": str(count.value)})
        e.compute(i.operands[0], "{0} >> {1}", form, a, by)
    else:
        function = e.constant(shift_right)
        e.set(i.operands[0], form, f"{function}({e.get(a, form.upper())}, {e.get(b, 'u')})")


def funnel(low: Any, high: Any, count: Any, left: bool, clamp: bool) -> Any:
    """shf: shift the 64-bit value high:low and keep its upper (left) or lower (right) word."""
    wide = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    count = (np.minimum(count, 32) if clamp else count & 31).astype(np.uint64)
    shifted = wide << count >> np.uint64(32) if left else wide >> count
    return shifted.astype(np.uint32)


@opcode("shf", "d s s s", "b32", "l clamp", ignored="r wrap")
def shf(e: Emitter, i: Instruction) -> None:
    low, high, count = (e.read(operand, 32) for operand in i.operands[1:])
    left, clamp = i.has("l"), i.has("clamp")
    if e.scalar(low, high, count):
        by = e.get(count, "i")
        by = f"min({by}, 32)" if clamp else f"({by} & 31)"
        wide = f"({e.get(high, 'i')} << 32 | {e.get(low, 'i')})"
        code = f"{wide} << {by} >> 32" if left else f"{wide} >> {by}"
        e.set(i.operands[0], "i", f"({code}) & 0xFFFFFFFF")
        return
    function = e.constant(funnel)
    args = f"{e.get(low, 'U')}, {e.get(high, 'U')}, {e.get(count, 'u')}"
    e.set(i.operands[0], "u", f"{function}({args}, {left}, {clamp})")


@opcode("lop3", "d s s s s", "b32")
def lop3(e: Emitter, i: Instruction) -> None:
    a, b, c = (e.read(operand, 32) for operand in i.operands[1:4])
    table = i.operands[4]
    if not isinstance(table, Imm):
        raise e.error("the look-up table of lop3 must be a literal")
    terms = []
    for row in range(8):
        if table.value >> row & 1:
            x, y, z = ("" if row >> bit & 1 else "~" for bit in (2, 1, 0))
            terms.append(f"({x}{{0}} & {y}{{1}} & {z}{{2}})")
    zero = "{0} & 0"
    e.compute(i.operands[0], " | ".join(terms) or zero, "u", a, b, c)


_PRMT_MODES = "f4e b4e rc8 ecl ecr rc16"


def permute(a: Any, b: Any, selector: Any) -> Any:
    """prmt: a nibble of the selector picks a byte of b:a; its top bit spreads the byte's sign."""
    words = np.broadcast_arrays(np.atleast_1d(a), np.atleast_1d(b), np.atleast_1d(selector))
    wide = words[0].astype(np.uint64) | words[1].astype(np.uint64) << np.uint64(32)
    out = np.zeros(wide.shape, np.uint32)
    for position in range(4):
        pick = words[2] >> np.uint32(4 * position)
        byte = (wide >> (np.uint64(8) * (pick & np.uint32(7)))) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        byte = np.where(pick & np.uint32(8), sign, byte)
        out |= byte.astype(np.uint32) << np.uint32(8 * position)
    return out


def _selectors(mode: str) -> tuple[int, int, int, int]:
    """The default-mode selectors that a mode stands for, by the two low bits of its selector."""
    rows = {
        "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
        "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
        "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
        "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
        "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
        "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
    }
    return rows[mode]


@opcode("prmt", "d s s s", "b32", _PRMT_MODES)
def prmt(e: Emitter, i: Instruction) -> None:
    a, b, c = (e.read(operand, 32) for operand in i.operands[1:])
    if i.modifiers:
        table = np.array(_selectors(i.modifiers[0]), np.uint32)
        name = e.constant(table, "prmt", i.modifiers[0])
        if c.scalar:
            c = Value(32, "i", {"i": e.temporary(f"int({name}[{e.get(c, 'i')} & 3])")})
        else:
            c = Value(32, "u", {"u": e.temporary(f"{name}[{e.get(c, 'u')} & 3]")})
    function = e.constant(permute)
    code = f"{function}({e.get(a, 'u')}, {e.get(b, 'u')}, {e.get(c, 'u')})"
    if e.scalar(a, b, c):
        e.set(i.operands[0], "i", f"{code}.item()")
    else:
        e.set(i.operands[0], "u", code)


def extract_field(a: Any, start: Any, length: Any) -> Any:
    """bfe: a field of bits, sign-extended for signed types; bits past the top repeat the sign."""
    bits = 8 * a.itemsize
    wide = a.astype(object)
    out = []
    values = np.broadcast_arrays(np.atleast_1d(wide), np.atleast_1d(start), np.atleast_1d(length))
    for value, first, count in zip(*(v.tolist() for v in values), strict=True):
        first, count = first & 0xFF, count & 0xFF
        signed = a.dtype.kind == "i"
        raw = value & ((1 << bits) - 1)
        top = min(first + count - 1, bits - 1)
        field = raw >> first & ((1 << count) - 1) if first < bits else 0
        if signed and count:
            sign = raw >> top & 1
            kept = max(0, min(count, bits - first))
            field &= (1 << kept) - 1
            if sign:
                field |= ((1 << bits) - 1) ^ ((1 << kept) - 1)
        out.append(field & ((1 << bits) - 1))
    return np.array(out, f"u{bits // 8}").view(a.dtype)


@opcode("bfe", "d s s s", "u32 u64 s32 s64")
def bfe(e: Emitter, i: Instruction) -> None:
    width, form = _width(i), i.types[0][0]
    a = e.read(i.operands[1], width)
    start, length = (e.read(operand, 32) for operand in i.operands[2:])
    first, count = i.operands[2:]
    if isinstance(first, Imm) and isinstance(count, Imm) and form == "u":
        by = Value(width, "i", {"i": str(min(first.value, width - 1))})
        kept = max(0, min(count.value, width - first.value))
        mask = Value(width, "i", {"i": str((1 << kept) - 1)})
        e.compute(i.operands[0], "({0} >> {1}) & {2}", "u", a, by, mask)
        return
    function = e.constant(extract_field)
    code = f"{function}({e.get(a, form)}, {e.get(start, 'u')}, {e.get(length, 'u')})"
    if e.scalar(a, start, length):
        e.set(i.operands[0], "i", f"{code}.item() & {(1 << width) - 1}")
    else:
        e.set(i.operands[0], form, code)


def insert_field(a: Any, b: Any, start: Any, length: Any) -> Any:
    """bfi: b with ``length`` bits from ``start`` on replaced by the low bits of a."""
    values = np.broadcast_arrays(*(np.atleast_1d(v) for v in (a, b, start, length)))
    bits = 8 * a.itemsize
    out = []
    for low, base, first, count in zip(*(v.tolist() for v in values), strict=True):
        first, count = first & 0xFF, count & 0xFF
        mask = ((1 << count) - 1) << first & ((1 << bits) - 1)
        out.append((base & ~mask) | (low << first & mask))
    return np.array(out, a.dtype)


@opcode("bfi", "d s s s s", "b32 b64")
def bfi(e: Emitter, i: Instruction) -> None:
    width = _width(i)
    a, b = (e.read(operand, width) for operand in i.operands[1:3])
    start, length = (e.read(operand, 32) for operand in i.operands[3:])
    first, count = i.operands[3:]
    if isinstance(first, Imm) and isinstance(count, Imm):
        mask = ((1 << count.value) - 1) << first.value & ((1 << width) - 1)
        field = Value(width, "i", {"i": str(mask)})
        rest = Value(width, "i", {"i": str(~mask & ((1 << width) - 1))})
        by = Value(width, "i", {"i": str(first.value)})
        e.compute(i.operands[0], "(({0} << {2}) & {3}) | ({1} & {4})", "u", a, b, by, field, rest)
        return
    function = e.constant(insert_field)
    args = ", ".join(e.get(value, "u") for value in (a, b, start, length))
    if e.scalar(a, b, start, length):
        e.set(i.operands[0], "i", f"{function}({args}).item()")
    else:
        e.set(i.operands[0], "u", f"{function}({args})")


def _bytes_of(values: Any) -> Any:
    return np.atleast_1d(values).view(np.uint8).reshape(-1, values.itemsize)


def population(a: Any) -> Any:
    """popc."""
    return np.unpackbits(_bytes_of(a), axis=1).sum(axis=1, dtype=np.uint32)


def leading_zeros(a: Any) -> Any:
    """clz."""
    bits = np.unpackbits(_bytes_of(a)[:, ::-1], axis=1)
    return np.where(bits.any(axis=1), bits.argmax(axis=1), bits.shape[1]).astype(np.uint32)


def reverse_bits(a: Any) -> Any:
    """brev."""
    bits = np.unpackbits(_bytes_of(a)[:, ::-1], axis=1)
    return np.packbits(bits[:, ::-1], axis=1)[:, ::-1].copy().view(a.dtype).reshape(-1)


def _count(name: str, function: Any, scalar: str) -> None:
    @opcode(name, "d s", "b32 b64")
    def generate(e: Emitter, i: Instruction) -> None:
        width = _width(i)
        a = e.read(i.operands[1], width)
        if a.scalar:
            e.set(i.operands[0], "i", scalar.format(e.get(a, "i"), width))
        else:
            e.set(i.operands[0], "u", f"{e.constant(function)}({e.get(a, 'u')})")


_count("popc", population, "bin({0}).count('1')")
_count("clz", leading_zeros, "{1} - {0}.bit_length()")
_count("brev", reverse_bits, "int(format({0}, '0{1}b')[::-1], 2)")


def find_leading(a: Any) -> Any:
    """bfind: the position of the highest bit that differs from the sign, or 0xFFFFFFFF."""
    flipped = np.where(a < 0, ~a, a).view(f"u{a.itemsize}") if a.dtype.kind == "i" else a
    return (8 * a.itemsize - 1 - leading_zeros(flipped).astype(np.int64)).astype(np.uint32)


@opcode("bfind", "d s", "u32 u64 s32 s64", "shiftamt")
def bfind(e: Emitter, i: Instruction) -> None:
    """.shiftamt: how far to shift left to bring the bit to the top; 0xFFFFFFFF stays."""
    form = i.types[0][0]
    a = e.read(i.operands[1], _width(i))
    code = f"{e.constant(find_leading)}({e.get(a, form)})"
    if i.has("shiftamt"):
        code = f"{e.constant(shift_amount)}({code}, {a.width - 1})"
    if a.scalar:
        e.set(i.operands[0], "i", f"{code}.item()", 32)
    else:
        e.set(i.operands[0], "u", code, 32)


def shift_amount(position: Any, top: int) -> Any:
    """bfind.shiftamt from the position of the bit."""
    missing = np.uint32(0xFFFFFFFF)
    return np.where(position == missing, missing, np.uint32(top) - position)


def mask_of(start: Any, length: Any, clamp: bool) -> Any:
    """bmsk: ones from bit ``start`` on, ``length`` of them; counts past 31 are cut or wrap."""
    first, count = (
        x.astype(np.uint64) if clamp else (x & np.uint32(31)).astype(np.uint64)
        for x in (start, length)
    )
    first, count = np.minimum(first, np.uint64(32)), np.minimum(count, np.uint64(32))
    one = np.uint64(1)
    return (((one << count) - one) << first).astype(np.uint32)


_MASKS = {"clamp": partial(mask_of, clamp=True), "wrap": partial(mask_of, clamp=False)}


@opcode("bmsk", "d s s", "b32", "clamp wrap")
def bmsk(e: Emitter, i: Instruction) -> None:
    sources = [e.read(operand, 32) for operand in i.operands[1:]]
    lanewise(e, i.operands[0], _MASKS[i.choice(_MASKS)], 32, *sources)


def extend(a: Any, bits: Any, signed: bool, clamp: bool) -> Any:
    """szext: the low ``bits`` bits of a, extended with zeros or with the sign."""
    kept = np.minimum(bits, 32) if clamp else bits & np.uint32(31)
    wide = a.astype(np.uint64) & ((np.uint64(1) << kept.astype(np.uint64)) - np.uint64(1))
    if signed:
        sign = np.where(kept > 0, np.uint64(1) << np.maximum(kept, 1).astype(np.uint64) - 1, 0)
        wide = (wide ^ sign.astype(np.uint64)) - sign.astype(np.uint64)
    return wide.astype(np.uint32)


_EXTENSIONS = {
    (kind, mode): partial(extend, signed=kind == "s32", clamp=mode == "clamp")
    for kind in ("u32", "s32")
    for mode in ("clamp", "wrap")
}


@opcode("szext", "d s s", "u32 s32", "clamp wrap")
def szext(e: Emitter, i: Instruction) -> None:
    function = _EXTENSIONS[i.types[0], i.choice(("clamp", "wrap"))]
    lanewise(e, i.operands[0], function, 32, *(e.read(o, 32) for o in i.operands[1:]))
