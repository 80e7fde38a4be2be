"""Comparison and selection (PTX ISA, "Comparison and Selection Instructions")."""

from __future__ import annotations

from typing import Any

from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.arithmetic import bits_of
from mlakern.emulator.opcodes.bits import truth
from mlakern.emulator.opcodes.floating import (
    extract_half,
    flush_half,
    flush_value,
    pack_halves,
    widen_half,
)
from mlakern.emulator.opcodes.table import BITS, FLOATS, INTEGERS, opcode
from mlakern.emulator.program import Both, Instruction
from mlakern.emulator.values import Value

_COMPARE = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "lo": "{0} < {1}",
    "ls": "{0} <= {1}",
    "hi": "{0} > {1}",
    "hs": "{0} >= {1}",
    "num": "({0} == {0}) & ({1} == {1})",
    "nan": "({0} != {0}) | ({1} != {1})",
    "equ": "~(({0} < {1}) | ({0} > {1}))",
    "neu": "~({0} == {1})",
    "ltu": "~({0} >= {1})",
    "leu": "~({0} > {1})",
    "gtu": "~({0} <= {1})",
    "geu": "~({0} < {1})",
}
_FLOAT_ONLY = ("num", "nan", "equ", "neu", "ltu", "leu", "gtu", "geu")
_ORDERED_NE = "({0} < {1}) | ({0} > {1})"


_JOINED = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}"}
_HALVES = ("f16", "bf16")


def compare(e: Emitter, i: Instruction, out: Any, a: Value, b: Value) -> Value:
    """The comparison named by an instruction's modifiers."""
    kind = i.types[-1].removesuffix("x2")
    name = i.choice(_COMPARE)
    template = _COMPARE[name]
    if kind in (*_HALVES, "f32", "f64"):
        if i.has("ftz"):
            a, b = (_flushed(e, value, kind) for value in (a, b))
        if kind in _HALVES:
            a, b = (widen_half(e, value, kind) for value in (a, b))
        if name == "ne":
            template = _ORDERED_NE
        if e.scalar(a, b):
            template = template.replace("~", "not ").replace("&", "and").replace("|", "or")
        form = "f"
    else:
        if i.has("ftz") or name in _FLOAT_ONLY:
            raise e.error(f"no such comparison of type .{kind}")
        form = "s" if kind[0] == "s" else "u"
    return e.predicate(out, template, form, a, b)


def _flushed(e: Emitter, value: Value, kind: str) -> Value:
    if kind == "f32":
        return flush_value(e, value)
    if kind not in _HALVES:
        raise e.error(f".ftz of type .{kind} is not supported")
    return flush_half(e, value, kind)


def _found(e: Emitter, i: Instruction, out: Any, a: Value, b: Value) -> Value:
    """The comparison, joined with the predicate that the last operand may be."""
    if len(i.operands) == 3:
        return compare(e, i, out, a, b)
    first = compare(e, i, e.scratch(1), a, b)
    joined = _JOINED[i.choice(_JOINED)]
    return e.predicate(out, joined, "p", first, truth(e.read(i.operands[3], 1)))


def _pairs(e: Emitter, i: Instruction) -> list[tuple[Value, Value]]:
    """The values to compare: two pairs of a packed type, low halves first."""
    kind = i.types[-1]
    if not kind.endswith("x2"):
        width = 16 if kind in _HALVES else bits_of(kind)
        return [(e.read(i.operands[1], width), e.read(i.operands[2], width))]
    a, b = (e.read(operand, 32) for operand in i.operands[1:3])
    return [(extract_half(e, a, half), extract_half(e, b, half)) for half in (0, 1)]


