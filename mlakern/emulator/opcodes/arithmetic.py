"""Integer arithmetic, comparison and selection (PTX ISA, "Integer Arithmetic Instructions",
"Comparison and Selection Instructions").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlakern.emulator.emitter import Emitter
from mlakern.emulator.errors import Fault
from mlakern.emulator.opcodes.floating import add_float, flush_value, minmax_float
from mlakern.emulator.opcodes.table import BITS, FLOATS, INTEGERS, opcode
from mlakern.emulator.program import Instruction
from mlakern.emulator.values import SIGNED, UNSIGNED, Value

HALVES = "f16 f16x2 bf16 bf16x2 f32x2"


def bits_of(kind: str) -> int:
    """Width in bits of a scalar type name such as s32."""
    return int(kind.lstrip("usbf"))


def form_of(kind: str) -> str:
    """The array form in which a type computes."""
    return {"s": "s", "f": "f"}.get(kind[0], "u")


def sources(e: Emitter, i: Instruction, width: int, first: int = 1) -> list[Value]:
    return [e.read(operand, width) for operand in i.operands[first:]]


def _modular(e: Emitter, i: Instruction, template: str) -> None:
    """An operation whose low bits do not depend on the sign."""
    e.compute(i.operands[0], template, "u", *sources(e, i, bits_of(i.types[0])))


@opcode("add", "d s s", f"{INTEGERS} {FLOATS} {HALVES}", "sat ftz rn")
def add(e: Emitter, i: Instruction) -> None:
    if i.types[0] in f"{FLOATS} {HALVES}".split():
        add_float(e, i, "{0} + {1}")
    else:
        _no_saturation(e, i)
        _modular(e, i, "{0} + {1}")


@opcode("sub", "d s s", f"{INTEGERS} {FLOATS} {HALVES}", "sat ftz rn")
def sub(e: Emitter, i: Instruction) -> None:
    if i.types[0] in f"{FLOATS} {HALVES}".split():
        add_float(e, i, "{0} - {1}")
    else:
        _no_saturation(e, i)
        _modular(e, i, "{0} - {1}")


def _no_saturation(e: Emitter, i: Instruction) -> None:
    if i.has("sat"):
        raise e.error("integer .sat is not supported")


@opcode("mul", "d s s", f"{INTEGERS} {FLOATS} {HALVES}", "lo hi wide sat ftz rn")
def mul(e: Emitter, i: Instruction) -> None:
    if i.types[0] in f"{FLOATS} {HALVES}".split():
        add_float(e, i, "{0} * {1}")
        return
    if i.has("wide"):
        _wide(e, i, *sources(e, i, bits_of(i.types[0])))
    elif i.has("hi"):
        e.bind(i.operands[0], _high(e, i, *sources(e, i, bits_of(i.types[0]))))
    else:
        _modular(e, i, "{0} * {1}")


@opcode("mul24", "d s s", "u32 s32", "lo")
def mul24(e: Emitter, i: Instruction) -> None:
    a, b = sources(e, i, 32)
    form = form_of(i.types[0])
    shift = (
        "(({0}) << 8 >> 8) * (({1}) << 8 >> 8)"
        if form == "s"
        else ("({0} & 0xFFFFFF) * ({1} & 0xFFFFFF)")
    )
    if e.scalar(a, b) and form == "s":
        raise e.error("mul24.s32 of uniform values is not supported")
    e.compute(i.operands[0], shift, form, a, b)


@opcode("mad", "d s s s", INTEGERS, "lo hi wide")
def mad(e: Emitter, i: Instruction) -> None:
    width = bits_of(i.types[0])
    a, b = (e.read(operand, width) for operand in i.operands[1:3])
    if i.has("wide"):
        product = _wide_value(e, i, a, b)
        c = e.read(i.operands[3], 2 * width)
        e.compute(i.operands[0], "{0} + {1}", "u", product, c, width=2 * width)
        return
    c = e.read(i.operands[3], width)
    if i.has("hi"):
        e.compute(i.operands[0], "{0} + {1}", "u", _high(e, i, a, b), c)
    else:
        e.compute(i.operands[0], "{0} * {1} + {2}", "u", a, b, c)


def _wide_value(e: Emitter, i: Instruction, a: Value, b: Value) -> Value:
    """The full product, twice as wide as the factors."""
    width = bits_of(i.types[0])
    form = form_of(i.types[0])
    if e.scalar(a, b):
        one = "j" if form == "s" else "i"
        mask = (1 << 2 * width) - 1
        code = f"({e.get(a, one)} * {e.get(b, one)}) & {mask}"
        return Value(2 * width, "i", {"i": e.temporary(code)})
    dtype = e.dtype(form, 2 * width)
    code = f"{e.get(a, form)}.astype({dtype}) * {e.get(b, form)}.astype({dtype})"
    return Value(2 * width, form, {form: e.temporary(code)})


def _wide(e: Emitter, i: Instruction, a: Value, b: Value) -> None:
    e.bind(i.operands[0], _wide_value(e, i, a, b))


def _high(e: Emitter, i: Instruction, a: Value, b: Value) -> Value:
    """The upper half of the product."""
    width = bits_of(i.types[0])
    form = form_of(i.types[0])
    if e.scalar(a, b):
        one = "j" if form == "s" else "i"
        mask = (1 << width) - 1
        code = f"(({e.get(a, one)} * {e.get(b, one)}) >> {width}) & {mask}"
        return Value(width, "i", {"i": e.temporary(code)})
    if width == 64:
        function = e.constant(high_product)
        code = f"{function}({e.get(a, form)}, {e.get(b, form)})"
        return Value(width, "u", {"u": e.temporary(code)})
    product = e.get(_wide_value(e, i, a, b), form)
    shift = e.constant(
        np.array(width, (SIGNED if form == "s" else UNSIGNED)[2 * width]), "shift", form, width
    )
    code = f"({product} >> {shift}).astype({e.dtype('u', width)})"
    return Value(width, "u", {"u": e.temporary(code)})


def high_product(a: Any, b: Any) -> Any:
    """Upper 64 bits of 64-bit products, exactly."""
    pairs = zip(
        np.broadcast_to(a, b.shape).tolist(), np.broadcast_to(b, a.shape).tolist(), strict=True
    )
    return np.array([(x * y >> 64) & 0xFFFFFFFFFFFFFFFF for x, y in pairs], np.uint64)


def divide(a: Any, b: Any) -> Any:
    """Integer division, truncating towards zero; division by zero is a fault."""
    _nonzero(b)
    unsigned = UNSIGNED[8 * a.itemsize]
    quotient = (np.abs(a).astype(unsigned) // np.abs(b).astype(unsigned)).astype(a.dtype)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


def remainder(a: Any, b: Any) -> Any:
    """The remainder of `divide`, with the sign of the dividend."""
    return (a - divide(a, b) * b).astype(a.dtype)


def _nonzero(divisor: Any) -> None:
    zero = np.flatnonzero(np.atleast_1d(divisor) == 0)
    if len(zero):
        raise Fault("integer division by zero is undefined", int(zero[0]))


@opcode("div", "d s s", f"{INTEGERS} {FLOATS}", "approx full rn ftz")
def div(e: Emitter, i: Instruction) -> None:
    if i.types[0] in FLOATS.split():
        add_float(e, i, "{0} / {1}")
    else:
        width, form = bits_of(i.types[0]), form_of(i.types[0])
        e.call(i.operands[0], divide, form, *sources(e, i, width))


@opcode("rem", "d s s", INTEGERS)
def rem(e: Emitter, i: Instruction) -> None:
    width, form = bits_of(i.types[0]), form_of(i.types[0])
    e.call(i.operands[0], remainder, form, *sources(e, i, width))


def _float_source(e: Emitter, i: Instruction) -> Value:
    """The source of neg or abs of a floating type, flushed for .ftz."""
    kind = i.types[0]
    value = e.read(i.operands[1], {"f64": 64, "f16": 16, "bf16": 16}.get(kind, 32))
    if i.has("ftz"):
        if kind != "f32":
            raise e.error(f".ftz of type .{kind} is not supported")
        value = flush_value(e, value)
    return value


@opcode("neg", "d s", f"s16 s32 s64 {FLOATS} {HALVES}", "ftz")
def neg(e: Emitter, i: Instruction) -> None:
    kind = i.types[0]
    if kind[0] == "s":
        _modular(e, i, "-{0}")
        return
    sign = {"f32": 1 << 31, "f64": 1 << 63, "f16": 1 << 15, "bf16": 1 << 15}.get(kind, 0x80008000)
    a = _float_source(e, i)
    flip = Value(a.width, "i", {"i": str(sign)})
    e.compute(i.operands[0], "{0} ^ {1}", "u", a, flip)


@opcode("abs", "d s", f"s16 s32 s64 {FLOATS} {HALVES}", "ftz")
def abs_(e: Emitter, i: Instruction) -> None:
    kind = i.types[0]
    if kind[0] == "s":
        e.compute(i.operands[0], "abs({0})", "s", *sources(e, i, bits_of(kind)))
        return
    keep = {"f32": (1 << 31) - 1, "f64": (1 << 63) - 1, "f16": 0x7FFF, "bf16": 0x7FFF}
    a = _float_source(e, i)
    mask = Value(a.width, "i", {"i": str(keep.get(kind, 0x7FFF7FFF))})
    e.compute(i.operands[0], "{0} & {1}", "u", a, mask)


def _minmax(e: Emitter, i: Instruction, largest: bool) -> None:
    kind = i.types[0]
    if kind in f"{FLOATS} {HALVES}".split():
        minmax_float(e, i, largest)
        return
    refused = [m for m in ("ftz", "NaN", "xorsign", "abs") if i.has(m)]
    if refused or len(i.operands) > 3 or (i.has("relu") and kind != "s32"):
        raise e.error("min and max of integers take two values, and .relu only of s32")
    form = form_of(kind)
    values = sources(e, i, bits_of(kind))
    scalar, array = ("max", np.maximum) if largest else ("min", np.minimum)
    if e.scalar(*values):
        code = f"max({scalar}({{0}}, {{1}}), 0)" if i.has("relu") else f"{scalar}({{0}}, {{1}})"
        e.compute(i.operands[0], code, form, *values)
    elif i.has("relu"):
        e.call(i.operands[0], _max_relu if largest else _min_relu, form, *values)
    else:
        e.call(i.operands[0], array, form, *values)


def _min_relu(a: Any, b: Any) -> Any:
    return np.maximum(np.minimum(a, b), 0)


def _max_relu(a: Any, b: Any) -> Any:
    return np.maximum(np.maximum(a, b), 0)


@opcode("min", "d s s s?", f"{INTEGERS} {FLOATS} {HALVES}", "ftz NaN xorsign abs relu")
def min_(e: Emitter, i: Instruction) -> None:
    _minmax(e, i, largest=False)


@opcode("max", "d s s s?", f"{INTEGERS} {FLOATS} {HALVES}", "ftz NaN xorsign abs relu")
def max_(e: Emitter, i: Instruction) -> None:
    _minmax(e, i, largest=True)


# Comparison and selection

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
_ORDERED_NE = "({0} < {1}) | ({0} > {1})"


def compare(e: Emitter, i: Instruction, out: Any, a: Value, b: Value) -> Value:
    """The comparison named by an instruction's modifiers."""
    kind = i.types[-1]
    name = next(m for m in i.modifiers if m in _COMPARE)
    template = _COMPARE[name]
    if kind[0] == "f":
        if i.has("ftz"):
            a, b = flush_value(e, a), flush_value(e, b)
        if name == "ne":
            template = _ORDERED_NE
        if e.scalar(a, b):
            template = template.replace("~", "not ").replace("&", "and").replace("|", "or")
        form = "f"
    else:
        form = "s" if kind[0] == "s" else "u"
    return e.predicate(out, template, form, a, b)


