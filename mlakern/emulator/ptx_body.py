"""Parse the body of a kernel: scopes, labels, instructions, operands.

Three things are resolved here so that nothing later has to know them: nested ``{ }`` scopes (of
inline assembly) have registers and labels of their own, which get names of their own; a guarded
instruction other than a branch becomes a branch around it; every opcode and modifier is checked
against the opcode table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from mlakern.emulator import opcodes, ptx_declarations
from mlakern.emulator.errors import PtxError
from mlakern.emulator.program import (
    Both,
    Entry,
    Imm,
    Instruction,
    Memory,
    Not,
    Operand,
    Program,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)
from mlakern.emulator.ptx_text import Text

OpcodeParts: TypeAlias = "tuple[opcodes.Row, tuple[str, ...], tuple[str, ...]]"

_LABEL = re.compile(r"([\w$]+)\s*:(?!:)\s*")
_TARGETS = re.compile(r"\.branchtargets\s+([^;]*);")
_STATEMENT = re.compile(r"([^;{}]|\{[^{}]*\})*;")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s]+")
_ADDRESS = re.compile(r"([^\s+]+)\s*(?:\+\s*(-?\w+)|(-\d+))?$")
_GUARD = re.compile(r"@(!?)([\w$%]+)\s+(.*)", re.S)
_WIDTH = re.compile(r"[a-z]+(\d+)(x2)?$")


@dataclass(slots=True)
class _Scope:
    """Names declared inside one pair of braces.

    suffix: what makes its labels unique. families: ``%r<9>`` as prefix → (count, width). labels:
    those that are used and must be defined. operands: a cache.
    """

    suffix: str
    registers: dict[str, Reg | Vector] = field(default_factory=dict)
    families: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)
    operands: dict[str, Operand] = field(default_factory=dict)


class Body:
    """The body being read. known: opcodes that were looked up before in this module."""

    def __init__(
        self, text: Text, program: Program, entry: Entry, known: dict[str, OpcodeParts]
    ) -> None:
        self.text = text
        self.program = program
        self.entry = entry
        self.known = known
        self.scopes: list[_Scope] = []
        self.opened = 0
        self.carry: Reg | None = None

    def read(self) -> None:
        """Read from the opening brace to its closing one, into the entry."""
        while True:
            character = self.text.peek()
            if character == "{":
                self._open()
            elif character == "}":
                self._close()
                if not self.scopes:
                    return
            elif character == ".":
                self._directive()
            elif character:
                self._statement()
            else:
                raise self.text.error("the text ends inside a function body")

    # Scopes

    def _open(self) -> None:
        self.text.skip("{")
        self.scopes.append(_Scope(f"#{self.opened}" if self.scopes else ""))
        self.opened += 1

    def _close(self) -> None:
        self.text.skip("}")
        scope = self.scopes.pop()
        for name in scope.labels:
            if name + scope.suffix not in self.entry.labels:
                raise self.text.error(f"label {name} is used but not defined")

    def _directive(self) -> None:
        if self.text.directive() == ".reg":
            self._declare_registers(self.text.take(_REGISTERS, "a register declaration"))
        elif not self.text.skip_debug_directive():
            variable = ptx_declarations.variable(self.text)
            self.entry.variables[variable.name] = variable

    def _declare_registers(self, match: re.Match[str]) -> None:
        kind, names = match.groups()
        sized = _WIDTH.match(kind)
        if sized is None and kind != "pred":
            raise self.text.error(f"register type .{kind} is not supported")
        width = int(sized[1]) * (2 if sized[2] else 1) if sized else 1
        scope = self.scopes[-1]
        for name in (name.strip() for name in names.split(",")):
            family = re.match(r"(.*)<(\d+)>$", name)
            if family:
                scope.families[family[1]] = int(family[2]), width
            else:
                scope.registers[name] = self._new_register(name, width)

    def _new_register(self, name: str, width: int) -> Reg | Vector:
        """A register; one of 128 bits is a pair of 64 bits, the lower first."""
        if width == 128:
            return Vector((self._word(f"{name}.lo", 64), self._word(f"{name}.hi", 64)))
        return self._word(name, width)

    def _word(self, name: str, width: int) -> Reg:
        register = Reg(len(self.entry.registers), name, width)
        self.entry.registers.append(register)
        return register

    def _carry(self) -> Reg:
        """The carry flag of the kernel's threads (PTX ISA, "Extended-Precision Arithmetic")."""
        if self.carry is None:
            self.carry = self._word("CC.CF", 1)
        return self.carry

    def _predicate(self, name: str) -> Reg | None:
        """The predicate register of this name."""
        found = self._register(name)
        return found if isinstance(found, Reg) else None

    def _register(self, name: str) -> Reg | Vector | None:
        """The register of this name in the innermost scope that declares it."""
        prefix = name.rstrip("0123456789")
        for scope in reversed(self.scopes):
            found = scope.registers.get(name)
            if found is None and prefix != name and prefix in scope.families:
                count, width = scope.families[prefix]
                if int(name[len(prefix) :]) < count:
                    found = scope.registers[name] = self._new_register(name, width)
            if found is not None:
                return found
        return None

    # Labels

    def _label(self, name: str) -> None:
        """A label has been read; it may name a table of branch targets."""
        targets = self.text.match(_TARGETS)
        if targets:
            words = (word.strip() for word in targets[1].split(","))
            self.entry.tables[name] = tuple(self._label_name(word) for word in words)
        else:
            self.entry.labels[name + self.scopes[-1].suffix] = len(self.entry.instructions)

    def _label_name(self, name: str) -> str:
        """The unique name of a label that is used here: of the innermost scope that defines it."""
        for depth in range(len(self.scopes) - 1, 0, -1):
            scope = self.scopes[depth]
            if name + scope.suffix in self.entry.labels or self._defined_ahead(
                name, len(self.scopes) - depth
            ):
                scope.labels.add(name)
                return name + scope.suffix
        self.scopes[0].labels.add(name)
        return name

    def _defined_ahead(self, name: str, closing: int) -> bool:
        """Whether a label follows before ``closing`` scopes have ended."""
        text, depth = self.text.text, 0
        for position in range(self.text.position, len(text)):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth <= -closing:
                break
        pattern = re.compile(rf"(?<![\w$]){re.escape(name)}\s*:(?!:)")
        return pattern.search(text, self.text.position, position) is not None

    # Instructions

    def _statement(self) -> None:
        label = self.text.match(_LABEL)
        if label:
            self._label(label[1])
            return
        line = self.text.line
        text = " ".join(self.text.take(_STATEMENT, "an instruction")[0][:-1].split())
        guard, body = None, text
        if text[0] == "@":
            match = _GUARD.match(text)
            register = self._predicate(match[2]) if match else None
            if match is None or register is None:
                raise PtxError(f"line {line}: guard not understood: {text!r}")
            guard, body = (register, match[1] == ""), match[3]
        name, _, rest = body.partition(" ")
        parts = self.known.get(name)
        if parts is None:
            parts = self.known[name] = opcodes.lookup(name, line)
        row = parts[0]
        operands = tuple(self._operand(word) for word in _OPERAND.findall(rest))
        if row.carry:
            operands = (*operands, self._carry())
        if not row.required <= len(operands) <= len(row.roles):
            raise PtxError(
                f"line {line}: {text}: got {len(operands)} operands, need {' '.join(row.roles)}"
            )
        if guard is not None and row.name != "bra":
            self._skip_unless(guard, line, text)
            guard = None
        self._append(line, text, parts, operands, guard)

    def _append(
        self,
        line: int,
        text: str,
        parts: OpcodeParts,
        operands: tuple[Operand, ...],
        guard: tuple[Reg, bool] | None,
    ) -> None:
        instructions = self.entry.instructions
        instructions.append(Instruction(text, line, len(instructions), *parts, operands, guard))

    def _skip_unless(self, guard: tuple[Reg, bool], line: int, text: str) -> None:
        """A branch around the next instruction, taken when its guard does not hold."""
        pc = len(self.entry.instructions)
        label = f"#skip{pc}"
        self.entry.labels[label] = pc + 2
        inverse = guard[0], not guard[1]
        self._append(line, text, opcodes.lookup("bra", line), (Symbol(label),), inverse)

    # Operands

    def _operand(self, word: str) -> Operand:
        cache = self.scopes[-1].operands
        found = cache.get(word)
        if found is None:
            found = self._new_operand(word)
            if not isinstance(found, Symbol):
                cache[word] = found
        return found

    def _new_operand(self, word: str) -> Operand:
        first = word[0]
        if first in "{(":
            return Vector(tuple(self._operand(w) for w in _OPERAND.findall(word[1:-1])))
        if first == "[":
            return self._memory(word[1:-1].strip())
        if first == "!":
            negated = self._predicate(word[1:])
            if negated is None:
                raise self.text.error(f"undeclared register {word[1:]}")
            return Not(negated)
        if "|" in word:
            left, right = word.split("|")
            return Both(self._operand(left), self._operand(right))
        if word == "_":
            return Sink()
        register = self._register(word)
        if register is not None:
            return register
        if first == "%":
            return Special(word[1:])
        if first.isdigit() or first == "-":
            return self.text.literal(word)
        return Symbol(self._symbol_name(word))

    def _symbol_name(self, word: str) -> str:
        """The name under which the entry knows a variable, a parameter, a table or a label."""
        entry = self.entry
        if word in self.program.variables:
            entry.variables.setdefault(word, self.program.variables[word])
            return word
        known = word in entry.variables or word in entry.tables
        if known or any(parameter.name == word for parameter in entry.parameters):
            return word
        return self._label_name(word)

    def _memory(self, text: str) -> Memory:
        """An address: base and offset, and after a comma coordinates and the like."""
        if "," in text:
            base, *items = _OPERAND.findall(text)
            first = self._memory(base)
            return Memory(first.base, first.offset, tuple(self._operand(w) for w in items))
        match = _ADDRESS.match(text)
        base_operand = self._operand(match[1]) if match else None
        if match is None or not isinstance(base_operand, Reg | Symbol | Imm):
            raise self.text.error(f"address not understood: [{text}]")
        return Memory(base_operand, int(match[2] or match[3] or "0", 0))
