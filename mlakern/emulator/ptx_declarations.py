"""Kernel parameters and variables (PTX ISA, "State Spaces, Types, Variables", ".param")."""

from __future__ import annotations

import re
import struct

from mlakern.emulator.program import FloatImm, Imm, Parameter, Variable
from mlakern.emulator.ptx_text import Text

_VARIABLE = re.compile(
    r"(?P<lead>(?:\.\w+(?:\s+\d+)?\s+)*?)\.(?P<type>[bsuf]\d+)\s+(?P<name>[\w$]+)"
    r"(?P<extents>(?:\[\d*\])*)\s*(?:=\s*(?P<initial>[^;]*))?;"
)
_PARAMETER = re.compile(
    r"\.param\s+(?P<lead>.*)\.(?P<type>[bsuf]\d+)\s+(?P<pointer>.*?)(?P<name>[\w$]+)"
    r"(?:\[(?P<count>\d+)\])?\s*$",
    re.S,
)
_ALIGN = re.compile(r"\.align\s+(\d+)")
_SPACES = ("shared", "global", "const", "local")


def parameters(text: Text, listed: str) -> tuple[Parameter, ...]:
    """Parameters of a kernel from what stands between its parentheses, with their offsets."""
    found: list[Parameter] = []
    offset = 0
    for item in filter(str.strip, listed.split(",")):
        match = _PARAMETER.match(item.strip())
        if match is None:
            raise text.error(f"parameter not understood: {item.strip()!r}")
        size = int(match["type"][1:]) // 8
        aligned = _ALIGN.search(match["lead"])  # an .align after .ptr is the pointee's
        alignment = int(aligned[1]) if aligned else size
        size *= int(match["count"] or 1)
        offset = -(-offset // alignment) * alignment
        found.append(Parameter(match["name"], offset, size, alignment))
        offset += size
    return tuple(found)


def variable(text: Text) -> Variable:
    """Read the declaration of a variable."""
    match = text.take(_VARIABLE, "a variable declaration")
    lead, name, kind = match["lead"], match["name"], match["type"]
    space = next((s for s in _SPACES if f".{s}" in lead), None)
    if space is None:
        raise text.error(f"variable {name}: got {match[0]!r}, need a space, one of {_SPACES}")
    size = int(kind[1:]) // 8
    aligned = _ALIGN.search(lead)
    alignment = int(aligned[1]) if aligned else size
    data = _initial_bytes(text, match["initial"], kind) if match["initial"] else b""
    for extent in re.findall(r"\[(\d*)\]", match["extents"]):
        size *= int(extent or 0)
    return Variable(name, space, size, alignment, data)


def _initial_bytes(text: Text, listed: str, kind: str) -> bytes:
    size = int(kind[1:]) // 8
    out = b""
    for word in re.findall(r"[^\s{},]+", listed):
        value = text.literal(word)
        if isinstance(value, Imm):
            out += (value.value % (1 << 8 * size)).to_bytes(size, "little")
        elif isinstance(value, FloatImm) and kind in ("f32", "f64"):
            out += struct.pack("<f" if kind == "f32" else "<d", value.value)
        else:
            raise text.error(f"initial value not understood: {word!r}")
    return out
