"""Moves and conversions of addresses (PTX ISA, "Data Movement and Conversion Instructions": mov,
cvta, isspacep, mapa, getctarank).
"""

from __future__ import annotations

from mlakern.emulator.addresses import GLOBAL, LOCAL, PARAM, RANK_SHIFT, SHARED, WINDOW_SHIFT
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.bits import truth
from mlakern.emulator.opcodes.floating import (
    bind_pair,
    extract_half,
    pack_halves,
)
from mlakern.emulator.opcodes.table import BITS, FLOATS, INTEGERS, opcode
from mlakern.emulator.program import Instruction, Operand, Reg, Vector, items_of
from mlakern.emulator.values import Value


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


@opcode(
    "cvta",
    "d s",
    "u32 u64",
    "to shared shared::cta shared::cluster",
    ignored="global const local param param::entry",
)
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
    if not i.modifiers:
        raise e.error("need a state space")
    window = _WINDOWS[i.modifiers[0].split("::")[0]] >> WINDOW_SHIFT
    address, shift = e.read(i.operands[1], 64), _word(WINDOW_SHIFT)
    e.predicate(i.operands[0], "{0} >> {1} == {2}", "u", address, shift, _word(window))


@opcode("mapa", "d s s", "u32 u64", ignored="shared::cluster")
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


@opcode("getctarank", "d s", "u32 u64", ignored="shared::cluster")
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
