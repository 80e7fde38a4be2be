"""Asynchronous copies (PTX ISA, "cp.async", "cp.async.bulk", "cp.async.bulk.tensor")."""

from __future__ import annotations

from mlakern.emulator import bulk
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.memory import address, argument
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Instruction, Memory, Operand, Vector
from mlakern.emulator.values import Value

_SHARED = "shared::cta shared::cluster"
_GROUPS = "cta_group::1 cta_group::2"
_COMPLETION = "mbarrier::complete_tx::bytes bulk_group"
_HINT = "L2::cache_hint"


def _copy(e: Emitter, values: list[Value], code: str) -> None:
    """Emit a call of a copy, whose fields are the values as ints."""
    e.line(code.format(*(e.get(value, "i") for value in values)))


@opcode(
    "cp.async.bulk.tensor",
    "m m m? s? s?",
    "",
    f"1d 2d 3d 4d 5d global tile {_SHARED} {_GROUPS} {_COMPLETION} multicast::cluster {_HINT}",
    Control.ALONE,
)
def copy_tensor(e: Emitter, i: Instruction) -> None:
    if e.part():
        return
    if i.has("bulk_group"):
        described, source = i.operands[0], i.operands[1]
        values = [_map(e, described), address(e, source, "shared"), *_coordinates(e, i, described)]
        function = e.constant(bulk.store_tensor)
        listed = ", ".join(f"{{{n}}}" for n in range(2, len(values)))
        _copy(e, values, f"{function}(g, {{0}}, [{listed}], {{1}}, {e.site})")
        return
    destination, described, barrier = i.operands[:3]
    values = [
        address(e, destination, "shared"),
        _map(e, described),
        address(e, barrier, "shared"),
        *_coordinates(e, i, described),
    ]
    listed = ", ".join(f"{{{n}}}" for n in range(3, len(values)))
    mask = "None"
    if i.has("multicast::cluster"):
        mask = f"{{{len(values)}}}"
        values.append(e.read(i.operands[3], 16))
    function = e.constant(bulk.load_tensor)
    pair = i.has("cta_group::2")
    _copy(
        e,
        values,
        f"{function}(g, {{0}}, {{1}}, [{listed}], {{2}}, {mask}, {pair}, {e.site})",
    )


def _map(e: Emitter, operand: Operand) -> Value:
    assert isinstance(operand, Memory)
    return address(e, Memory(operand.base, operand.offset), "global")


def _coordinates(e: Emitter, i: Instruction, operand: Operand) -> list[Value]:
    rank = int(i.modifiers[0][0])
    items = operand.items[0] if isinstance(operand, Memory) and operand.items else None
    if not isinstance(items, Vector) or len(items.items) != rank:
        raise e.error(f"expected {rank} coordinates in braces")
    return [e.read(item, 32) for item in items.items]


@opcode(
    "cp.async.bulk",
    "m m s m? s? s?",
    "",
    f"global {_SHARED} {_COMPLETION} multicast::cluster {_HINT}",
    Control.ALONE,
)
def copy_bulk(e: Emitter, i: Instruction) -> None:
    if e.part():
        return
    size = e.read(i.operands[2], 32)
    if i.has("bulk_group"):
        values = [
            address(e, i.operands[0], "global"),
            address(e, i.operands[1], "shared"),
            size,
        ]
        function = e.constant(bulk.store_bytes)
        _copy(e, values, f"{function}(g, {{0}}, {{1}}, {{2}}, {e.site})")
        return
    space = "shared" if i.modifiers[1] == "shared::cta" else "global"
    values = [
        address(e, i.operands[0], "shared"),
        address(e, i.operands[1], space),
        size,
        address(e, i.operands[3], "shared"),
    ]
    mask = "None"
    if i.has("multicast::cluster"):
        mask = "{4}"
        values.append(e.read(i.operands[4], 16))
    function = e.constant(bulk.load_bytes)
    _copy(
        e,
        values,
        f"{function}(g, {{0}}, {{1}}, {{2}}, {{3}}, {mask}, {e.site})",
    )


@opcode("cp.async.bulk.prefetch.tensor", "m s?", "", f"1d 2d 3d 4d 5d L2 global tile {_HINT}")
def prefetch_tensor(e: Emitter, i: Instruction) -> None:
    """No effect on values."""


@opcode("cp.async.bulk.prefetch", "m s s?", "", f"L2 global {_HINT}")
def prefetch_bulk(e: Emitter, i: Instruction) -> None:
    """No effect on values."""


@opcode("cp.async.bulk.commit_group")
def commit_group(e: Emitter, _: Instruction) -> None:
    e.line(f"{e.constant(bulk.commit_group)}(g)")


@opcode("cp.async.bulk.wait_group", "s", "", "read")
def wait_group(e: Emitter, i: Instruction) -> None:
    pending = e.get(e.read(i.operands[0], 32), "i")
    e.line(f"{e.constant(bulk.wait_group)}(g, {pending})")


@opcode(
    "cp.async",
    "m m s s?",
    "",
    "ca cg shared shared::cta global L2::64B L2::128B L2::256B",
)
def copy_small(e: Emitter, i: Instruction) -> None:
    """Done at once in either mode; commit_group and wait_group therefore have nothing to do."""
    destination = argument(e, address(e, i.operands[0], "shared"))
    source = argument(e, address(e, i.operands[1], "global"))
    size = e.get(e.read(i.operands[2], 32), "i")
    filled = "None"
    if len(i.operands) > 3:
        filled = e.get(e.read(i.operands[3], 32), "i")
    function = e.constant(bulk.copy_small)
    e.line(f"{function}(g, {destination}, {source}, {size}, {filled}, {e.site})")


def _nothing(e: Emitter, _: Instruction) -> None:
    """The copies are already done."""


opcode("cp.async.commit_group")(_nothing)
opcode("cp.async.wait_group", "s")(_nothing)
opcode("cp.async.wait_all")(_nothing)
