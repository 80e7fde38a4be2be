"""Floating-point arithmetic (PTX ISA, "Floating Point Instructions" and the half-precision ones).

float32 results are rounded to nearest even; fma is computed in float64, where the product is
exact, and rounded once more (double rounding can differ from hardware in the last bit about once
in 2^29). Subnormals are kept unless the instruction says .ftz. The approximate functions give
the correctly rounded value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

import numpy as np

from mlakern.emulator import formats, rounding
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.table import opcode
from mlakern.emulator.program import Instruction, Operand
from mlakern.emulator.values import Value


def add_float(e: Emitter, i: Instruction, template: str) -> None:
    """add, sub, mul or div of one of the floating types, as an expression in {0} and {1}."""
    directed = _directed(e, i)
    if directed is not None:
        arithmetic(e, i, directed)
    else:
        arithmetic(e, i, lambda *values: e.compute(e.scratch(32), template, "f", *values))


def _directed(e: Emitter, i: Instruction) -> Callable[..., Value] | None:
    """The operation for an instruction that does not round to nearest; None if it does."""
    mode = next((m for m in i.modifiers if m in rounding.MODES), None)
    if mode is None:
        return None
    if i.types[0] not in ("f32", "f32x2"):
        raise e.error(f".{mode} of type .{i.types[0]} is not supported")
    function = rounding.directed(i.row.name, mode)
    return lambda *values: e.call(e.scratch(32), function, "f", *values)


def arithmetic(e: Emitter, i: Instruction, scalar: Callable[..., Value]) -> None:
    """Apply a float32 (or float64) operation to the type of an instruction.

    Packed and 16-bit types are widened, computed by ``scalar`` and rounded back.
    """
    kind = i.types[0]
    out, operands = i.operands[0], i.operands[1:]
    if kind == "f64" and (i.has("ftz") or i.has("sat")):
        raise e.error(".ftz and .sat of type .f64 are not supported")
    if len(i.types) > 1:
        if kind != "f32" or i.types[1] not in ("f16", "bf16"):
            raise e.error(f"no operation of types {' '.join(i.types)}")
        # All sources but the last are of the narrow type, and exact in float32.
        values = [widen_half(e, e.read(operand, 16), i.types[1]) for operand in operands[:-1]]
        values.append(e.read(operands[-1], 32))
        e.bind(out, saturate(e, i, flushed(e, i, scalar, values)))
    elif kind in ("f32", "f64"):
        values = [e.read(operand, int(kind[1:])) for operand in operands]
        e.bind(out, saturate(e, i, flushed(e, i, scalar, values)))
    elif kind == "f32x2":
        if i.has("sat"):
            raise e.error(".sat of type .f32x2 is not supported")
        pairs = [e.split(e.read(operand, 64)) for operand in operands]
        low, high = (flushed(e, i, scalar, [pair[half] for pair in pairs]) for half in (0, 1))
        bind_pair(e, out, low, high)
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
            if i.has("ftz"):
                part = flush_half(e, part, kind)
            wide.append(widen_half(e, part, kind))
        result = narrow_half(e, saturate(e, i, scalar(*wide)), kind)
        results.append(flush_half(e, result, kind) if i.has("ftz") else result)
    if not packed:
        e.bind(out, results[0])
        return
    pack_halves(e, out, *results)


def flush_codes(codes: Any, exponent: Any) -> Any:
    """16-bit floats with subnormals as zeros of their sign; exponent: the bits of that field."""
    return np.where(codes & exponent, codes, codes & np.uint16(0x8000))


_FLUSH_HALF = {
    "f16": partial(flush_codes, exponent=np.uint16(0x7C00)),
    "bf16": partial(flush_codes, exponent=np.uint16(0x7F80)),
}


def flush_half(e: Emitter, value: Value, kind: str) -> Value:
    """A 16-bit float with a subnormal flushed."""
    return e.call(e.scratch(16), _FLUSH_HALF[kind], "u", value, width=16)


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


def fused_odd(a: Any, b: Any, c: Any) -> Any:
    """a·b + c of 16-bit floats, as a float32 that rounds to 16 bits as the exact value does."""
    double = np.float64
    return odd_float32(np.add(np.multiply(a, b, dtype=double), c, dtype=double))


def odd_float32(exact: Any) -> Any:
    """float64 to float32, rounded to odd: then rounding again to fewer bits is harmless."""
    nearest = np.asarray(exact, np.float64).astype(np.float32)
    back = nearest.astype(np.float64)
    inexact = (back != exact) & ~np.isnan(back)
    bits = nearest.view(np.uint32) - (inexact & (np.abs(back) > np.abs(exact))).astype(np.uint32)
    return (bits | inexact).astype(np.uint32).view(np.float32)


def rectified(x: Any) -> Any:
    """.relu: negative numbers and -0 become +0, NaN stays."""
    return np.where(x <= 0, np.float32(0), x)


@opcode(
    "fma",
    "d s s s",
    "f32 f64 f16 f16x2 bf16 bf16x2 f32x2",
    "rz rm rp ftz sat relu",
    ignored="rn",
    typed=2,
)
def fma(e: Emitter, i: Instruction) -> None:
    half = i.types[0].removesuffix("x2") in ("f16", "bf16")
    if i.has("relu") and not half:
        raise e.error(f".relu of type .{i.types[0]} is not supported")
    directed = _directed(e, i)

    def scalar(*values: Value) -> Value:
        if values[0].width == 64:
            return e.compute(e.scratch(64), "{0} * {1} + {2}", "f", *values)
        result = e.call(e.scratch(32), fused_odd if half else fused, "f", *values)
        return e.call(e.scratch(32), rectified, "f", result) if i.has("relu") else result

    arithmetic(e, i, directed or scalar)


@cache
def extreme(largest: bool, nan: bool, absolute: bool, xor_sign: bool) -> Callable[..., Any]:
    """min or max of two or three floats. nan: a NaN wins, else the other value does.

    absolute: of magnitudes; xor_sign: with the product of the signs. Zeros of both signs are equal.
    """
    plain, strict = (np.fmax, np.maximum) if largest else (np.fmin, np.minimum)
    pick = strict if nan else plain

    def apply(*values: Any) -> Any:
        found = [np.abs(value) for value in values] if absolute else list(values)
        result = reduce(pick, found)
        if xor_sign:
            negative = reduce(np.logical_xor, [np.signbit(value) for value in values])
            result = np.copysign(result, np.where(negative, -1, 1).astype(result.dtype))
        return result

    return apply


def minmax_float(e: Emitter, i: Instruction, largest: bool) -> None:
    """min and max of floating types."""
    xor_sign = i.has("xorsign")
    if i.has("relu") or (xor_sign and (len(i.operands) > 3 or not i.has("abs"))):
        raise e.error("min and max of floats take no .relu, and .xorsign.abs of two values only")
    function = extreme(largest, i.has("NaN"), i.has("abs"), xor_sign)
    if not i.has("NaN") and not i.has("abs") and len(i.operands) == 3:
        function = np.fmax if largest else np.fmin
    arithmetic(e, i, lambda *values: e.call(e.scratch(32), function, "f", *values))


def exp2(x: Any) -> Any:
    return np.exp2(x)


def exp2_flushed(x: Any) -> Any:
    """2^x with a subnormal result flushed (2^x of a subnormal number is 1 either way)."""
    y = np.exp2(x)
    return y * (y >= SMALLEST_NORMAL)


@opcode("ex2", "d s", "f32 f16 f16x2 bf16 bf16x2", "ftz", ignored="approx")
def ex2(e: Emitter, i: Instruction) -> None:
    if i.types[0] == "f32":
        function = exp2_flushed if i.has("ftz") else exp2
        e.call(i.operands[0], function, "f", e.read(i.operands[1], 32))
    else:
        arithmetic(e, i, lambda value: e.call(e.scratch(32), exp2, "f", value))


def _unary(name: str, modifiers: str, function: Callable[[Any], Any], types: str = "f32") -> None:
    @opcode(name, "d s", types, modifiers, ignored="approx rn")
    def generate(e: Emitter, i: Instruction) -> None:
        def plain(value: Value) -> Value:
            return e.call(e.scratch(32), function, "f", value)

        arithmetic(e, i, _directed(e, i) or plain)


def reciprocal(x: Any) -> Any:
    return np.reciprocal(x)


def reciprocal_root(x: Any) -> Any:
    return np.reciprocal(np.sqrt(x))


_unary("lg2", "ftz", np.log2)
_unary("rcp", "rz rm rp ftz", reciprocal, "f32 f64")
_unary("sqrt", "rz rm rp ftz", np.sqrt, "f32 f64")
_unary("rsqrt", "ftz", reciprocal_root, "f32 f64")
_unary("sin", "ftz", np.sin)
_unary("cos", "ftz", np.cos)
_unary("tanh", "", np.tanh, "f32 f16 f16x2 bf16 bf16x2")


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
    function = e.constant(_CLASSES[i.choice(_CLASSES)])
    e.predicate(i.operands[0], f"{function}({{0}})", "f", value)
