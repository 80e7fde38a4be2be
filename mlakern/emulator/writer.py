"""The text of a generated function: lines that remember their instruction, names and constants."""

from __future__ import annotations

from enum import Enum
from typing import Any

from mlakern.emulator.errors import PtxError
from mlakern.emulator.program import Instruction


class Mode(Enum):
    """What kind of group of lanes a region is compiled for."""

    LANE = "one lane: every register is a scalar"
    WARP = "one whole warp"
    BUNDLE = "several whole warps"
    PARTIAL = "lanes of incomplete warps"


class Writer:
    """Lines of Python, one for each step, so that a line number leads back to an instruction.

    sites: for each line, its instruction. namespace: the globals of the generated code.
    """

    def __init__(self, first: Instruction, mode: Mode, namespace: dict[str, Any]) -> None:
        self.mode = mode
        self.single = mode is Mode.LANE
        self.namespace = namespace
        self.lines: list[str] = []
        self.sites: list[Instruction] = []
        self.instruction = first
        self.constants: dict[tuple[Any, ...], str] = {}
        self.count = 0

    def line(self, code: str) -> None:
        """Append a line of code that belongs to the current instruction."""
        self.lines.append(code)
        self.sites.append(self.instruction)

    def name(self, prefix: str = "t") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def temporary(self, code: str) -> str:
        """Compute ``code`` into a new local variable."""
        name = self.name()
        self.line(f"{name} = {code}")
        return name

    def constant(self, value: Any, *key: Any) -> str:
        """A name for an object that generated code refers to; key: what tells it from others.

        Something hashable, such as a function or a type, is its own key.
        """
        key = key or (value,)
        found = self.constants.get(key)
        if found is None:
            found = self.constants[key] = f"K{len(self.namespace)}"
            self.namespace[found] = value
        return found

    @property
    def site(self) -> str:
        """The current instruction as a constant of generated code."""
        return self.constant(self.instruction, "site", self.instruction.pc)

    def error(self, message: str) -> PtxError:
        return PtxError(f"line {self.instruction.line}: {self.instruction.text}: {message}")
