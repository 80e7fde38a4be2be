"""Reads the parts of a PTX file that the build checks: its target and the entries' parameters."""

from __future__ import annotations

import re

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
# PTX ISA, "Parameter State Space": .param [.align N] .type [.ptr …] name[count]
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.[busf](?P<bits>\d+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?[\w$]+(?:\[(?P<count>\d+)\])?"
)


class PtxError(ValueError):
    """PTX without the thing that was looked for."""


def target(ptx: str) -> str:
    """The architecture in the .target directive."""
    match = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if match is None:
        raise PtxError("PTX: no .target directive")
    return match[1]


def parameters(ptx: str, entry: str) -> tuple[tuple[int, int], ...]:
    """(offset, size) in bytes of each parameter of an entry, in order."""
    match = re.search(rf"\.entry\s+{re.escape(entry)}\s*\((.*?)\)", ptx, re.DOTALL)
    if match is None:
        raise PtxError(f"PTX: no entry {entry}")
    declarations = [text.strip() for text in match[1].split(",") if text.strip()]
    slots = []
    at = 0
    for declaration in declarations:
        parameter = _PARAMETER.fullmatch(declaration)
        if parameter is None:
            raise PtxError(f"PTX: {entry}: cannot read parameter {declaration!r}")
        element = _SIZES[parameter["bits"]]
        align = int(parameter["align"] or element)
        at = -(-at // align) * align
        slots.append((at, element * int(parameter["count"] or 1)))
        at += slots[-1][1]
    return tuple(slots)
