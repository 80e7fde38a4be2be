"""A cubin as instructions: runs nvdisasm and reads its text.

nvdisasm comes with the package nvidia-cuda-nvdisasm. Its text has for each function the label
``.text.NAME:``, other labels on lines of their own, and instructions as
``/*address*/ @guard OPCODE operands ;``.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = "nvidia-cuda-nvdisasm"
_FILE = "nvidia/cu13/bin/nvdisasm"

_FUNCTION = re.compile(r"^\.text\.([\w$]+):\s*$")
_LABEL = re.compile(r"^([.$][\w.$]+):\s*$")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@(?P<guard>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*?)\s*;"
)
_TARGET = re.compile(r"`\(([^)]+)\)")
_PREDICATE = re.compile(r"^!?U?P[\dT]")


class DisassemblyError(RuntimeError):
    """nvdisasm is missing, failed, or wrote something that is not understood."""


@dataclass(frozen=True)
class Instruction:
    """One instruction; `opcode` with its modifiers, `guard` without the @, "" if there is none."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> str | None:
        """The label that a branch goes to."""
        if self.name not in ("BRA", "JMP"):
            return None
        match = _TARGET.search(self.operands)
        return match[1] if match else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may be the one that follows."""
        if self.name not in ("BRA", "JMP", "EXIT", "RET"):
            return True
        # Not taken by some lanes, or decided by a predicate among the operands.
        return bool(self.guard) or bool(_PREDICATE.match(self.operands)) or ".DIV" in self.opcode

    def __str__(self) -> str:
        guard = f"@{self.guard}" if self.guard else ""
        return f"{self.address:05x} {guard:>5} {self.opcode} {self.operands}".rstrip()


@dataclass(frozen=True)
class Function:
    """The instructions of one entry; labels: name to the index of the instruction that follows."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


def disassemble(cubin: bytes) -> str:
    """nvdisasm's text of the code sections; DisassemblyError if it cannot be made."""
    try:
        program = importlib.metadata.distribution(_PACKAGE).locate_file(_FILE)
    except importlib.metadata.PackageNotFoundError:
        raise DisassemblyError(
            f"{_PACKAGE} is not installed; try pip install 'mlakern[build]'"
        ) from None
    with tempfile.TemporaryDirectory(prefix="mlakern-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [str(program), "-c", str(file)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise DisassemblyError(f"nvdisasm failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def functions(text: str) -> dict[str, Function]:
    """The functions in nvdisasm's text, by name."""
    found: dict[str, Function] = {}
    name: str | None = None
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            name, instructions, labels = match[1], [], {}
        elif match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
        elif (match := _INSTRUCTION.match(line)) and name is not None:
            address, guard, opcode, operands = match.groups()
            instructions.append(Instruction(int(address, 16), guard or "", opcode, operands))
            found[name] = Function(name, tuple(instructions), labels)
    if not found:
        raise DisassemblyError("disassembly: got no function; need the text of nvdisasm -c")
    return found
