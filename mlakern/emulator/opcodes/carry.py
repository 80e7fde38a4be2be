"""Arithmetic with a carry (PTX ISA, "Extended-Precision Integer Arithmetic Instructions").

The parser gives these instructions the carry flag as their last operand.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.arithmetic import bits_of, high_part
from mlakern.emulator.opcodes.packed import bind_lanes
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Instruction
from mlakern.emulator.values import Value

_TYPES = "u32 s32 u64 s64"


def add_carry(a: Any, b: Any, carry: Any) -> tuple[Any, Any]:
    """a + b + carry of unsigned arrays, and the carry out of it."""
    first = a + b
    total = first + carry.astype(a.dtype)
    return total, (first < a) | (total < first)


def sub_borrow(a: Any, b: Any, borrow: Any) -> tuple[Any, Any]:
    """a - b - borrow of unsigned arrays, and the borrow out of it."""
    first = a - b
    total = first - borrow.astype(a.dtype)
    return total, (first > a) | (total > first)


def _chain(e: Emitter, i: Instruction, function: Any, a: Value, b: Value) -> None:
    """Add or subtract with the carry that the name asks for, and keep the new one if it says so."""
    name = i.row.name
    width = bits_of(i.types[0])
    flag = e.constant(np.zeros((), np.bool_), "no carry")
    if _reads(name):
        flag = e.get(e.read(i.operands[-1], 1), "P")
    args = f"{e.get(a, 'U')}, {e.get(b, 'U')}, {flag}"
    total, carry = e.name("u"), e.name("p")
    e.line(f"{total}, {carry} = {e.constant(function)}({args})")
    bind_lanes(e, i.operands[0], "u", total, width)
    if name.endswith(".cc"):
        bind_lanes(e, i.operands[-1], "p", carry, 1)


def _reads(name: str) -> bool:
    return name.split(".")[0] in ("addc", "subc", "madc")


def _role(name: str) -> str:
    return ("b" if name.endswith(".cc") else "s") if _reads(name) else "d"


def _sum(e: Emitter, i: Instruction) -> None:
    width = bits_of(i.types[0])
    a, b = (e.read(operand, width) for operand in i.operands[1:3])
    _chain(e, i, sub_borrow if i.row.name.startswith("sub") else add_carry, a, b)


def _product(e: Emitter, i: Instruction) -> None:
    width = bits_of(i.types[0])
    a, b, c = (e.read(operand, width) for operand in i.operands[1:4])
    if ".hi" in i.row.name:
        product = high_part(e, i, a, b)
    else:
        product = e.compute(e.scratch(width), "{0} * {1}", "u", a, b, width=width)
    _chain(e, i, add_carry, product, c)


for _name in ("add.cc", "addc", "addc.cc", "sub.cc", "subc", "subc.cc"):
    opcode(_name, f"d s s {_role(_name)}", _TYPES, "", Control.NONE, carry=True)(_sum)
for _name in ("mad.lo.cc", "mad.hi.cc", "madc.lo", "madc.hi", "madc.lo.cc", "madc.hi.cc"):
    opcode(_name, f"d s s s {_role(_name)}", _TYPES, "", Control.NONE, carry=True)(_product)
