"""Atomics and remote stores (PTX ISA, "atom", "red", "st.async", "red.async")."""

from __future__ import annotations

from mlakern.emulator import atomics, remote
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.memory import (
    ORDER,
    SCOPES,
    address,
    argument,
    element_of,
    space_of,
    stored,
)
from mlakern.emulator.opcodes.table import BITS, FLOATS, INTEGERS, opcode
from mlakern.emulator.program import Instruction, Memory, Operand, items_of
from mlakern.emulator.values import Value

_TYPES = f"{BITS} {INTEGERS} {FLOATS} f16 f16x2 bf16 bf16x2"
_INERT = f"{SCOPES} {ORDER} noftz v2 v4 v8"
_SPACES = "global shared shared::cta shared::cluster"
_COUNTS = {"cas": 2}


def _legal(e: Emitter, name: str, kind: str) -> None:
    """Refuse operations that a type does not have."""
    floating = kind.lstrip("b")[0] == "f"
    if name in ("and", "or", "xor", "cas", "exch"):
        wrong = floating or (kind[0] in "us" and name not in ("exch", "cas"))
    elif name in ("inc", "dec"):
        wrong = kind != "u32"
    else:
        wrong = kind in BITS.split()
    if wrong:
        raise e.error(f"no .{name} of type .{kind}")


def _sources(i: Instruction, first: int) -> list[list[Operand]]:
    """For each element of a vector the operands that it takes; not a cache hint at the end."""
    end = len(i.operands) - i.has("L2::cache_hint")
    given = [items_of(operand) for operand in i.operands[first:end]]
    return [list(element) for element in zip(*given, strict=True)]


def _old(e: Emitter, i: Instruction, at: int) -> tuple[str, int]:
    """Code for the old values, and their width; the address is operand ``at``."""
    space, kind = space_of(i), i.types[0]
    name = i.choice(atomics.OPERATIONS)
    where = argument(e, address(e, i.operands[at], space))
    if kind == "b128":
        if name not in ("exch", "cas"):
            raise e.error(f"no .{name} of type .b128")
        words = [item for operand in i.operands[at + 1 :] for item in items_of(operand)]
        listed = ", ".join(argument(e, e.read(word, 64)) for word in words)
        function = e.constant(atomics.exchange_wide)
        return f"{function}(g, {space!r}, {where}, {name!r}, [{listed}], {e.site})", 64
    _legal(e, name, kind)
    width = 8 * atomics.SIZES[kind]
    elements = []
    for element in _sources(i, at + 1):
        if len(element) != _COUNTS.get(name, 1):
            raise e.error(f".{name}: got {len(element)} sources")
        listed = ", ".join(argument(e, e.read(source, width)) for source in element)
        elements.append(f"[{listed}]")
    function = e.constant(atomics.atomic)
    args = f"g, {space!r}, {where}, {name!r}, {kind!r}, [{', '.join(elements)}], {e.site}"
    return f"{function}({args})", width


@opcode(
    "atom",
    "d m s s? s?",
    f"{_TYPES} b128",
    f"{_SPACES} {' '.join(atomics.OPERATIONS)} L2::cache_hint",
    ignored=_INERT,
)
def atom(e: Emitter, i: Instruction) -> None:
    code, width = _old(e, i, 1)
    outs = items_of(i.operands[0])
    names = [e.name() for _ in outs]
    e.line(f"{', '.join(names)}, = {code}")
    form = "i" if e.single else "u"
    for out, name in zip(outs, names, strict=True):
        e.bind(out, Value(width, form, {form: name}))


@opcode(
    "red",
    "m s s?",
    _TYPES,
    f"{_SPACES} {' '.join(atomics.OPERATIONS)} L2::cache_hint",
    ignored=_INERT,
)
def red(e: Emitter, i: Instruction) -> None:
    e.line(_old(e, i, 0)[0])


_REMOTE = f"{SCOPES} {ORDER} shared::cluster mbarrier::complete_tx::bytes"


@opcode("st.async", "m s m", f"{BITS} {INTEGERS} {FLOATS}", ignored=f"{_REMOTE} v2 v4")
def st_async(e: Emitter, i: Instruction) -> None:
    kind, bits = element_of(i)
    where, barrier = (argument(e, address(e, i.operands[n], "shared")) for n in (0, 2))
    values = [argument(e, stored(e, item, kind)) for item in items_of(i.operands[1])]
    args = f"g, {where}, {bits // 8}, [{', '.join(values)}], {barrier}, {e.site}"
    e.line(f"{e.constant(remote.store)}({args})")


@opcode(
    "red.async", "m s m", f"{BITS} {INTEGERS}", "inc dec min max add and or xor", ignored=_REMOTE
)
def red_async(e: Emitter, i: Instruction) -> None:
    kind, bits = element_of(i)
    name = i.choice(atomics.OPERATIONS)
    if name not in ("and", "or", "xor"):
        _legal(e, name, kind)
    if not isinstance(i.operands[2], Memory):
        raise e.error("expected an mbarrier in brackets")
    where, barrier = (argument(e, address(e, i.operands[n], "shared")) for n in (0, 2))
    value = argument(e, e.read(i.operands[1], bits))
    args = f"g, {where}, {name!r}, {kind!r}, {value}, {barrier}, {e.site}"
    e.line(f"{e.constant(remote.reduce)}({args})")
