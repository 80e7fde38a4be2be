"""Arithmetic (PTX ISA, "Integer Arithmetic Instructions"); floating.py has the floating forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mlakern.emulator.emitter import Emitter
from mlakern.emulator.errors import Fault
from mlakern.emulator.opcodes.floating import add_float, flush_half, flush_value, minmax_float
from mlakern.emulator.opcodes.packed import lanewise, packed_integers
from mlakern.emulator.opcodes.table import FLOATS, INTEGERS, opcode
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


_ROUNDING = "rz rm rp ftz sat"


def _additive(name: str, template: str, saturated: Any) -> None:
    types = f"{INTEGERS} {FLOATS} {HALVES} u16x2 s16x2"

    @opcode(name, "d s s", types, _ROUNDING, ignored="rn", typed=2)
    def generate(e: Emitter, i: Instruction) -> None:
        if i.types[0] in f"{FLOATS} {HALVES}".split():
            add_float(e, i, template)
        elif len(i.types) > 1:
            raise e.error(f"no operation of types {' '.join(i.types)}")
        elif packed_integers(e, i):
            pass
        elif i.has("sat"):
            if i.types[0] != "s32" or len(i.modifiers) > 1:
                raise e.error("integer .sat is for .s32 alone")
            lanewise(e, i.operands[0], saturated, 32, *sources(e, i, 32))
        else:
            _integers_only(e, i)
            _modular(e, i, template)


def _integers_only(e: Emitter, i: Instruction) -> None:
    refused = [m for m in i.modifiers if m in _ROUNDING.split()]
    if refused:
        raise e.error(f".{refused[0]} of type .{i.types[0]} is not supported")


def _clamped(total: Any) -> Any:
    return total.clip(-(1 << 31), (1 << 31) - 1).astype(np.int32).view(np.uint32)


def saturated_sum(a: Any, b: Any) -> Any:
    """add.sat.s32."""
    return _clamped(a.view(np.int32).astype(np.int64) + b.view(np.int32))


def saturated_difference(a: Any, b: Any) -> Any:
    """sub.sat.s32."""
    return _clamped(a.view(np.int32).astype(np.int64) - b.view(np.int32))


_additive("add", "{0} + {1}", saturated_sum)
_additive("sub", "{0} - {1}", saturated_difference)


@opcode("mul", "d s s", f"{INTEGERS} {FLOATS} {HALVES}", f"hi wide {_ROUNDING}", ignored="lo rn")
def mul(e: Emitter, i: Instruction) -> None:
    if i.types[0] in f"{FLOATS} {HALVES}".split():
        if i.has("hi") or i.has("wide"):
            raise e.error(f".hi and .wide of type .{i.types[0]} do not exist")
        add_float(e, i, "{0} * {1}")
        return
    _integers_only(e, i)
    if i.has("wide"):
        _wide(e, i, *sources(e, i, bits_of(i.types[0])))
    elif i.has("hi"):
        e.bind(i.operands[0], high_part(e, i, *sources(e, i, bits_of(i.types[0]))))
    else:
        _modular(e, i, "{0} * {1}")


def product_of_24(a: Any, b: Any, signed: bool, high: bool) -> Any:
    """mul24: bits [0:32) or [16:48) of the product of the low 24 bits."""
    if signed:
        wide = [(x << np.uint32(8)).view(np.int32).astype(np.int64) >> 8 for x in (a, b)]
    else:
        wide = [(x & np.uint32(0xFFFFFF)).astype(np.int64) for x in (a, b)]
    return (wide[0] * wide[1] >> (16 if high else 0)).astype(np.uint32)


_PRODUCTS_OF_24 = {
    (kind, high): partial(product_of_24, signed=kind == "s32", high=high)
    for kind in ("u32", "s32")
    for high in (False, True)
}


@opcode("mul24", "d s s", "u32 s32", "hi", ignored="lo")
def mul24(e: Emitter, i: Instruction) -> None:
    function = _PRODUCTS_OF_24[i.types[0], i.has("hi")]
    lanewise(e, i.operands[0], function, 32, *sources(e, i, 32))


@opcode("mad", "d s s s", INTEGERS, "hi wide", ignored="lo")
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
        e.compute(i.operands[0], "{0} + {1}", "u", high_part(e, i, a, b), c)
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


def high_part(e: Emitter, i: Instruction, a: Value, b: Value) -> Value:
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


@opcode("div", "d s s", f"{INTEGERS} {FLOATS}", "rz rm rp ftz", ignored="approx full rn")
def div(e: Emitter, i: Instruction) -> None:
    if i.types[0] in FLOATS.split():
        add_float(e, i, "{0} / {1}")
    else:
        _integers_only(e, i)
        width, form = bits_of(i.types[0]), form_of(i.types[0])
        e.call(i.operands[0], divide, form, *sources(e, i, width))


@opcode("rem", "d s s", INTEGERS)
def rem(e: Emitter, i: Instruction) -> None:
    width, form = bits_of(i.types[0]), form_of(i.types[0])
    e.call(i.operands[0], remainder, form, *sources(e, i, width))


_SIGNS = {
    "f32": 1 << 31,
    "f64": 1 << 63,
    "f16": 1 << 15,
    "bf16": 1 << 15,
    "f32x2": 0x80000000 << 32 | 0x80000000,
}
_SIGNED = "s16 s32 s64"


def _sign_operation(e: Emitter, i: Instruction, template: str, keep: bool) -> None:
    """neg or abs of a floating type: flip the sign bits, or keep all others."""
    kind = i.types[0]
    width = {"f64": 64, "f32x2": 64, "f16": 16, "bf16": 16}.get(kind, 32)
    value = e.read(i.operands[1], width)
    if i.has("ftz"):
        if kind == "f32":
            value = flush_value(e, value)
        elif kind == "f16":
            value = flush_half(e, value, kind)
        else:
            raise e.error(f".ftz of type .{kind} is not supported")
    sign = _SIGNS.get(kind, 0x80008000)
    mask = ((1 << width) - 1) ^ sign if keep else sign
    constant = Value(width, "i", {"i": str(mask)})
    e.compute(i.operands[0], template, "u", value, constant)


@opcode("neg", "d s", f"{_SIGNED} {FLOATS} {HALVES}", "ftz")
def neg(e: Emitter, i: Instruction) -> None:
    if i.types[0] in _SIGNED.split():
        _integers_only(e, i)
        _modular(e, i, "-{0}")
    else:
        _sign_operation(e, i, "{0} ^ {1}", keep=False)


@opcode("abs", "d s", f"{_SIGNED} {FLOATS} {HALVES}", "ftz")
def abs_(e: Emitter, i: Instruction) -> None:
    if i.types[0] in _SIGNED.split():
        _integers_only(e, i)
        e.compute(i.operands[0], "abs({0})", "s", *sources(e, i, bits_of(i.types[0])))
    else:
        _sign_operation(e, i, "{0} & {1}", keep=True)


def _minmax(e: Emitter, i: Instruction, largest: bool) -> None:
    kind = i.types[0]
    if kind in f"{FLOATS} {HALVES}".split():
        minmax_float(e, i, largest)
        return
    if packed_integers(e, i):
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


_EXTREMES = f"{INTEGERS} {FLOATS} {HALVES} u16x2 s16x2"


@opcode("min", "d s s s?", _EXTREMES, "ftz NaN xorsign abs relu")
def min_(e: Emitter, i: Instruction) -> None:
    _minmax(e, i, largest=False)


@opcode("max", "d s s s?", _EXTREMES, "ftz NaN xorsign abs relu")
def max_(e: Emitter, i: Instruction) -> None:
    _minmax(e, i, largest=True)


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
