"""Writing the Python function of one region: what opcode generators talk to.

An `Emitter` knows in which forms every register exists at this point (`values.Value`), fetches
registers that earlier regions wrote, and writes back those that later regions may read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlakern.emulator.addresses import Layout, symbol_code
from mlakern.emulator.forms import Forms
from mlakern.emulator.program import (
    Both,
    Entry,
    FloatImm,
    Imm,
    Not,
    Operand,
    Reg,
    Sink,
    Special,
    Symbol,
)
from mlakern.emulator.special import SPECIAL_REGISTERS
from mlakern.emulator.values import Value, float_bits
from mlakern.emulator.writer import Mode

SCRATCH = -1  # register number of intermediate results


class Emitter(Forms):
    """State of the function being written.

    kinds: of the live registers at the start of the region. written: registers written so far.
    live_out: registers that may be read after the region. stored: kinds of those written back.
    """

    def __init__(
        self,
        entry: Entry,
        places: Layout,
        mode: Mode,
        kinds: dict[int, str],
        namespace: dict[str, Any],
    ) -> None:
        super().__init__(entry.instructions[0], mode, namespace)
        self.entry = entry
        self.places = places
        self.kinds = kinds
        self.registers: dict[int, Value] = {}
        self.specials: dict[str, Value] = {}
        self.written: set[int] = set()
        self.live_out: list[int] = []
        self.stored: dict[int, str] = {}

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
            name = self.temporary(
                f"defined(r, {number}, {register.name!r}, {register.width}, {self.single}, g)"
            )
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
        name = self.constant(function)
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