@opcode(
    "setp",
    "d s s s?",
    f"{INTEGERS} {FLOATS} {BITS} f16 bf16 f16x2 bf16x2",
    f"{' '.join(_COMPARE)} {' '.join(_JOINED)} ftz",
)
def setp(e: Emitter, i: Instruction) -> None:
    pairs, out = _pairs(e, i), i.operands[0]
    if len(pairs) == 1:
        _found(e, i, out, *pairs[0])
        return
    if not isinstance(out, Both):
        raise e.error("expected two predicates p|q")
    for item, pair in zip((out.first, out.second), pairs, strict=True):
        _found(e, i, item, *pair)


_ONES = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "u16": 0xFFFF, "s16": 0xFFFF}


@opcode(
    "set",
    "d s s s?",
    f"{INTEGERS} {FLOATS} {BITS} f16 bf16 f16x2 bf16x2",
    f"{' '.join(_COMPARE)} {' '.join(_JOINED)} ftz",
    typed=2,
)
def set_(e: Emitter, i: Instruction) -> None:
    """All ones, or 1.0 for a floating destination, where the comparison holds, else 0."""
    kind, pairs = i.types[0], _pairs(e, i)
    if len(i.types) != 2 or (kind.endswith("x2") and len(pairs) != 2):
        raise e.error(
            "need the types of the result and of what is compared, both packed or neither"
        )
    single = kind.removesuffix("x2") if len(pairs) == 1 or kind.endswith("x2") else "u16"
    width = 16 if single in ("f16", "bf16", "u16", "s16") else 32
    one, zero = (Value(width, "i", {"i": str(bits)}) for bits in (_ONES.get(single, 0xFFFFFFFF), 0))
    if len(pairs) == 1:
        select(e, i.operands[0], one, zero, _found(e, i, e.scratch(1), *pairs[0]))
        return
    low, high = (
        select(e, e.scratch(16), one, zero, _found(e, i, e.scratch(1), *pair)) for pair in pairs
    )
    pack_halves(e, i.operands[0], low, high)


def select(e: Emitter, out: Any, a: Value, b: Value, condition: Value) -> Value:
    """``condition ? a : b``."""
    if condition.scalar:
        test = e.get(condition, "b")
        if e.scalar(a, b):
            form = "g" if a.kind == b.kind == "g" else "i"
            return e.set(out, form, f"{e.get(a, form)} if {test} else {e.get(b, form)}", a.width)
        form = _common(a, b)
        full = form.upper()
        return e.set(out, form, f"{e.get(a, full)} if {test} else {e.get(b, full)}", a.width)
    form = _common(a, b)
    test = e.get(condition, "p")
    return e.set(out, form, f"where({test}, {e.get(a, form)}, {e.get(b, form)})", a.width)


def _common(a: Value, b: Value) -> str:
    """The array form in which two values are at hand without conversion, if there is one."""
    for value, other in ((a, b), (b, a)):
        if value.kind == "f" and (other.scalar or other.kind == "f"):
            return "f"
        if value.kind == "s" and (other.scalar or other.kind == "s"):
            return "s"
    return "u"


@opcode("selp", "d s s s", f"{INTEGERS} {FLOATS} {BITS}")
def selp(e: Emitter, i: Instruction) -> None:
    width = bits_of(i.types[0])
    a, b = (e.read(operand, width) for operand in i.operands[1:3])
    select(e, i.operands[0], a, b, truth(e.read(i.operands[3], 1)))


@opcode("slct", "d s s s", f"{INTEGERS} {FLOATS} {BITS}", "ftz", typed=2)
def slct(e: Emitter, i: Instruction) -> None:
    width = bits_of(i.types[0])
    a, b = (e.read(operand, width) for operand in i.operands[1:3])
    c = e.read(i.operands[3], 32)
    zero = Value(32, "i", {"i": "0"})
    form = "f" if i.types[1] == "f32" else "s"
    if i.has("ftz") and form != "f":
        raise e.error(".ftz needs .f32")
    c = flush_value(e, c) if i.has("ftz") else c
    select(e, i.operands[0], a, b, e.predicate(e.scratch(1), "{0} >= {1}", form, c, zero))
