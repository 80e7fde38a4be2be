"""Helpers for instructions that are computed by one numpy function of whole arrays, and the
instructions on packed integers (PTX ISA, "dp4a", "dp2a", and .u16x2, .s16x2 forms).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.table import opcode
from mlakern.emulator.program import Instruction, Operand
from mlakern.emulator.values import Value


def lanewise(
    e: Emitter, out: Operand, function: Callable[..., Any], width: int, *sources: Value
) -> None:
    """``out`` is the unsigned result of ``function``, which gets unsigned arrays of the sources."""
    code = f"{e.constant(function)}({', '.join(e.get(source, 'U') for source in sources)})"
    bind_lanes(e, out, "u", e.temporary(code), width)


def bind_lanes(e: Emitter, out: Operand, form: str, name: str, width: int) -> None:
    """An array result; the scalar in it for one lane."""
    if not e.single:
        e.bind(out, Value(width, form, {form: name}))
    elif form == "p":
        e.set(out, "b", f"bool({name}[0])", 1)
    else:
        e.set(out, "i", f"int({name}[0])", width)


_DOTS: dict[tuple[str, str, str, bool], Callable[..., Any]] = {}


def _dot(a_type: str, b_type: str, parts: int, high: bool) -> Callable[..., Any]:
    """c plus the dot product of the bytes of b with the bytes (dp4a) or halves (dp2a) of a."""

    def dot(a: Any, b: Any, c: Any) -> Any:
        kinds = {"u32": np.uint8, "s32": np.int8}
        wide = {"u32": np.uint16, "s32": np.int16}
        left = a.view(kinds[a_type] if parts == 4 else wide[a_type]).reshape(-1, parts)
        right = b.view(kinds[b_type]).reshape(-1, 4)
        right = right[:, 2 * high : 2 * high + parts]
        total = (left.astype(np.int64) * right).sum(axis=1) + c.view(np.int32)
        return total.astype(np.uint32)

    return dot


def _dot_row(name: str, parts: int, modifiers: str, ignored: str = "") -> None:
    @opcode(name, "d s s s", "u32 s32", modifiers, ignored=ignored, typed=2)
    def generate(e: Emitter, i: Instruction) -> None:
        if len(i.types) != 2:
            raise e.error("need the types of A and B")
        key = (name, *i.types, i.has("hi"))
        if key not in _DOTS:
            _DOTS[key] = _dot(*i.types, parts, i.has("hi"))
        lanewise(e, i.operands[0], _DOTS[key], 32, *(e.read(o, 32) for o in i.operands[1:]))


_dot_row("dp4a", 4, "")
_dot_row("dp2a", 2, "hi", "lo")


def _halves(function: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """A function of 16-bit arrays applied to both halves of words."""

    def both(*words: Any) -> Any:
        result = function(*(word.view(dtype) for word in words))
        return np.ascontiguousarray(result).view(np.uint32)

    return both


PACKED_INTEGERS: dict[tuple[str, str, bool], Callable[..., Any]] = {
    (name, kind, relu): _halves(
        (lambda a, b, f=function: np.maximum(f(a, b), 0)) if relu else function, dtype
    )
    for kind, dtype in (("u16x2", np.uint16), ("s16x2", np.int16))
    for name, function in (
        ("add", np.add),
        ("sub", np.subtract),
        ("min", np.minimum),
        ("max", np.maximum),
    )
    for relu in (False, True)
    if not (relu and (kind == "u16x2" or name in ("add", "sub")))
}


def packed_integers(e: Emitter, i: Instruction) -> bool:
    """Generate add, sub, min or max of .u16x2 or .s16x2; False for other types."""
    if i.types[0] not in ("u16x2", "s16x2"):
        return False
    function = PACKED_INTEGERS.get((i.row.name, i.types[0], i.has("relu")))
    if function is None or set(i.modifiers) - {"relu"}:
        raise e.error("no such form of packed integers")
    lanewise(e, i.operands[0], function, 32, *(e.read(o, 32) for o in i.operands[1:]))
    return True