@opcode(
    "setp",
    "d s s s?",
    f"{INTEGERS} {FLOATS} {BITS} f16 bf16",
    " ".join(_COMPARE) + " and or xor ftz",
)
def setp(e: Emitter, i: Instruction) -> None:
    kind = i.types[-1]
    width = 16 if kind == "bf16" else bits_of(kind)
    if kind in ("f16", "bf16"):
        raise e.error(f"setp.{kind} is not supported")
    a, b = (e.read(operand, width) for operand in i.operands[1:3])
    if len(i.operands) == 3:
        compare(e, i, i.operands[0], a, b)
        return
    first = compare(e, i, e.scratch(1), a, b)
    joined = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}"}
    name = next(m for m in i.modifiers if m in joined)
    e.predicate(i.operands[0], joined[name], "p", first, e.read(i.operands[3], 1))


@opcode("set", "d s s", f"{INTEGERS} {FLOATS} {BITS}", " ".join(_COMPARE) + " ftz")
def set_(e: Emitter, i: Instruction) -> None:
    width = bits_of(i.types[-1])
    a, b = (e.read(operand, width) for operand in i.operands[1:3])
    found = compare(e, i, e.scratch(1), a, b)
    one = "1.0" if i.types[0] == "f32" else "-1"
    bits = 0x3F800000 if one == "1.0" else 0xFFFFFFFF
    select(e, i.operands[0], Value(32, "i", {"i": str(bits)}), Value(32, "i", {"i": "0"}), found)


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
    select(e, i.operands[0], a, b, e.read(i.operands[3], 1))


@opcode("slct", "d s s s", f"{INTEGERS} {FLOATS} {BITS}", "ftz")
def slct(e: Emitter, i: Instruction) -> None:
    width = bits_of(i.types[0])
    a, b = (e.read(operand, width) for operand in i.operands[1:3])
    c = e.read(i.operands[3], 32)
    zero = Value(32, "i", {"i": "0"})
    form = "f" if i.types[1] == "f32" else "s"
    c = flush_value(e, c) if i.has("ftz") else c
    select(e, i.operands[0], a, b, e.predicate(e.scratch(1), "{0} >= {1}", form, c, zero))


@opcode("sad", "d s s s", "u32 s32")
def sad(e: Emitter, i: Instruction) -> None:
    form = form_of(i.types[0])
    a, b, c = sources(e, i, 32)
    if e.scalar(a, b, c):
        e.compute(i.operands[0], "abs({0} - {1}) + {2}", form, a, b, c)
        return
    x, y, z = (e.get(v, form) for v in (a, b, c))
    larger = f"{e.constant(np.maximum)}({x}, {y})"
    smaller = f"{e.constant(np.minimum)}({x}, {y})"
    e.set(i.operands[0], form, f"{larger} - {smaller} + {z}")
