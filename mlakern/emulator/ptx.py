"""Parse PTX text into a `Program`. Declarations and bodies have modules of their own.

The grammar is that of the PTX ISA, "Syntax" and "Directives", as far as compilers emit it.
"""

from __future__ import annotations

import re

from mlakern.emulator import ptx_declarations
from mlakern.emulator.program import Entry, Program
from mlakern.emulator.ptx_body import Body, OpcodeParts
from mlakern.emulator.ptx_text import Text

_FUNCTION = re.compile(
    r"(?:\.\w+\s+)*?\.(?P<kind>entry|func)\s*(?:\([^)]*\)\s*)?(?P<name>[\w$]+)\s*"
    r"(?:\((?P<parameters>[^)]*)\))?(?P<tuning>[^{;]*)"
)
_SETTING = re.compile(r"\.(?P<name>version|target|address_size)\s+(?P<value>[\w.]+)[^\n]*")
_TUNING = re.compile(r"\.(reqntid|maxntid|reqnctapercluster)\s+([\d\s,]+)")


def parse(text: str) -> Program:
    """Parse a PTX module. Raises PtxError with the line of anything not understood."""
    reader = Text(text)
    program = Program()
    known: dict[str, OpcodeParts] = {}
    while character := reader.peek():
        if character != ".":
            raise reader.error(f"expected a directive: got {character!r}")
        if reader.skip_debug_directive():
            continue
        if setting := reader.match(_SETTING):
            if setting["name"] != "address_size":
                setattr(program, setting["name"], setting["value"])
        elif function := reader.match(_FUNCTION):
            _function(reader, program, function, known)
        else:
            variable = ptx_declarations.variable(reader)
            program.variables[variable.name] = variable
    return program


def _function(
    reader: Text, program: Program, match: re.Match[str], known: dict[str, OpcodeParts]
) -> None:
    """A kernel, or the declaration of a function (a call of it is refused where it happens)."""
    name = match["name"]
    if reader.peek() == ";":
        reader.skip(";")
        return
    if match["kind"] == "func":
        raise reader.error(f"function {name}: only kernels are supported; inline it")
    entry = Entry(name, ptx_declarations.parameters(reader, match["parameters"] or ""))
    for directive, sizes in _TUNING.findall(match["tuning"]):
        values = [int(size) for size in re.findall(r"\d+", sizes)]
        setattr(entry, directive, tuple(values + [1] * (3 - len(values))))
    program.entries[name] = entry
    Body(reader, program, entry, known).read()
