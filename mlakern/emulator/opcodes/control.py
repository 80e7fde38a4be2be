"""Control flow (PTX ISA, "Control Flow Instructions") and instructions without effect here."""

from __future__ import annotations

from mlakern.emulator.emitter import Emitter
from mlakern.emulator.errors import Fault
from mlakern.emulator.opcodes.bits import truth
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Imm, Instruction


@opcode("bra", "l", "", "", Control.JUMP, ignored="uni")
def bra(e: Emitter, i: Instruction) -> None:
    """Successor 0 is the next instruction and 1 the target; an unguarded branch has the target
    only.
    """
    if i.guard is None:
        e.store()
        e.line("return 0")
        return
    register, sense = i.guard
    condition = truth(e.read(register, 1))
    e.store()
    if condition.scalar:
        yes, no = (1, 0) if sense else (0, 1)
        e.line(f"return {yes} if {e.get(condition, 'b')} else {no}")
        return
    test = e.get(condition, "p")
    if not sense:
        test = e.temporary(f"~{test}")
    raw = e.temporary(f"{test}.tobytes()")
    e.line(f"if b'\\1' not in {raw}: return 0")
    e.line(f"if b'\\0' not in {raw}: return 1")
    e.line(f"return {test}")


@opcode("brx.idx", "s l", "", "", Control.JUMP, ignored="uni")
def brx(e: Emitter, i: Instruction) -> None:
    index = e.read(i.operands[0], 32)
    e.store()
    if index.scalar:
        e.line(f"return {e.get(index, 'i')}")
    else:
        code = e.get(index, "s")
        e.line(f"return int({code}[0]) if ({code} == {code}[0]).all() else {code}")


def _leave(e: Emitter, _: Instruction) -> None:
    e.line("return EXITED")


opcode("ret", "", "", "", Control.JUMP, ignored="uni")(_leave)
opcode("exit", "", "", "", Control.JUMP)(_leave)


def trap() -> None:
    """A trap instruction was reached."""
    raise Fault("trap executed")


def _trap(e: Emitter, _: Instruction) -> None:
    e.line(f"{e.constant(trap)}()")
    e.line("return EXITED")


opcode("trap", "", "", "", Control.JUMP)(_trap)
opcode("brkpt", "", "", "", Control.JUMP)(_trap)


@opcode("call", "d s? s? s?", "", "", Control.JUMP, ignored="uni")
def call(e: Emitter, _: Instruction) -> None:
    raise e.error("function calls are not supported; inline the function")


def _nothing(e: Emitter, _: Instruction) -> None:
    """No effect on values."""


@opcode("setmaxnreg", "s", "u32", "", Control.CONVERGED, ignored="inc dec sync aligned")
def setmaxnreg(e: Emitter, i: Instruction) -> None:
    """No effect on values; the count must be one that hardware takes."""
    e.converge()
    count = i.operands[0]
    if not isinstance(count, Imm) or count.value % 8 or not 24 <= count.value <= 256:
        raise e.error(f"got {count}, need a multiple of 8 from 24 to 256")


for _name, _roles, _modifiers in (
    ("nanosleep", "s", "u32"),
    ("pmevent", "s", "mask"),
    ("griddepcontrol", "", "wait launch_dependents"),
):
    opcode(_name, _roles, ignored=_modifiers)(_nothing)
