"""Cluster launch control (PTX ISA, "clusterlaunchcontrol")."""

from __future__ import annotations

from mlakern.emulator import launch_control
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.memory import address
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Instruction, Operand, Sink, Vector
from mlakern.emulator.values import Value


@opcode(
    "clusterlaunchcontrol.try_cancel",
    "m m",
    "b128",
    "multicast::cluster::all",
    Control.ALONE,
    ignored="async shared::cta mbarrier::complete_tx::bytes",
)
def try_cancel(e: Emitter, i: Instruction) -> None:
    if e.part():
        return
    where, barrier = (e.get(address(e, o, "shared"), "i") for o in i.operands)
    everywhere = i.has("multicast::cluster::all")
    e.line(
        f"{e.constant(launch_control.try_cancel)}(g, {where}, {barrier}, {everywhere}, {e.site})"
    )


def _words(e: Emitter, operand: Operand) -> list[Value]:
    """x, y, z and the flag of an answer, as 32-bit values."""
    if not isinstance(operand, Vector):
        raise e.error("expected a 128-bit register")
    return [half for word in operand.items for half in e.split(e.read(word, 64))]


@opcode("clusterlaunchcontrol.query_cancel.is_canceled", "d s", "pred b128", typed=2)
def is_canceled(e: Emitter, i: Instruction) -> None:
    flag = _words(e, i.operands[1])[3]
    e.predicate(i.operands[0], "{0} != 0", "u", flag)


def _first_cta(e: Emitter, i: Instruction) -> None:
    words = _words(e, i.operands[1])
    axis = i.row.name.rpartition("::")[2]
    if axis in "xyz":
        e.bind(i.operands[0], words["xyz".index(axis)])
        return
    out = i.operands[0]
    if not isinstance(out, Vector):
        raise e.error("expected a vector of destinations")
    for item, word in zip(out.items, words, strict=False):
        if not isinstance(item, Sink):
            e.bind(item, word)


_FIRST = "clusterlaunchcontrol.query_cancel.get_first_ctaid"
opcode(_FIRST, "d s", "b32 b128", ignored="v4", typed=2)(_first_cta)
for _axis in "xyz":
    opcode(f"{_FIRST}::{_axis}", "d s", "b32 b128", typed=2)(_first_cta)
