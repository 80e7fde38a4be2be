"""Conversions (PTX ISA, "cvt")."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import numpy as np

from mlakern.emulator import formats, rounding
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.conversion import resize
from mlakern.emulator.opcodes.floating import (
    clamp_to_one,
    flush_value,
    narrow_half,
    odd_float32,
    pack_halves,
    widen_half,
)
from mlakern.emulator.opcodes.table import FLOATS, INTEGERS, opcode
from mlakern.emulator.program import Instruction, Reg
from mlakern.emulator.values import Value

_TO_WHOLE: dict[str, Callable[[Any], Any]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_HALVES = ("f16", "bf16")
_FLOATING = (*_HALVES, "f32", "f64", "tf32")
_SMALL = {"e4m3x2": 16, "e5m2x2": 16, "e2m3x2": 16, "e3m2x2": 16, "e2m1x2": 8, "ue8m0x2": 16}


@opcode(
    "cvt",
    "d s s?",
    f"{INTEGERS} {FLOATS} u8 s8 f16 bf16 tf32 f16x2 bf16x2 {' '.join(_SMALL)}",
    f"{' '.join(_TO_WHOLE)} rz rm rp rna ftz sat satfinite relu",
    ignored="rn",
    typed=2,
)
def cvt(e: Emitter, i: Instruction) -> None:
    if len(i.types) != 2:
        raise e.error("need the types of the result and of the source")
    target, source = i.types
    if target in _SMALL:
        _to_small(e, i, target, source)
    elif source in _SMALL:
        _from_small(e, i, target, source)
    elif target in ("f16x2", "bf16x2"):
        _two_halves(e, i, target.removesuffix("x2"))
    elif target in _FLOATING or source in _FLOATING:
        _floating(e, i, target, source)
    else:
        _integer(e, i, target, source)


def _allow(e: Emitter, i: Instruction, names: str) -> None:
    """Refuse modifiers that this form of the instruction does not have."""
    extra = [m for m in i.modifiers if m not in names.split()]
    if extra:
        raise e.error(f".{extra[0]} is not supported from {i.types[1]} to {i.types[0]}")


# Integers


def _integer(e: Emitter, i: Instruction, target: str, source: str) -> None:
    _allow(e, i, "sat")
    bits, kept = int(source[1:]), int(target[1:])
    value = e.read(i.operands[1], bits)
    form = "s" if source[0] == "s" else "u"
    if i.has("sat"):
        value = resize(e, value, form, bits, bits)
        function = saturating(source, target)
        value = e.call(e.scratch(bits), function, form, value, width=bits)
    _bind_integer(e, i, resize(e, value, form, bits, kept), target)


def _bind_integer(e: Emitter, i: Instruction, result: Value, target: str) -> None:
    """Extend a result to its register as its type says."""
    out, kept = i.operands[0], int(target[1:])
    register = out.width if isinstance(out, Reg) else kept
    if kept < register:
        result = resize(e, result, "s" if target[0] == "s" else "u", kept, register)
    e.bind(out, result)


@cache
def saturating(source: str, target: str) -> Callable[[Any], Any]:
    """Clamp integers of one type to the range of another."""
    given, wanted = (np.iinfo(_dtype(kind)) for kind in (source, target))
    low, high = max(given.min, wanted.min), min(given.max, wanted.max)
    kind = _dtype(source)
    return partial(np.clip, a_min=kind(low), a_max=kind(high))


def _dtype(kind: str) -> type[Any]:
    found: type[Any] = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}").type
    return found


# Floats and integers


def _floating(e: Emitter, i: Instruction, target: str, source: str) -> None:
    value = e.read(i.operands[1], _bits(source))
    if source in _FLOATING:
        value = widen_half(e, value, source) if source in _HALVES else value
        if i.has("ftz") and source == "f32":
            value = flush_value(e, value)
        if target[0] in "us":
            _to_integer(e, i, value, target, source)
            return
        whole = next((m for m in i.modifiers if m in _TO_WHOLE), None)
        if whole is not None:
            value = e.call(e.scratch(value.width), _TO_WHOLE[whole], "f", value)
    else:
        _allow(e, i, "rz rm rp sat")
        value = resize(e, value, source[0], int(source[1:]), 64)
    _bind_float(e, i, value, target, source)


def _bits(kind: str) -> int:
    return {"f16": 16, "bf16": 16, "tf32": 32}.get(kind) or int(kind[1:])


def _to_integer(e: Emitter, i: Instruction, value: Value, target: str, source: str) -> None:
    _allow(e, i, f"{' '.join(_TO_WHOLE)} ftz sat")
    how = next((m for m in i.modifiers if m in _TO_WHOLE), "rzi")
    kept = int(target[1:])
    form = "s" if target[0] == "s" else "u"
    function = to_integer(how, target, source == "f64" or kept == 64)
    code = f"{e.constant(function)}({e.get(value, 'f')})"
    if value.scalar:
        result = Value(kept, "i", {"i": e.temporary(f"{code}.item() & {(1 << kept) - 1}")})
    else:
        result = Value(kept, form, {form: e.temporary(code)})
    _bind_integer(e, i, result, target)


@cache
def to_integer(how: str, target: str, top_bit: bool) -> Callable[[Any], Any]:
    """Floats to integers: rounded and clamped to the range. NaN becomes 0, or where ``top_bit`` is
    set (64-bit types) the value of the top bit alone.
    """
    dtype = _dtype(target)
    info = np.iinfo(dtype)
    beyond = np.nextafter(float(info.max) + 1, 0)
    nan = dtype(info.min if info.min else 1 << info.bits - 1) if top_bit else dtype(0)

    def convert(x: Any) -> Any:
        rounded = _TO_WHOLE[how](np.asarray(x, np.float64))
        finite = np.nan_to_num(rounded, nan=0.0, posinf=2.0**70, neginf=-(2.0**70))
        inside = np.clip(finite, float(info.min), beyond).astype(dtype)
        result = np.where(finite >= float(info.max), dtype(info.max), inside)
        return np.where(np.isnan(rounded), nan, result).astype(dtype)

    return convert


def _bind_float(e: Emitter, i: Instruction, value: Value, target: str, source: str) -> None:
    """Round a float, or a 64-bit integer, to a floating type."""
    mode = next((m for m in i.modifiers if m in ("rz", "rm", "rp", "rna")), "rn")
    out = i.operands[0]
    whole = source not in _FLOATING
    signed = whole and source[0] == "s"
    if target == "tf32":
        if source != "f32" or mode in ("rm", "rp") or i.has("sat") or i.has("ftz"):
            raise e.error("no such conversion to tf32")
        function = _tf32(mode, i.has("satfinite"), i.has("relu"))
        e.bind(out, _word(e, value, function, 32))
        return
    if mode == "rna":
        raise e.error(".rna is for tf32")
    if target in _HALVES:
        _bind_half(e, i, value, target, mode, whole, signed)
        return
    _allow(e, i, f"{' '.join(_TO_WHOLE)} rz rm rp ftz sat")
    width = int(target[1:])
    if whole:
        value = _float_of(e, value, width, signed, mode)
    elif value.width != width:
        value = _resized(e, value, width, mode)
    if i.has("ftz") and target == "f32":
        value = flush_value(e, value)
    if i.has("sat"):
        value = e.call(e.scratch(width), clamp_to_one, "f", value)
    e.bind(out, value)


def _float_of(e: Emitter, value: Value, width: int, signed: bool, mode: str) -> Value:
    """A 64-bit integer as a float."""
    if width == 64 and mode != "rn":
        raise e.error(f".{mode} to f64 is not supported")
    function = from_integer(width, mode)
    code = f"{e.constant(function)}({e.get(value, 's' if signed else 'u')})"
    if value.scalar:
        form, make = ("g", "float32") if width == 32 else ("h", "float")
        return Value(width, form, {form: e.temporary(f"{make}({code})")})
    return Value(width, "f", {"f": e.temporary(code)})


@cache
def from_integer(width: int, mode: str) -> Callable[[Any], Any]:
    """64-bit integers to float64, or to float32 rounded by ``mode``."""
    if width == 64:
        return lambda x: x.astype(np.float64)
    if mode == "rn":
        return lambda x: x.astype(np.float32)

    def convert(x: Any) -> Any:
        low = (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
        high = (x >> x.dtype.type(32)).astype(np.float64) * 2.0**32
        total = high + low
        return rounding.round_pair(total, low - (total - high), mode)

    return convert


def _resized(e: Emitter, value: Value, width: int, mode: str) -> Value:
    """float32 to float64, exactly, or back, rounded by ``mode``."""
    if width == 32 and mode != "rn":
        function: Callable[[Any], Any] = partial(rounding.round_pair, error=0.0, mode=mode)
        code = f"{e.constant(function, 'round', mode)}({e.get(value, 'f')})"
    else:
        code = f"{e.get(value, 'f')}.astype({e.dtype('f', width)})"
    if value.scalar:
        form, make = ("g", "float32") if width == 32 else ("h", "float")
        return Value(width, form, {form: e.temporary(f"{make}({code})")})
    return Value(width, "f", {"f": e.temporary(code)})


# 16-bit floats


def _bind_half(
    e: Emitter, i: Instruction, value: Value, target: str, mode: str, whole: bool, signed: bool
) -> None:
    _allow(e, i, f"{' '.join(_TO_WHOLE)} rz ftz sat satfinite relu")
    if whole:
        value = _float_of(e, value, 64, signed, "rn")
    if value.width == 64:
        if mode == "rz":
            raise e.error(f".rz to {target} is supported from f32 only")
        code = f"{e.constant(odd_float32)}({e.get(value, 'f')})"
        form = "g" if value.scalar else "f"
        value = Value(32, form, {form: e.temporary(f"float32({code})" if value.scalar else code)})
    if i.has("sat"):
        value = e.call(e.scratch(32), clamp_to_one, "f", value)
    e.bind(i.operands[0], _round_half(e, i, value, target))


def _round_half(e: Emitter, i: Instruction, value: Value, target: str) -> Value:
    if not (i.has("rz") or i.has("satfinite") or i.has("relu")):
        return narrow_half(e, value, target)
    make = formats.f32_to_f16 if target == "f16" else formats.f32_to_bf16
    rounds: Literal["rn", "rz"] = "rz" if i.has("rz") else "rn"
    function = partial(make, rounding=rounds, satfinite=i.has("satfinite"), relu=i.has("relu"))
    key = (target, rounds, i.has("satfinite"), i.has("relu"))
    return _word(e, value, function, 16, *key)


def _word(e: Emitter, value: Value, function: Any, width: int, *key: Any) -> Value:
    """The codes that a function makes of a float."""
    code = f"{e.constant(function, *key)}({e.get(value, 'f')})"
    if value.scalar:
        return Value(width, "i", {"i": e.temporary(f"{code}.item()")})
    return Value(width, "u", {"u": e.temporary(code)})


@cache
def _tf32(mode: Any, satfinite: bool, relu: bool) -> Callable[[Any], Any]:
    return partial(formats.f32_to_tf32, rounding=mode, satfinite=satfinite, relu=relu)


def _two_halves(e: Emitter, i: Instruction, kind: str) -> None:
    """cvt.f16x2.f32 d, a, b: a goes to the upper half."""
    _allow(e, i, "rz satfinite relu ftz")
    if i.types[1] != "f32" or len(i.operands) != 3:
        raise e.error("need two sources of type f32")
    sources = [e.read(operand, 32) for operand in i.operands[1:]]
    if i.has("ftz"):
        raise e.error(".ftz is not supported for packed results")
    high, low = (_round_half(e, i, source, kind) for source in sources)
    pack_halves(e, i.operands[0], low, high)


# 8-, 6- and 4-bit floats


def _to_small(e: Emitter, i: Instruction, target: str, source: str) -> None:
    name, bits = target.removesuffix("x2"), _SMALL[target]
    if name == "ue8m0":
        _allow(e, i, "rz rp satfinite")
        mode = i.choice(("rz", "rp"))
    else:
        _allow(e, i, "satfinite relu")
        mode = "rn"
        if not i.has("satfinite"):
            raise e.error(f"conversions to {target} need .satfinite")
    function = e.constant(to_pair(name, mode, i.has("relu")))
    if source == "f32" and len(i.operands) == 3:
        high, low = (e.read(operand, 32) for operand in i.operands[1:])
    elif source in ("f16x2", "bf16x2") and len(i.operands) == 2:
        word = e.read(i.operands[1], 32)
        spread = e.constant(widen_both(source.removesuffix("x2")))
        name_high, name_low = e.name("f"), e.name("f")
        e.line(f"{name_high}, {name_low} = {spread}({e.get(word, 'U')})")
        high, low = (Value(32, "f", {"f": each}) for each in (name_high, name_low))
    else:
        raise e.error(f"no conversion from {source} to {target}")
    code = f"{function}({e.get(high, 'F')}, {e.get(low, 'F')})"
    if e.single:
        e.set(i.operands[0], "i", f"int({code}[0])", bits)
    else:
        e.set(i.operands[0], "u", code, bits)


@cache
def to_pair(name: Any, mode: str, relu: bool) -> Callable[[Any, Any], Any]:
    """Two float arrays as pairs of codes, the first in the upper part."""

    def narrow(values: Any) -> Any:
        if name == "ue8m0":
            return formats.narrow_scale(values, up=mode == "rp")
        return formats.narrow(values, name, relu)

    def pair(high: Any, low: Any) -> Any:
        if name == "e2m1":
            return narrow(high) << np.uint8(4) | narrow(low)
        return formats.pack_bytes(narrow(high), narrow(low))

    return pair


@cache
def widen_both(kind: str) -> Callable[[Any], tuple[Any, Any]]:
    """The upper and the lower half of words as float32."""
    widen = formats.f16_to_f32 if kind == "f16" else formats.bf16_to_f32

    def both(words: Any) -> tuple[Any, Any]:
        high, low = formats.unpack_halves(words)
        return widen(high), widen(low)

    return both


def _from_small(e: Emitter, i: Instruction, target: str, source: str) -> None:
    _allow(e, i, "relu")
    name = source.removesuffix("x2")
    wanted = "bf16x2" if name == "ue8m0" else "f16x2"
    if target != wanted or (name == "ue8m0" and i.modifiers):
        raise e.error(f"no conversion from {source} to {target}; need {wanted}")
    value = e.read(i.operands[1], _SMALL[source])
    function = e.constant(from_pair(name, i.has("relu")))
    code = f"{function}({e.get(value, 'U')})"
    if e.single:
        e.set(i.operands[0], "i", f"int({code}[0])", 32)
    else:
        e.set(i.operands[0], "u", code, 32)


@cache
def from_pair(name: Any, relu: bool) -> Callable[[Any], Any]:
    """Pairs of codes as words of two 16-bit floats."""

    def half(codes: Any) -> Any:
        if name == "ue8m0":
            return formats.f32_to_bf16(formats.widen_scale(codes, "ue8m0"))
        return formats.f32_to_f16(formats.widen(codes, name), relu=relu)

    def convert(pairs: Any) -> Any:
        if name == "e2m1":
            bytes_ = pairs.astype(np.uint8)
            return formats.pack_halves(half(bytes_ >> np.uint8(4)), half(bytes_ & np.uint8(15)))
        high, low = formats.unpack_bytes(pairs)
        return formats.pack_halves(half(high), half(low))

    return convert
