"""Control flow and liveness of one kernel.

Code runs in *regions*: straight lines of instructions that begin at a branch target, after a
branch or at an instruction that may wait, and end before the next such place. `live_in` says
which registers a region or anything after it may read; only those survive when lanes part and
meet again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from mlakern.emulator.opcodes.table import Control
from mlakern.emulator.program import (
    Both,
    Entry,
    Instruction,
    Memory,
    Not,
    Operand,
    Reg,
    Symbol,
    Vector,
)


def registers_of(operand: Operand) -> Iterator[Reg]:
    """Every register named by an operand."""
    match operand:
        case Reg():
            yield operand
        case Not(register):
            yield register
        case Both(first, second):
            yield from registers_of(first)
            yield from registers_of(second)
        case Vector(items):
            for item in items:
                yield from registers_of(item)
        case Memory(base, _, items):
            if isinstance(base, Reg):
                yield base
            for item in items:
                yield from registers_of(item)


def reads_and_writes(instruction: Instruction) -> tuple[list[int], list[int]]:
    """Register numbers that an instruction reads, and those that it writes."""
    reads: list[int] = []
    writes: list[int] = []
    for role, operand in zip(instruction.row.roles, instruction.operands, strict=False):
        numbers = [register.number for register in registers_of(operand)]
        if role[0] in "db":
            writes += numbers
        if role[0] != "d":
            reads += numbers
    if instruction.guard:
        reads.append(instruction.guard[0].number)
    return reads, writes


class Flow:
    """Regions and liveness of an entry."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.instructions = entry.instructions
        self._live: dict[int, tuple[int, ...]] = {}

    def target(self, label: Operand) -> int:
        """The instruction that a branch operand leads to."""
        assert isinstance(label, Symbol)
        return self.entry.labels[label.name]

    def targets(self, instruction: Instruction) -> list[int]:
        """Where control may go from a jump; empty for instructions that end the thread."""
        match instruction.row.name:
            case "bra":
                there = self.target(instruction.operands[0])
                return [instruction.pc + 1, there] if instruction.guard else [there]
            case "brx.idx":
                table = instruction.operands[1]
                assert isinstance(table, Symbol)
                return [self.entry.labels[name] for name in self.entry.tables[table.name]]
        return []

    @cached_property
    def leaders(self) -> list[int]:
        """First instructions of basic blocks, in order, with the end of the text last."""
        found = {0, *self.entry.labels.values(), len(self.instructions)}
        for instruction in self.instructions:
            if instruction.row.control is Control.JUMP:
                found.add(instruction.pc + 1)
        return sorted(found)

    @cached_property
    def leader_set(self) -> frozenset[int]:
        return frozenset(self.leaders)

    @cached_property
    def _block_live_in(self) -> dict[int, int]:
        """Registers live at the start of each basic block, as bit sets."""
        blocks = list(zip(self.leaders[:-1], self.leaders[1:], strict=True))
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        successors: dict[int, list[int]] = {}
        for start, end in blocks:
            read: set[int] = set()
            written: set[int] = set()
            for instruction in self.instructions[start:end]:
                used, defined = reads_and_writes(instruction)
                read.update(n for n in used if n not in written)
                written.update(defined)
            reads[start], writes[start] = _bits(read), ~_bits(written)
            last = self.instructions[end - 1]
            jumps = last.row.control is Control.JUMP
            successors[start] = self.targets(last) if jumps else [end]
        live = dict.fromkeys(self.leaders, 0)
        changed = True
        while changed:
            changed = False
            for start, _ in reversed(blocks):
                out = 0
                for successor in successors[start]:
                    out |= live[successor]
                value = reads[start] | (out & writes[start])
                if value != live[start]:
                    live[start] = value
                    changed = True
        return live

    def live_in(self, pc: int) -> tuple[int, ...]:
        """Register numbers that may be read at or after ``pc`` before being written."""
        found = self._live.get(pc)
        if found is None:
            found = self._live[pc] = self._live_in(pc)
        return found

    def _live_in(self, pc: int) -> tuple[int, ...]:
        end = pc
        while end not in self.leader_set or (end == pc and pc not in self._block_live_in):
            end += 1
        if end == pc:
            return _members(self._block_live_in[pc])
        last = self.instructions[end - 1]
        live: set[int] = set()
        successors = self.targets(last) if last.row.control is Control.JUMP else [end]
        for successor in successors:
            live.update(_members(self._block_live_in[successor]))
        for instruction in reversed(self.instructions[pc:end]):
            used, defined = reads_and_writes(instruction)
            live.difference_update(defined)
            live.update(used)
        return tuple(sorted(live))

    def region_end(self, pc: int, cuts: frozenset[Control]) -> int:
        """One past the last instruction of the region at ``pc``; it ends before any of ``cuts``."""
        end = pc
        while True:
            if self.instructions[end].row.control is Control.JUMP:
                return end + 1
            end += 1
            if end in self.leader_set or self.instructions[end].row.control in cuts:
                return end


def _bits(numbers: set[int]) -> int:
    out = 0
    for number in numbers:
        out |= 1 << number
    return out


def _members(bits: int) -> tuple[int, ...]:
    text = bin(bits)[:1:-1]
    found = []
    position = text.find("1")
    while position >= 0:
        found.append(position)
        position = text.find("1", position + 1)
    return tuple(found)
