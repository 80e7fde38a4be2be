"""Asynchronous copies (PTX ISA, "cp.async", "cp.async.bulk", "cp.async.bulk.tensor")."""

from __future__ import annotations

from mlakern.emulator import bulk, reductions, small_copies
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.opcodes.barrier import each_lane
from mlakern.emulator.opcodes.comparison import select
from mlakern.emulator.opcodes.memory import address, argument
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Imm, Instruction, Memory, Operand, Vector
from mlakern.emulator.values import Value

_SHARED = "shared::cta shared::cluster"
_HINT = "L2::cache_hint"


def _copy(e: Emitter, values: list[Value], code: str) -> None:
    """Emit a call of a copy, whose fields are the values as ints."""
    e.line(code.format(*(e.get(value, "i") for value in values)))


@opcode(
    "cp.async.bulk.tensor",
    "m m m? s? s?",
    "",
    "1d 2d 3d 4d 5d cta_group::2 bulk_group multicast::cluster",
    Control.ALONE,
    ignored=f"global tile {_SHARED} cta_group::1 mbarrier::complete_tx::bytes {_HINT}",
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
    destination, described, barrier = (_operand(e, i, n) for n in range(3))
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
        values.append(e.read(_operand(e, i, 3), 16))
    function = e.constant(bulk.load_tensor)
    pair = i.has("cta_group::2")
    _copy(
        e,
        values,
        f"{function}(g, {{0}}, {{1}}, [{listed}], {{2}}, {mask}, {pair}, {e.site})",
    )


def _operand(e: Emitter, i: Instruction, number: int) -> Operand:
    """An operand that this form of the instruction needs."""
    if number >= len(i.operands):
        raise e.error(f"got {len(i.operands)} operands, need more")
    return i.operands[number]


def _map(e: Emitter, operand: Operand) -> Value:
    assert isinstance(operand, Memory)
    return address(e, Memory(operand.base, operand.offset), "global")


def _coordinates(e: Emitter, i: Instruction, operand: Operand) -> list[Value]:
    rank = int(i.choice(("1d", "2d", "3d", "4d", "5d"))[0])
    items = operand.items[0] if isinstance(operand, Memory) and operand.items else None
    if not isinstance(items, Vector) or len(items.items) != rank:
        raise e.error(f"expected {rank} coordinates in braces")
    return [e.read(item, 32) for item in items.items]


@opcode(
    "cp.async.bulk",
    "m m s m? s? s?",
    "",
    f"{_SHARED} bulk_group multicast::cluster",
    Control.ALONE,
    ignored=f"global mbarrier::complete_tx::bytes {_HINT}",
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
    # The destination's space comes first: of two the second is the source's.
    spaces = [m for m in i.modifiers if m in _SHARED.split()]
    from_shared = len(spaces) == 2
    values = [
        address(e, i.operands[0], "shared"),
        address(e, i.operands[1], "shared" if from_shared else "global"),
        size,
        address(e, _operand(e, i, 3), "shared"),
    ]
    mask = "None"
    if i.has("multicast::cluster"):
        mask = "{4}"
        values.append(e.read(_operand(e, i, 4), 16))
    function = e.constant(bulk.load_bytes)
    _copy(
        e,
        values,
        f"{function}(g, {{0}}, {{1}}, {{2}}, {{3}}, {mask}, {from_shared}, {e.site})",
    )


_REDUCTIONS = "add min max inc dec and or xor"


@opcode(
    "cp.reduce.async.bulk.tensor",
    "m m s?",
    "",
    f"1d 2d 3d 4d 5d {_REDUCTIONS}",
    Control.ALONE,
    ignored=f"global shared::cta tile bulk_group {_HINT}",
)
def reduce_tensor(e: Emitter, i: Instruction) -> None:
    if e.part():
        return
    described, source = i.operands[:2]
    values = [_map(e, described), address(e, source, "shared"), *_coordinates(e, i, described)]
    function = e.constant(reductions.reduce_tensor)
    listed = ", ".join(f"{{{n}}}" for n in range(2, len(values)))
    name = i.choice(_REDUCTIONS.split())
    _copy(e, values, f"{function}(g, {{0}}, [{listed}], {{1}}, {name!r}, {e.site})")


@opcode(
    "cp.reduce.async.bulk",
    "m m s m? s?",
    "u32 s32 u64 s64 b32 b64 f16 bf16 f32 f64",
    f"bulk_group {_REDUCTIONS}",
    Control.ALONE,
    ignored=f"global {_SHARED} mbarrier::complete_tx::bytes noftz {_HINT}",
)
def reduce_bulk(e: Emitter, i: Instruction) -> None:
    if e.part():
        return
    name, kind = i.choice(_REDUCTIONS.split()), i.types[0]
    to_global = i.has("bulk_group")
    values = [
        address(e, i.operands[0], "global" if to_global else "shared"),
        address(e, i.operands[1], "shared"),
        e.read(i.operands[2], 32),
    ]
    if to_global:
        function = e.constant(reductions.reduce_bytes)
        _copy(e, values, f"{function}(g, {{0}}, {{1}}, {{2}}, {name!r}, {kind!r}, {e.site})")
        return
    values.append(address(e, _operand(e, i, 3), "shared"))
    function = e.constant(reductions.reduce_shared)
    _copy(e, values, f"{function}(g, {{0}}, {{1}}, {{2}}, {{3}}, {name!r}, {kind!r}, {e.site})")


@opcode("cp.async.bulk.prefetch.tensor", "m s?", ignored=f"1d 2d 3d 4d 5d L2 global tile {_HINT}")
def prefetch_tensor(e: Emitter, i: Instruction) -> None:
    """No effect on values."""


@opcode("cp.async.bulk.prefetch", "m s s?", ignored=f"L2 global {_HINT}")
def prefetch_bulk(e: Emitter, i: Instruction) -> None:
    """No effect on values."""


@opcode("cp.async.bulk.commit_group")
def commit_group(e: Emitter, _: Instruction) -> None:
    e.line(f"{e.constant(bulk.commit_group)}(g)")


@opcode("cp.async.bulk.wait_group", "s", ignored="read")
def wait_group(e: Emitter, i: Instruction) -> None:
    pending = e.get(e.read(i.operands[0], 32), "i")
    e.line(f"{e.constant(bulk.wait_group)}(g, {pending})")


@opcode(
    "cp.async",
    "m m s s? s?",
    "",
    "L2::cache_hint",
    ignored="ca cg shared shared::cta global L2::64B L2::128B L2::256B",
)
def copy_small(e: Emitter, i: Instruction) -> None:
    """Operands after the size: how many bytes to copy, or a predicate to copy none; a hint."""
    destination = argument(e, address(e, i.operands[0], "shared"))
    source = argument(e, address(e, i.operands[1], "global"))
    size = i.operands[2]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise e.error("the size must be 4, 8 or 16")
    rest = i.operands[3:-1] if i.has("L2::cache_hint") else i.operands[3:]
    if len(rest) > 1:
        raise e.error("got too many operands")
    filled = "None"
    if rest:
        value = e.read(rest[0], 32)
        if value.width == 1:
            whole = Value(32, "i", {"i": str(size.value)})
            none = Value(32, "i", {"i": "0"})
            value = select(e, e.scratch(32), none, whole, value)
        filled = argument(e, value)
    function = e.constant(small_copies.copy)
    e.line(f"{function}(g, {destination}, {source}, {size.value}, {filled}, {e.site})")


@opcode("cp.async.commit_group")
def commit_small(e: Emitter, _: Instruction) -> None:
    e.line(f"if g.bundle.small_copies: {e.constant(small_copies.commit_group)}(g)")


@opcode("cp.async.wait_group", "s")
def wait_small(e: Emitter, i: Instruction) -> None:
    pending = e.get(e.read(i.operands[0], 32), "i")
    e.line(f"if g.bundle.small_copies: {e.constant(small_copies.wait_group)}(g, {pending})")


@opcode("cp.async.wait_all")
def wait_all(e: Emitter, _: Instruction) -> None:
    e.line(f"if g.bundle.small_copies: {e.constant(small_copies.wait_all)}(g)")


@opcode("cp.async.mbarrier.arrive", "m", "b64", "noinc", ignored="shared shared::cta")
def arrive_small(e: Emitter, i: Instruction) -> None:
    function = e.constant(small_copies.arrive)
    each_lane(
        e,
        [address(e, i.operands[0], "shared")],
        f"{function}({{g}}, {{0}}, {i.has('noinc')}, {e.site})",
    )
