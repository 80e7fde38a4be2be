"""A PTX module after parsing: entries, parameters, variables, instructions, operands.

Plain data. `ptx.py` builds it, `flow.py` and the code generator read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from mlakern.emulator.errors import PtxError
from mlakern.emulator.observer import Site

if TYPE_CHECKING:
    from mlakern.emulator.opcodes.table import Row


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register: its number in the entry, its PTX name and its width in bits (1: pred)."""

    number: int
    name: str
    width: int


@dataclass(frozen=True, slots=True)
class Imm:
    """An integer literal."""

    value: int


@dataclass(frozen=True, slots=True)
class FloatImm:
    """A floating literal: the value, and the width it was written in (0f…: 32, 0d… or 1.5: 64)."""

    value: float
    width: int


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A label, a variable, a parameter or a function, with a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Sink:
    """The bit bucket ``_``."""


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate source, ``!%p``."""

    register: Reg


@dataclass(frozen=True, slots=True)
class Both:
    """Two destinations written ``a|b``."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, …}``, or the parenthesised list of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """``[base + offset]``; ``[map, {coordinates}]`` has the base, then the further items."""

    base: Reg | Symbol | Imm
    offset: int = 0
    items: tuple[Operand, ...] = ()


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """The elements of a vector, of nested ones too; else the operand itself."""
    if not isinstance(operand, Vector):
        return (operand,)
    return tuple(item for inner in operand.items for item in items_of(inner))


Operand: TypeAlias = "Reg | Imm | FloatImm | Special | Symbol | Sink | Not | Both | Vector | Memory"


@dataclass(frozen=True, eq=False)
class Instruction(Site):
    """One instruction; its text and PTX line are those of a `Site`.

    pc: its index in the kernel. row: its line in the opcode table. modifiers: what follows the
    opcode except types and what has no effect, in order; types: ``s32`` and the like, in order.
    guard: (predicate, runs when the predicate is …), only on branches: other guarded instructions
    were rewritten.
    """

    pc: int
    row: Row
    modifiers: tuple[str, ...]
    types: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[Reg, bool] | None = None

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers

    def choice(self, names: Iterable[str]) -> str:
        """The one of these modifiers that the instruction has; PtxError if it has none."""
        names = tuple(names)
        for modifier in self.modifiers:
            if modifier in names:
                return modifier
        listed = " ".join(f".{name}" for name in names)
        raise PtxError(f"line {self.line}: {self.text}: need one of {listed}")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter: its byte offset in parameter space, size and alignment."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A module variable. ``data`` holds the initial bytes of const and global variables."""

    name: str
    space: str
    size: int
    align: int
    data: bytes = b""


@dataclass(slots=True)
class Entry:
    """A kernel."""

    name: str
    parameters: tuple[Parameter, ...]
    reqntid: tuple[int, int, int] | None = None
    maxntid: tuple[int, int, int] | None = None
    reqnctapercluster: tuple[int, int, int] | None = None
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    registers: list[Reg] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)

    @property
    def parameter_bytes(self) -> int:
        last = self.parameters[-1] if self.parameters else None
        return last.offset + last.size if last else 0


@dataclass(slots=True)
class Program:
    """A whole PTX module."""

    version: str = ""
    target: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
