"""Writing the Python function of one region: values, their forms, and lines of code.

The opcode generators talk to an `Emitter`. It knows in which forms every register exists at this
point (`values.Value`), converts on demand and only once, and keeps one generated line for each
step so that an exception's line number leads back to the PTX instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from mlakern.emulator import values
from mlakern.emulator.addresses import Layout, symbol_code
from mlakern.emulator.errors import PtxError
from mlakern.emulator.program import (
    Both,
    Entry,
    FloatImm,
    Imm,
    Instruction,
    Not,
    Operand,
    Reg,
    Sink,
    Special,
    Symbol,
)
from mlakern.emulator.special import SPECIAL_REGISTERS
from mlakern.emulator.values import Value, dtype_of, float_bits


class Mode(Enum):
    """What kind of group of lanes a region is compiled for."""

    LANE = "one lane: every register is a scalar"
    WARP = "one whole warp"
    BUNDLE = "several whole warps"
    PARTIAL = "lanes of incomplete warps"


# How a form is made from the form a value was computed in. {0}: the source, {1}: the dtype's name.
_SCALAR_STEPS = {
    ("i", "j"): "({0} ^ {sign}) - {sign}",
    ("j", "i"): "{0} & {mask}",
    ("i", "g"): "to_float32({0})",
    ("g", "i"): "from_float32({0})",
    ("i", "h"): "to_float64({0})",
    ("h", "i"): "from_float64({0})",
}


SCRATCH = -1


class Emitter:
    """State of the function being written."""

    def __init__(
        self,
        entry: Entry,
        places: Layout,
        mode: Mode,
        kinds: dict[int, str],
        namespace: dict[str, Any],
    ) -> None:
        self.entry = entry
        self.places = places
        self.mode = mode
        self.namespace = namespace
        self.lines: list[str] = []
        self.sites: list[Instruction] = []
        self.instruction = entry.instructions[0]
        self.registers: dict[int, Value] = {}
        self.kinds = kinds
        self.written: set[int] = set()
        self.live_out: list[int] = []
        self.stored: dict[int, str] = {}
        self.specials: dict[str, Value] = {}
        self.constants: dict[tuple[Any, ...], str] = {}
        self.count = 0
        self.single = mode is Mode.LANE

    # Lines and names

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
        """A name for an object that generated code refers to."""
        found = self.constants.get(key) if key else None
        if found is None:
            found = f"K{len(self.namespace)}"
            self.namespace[found] = value
            if key:
                self.constants[key] = found
        return found

    @property
    def site(self) -> str:
        """The current instruction as a constant of generated code."""
        return self.constant(self.instruction, "site", self.instruction.pc)

    def error(self, message: str) -> PtxError:
        return PtxError(f"line {self.instruction.line}: {self.instruction.text}: {message}")

    # Reading

    def read(self, operand: Operand, width: int = 32) -> Value:
        """The value of a source operand; ``width`` in bits fits literals and addresses."""
        match operand:
            case Reg():
                return self.read_register(operand)
            case Imm(value):
                return Value(width, "i", {"i": str(value & ((1 << width) - 1))})
            case FloatImm(value):
                return Value(width, "i", {"i": str(float_bits(value, width))})
            case Not(register):
                source = self.read_register(register)
                if source.scalar:
                    return Value(1, "b", {"b": f"(not {self.get(source, 'b')})"})
                return Value(1, "p", {"p": self.temporary(f"~{self.get(source, 'p')}")})
            case Special(name):
                return self.special(name)
            case Symbol():
                code = symbol_code(self.entry, self.places, operand)
                return Value(width, "i", {"i": self.temporary(code)})
        raise self.error(f"operand {operand} cannot be read here")

    def read_register(self, register: Reg) -> Value:
        number = register.number
        found = self.registers.get(number)
        if found is None:
            found = self.registers[number] = self.load(register)
        return found

    def load(self, register: Reg) -> Value:
        """Fetch a register that an earlier region wrote."""
        number, kind = register.number, self.kinds.get(register.number, "-")
        if kind in "-P":
            kind = (
                ("p" if register.width == 1 else "u")
                if not self.single
                else ("b" if register.width == 1 else "i")
            )
            name = self.temporary(f"defined(r, {number}, {register.name!r}, {self.single})")
            self.written.add(number)
            return Value(register.width, kind, {kind: name})
        if kind == "w":
            low, high = self.name("f"), self.name("f")
            self.line(f"{low}, {high} = r[{number}]")
            return Value(64, "w", {}, (self.half(low), self.half(high)))
        name = self.name(kind)
        self.line(f"{name} = r[{number}]")
        return Value(register.width, kind, {kind: name})

    def half(self, name: str) -> Value:
        return Value(32, "f", {"f": name})

    def special(self, name: str) -> Value:
        found = self.specials.get(name)
        if found is None:
            rule = SPECIAL_REGISTERS.get(name)
            if rule is None:
                known = " ".join(sorted(SPECIAL_REGISTERS))
                raise self.error(f"special register %{name} is unknown; known: {known}")
            constant = rule.constant(self.entry)
            if constant is not None:
                return Value(rule.width, "i", {"i": str(constant)})
            kind = "u" if rule.per_lane and not self.single else "b" if rule.width == 1 else "i"
            code = f"g.special({name!r})" if rule.per_lane else rule.code
            found = Value(rule.width, kind, {kind: self.temporary(code)})
            if rule.stable:
                self.specials[name] = found
        return found

    def scalar(self, *sources: Value) -> bool:
        return all(source.scalar for source in sources)

    # Forms

    def get(self, value: Value, form: str) -> str:
        """The Python expression of a value in a form; array forms of scalars are 0-d."""
        name = value.names.get(form)
        if name is None:
            name = value.names[form] = self.convert(value, form)
        return name

    def convert(self, value: Value, form: str) -> str:
        if value.kind == "w":
            return self.convert_halves(value, form)
        if value.scalar:
            return self.convert_scalar(value, form)
        if form.isupper():
            return self.get(value, form.lower())
        if form in values.SCALAR_KINDS:
            raise self.error("an operand that must be the same in all lanes differs between them")
        name = self.name(form)
        source = value.names.get(value.kind) or next(iter(value.names.values()))
        self.line(f"{name} = {source}.view({self.dtype(form, value.width)})")
        return name

    def convert_scalar(self, value: Value, form: str) -> str:
        if form in "us" or form in "US":
            return self.array_of(value, "i", "u", form)
        if form in "fF":
            return self.array_of(value, "i", "u", form)
        if form in "pP":
            return self.array_of(value, "b", "p", form)
        if value.kind != "i" and form != "i":
            source = Value(value.width, "i", {"i": self.get(value, "i")})
            return self.convert_scalar(source, form)
        rule = _SCALAR_STEPS.get((value.kind, form))
        if rule is None:
            raise self.error(f"a {value.kind} value has no form {form}")
        code = value.names[value.kind]
        if form == "j" and code.isdigit():
            bits = int(code)
            return str(bits - (1 << value.width) if bits >> (value.width - 1) else bits)
        if form in "gh" and code.isdigit():
            make = values.to_float32 if form == "g" else values.to_float64
            return self.constant(make(int(code)), "float", form, code)
        name = self.name(form)
        text = rule.format(code, sign=1 << (value.width - 1), mask=(1 << value.width) - 1)
        self.line(f"{name} = {text}")
        return name

    def array_of(self, value: Value, scalar_form: str, array_form: str, form: str) -> str:
        """A scalar as an array: 0-d, or one element for each lane for upper-case forms."""
        low = form.lower()
        if value.kind == "g" and low == "f":
            scalar_form = "g"
        code = self.get(value, scalar_form)
        if form.isupper():
            source = self.get(value, low)
            return self.temporary(f"full(g.width, {source})")
        if code.isdigit():
            zero_d = np.array(int(code), dtype_of(array_form, value.width))
            return self.constant(zero_d.view(dtype_of(low, value.width)), low, value.width, code)
        name = self.name(low)
        dtype = self.dtype("f" if scalar_form == "g" else array_form, value.width)
        view = (
            ""
            if scalar_form == "g" or low == array_form
            else f".view({self.dtype(low, value.width)})"
        )
        self.line(f"{name} = array({code}, {dtype}){view}")
        return name

    def convert_halves(self, value: Value, form: str) -> str:
        assert value.halves is not None
        low, high = (self.get(half, "U") for half in value.halves)
        name = self.name("u")
        self.line(f"{name} = join({low}, {high})")
        if form in "uU":
            return name
        value.names["u"] = name
        return self.temporary(f"{name}.view({self.dtype(form.lower(), 64)})")

    def dtype(self, form: str, width: int) -> str:
        return self.constant(dtype_of(form, width), "dtype", form, width)

    def split(self, value: Value) -> tuple[Value, Value]:
        """The low and high 32 bits of a 64-bit value."""
        if value.halves is None:
            if value.scalar:
                code = self.get(value, "i")
                low = Value(32, "i", {"i": self.temporary(f"{code} & 0xFFFFFFFF")})
                high = Value(32, "i", {"i": self.temporary(f"{code} >> 32")})
            else:
                code = self.get(value, "u")
                low = Value(32, "u", {"u": self.temporary(f"low_half({code})")})
                high = Value(32, "u", {"u": self.temporary(f"high_half({code})")})
            value.halves = low, high
        return value.halves

    # Writing

    def scratch(self, width: int) -> Reg:
        """A destination for an intermediate result, which only its returned `Value` names."""
        return Reg(SCRATCH, "", width)

    def bind(self, operand: Operand, value: Value) -> None:
        """Make a destination register hold a value that already has a name."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Reg):
            raise self.error(f"operand {operand} cannot be written")
        if operand.number == SCRATCH:
            return
        self.registers[operand.number] = value
        self.written.add(operand.number)

    def set(self, operand: Operand, form: str, code: str, width: int | None = None) -> Value:
        """Compute ``code``, a value in ``form``, into a destination."""
        name = self.name(form)
        self.line(f"{name} = {code}")
        bits = width or (operand.width if isinstance(operand, Reg) else 32)
        value = Value(bits, form, {form: name})
        self.bind(operand, value)
        return value

    def compute(
        self, operand: Operand, template: str, form: str, *sources: Value, width: int | None = None
    ) -> Value:
        """One expression over sources that are read in one form, scalar or array alike.

        form: "u", "s" or "f"; the expression wraps to the destination's width.
        """
        if self.scalar(*sources):
            scalar_form = {"u": "i", "s": "j", "f": "g"}[form]
            if form == "f" and sources[0].width == 64:
                scalar_form = "h"
            code = template.format(*(self.get(source, scalar_form) for source in sources))
            if form == "f":
                return self.set(operand, scalar_form, code, width)
            bits = width or (operand.width if isinstance(operand, Reg) else 32)
            return self.set(operand, "i", f"({code}) & {(1 << bits) - 1}", width)
        code = template.format(*(self.get(source, form) for source in sources))
        return self.set(operand, form, code, width)

    def call(
        self,
        operand: Operand,
        function: Callable[..., Any],
        form: str,
        *sources: Value,
        width: int | None = None,
    ) -> Value:
        """Like `compute`, for a numpy function of arrays that also takes 0-d arrays.

        A scalar result is turned back into a scalar.
        """
        name = self.constant(function, function)
        code = f"{name}({', '.join(self.get(source, form) for source in sources)})"
        if not self.scalar(*sources):
            return self.set(operand, form, code, width)
        if form == "f" and sources[0].width == 32:
            return self.set(operand, "g", f"float32({code})", width)
        if form == "f":
            return self.set(operand, "h", f"float({code})", width)
        bits = width or (operand.width if isinstance(operand, Reg) else 32)
        return self.set(operand, "i", f"int({code}) & {(1 << bits) - 1}", width)

    def predicate(self, operand: Operand, template: str, form: str, *sources: Value) -> Value:
        """A comparison, written to a predicate or to both halves of ``p|q``."""
        if self.scalar(*sources):
            scalar_form = {"u": "i", "s": "j", "f": "g", "p": "b"}[form]
            if form == "f" and sources[0].width == 64:
                scalar_form = "h"
            code = template.format(*(self.get(source, scalar_form) for source in sources))
            kind = "b"
            code = f"bool({code})"
        else:
            code = template.format(*(self.get(source, form) for source in sources))
            kind = "p"
        if isinstance(operand, Both):
            value = self.set(operand.first, kind, code, 1)
            inverse = f"not {self.get(value, 'b')}" if kind == "b" else f"~{self.get(value, 'p')}"
            self.set(operand.second, kind, inverse, 1)
            return value
        return self.set(operand, kind, code, 1)

    # Control

    def store(self) -> None:
        """Write the registers that later regions may read back to the group."""
        for number in self.live_out:
            if number not in self.written:
                continue
            value = self.registers[number]
            kind = "i" if value.kind in "jh" else value.kind
            if kind == "w":
                assert value.halves is not None
                low, high = (self.get(half, "F") for half in value.halves)
                self.line(f"r[{number}] = {low}, {high}")
            else:
                self.line(f"r[{number}] = {self.get(value, kind)}")
            self.stored[number] = kind

    def converge(self, membermask: Value | None = None) -> None:
        """Wait until the lanes that the current instruction names are in this group.

        Generators of CONVERGED opcodes call it first. Whole warps are together by construction.
        """
        if self.mode in (Mode.WARP, Mode.BUNDLE):
            return
        mask = "0xFFFFFFFF"
        if membermask is not None:
            mask = self.get(membermask, "i" if membermask.scalar else "u")
        self.line(f"if not converged(g, {mask}): return BLOCKED")

    def part(self) -> bool:
        """For instructions that each lane executes for itself: make lanes part unless there is one.

        Returns whether code that parts the lanes was emitted; nothing else is to be generated then.
        """
        if not self.single:
            self.line("return (arange(g.width),)")
        return not self.single

    @property
    def warp(self) -> bool:
        """Whether exactly one whole warp runs this code."""
        return self.mode is Mode.WARP
