"""Floating-point arithmetic (PTX ISA, "Floating Point Instructions" and the half-precision ones).

float32 results are rounded to nearest even; fma is computed in float64, where the product is
exact, and rounded once more (double rounding can differ from hardware in the last bit about once
in 2^29). Subnormals are kept unless the instruction says .ftz. The approximate functions give
the correctly rounded value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlakern.emulator import formats
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.table import opcode
from mlakern.emulator.program import Instruction, Operand
from mlakern.emulator.values import Value


def add_float(e: Emitter, i: Instruction, template: str) -> None:
    """add, sub, mul or div of one of the floating types, as an expression in {0} and {1}."""
    arithmetic(e, i, lambda *values: e.compute(e.scratch(32), template, "f", *values))


def arithmetic(e: Emitter, i: Instruction, scalar: Callable[..., Value]) -> None:
    """Apply a float32 (or float64) operation to the type of an instruction.

    Packed and 16-bit types are widened, computed by ``scalar`` and rounded back.
    """
    kind = i.types[0]
    out, operands = i.operands[0], i.operands[1:]
    if kind in ("f32", "f64"):
        values = [e.read(operand, int(kind[1:])) for operand in operands]
        e.bind(out, saturate(e, i, flushed(e, i, scalar, values)))
    elif kind == "f32x2":
        pairs = [e.split(e.read(operand, 64)) for operand in operands]
        low, high = (flushed(e, i, scalar, [pair[half] for pair in pairs]) for half in (0, 1))
        bind_pair(e, out, low, high)
    elif i.has("ftz"):
        raise e.error(f".ftz of type .{kind} is not supported")
    else:
        _halves(e, i, out, operands, scalar)


def bind_pair(e: Emitter, out: Operand, low: Value, high: Value) -> None:
    """A 64-bit destination that holds two 32-bit values."""
    if e.scalar(low, high):
        e.set(out, "i", f"{e.get(low, 'i')} | {e.get(high, 'i')} << 32", 64)
    else:
        e.bind(out, Value(64, "w", {}, (low, high)))


SMALLEST_NORMAL = np.finfo(np.float32).tiny


def flush(x: Any) -> Any:
    """Subnormal float32 numbers as zeros of their sign (PTX ISA, .ftz)."""
    return x * (np.abs(x) >= SMALLEST_NORMAL)


def flushed(e: Emitter, i: Instruction, scalar: Callable[..., Value], values: list[Value]) -> Value:
    """An operation on float32 values whose inputs and result are flushed if it says .ftz."""
    if not i.has("ftz"):
        return scalar(*values)
    return flush_value(e, scalar(*(flush_value(e, value) for value in values)))


def flush_value(e: Emitter, value: Value) -> Value:
    """A value with subnormals flushed; literals are flushed here and now."""
    if value.scalar and value.names.get("i", "").isdigit():
        bits = int(value.names["i"])
        return Value(32, "i", {"i": str(bits if bits & 0x7F800000 else bits & 1 << 31)})
    return e.call(e.scratch(32), flush, "f", value)


def saturate(e: Emitter, i: Instruction, value: Value) -> Value:
    if not i.has("sat"):
        return value
    return e.call(e.scratch(32), clamp_to_one, "f", value)


def clamp_to_one(x: Any) -> Any:
    """Clamp to [0, 1]; NaN becomes 0 (PTX ISA, .sat)."""
    return np.fmin(np.fmax(x, np.float32(0)), np.float32(1))


_WIDEN = {"f16": formats.f16_to_f32, "bf16": formats.bf16_to_f32}


def _round(kind: str) -> Callable[[Any], Any]:
    return formats.f32_to_f16 if kind == "f16" else formats.f32_to_bf16


def _halves(
    e: Emitter,
    i: Instruction,
    out: Operand,
    operands: tuple[Operand, ...],
    scalar: Callable[..., Value],
) -> None:
    kind = i.types[0].removesuffix("x2")
    packed = i.types[0].endswith("x2")
    results = []
    values = [e.read(operand, 32 if packed else 16) for operand in operands]
    for half in range(2 if packed else 1):
        wide = []
        for value in values:
            part = extract_half(e, value, half) if packed else value
            wide.append(widen_half(e, part, kind))
        results.append(narrow_half(e, scalar(*wide), kind))
    if not packed:
        e.bind(out, results[0])
        return
    pack_halves(e, out, *results)


def extract_half(e: Emitter, value: Value, half: int) -> Value:
    """The low or high 16 bits of a 32-bit value."""
    if value.scalar:
        code = e.get(value, "i")
        code = f"{code} >> 16" if half else f"{code} & 0xFFFF"
        return Value(16, "i", {"i": e.temporary(code)})
    code = f"{e.get(value, 'U')}.view({e.dtype('u', 16)})[{half}::2]"
    return Value(16, "u", {"u": e.temporary(code)})


def widen_half(e: Emitter, value: Value, kind: str) -> Value:
    """A 16-bit float as float32."""
    function = e.constant(_WIDEN[kind])
    if value.scalar:
        code = f"float32({function}({e.get(value, 'u')}).item())"
        return Value(32, "g", {"g": e.temporary(code)})
    return Value(32, "f", {"f": e.temporary(f"{function}({e.get(value, 'u')})")})


def narrow_half(e: Emitter, value: Value, kind: str) -> Value:
    """float32 rounded to a 16-bit float."""
    function = e.constant(_round(kind))
    code = f"{function}({e.get(value, 'f')})"
    if value.scalar:
        return Value(16, "i", {"i": e.temporary(f"{code}.item()")})
    return Value(16, "u", {"u": e.temporary(code)})


def pack_halves(e: Emitter, out: Operand, low: Value, high: Value) -> Value:
    """A 32-bit destination from two 16-bit values."""
    if e.scalar(low, high):
        return e.set(out, "i", f"{e.get(low, 'i')} | {e.get(high, 'i')} << 16", 32)
    function = e.constant(formats.pack_halves)
    return e.set(out, "u", f"{function}({e.get(high, 'U')}, {e.get(low, 'U')})", 32)


def fused(a: Any, b: Any, c: Any) -> Any:
    """a·b + c with one rounding (see the module's note)."""
    double = np.float64
    return np.add(np.multiply(a, b, dtype=double), c, dtype=double).astype(np.float32)


@opcode("fma", "d s s s", "f32 f64 f16 f16x2 bf16 bf16x2 f32x2", "rn ftz sat relu")
def fma(e: Emitter, i: Instruction) -> None:
    if i.has("relu"):
        raise e.error("fma.relu is not supported")

    def scalar(*values: Value) -> Value:
        if values[0].width == 64:
            return e.compute(e.scratch(64), "{0} * {1} + {2}", "f", *values)
        return e.call(e.scratch(32), fused, "f", *values)

    arithmetic(e, i, scalar)


def minmax_float(e: Emitter, i: Instruction, largest: bool) -> None:
    """min and max: without .NaN the operand that is a number wins."""
    if i.has("relu") or i.has("abs") or i.has("xorsign"):
        raise e.error("min and max with .relu, .abs or .xorsign are not supported")
    plain = (np.fmin, np.fmax)[largest]
    function = (np.minimum, np.maximum)[largest] if i.has("NaN") else plain

    def scalar(*values: Value) -> Value:
        result = values[0]
        for value in values[1:]:
            result = e.call(e.scratch(32), function, "f", result, value)
        return result

    arithmetic(e, i, scalar)


def exp2(x: Any) -> Any:
    return np.exp2(x)


def exp2_flushed(x: Any) -> Any:
    """2^x with a subnormal result flushed (2^x of a subnormal number is 1 either way)."""
    y = np.exp2(x)
    return y * (y >= SMALLEST_NORMAL)


@opcode("ex2", "d s", "f32 f16 f16x2 bf16 bf16x2", "approx ftz")
def ex2(e: Emitter, i: Instruction) -> None:
    if i.types[0] == "f32":
        function = exp2_flushed if i.has("ftz") else exp2
        e.call(i.operands[0], function, "f", e.read(i.operands[1], 32))
    else:
        arithmetic(e, i, lambda value: e.call(e.scratch(32), exp2, "f", value))


def _unary(name: str, modifiers: str, function: Callable[[Any], Any], types: str = "f32") -> None:
    @opcode(name, "d s", types, modifiers)
    def generate(e: Emitter, i: Instruction) -> None:
        arithmetic(e, i, lambda value: e.call(e.scratch(32), function, "f", value))


def reciprocal(x: Any) -> Any:
    return np.reciprocal(x)


def reciprocal_root(x: Any) -> Any:
    return np.reciprocal(np.sqrt(x))


_unary("lg2", "approx ftz", np.log2)
_unary("rcp", "approx rn ftz", reciprocal, "f32 f64")
_unary("sqrt", "approx rn ftz", np.sqrt, "f32 f64")
_unary("rsqrt", "approx ftz", reciprocal_root)
_unary("sin", "approx ftz", np.sin)
_unary("cos", "approx ftz", np.cos)
_unary("tanh", "approx", np.tanh, "f32 f16 f16x2 bf16 bf16x2")


def copy_sign(sign: Any, magnitude: Any) -> Any:
    return np.copysign(magnitude, sign)


@opcode("copysign", "d s s", "f32 f64")
def copysign(e: Emitter, i: Instruction) -> None:
    width = int(i.types[0][1:])
    e.call(i.operands[0], copy_sign, "f", *(e.read(o, width) for o in i.operands[1:]))


_CLASSES: dict[str, Callable[[Any], Any]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
}


@opcode("testp", "d s", "f32 f64", " ".join(_CLASSES))
def testp(e: Emitter, i: Instruction) -> None:
    value = e.read(i.operands[1], int(i.types[0][1:]))
    function = e.constant(_CLASSES[i.modifiers[0]])
    e.predicate(i.operands[0], f"{function}({{0}})", "f", value)
