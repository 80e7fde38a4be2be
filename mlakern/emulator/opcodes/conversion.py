"""Moves and conversions (PTX ISA, "Data Movement and Conversion Instructions": mov, cvt, cvta,
mapa).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlakern.emulator import formats
from mlakern.emulator.addresses import GLOBAL, LOCAL, PARAM, RANK_SHIFT, SHARED, WINDOW_SHIFT
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.bits import truth
from mlakern.emulator.opcodes.floating import (
    bind_pair,
    clamp_to_one,
    extract_half,
    flush_value,
    narrow_half,
    pack_halves,
    widen_half,
)
from mlakern.emulator.opcodes.table import BITS, FLOATS, INTEGERS, opcode
from mlakern.emulator.program import Instruction, Operand, Reg, Vector, items_of
from mlakern.emulator.values import Value

_ROUND_TO_INTEGER: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


@opcode("mov", "d s", f"pred b128 {BITS} {INTEGERS} {FLOATS}")
def mov(e: Emitter, i: Instruction) -> None:
    out, source = i.operands
    kind = i.types[0]
    width = 1 if kind == "pred" else int(kind[1:])
    if kind == "b128":
        for item, word in zip(items_of(out), items_of(source), strict=True):
            e.bind(item, e.read(word, 64))
    elif isinstance(source, Vector):
        _pack(e, out, [e.read(item, width // len(source.items)) for item in source.items], width)
    elif isinstance(out, Vector):
        _unpack(e, out.items, e.read(source, width), width)
    else:
        value = e.read(source, width)
        e.bind(out, truth(value) if width == 1 else value)


def _pack(e: Emitter, out: Operand, parts: list[Value], width: int) -> None:
    if (len(parts), width) == (2, 64):
        bind_pair(e, out, *parts)
    elif (len(parts), width) == (2, 32):
        pack_halves(e, out, *parts)
    elif (len(parts), width) == (4, 64):
        low, high = (pack_halves(e, e.scratch(32), *pair) for pair in (parts[:2], parts[2:]))
        bind_pair(e, out, low, high)
    elif width == 32 and len(parts) == 4:
        scalar = e.scalar(*parts)
        terms = []
        for n, part in enumerate(parts):
            byte = e.get(part, "i") if scalar else f"{e.get(part, 'U')}.astype({e.dtype('u', 32)})"
            terms.append(f"({byte} & 0xFF) << {8 * n}")
        e.set(out, "i" if scalar else "u", " | ".join(terms), 32)
    elif width == 16 and len(parts) == 2:
        form = "i" if e.scalar(*parts) else "u"
        first, second = (e.get(part, form) for part in parts)
        e.set(out, form, f"{first} & 0xFF | ({second} & 0xFF) << 8", 16)
    else:
        raise e.error(f"packing {len(parts)} values into {width} bits is not supported")


def _unpack(e: Emitter, items: tuple[Operand, ...], value: Value, width: int) -> None:
    parts: list[Value]
    if (len(items), width) == (2, 64):
        parts = list(e.split(value))
    elif (len(items), width) == (2, 32):
        parts = [extract_half(e, value, half) for half in (0, 1)]
    elif (len(items), width) == (4, 64):
        parts = [extract_half(e, word, half) for word in e.split(value) for half in (0, 1)]
    elif len(items) * 8 == width:
        form = "i" if value.scalar else "u"
        code = e.get(value, form)
        parts = []
        for n, item in enumerate(items):
            bits = item.width if isinstance(item, Reg) else 16
            cast = "" if value.scalar else f".astype({e.dtype('u', bits)})"
            byte = e.temporary(f"(({code} >> {8 * n}) & 0xFF){cast}")
            parts.append(Value(bits, form, {form: byte}))
    else:
        raise e.error(f"unpacking {width} bits into {len(items)} values is not supported")
    for item, part in zip(items, parts, strict=True):
        e.bind(item, part)


@opcode("cvta", "d s", "u32 u64", "to shared shared::cta shared::cluster global const local param")
def cvta(e: Emitter, i: Instruction) -> None:
    """Only shared addresses change: all others carry their window in every form."""
    value = e.read(i.operands[1], 64)
    if not any(m.startswith("shared") for m in i.modifiers):
        e.bind(i.operands[0], value)
    elif i.has("to"):
        e.compute(i.operands[0], "{0} & {1}", "u", value, _word((1 << 32) - 1))
    else:
        e.compute(i.operands[0], "{0} | {1}", "u", value, _word(SHARED))


def _word(value: int, width: int = 64) -> Value:
    return Value(width, "i", {"i": str(value)})


_WINDOWS = {"global": GLOBAL, "const": GLOBAL, "shared": SHARED, "local": LOCAL, "param": PARAM}


@opcode("isspacep", "d s", "", "global shared shared::cta shared::cluster const local param")
def isspacep(e: Emitter, i: Instruction) -> None:
    window = _WINDOWS[i.modifiers[0].split("::")[0]] >> WINDOW_SHIFT
    address, shift = e.read(i.operands[1], 64), _word(WINDOW_SHIFT)
    e.predicate(i.operands[0], "{0} >> {1} == {2}", "u", address, shift, _word(window))


@opcode("mapa", "d s s", "u32 u64", "shared::cluster")
def mapa(e: Emitter, i: Instruction) -> None:
    width = int(i.types[0][1:])
    address = e.read(i.operands[1], width)
    rank = e.read(i.operands[2], 32)
    rank = resize(e, rank, "u", 32, width)
    mask = ((1 << width) - 1) ^ (0xFF << RANK_SHIFT)
    template = "({0} & {1}) | ({2} << {3})"
    e.compute(
        i.operands[0], template, "u", address, _word(mask, width), rank, _word(RANK_SHIFT, width)
    )


@opcode("getctarank", "d s", "u32 u64", "shared::cluster")
def getctarank(e: Emitter, i: Instruction) -> None:
    width = int(i.types[0][1:])
    address = e.read(i.operands[1], width)
    template = "({0} >> {1}) & {2}"
    shifted = e.compute(
        e.scratch(width), template, "u", address, _word(RANK_SHIFT, width), _word(0xFF, width)
    )
    e.bind(i.operands[0], resize(e, shifted, "u", width, 32))


def resize(e: Emitter, value: Value, form: str, source: int, target: int) -> Value:
    """An integer of ``source`` bits as one of ``target`` bits; form "s" extends the sign."""
    if value.scalar:
        code = e.get(value, "i")
        if source < value.width:
            code = f"({code} & {(1 << source) - 1})"
        if form == "s" and source < target:
            sign = 1 << (source - 1)
            code = f"(({code} ^ {sign}) - {sign}) & {(1 << target) - 1}"
        elif target < source:
            code = f"{code} & {(1 << target) - 1}"
        elif source >= value.width:
            return Value(target, "i", {"i": code})
        return Value(target, "i", {"i": e.temporary(code)})
    code = e.get(value, form)
    if source < value.width:
        code = f"{code}.astype({e.dtype(form, source)})"
    if source != target:
        code = f"{code}.astype({e.dtype(form, target)})"
    return Value(target, form, {form: e.temporary(code)})


_CVT_MODIFIERS = (
    "rn rz rm rp rna rni rzi rmi rpi ftz sat satfinite relu pack noftz scaled::n2::ue8m0"
)
_FLOATING = ("f16", "bf16", "f32", "f64", "tf32")
_SMALL = ("e4m3x2", "e5m2x2", "e2m1x2")


@opcode(
    "cvt",
    "d s s? s?",
    f"{INTEGERS} {FLOATS} u8 s8 f16 bf16 tf32 f16x2 bf16x2 {' '.join(_SMALL)}",
    _CVT_MODIFIERS,
)
def cvt(e: Emitter, i: Instruction) -> None:
    if i.has("pack") or i.has("scaled::n2::ue8m0") or i.has("rm") or i.has("rp"):
        raise e.error("this rounding or packing is not supported")
    target, source = i.types[0], i.types[1]
    if target in _SMALL or source in _SMALL:
        _small(e, i, target, source)
    elif target in ("f16x2", "bf16x2"):
        _two_halves(e, i, target.removesuffix("x2"))
    elif target in _FLOATING or source in _FLOATING:
        _floating(e, i, target, source)
    else:
        _integer(e, i, target, source)


def _integer(e: Emitter, i: Instruction, target: str, source: str) -> None:
    if i.has("sat"):
        raise e.error("integer .sat is not supported")
    bits, kept = int(source[1:]), int(target[1:])
    value = e.read(i.operands[1], bits)
    out = i.operands[0]
    form = "s" if source[0] == "s" else "u"
    result = resize(e, value, form, bits, kept)
    register = out.width if isinstance(out, Reg) else kept
    if kept < register:
        result = resize(e, result, "s" if target[0] == "s" else "u", kept, register)
    e.bind(out, result)


def _floating(e: Emitter, i: Instruction, target: str, source: str) -> None:
    value = _as_float(e, e.read(i.operands[1], _bits(source)), source)
    if i.has("ftz") and source == "f32":
        value = flush_value(e, value)
    rounding = next((m for m in i.modifiers if m in _ROUND_TO_INTEGER), None)
    if target[0] in "us":
        name = e.constant(to_integer)
        how = e.constant(_ROUND_TO_INTEGER[rounding or "rzi"])
        dtype = e.dtype("s" if target[0] == "s" else "u", int(target[1:]))
        code = f"{name}({e.get(value, 'f')}, {how}, {dtype})"
        kept = int(target[1:])
        if value.scalar:
            result = Value(kept, "i", {"i": e.temporary(f"{code}.item() & {(1 << kept) - 1}")})
        else:
            form = "s" if target[0] == "s" else "u"
            result = Value(kept, form, {form: e.temporary(code)})
        e.bind(i.operands[0], result)
        return
    if rounding is not None:
        value = e.call(e.scratch(value.width), _ROUND_TO_INTEGER[rounding], "f", value)
    _bind_float(e, i, value, target)


def _bits(kind: str) -> int:
    return {"f16": 16, "bf16": 16, "tf32": 32}.get(kind) or int(kind[1:])


def _as_float(e: Emitter, value: Value, source: str) -> Value:
    """Any source as float32 or float64, whichever holds it exactly."""
    if source in ("f16", "bf16"):
        return widen_half(e, value, source)
    if source in ("f32", "f64"):
        return value
    signed = source[0] == "s"
    value = resize(e, value, "s" if signed else "u", int(source[1:]), 64)
    if value.scalar:
        return Value(64, "h", {"h": e.temporary(f"float({e.get(value, 'j' if signed else 'i')})")})
    code = f"{e.get(value, 's' if signed else 'u')}.astype({e.dtype('f', 64)})"
    return Value(64, "f", {"f": e.temporary(code)})


def _bind_float(e: Emitter, i: Instruction, value: Value, target: str) -> None:
    out = i.operands[0]
    if target == "tf32":
        rounding = next((m for m in ("rn", "rz", "rna") if i.has(m)), "rn")
        function = e.constant(formats.f32_to_tf32)
        code = (
            f"{function}({e.get(value, 'f')}, {rounding!r}, {i.has('satfinite')}, {i.has('relu')})"
        )
        e.set(out, "i" if value.scalar else "u", code + (".item()" if value.scalar else ""), 32)
        return
    if target in ("f16", "bf16"):
        if value.width == 64:
            value = _to_float(e, value, 32)
        e.bind(out, _round_half(e, i, value, target))
        return
    value = _to_float(e, value, int(target[1:]))
    if i.has("ftz") and target == "f32":
        value = flush_value(e, value)
    if i.has("sat"):
        value = e.call(e.scratch(value.width), clamp_to_one, "f", value)
    e.bind(out, value)


def _to_float(e: Emitter, value: Value, width: int) -> Value:
    if value.width == width:
        return value
    if value.scalar:
        form = "g" if width == 32 else "h"
        code = e.get(value, "h" if value.width == 64 else "g")
        make = "float32" if width == 32 else "float"
        return Value(width, form, {form: e.temporary(f"{make}({code})")})
    code = f"{e.get(value, 'f')}.astype({e.dtype('f', width)})"
    return Value(width, "f", {"f": e.temporary(code)})


def to_integer(x: Any, rounding: Callable[[Any], Any], dtype: type[Any]) -> Any:
    """Float to integer: rounded, clamped to the range; NaN becomes 0 (PTX ISA, cvt)."""
    info = np.iinfo(dtype)
    rounded = np.nan_to_num(
        rounding(np.asarray(x, np.float64)), nan=0.0, posinf=2.0**70, neginf=-(2.0**70)
    )
    inside = np.clip(rounded, float(info.min), np.nextafter(float(info.max) + 1, 0))
    return np.where(rounded >= float(info.max), info.max, inside.astype(dtype)).astype(dtype)


def _round_half(e: Emitter, i: Instruction, value: Value, target: str) -> Value:
    if not (i.has("rz") or i.has("satfinite") or i.has("relu")):
        return narrow_half(e, value, target)
    make = formats.f32_to_f16 if target == "f16" else formats.f32_to_bf16
    function = e.constant(make)
    rounding = "rz" if i.has("rz") else "rn"
    code = f"{function}({e.get(value, 'f')}, {rounding!r}, {i.has('satfinite')}, {i.has('relu')})"
    if value.scalar:
        return Value(16, "i", {"i": e.temporary(f"{code}.item()")})
    return Value(16, "u", {"u": e.temporary(code)})


def _two_halves(e: Emitter, i: Instruction, kind: str) -> None:
    """cvt.f16x2.f32 d, a, b: a goes to the upper half."""
    high, low = (_round_half(e, i, e.read(operand, 32), kind) for operand in i.operands[1:3])
    pack_halves(e, i.operands[0], low, high)


def narrow_pair(high: Any, low: Any, name: Any, relu: bool) -> Any:
    """Two floats as a pair of 8-bit codes, the first in the upper byte."""
    return formats.pack_bytes(formats.narrow(high, name, relu), formats.narrow(low, name, relu))


def widen_pair(codes: Any, name: Any) -> Any:
    """A pair of 8-bit codes as a word of two f16."""
    high, low = formats.unpack_bytes(codes)
    return formats.pack_halves(
        formats.f32_to_f16(formats.widen(high, name)), formats.f32_to_f16(formats.widen(low, name))
    )


def _small(e: Emitter, i: Instruction, target: str, source: str) -> None:
    out = i.operands[0]
    if target in ("e4m3x2", "e5m2x2") and source == "f32" and i.has("satfinite"):
        high, low = (e.read(operand, 32) for operand in i.operands[1:3])
        name = target.removesuffix("x2")
        function = e.constant(narrow_pair)
        if e.scalar(high, low):
            args = f"{e.get(high, 'f')}, {e.get(low, 'f')}"
            e.set(out, "i", f"{function}({args}, {name!r}, {i.has('relu')}).item()", 16)
        else:
            args = f"{e.get(high, 'F')}, {e.get(low, 'F')}"
            e.set(out, "u", f"{function}({args}, {name!r}, {i.has('relu')})", 16)
    elif source in ("e4m3x2", "e5m2x2") and target == "f16x2":
        value = e.read(i.operands[1], 16)
        function = e.constant(widen_pair)
        code = f"{function}({e.get(value, 'u')}, {source.removesuffix('x2')!r})"
        e.set(out, "i" if value.scalar else "u", code + (".item()" if value.scalar else ""), 32)
    else:
        raise e.error(f"cvt from {source} to {target} is not supported")
