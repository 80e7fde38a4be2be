"""The opcode table: one row for each opcode, and how rows are found and checked.

A row says which modifiers and types the opcode takes, the roles of its operands and how code is
generated for it. Adding an opcode is one decorated function::

    @opcode("add", "d s s", types=INTEGERS + FLOATS, modifiers="sat ftz", ignored="rn")
    def add(e: Emitter, i: Instruction) -> None: ...

``modifiers`` change what the generator emits; ``ignored`` ones are accepted because they cannot
change a result here (cache hints, scopes, the default rounding). Anything else is refused.

Operand roles, separated by spaces: ``d`` written, ``s`` read, ``m`` an address (read), ``l`` a
label or another name, ``b`` read and written; a trailing ``?`` makes an operand optional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from mlakern.emulator.errors import PtxError

if TYPE_CHECKING:
    from mlakern.emulator.emitter import Emitter
    from mlakern.emulator.program import Instruction

Generator: TypeAlias = "Callable[[Emitter, Instruction], None]"

BITS = "b16 b32 b64"
INTEGERS = "u16 u32 u64 s16 s32 s64"
FLOATS = "f32 f64"


class Control(Enum):
    """What an instruction does to the flow of control; decides where regions of code end."""

    NONE = "runs through"
    JUMP = "ends a region"
    BLOCKING = "may wait: begins a region, and is executed again on wake-up"
    CONVERGED = "needs the lanes it names together: begins a region unless whole warps run"
    ALONE = "each lane executes it for itself: begins a region unless one lane runs"


@dataclass(frozen=True, slots=True)
class Row:
    """One opcode.

    typed: how many types it takes at most. modifiers: those that its generator acts on. ignored:
    those without effect on results. carry: the instruction reads or writes the carry flag, which
    the parser adds as its last operand.
    """

    name: str
    roles: tuple[str, ...]
    types: frozenset[str]
    modifiers: frozenset[str]
    ignored: frozenset[str]
    control: Control
    generate: Generator
    typed: int
    carry: bool

    @property
    def required(self) -> int:
        return sum(not role.endswith("?") for role in self.roles)


_rows: dict[str, Row] = {}


def opcode(
    name: str,
    roles: str = "",
    types: str = "",
    modifiers: str = "",
    control: Control = Control.NONE,
    *,
    ignored: str = "",
    typed: int = 1,
    carry: bool = False,
) -> Callable[[Generator], Generator]:
    """Decorate a generator to add the row ``name`` to the table."""

    def add(generate: Generator) -> Generator:
        if name in _rows:
            raise ValueError(f"opcode {name} is in the table twice")
        _rows[name] = Row(
            name,
            tuple(roles.split()),
            frozenset(types.split()),
            frozenset(modifiers.split()),
            frozenset(ignored.split()),
            control,
            generate,
            typed,
            carry,
        )
        return generate

    return add


def lookup(dotted: str, line: int) -> tuple[Row, tuple[str, ...], tuple[str, ...]]:
    """The row of an opcode as written, its modifiers (without the ignored ones) and its types.

    The longest row name that the written opcode begins with wins. Raises PtxError for an unknown
    opcode and for a modifier or type that the row does not list.
    """
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        row = _rows.get(".".join(parts[:length]))
        if row is None:
            continue
        modifiers, types = [], []
        for part in parts[length:]:
            if part in row.modifiers:
                modifiers.append(part)
            elif part in row.types:
                types.append(part)
            elif part not in row.ignored:
                allowed = " ".join(sorted(row.modifiers | row.ignored | row.types)) or "none"
                raise PtxError(
                    f"line {line}: opcode {row.name}: got modifier .{part} in {dotted}, "
                    f"need one of: {allowed}"
                )
        if len(types) > row.typed:
            raise PtxError(
                f"line {line}: opcode {row.name}: got {len(types)} types in {dotted}, "
                f"need at most {row.typed}"
            )
        return row, tuple(modifiers), tuple(types)
    raise PtxError(f"line {line}: unknown opcode {dotted}; the table has {len(_rows)} opcodes")


def rows() -> dict[str, Row]:
    """The whole table, by name."""
    return dict(_rows)
