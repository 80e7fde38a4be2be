"""Budgets: what each released kernel weighs, kept in the repository so that growth shows in review.

The file is one JSON object with one line for each configuration, sorted by name: size of the cubin,
registers, shared memory, spilled bytes, and the instructions of each main loop. A build is compared
with it; a kernel may be smaller than its budget, and its cubin a little larger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mlakern.performance.profile import Profile

FILE_NAME = "budgets.json"
# A cubin's size follows from much that costs no time (symbols, alignment); instructions do not.
SIZE_TOLERANCE = 0.03


class BudgetError(ValueError):
    """A budget file that cannot be read; starts with the file."""


@dataclass(frozen=True)
class Budget:
    """One configuration's line. loops: instructions of a main loop by role.

    registers, spill_bytes: in a thread of the attention kernel; shared_bytes: in a block of it.
    """

    cubin_bytes: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    loops: Mapping[str, int]

    @classmethod
    def of(cls, profile: Profile) -> Budget:
        kernel = profile.manifest.kernel("attention")
        return cls(
            cubin_bytes=profile.manifest.cubin.size,
            registers=kernel.registers,
            shared_bytes=kernel.dynamic_shared + kernel.static_shared,
            spill_bytes=kernel.spill_stores + kernel.spill_loads,
            loops={role: loop.instructions for role, loop in sorted(profile.loops.items())},
        )

    def items(self) -> dict[str, int]:
        """Every number under one name: "cubin_bytes", …, "loop softmax"."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "loops"}
        return {**numbers, **{f"loop {role}": count for role, count in self.loops.items()}}


@dataclass(frozen=True)
class Excess:
    """A number of one kernel that is above what its budget allows; None: not in the budget."""

    name: str
    item: str
    got: int
    budget: int | None

    @property
    def growth(self) -> float | None:
        """Relative to the budget; None where that is 0 or missing."""
        return self.got / self.budget - 1 if self.budget else None


def excesses(name: str, measured: Budget, budget: Budget) -> list[Excess]:
    """What of a kernel is above its budget."""
    allowed = budget.items()
    return [
        Excess(name, item, got, allowed.get(item))
        for item, got in measured.items().items()
        if item not in allowed or got > allowed[item] * _tolerance(item)
    ]


def read(path: Path) -> dict[str, Budget]:
    """The budgets by configuration name; BudgetError names what is wrong."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BudgetError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BudgetError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise BudgetError(f"{path}: got {type(document).__name__}, need an object")
    return {name: _budget(path, name, line) for name, line in document.items()}


def write(path: Path, budgets: Mapping[str, Budget]) -> None:
    """One line for each configuration, sorted."""
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(b))}" for name, b in sorted(budgets.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _tolerance(item: str) -> float:
    return 1 + SIZE_TOLERANCE if item == "cubin_bytes" else 1.0


def _budget(path: Path, name: str, line: object) -> Budget:
    wanted = {field.name for field in fields(Budget)}
    if not isinstance(line, dict) or set(line) != wanted or not isinstance(line["loops"], dict):
        raise BudgetError(f"{path}: {name}: need {', '.join(sorted(wanted))}; try --update")
    numbers = [line[key] for key in wanted - {"loops"}] + list(line["loops"].values())
    if any(type(number) is not int for number in numbers):
        raise BudgetError(f"{path}: {name}: need whole numbers")
    return Budget(**line)
