"""Parse PTX text into a `Program`.

The grammar is that of the PTX ISA, "Syntax", as far as compilers emit it. Three things are
resolved here so that nothing later has to know them: nested ``{ }`` scopes (of inline assembly)
have their own registers and labels, which get names of their own; a guarded instruction other
than a branch becomes a branch around it; every opcode and modifier is checked against the opcode
table.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from mlakern.emulator import opcodes
from mlakern.emulator.errors import PtxError
from mlakern.emulator.program import (
    Both,
    Entry,
    FloatImm,
    Imm,
    Instruction,
    Memory,
    Not,
    Operand,
    Parameter,
    Program,
    Reg,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s*")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_STATEMENT = re.compile(r"([^;{}]|\{[^{}]*\})*;")
_DIRECTIVE = re.compile(r"\.\w+")
_LINE = re.compile(r"[^\n]*")
_ENTRY = re.compile(
    r"((?:\.\w+\s+)*)\.(entry|func)\s*(\([^)]*\)\s*)?([\w$]+)\s*(\([^)]*\))?([^{;]*)"
)
_VARIABLE = re.compile(
    r"(?P<lead>(?:\.\w+(?:\s+\d+)?\s+)*?)\.(?P<type>[bsuf]\d+)\s+(?P<name>[\w$]+)"
    r"(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<init>[^;]*))?;"
)
_PARAM = re.compile(r"\.param\s+(.*)\.([bsuf]\d+|pred)\s+(.*?)([\w$]+)(?:\[(\d+)\])?\s*$", re.S)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s]+")
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?$")
_ADDRESS = re.compile(r"([^\s+]+)\s*(?:\+\s*(-?\w+)|(-\d+))?$")
_DIMENSIONS = re.compile(r"\d+")
_IGNORED = (".file", ".loc", ".section", ".pragma", ".noreturn", ".alias")
_TUNING = ("reqntid", "maxntid", "reqnctapercluster")
_GUARD = re.compile(r"@(!?)([\w$%]+)\s+(.*)", re.S)


@dataclass(slots=True)
class _Scope:
    """Names declared inside one pair of braces."""

    suffix: str
    registers: dict[str, Reg] = field(default_factory=dict)
    families: dict[str, tuple[int, int]] = field(default_factory=dict)  # %r<9> → (count, width)
    labels: set[str] = field(default_factory=set)
    operands: dict[str, Operand] = field(default_factory=dict)


def parse(text: str) -> Program:
    """Parse a PTX module. Raises PtxError with the line of anything not understood."""
    return _Parser(text).run()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
        self.position = 0
        self.line = 1
        self.program = Program()
        self.entry: Entry | None = None
        self.scopes: list[_Scope] = []
        self.scope_count = 0
        self.opcodes: dict[str, tuple[opcodes.Row, tuple[str, ...], tuple[str, ...]]] = {}

    # Text

    def error(self, message: str) -> PtxError:
        return PtxError(f"line {self.line}: {message}")

    def advance(self, end: int) -> str:
        taken = self.text[self.position : end]
        self.line += taken.count("\n")
        self.position = end
        return taken

    def take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = pattern.match(self.text, self.position)
        if match is None:
            near = self.text[self.position : self.position + 60].split("\n")[0]
            raise self.error(f"expected {what}: got {near!r}")
        self.advance(match.end())
        return match

    def run(self) -> Program:
        while True:
            self.take(_SPACE, "space")
            if self.position >= len(self.text):
                break
            character = self.text[self.position]
            if character == "{":
                self.position += 1
                self.scope_count += 1
                self.scopes.append(_Scope(f"#{self.scope_count}" if self.scopes else ""))
            elif character == "}":
                self.position += 1
                self.close_scope()
            elif character == ".":
                self.directive()
            elif self.entry is None:
                raise self.error(f"expected a directive: got {character!r}")
            else:
                self.statement(self.entry)
        if self.scopes:
            raise self.error("the text ends inside a function body")
        return self.program

    # Module level

    def directive(self) -> None:
        word = _DIRECTIVE.match(self.text, self.position)
        name = word[0] if word else "."
        if name == ".reg":
            self.registers(self.take(_REGISTERS, "a register declaration"))
        elif name in _IGNORED:
            line = self.take(_LINE, "a line")[0]
            if name == ".section" and "{" in line:
                self.advance(self.text.index("}", self.position) + 1)
        elif name in (".version", ".target", ".address_size"):
            value = self.take(_LINE, "a value")[0].split(None, 1)[1].strip()
            if name == ".version":
                self.program.version = value
            elif name == ".target":
                self.program.target = value.split(",")[0]
        elif (function := _ENTRY.match(self.text, self.position)) is not None:
            self.advance(function.end())
            self.function(function)
        else:
            self.variable(self.take(_VARIABLE, "a variable declaration"))

    def function(self, match: re.Match[str]) -> None:
        _, kind, _, name, params, tail = match.groups()
        if kind == "func":
            if self.text[self.position : self.position + 1] == ";":
                self.position += 1  # a declaration; a call of it is refused where it happens
                return
            raise self.error(f"function {name}: only kernels are supported; inline it")
        entry = Entry(name, self.parameters(params or "()"))
        for directive in tail.split("."):
            word = directive.split(None, 1)
            if word and word[0] in _TUNING:
                sizes = [int(n) for n in _DIMENSIONS.findall(word[1])]
                setattr(entry, word[0], tuple(sizes + [1] * (3 - len(sizes))))
        self.program.entries[name] = entry
        self.entry = entry

    def parameters(self, text: str) -> tuple[Parameter, ...]:
        found: list[Parameter] = []
        offset = 0
        for item in text.strip()[1:-1].split(","):
            if not item.strip():
                continue
            match = _PARAM.match(item.strip())
            if match is None:
                raise self.error(f"parameter not understood: {item.strip()!r}")
            lead, kind, _, name, count = match.groups()
            size = int(kind[1:]) // 8
            align = re.search(r"\.align\s+(\d+)", lead)
            alignment = int(align[1]) if align and ".ptr" not in lead else size
            size *= int(count or 1)
            offset = -(-offset // alignment) * alignment
            found.append(Parameter(name, offset, size, alignment))
            offset += size
        return tuple(found)

    def variable(self, match: re.Match[str]) -> None:
        lead, size = match["lead"], int(match["type"][1:]) // 8
        space = next((s for s in ("shared", "global", "const", "local") if "." + s in lead), "")
        if not space:
            raise self.error(f"variable {match['name']}: no state space in {match[0]!r}")
        count = 1
        for extent in re.findall(r"\[(\d*)\]", match["dims"]):
            count *= int(extent or 0)
        align = re.search(r"\.align\s+(\d+)", lead)
        data = self.initial_bytes(match["init"], size, match["type"]) if match["init"] else b""
        variable = Variable(
            match["name"], space, size * count, int(align[1]) if align else size, data
        )
        owner = self.entry.variables if self.entry and self.scopes else self.program.variables
        owner[variable.name] = variable

    def initial_bytes(self, text: str, size: int, kind: str) -> bytes:
        out = b""
        for word in re.findall(r"[^\s{},]+", text):
            value = self.literal(word)
            if isinstance(value, Imm):
                out += (value.value % (1 << 8 * size)).to_bytes(size, "little")
            elif isinstance(value, FloatImm) and kind in ("f32", "f64"):
                out += struct.pack("<f" if kind == "f32" else "<d", value.value)
            else:
                raise self.error(f"initial value not understood: {word!r}")
        return out

    # Function bodies

    def close_scope(self) -> None:
        if not self.scopes or self.entry is None:
            raise self.error("unmatched }")
        scope = self.scopes.pop()
        for name in scope.labels:
            if name + scope.suffix not in self.entry.labels:
                raise self.error(f"label {name} is used but not defined")
        if not self.scopes:
            self.entry = None

    def registers(self, match: re.Match[str]) -> None:
        kind, names = match.groups()
        width = 1 if kind == "pred" else int(re.sub(r"\D", "", kind.split("x")[0]))
        if kind.endswith("x2"):
            width *= 2
        scope = self.scopes[-1]
        for name in (n.strip() for n in names.split(",")):
            family = re.match(r"(.*)<(\d+)>$", name)
            if family:
                scope.families[family[1]] = (int(family[2]), width)
            else:
                scope.registers[name] = self.new_register(name, width)

    def new_register(self, name: str, width: int) -> Reg:
        assert self.entry is not None
        register = Reg(len(self.entry.registers), name, width)
        self.entry.registers.append(register)
        return register

    def register(self, name: str) -> Reg | None:
        prefix = name.rstrip("0123456789")
        for scope in reversed(self.scopes):
            found = scope.registers.get(name)
            if found is None and prefix != name and prefix in scope.families:
                count, width = scope.families[prefix]
                if int(name[len(prefix) :]) < count:
                    found = scope.registers[name] = self.new_register(name, width)
            if found is not None:
                return found
        return None

    def statement(self, entry: Entry) -> None:
        label = _LABEL.match(self.text, self.position)
        if label:
            self.advance(label.end())
            self.label(entry, label[1])
            return
        line = self.line
        text = " ".join(self.take(_STATEMENT, "an instruction")[0][:-1].split())
        guard = None
        body = text
        if text[0] == "@":
            match = _GUARD.match(text)
            register = self.register(match[2]) if match else None
            if match is None or register is None:
                raise self.error(f"guard not understood: {text!r}")
            guard, body = (register, match[1] == ""), match[3]
        name, _, rest = body.partition(" ")
        found = self.opcodes.get(name)
        if found is None:
            found = self.opcodes[name] = opcodes.lookup(name, line)
        row, modifiers, types = found
        operands = tuple(self.operand(word) for word in _OPERAND.findall(rest))
        if not row.required <= len(operands) <= len(row.roles):
            raise PtxError(
                f"line {line}: {text}: got {len(operands)} operands, need {' '.join(row.roles)}"
            )
        if guard is not None and row.name != "bra":
            self.skip(entry, line, text, guard)
            guard = None
        entry.instructions.append(
            Instruction(len(entry.instructions), line, text, row, modifiers, types, operands, guard)
        )

    def skip(self, entry: Entry, line: int, text: str, guard: tuple[Reg, bool]) -> None:
        """A branch around the next instruction, taken when its guard does not hold."""
        pc = len(entry.instructions)
        name = f"#skip{pc}"
        entry.labels[name] = pc + 2
        row, modifiers, types = opcodes.lookup("bra", line)
        entry.instructions.append(
            Instruction(
                pc, line, text, row, modifiers, types, (Symbol(name),), (guard[0], not guard[1])
            )
        )

    def label(self, entry: Entry, name: str) -> None:
        rest = _SPACE.match(self.text, self.position)
        after = rest.end() if rest else self.position
        if self.text.startswith(".branchtargets", after):
            words = self.take(_STATEMENT, "branch targets")[0][:-1].split(None, 1)[1]
            entry.tables[name] = tuple(self.label_name(w.strip()) for w in words.split(","))
            return
        entry.labels[name + self.scopes[-1].suffix] = len(entry.instructions)

    def label_name(self, name: str) -> str:
        """Where ``name`` leads: the innermost scope whose text defines it."""
        if name.startswith("$L__BB") or len(self.scopes) == 1:
            self.scopes[0].labels.add(name)
            return name
        depth = 0
        for position in range(self.position, len(self.text)):
            character = self.text[position]
            depth += (character == "{") - (character == "}")
            if depth < 0:
                break
        scope = self.scopes[-1]
        here = re.search(
            rf"(?<![\w$]){re.escape(name)}\s*:(?!:)", self.text[self.position : position]
        )
        if here or name + scope.suffix in (self.entry.labels if self.entry else {}):
            scope.labels.add(name)
            return name + scope.suffix
        outer = self.scopes.pop()
        try:
            return self.label_name(name)
        finally:
            self.scopes.append(outer)

    # Operands

    def operand(self, word: str) -> Operand:
        cache = self.scopes[-1].operands
        found = cache.get(word)
        if found is None:
            found = self.new_operand(word)
            if not isinstance(found, Symbol):
                cache[word] = found
        return found

    def new_operand(self, word: str) -> Operand:
        first = word[0]
        if first in "{(":
            return Vector(tuple(self.operand(w) for w in _OPERAND.findall(word[1:-1])))
        if first == "[":
            return self.memory(word[1:-1].strip())
        if first == "!":
            register = self.register(word[1:])
            if register is None:
                raise self.error(f"undeclared register {word[1:]}")
            return Not(register)
        if "|" in word:
            left, right = word.split("|")
            return Both(self.operand(left), self.operand(right))
        if word == "_":
            return Sink()
        register = self.register(word)
        if register is not None:
            return register
        if first == "%":
            return Special(word[1:])
        if first.isdigit() or first == "-":
            return self.literal(word)
        return Symbol(self.symbol_name(word))

    def symbol_name(self, word: str) -> str:
        """The name under which the entry knows a variable, a parameter, a table or a label."""
        entry = self.entry
        assert entry is not None
        if word in self.program.variables:
            entry.variables.setdefault(word, self.program.variables[word])
        elif (
            word not in entry.variables
            and word not in entry.tables
            and all(parameter.name != word for parameter in entry.parameters)
        ):
            return self.label_name(word)
        return word

    def literal(self, word: str) -> Imm | FloatImm:
        if _INTEGER.match(word):
            return Imm(int(word.rstrip("uU"), 0) if not word.isdigit() else int(word))
        if word[:2] in ("0f", "0F"):
            return FloatImm(struct.unpack(">f", bytes.fromhex(word[2:]))[0], 32)
        if word[:2] in ("0d", "0D"):
            return FloatImm(struct.unpack(">d", bytes.fromhex(word[2:]))[0], 64)
        try:
            return FloatImm(float(word), 64)
        except ValueError:
            raise self.error(f"literal not understood: {word!r}") from None

    def memory(self, text: str) -> Memory:
        words = _OPERAND.findall(text)
        if "," in text:
            base, *items = words
            first = self.memory(base)
            return Memory(first.base, first.offset, tuple(self.operand(w) for w in items))
        match = _ADDRESS.match(text)
        if match is None:
            raise self.error(f"address not understood: [{text}]")
        base = self.operand(match[1])
        shift = match[2] or match[3]
        offset = int(shift, 0) if shift else 0
        if not isinstance(base, Reg | Symbol | Imm):
            raise self.error(f"address not understood: [{text}]")
        return Memory(base, offset)
