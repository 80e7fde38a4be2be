"""Compile regions of a kernel to Python functions, once for each way in which they are used.

A *variant* is a region compiled for one mode (whole warps, one lane, …) and one kind for each
live register. Since the kinds at its end follow from those at its start, a variant remembers its
successors, and running from region to region costs one list access. Variants live as long as the
module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlakern.emulator import runtime, values
from mlakern.emulator.addresses import layout
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.errors import EmulatorError
from mlakern.emulator.flow import Flow
from mlakern.emulator.opcodes.table import Control
from mlakern.emulator.program import Entry, Instruction
from mlakern.emulator.writer import Mode

BLOCKED = -1
EXITED = -2

_BASE_NAMESPACE: dict[str, Any] = {
    "array": np.array,
    "full": np.full,
    "float32": np.float32,
    "join": values.join,
    "low_half": values.low_half,
    "high_half": values.high_half,
    "to_float32": values.to_float32,
    "from_float32": values.from_float32,
    "to_float64": values.to_float64,
    "from_float64": values.from_float64,
    "defined": runtime.defined,
    "converged": runtime.converged,
    "uniform": runtime.uniform,
    "where": np.where,
    "arange": np.arange,
    "BLOCKED": BLOCKED,
    "EXITED": EXITED,
}


_CUTS = {
    Mode.LANE: frozenset({Control.BLOCKING, Control.CONVERGED}),
    Mode.PARTIAL: frozenset({Control.BLOCKING, Control.CONVERGED, Control.ALONE}),
    Mode.WARP: frozenset({Control.BLOCKING, Control.ALONE}),
    Mode.BUNDLE: frozenset({Control.BLOCKING, Control.ALONE}),
}


class Variant:
    """A compiled region.

    run(registers, group): returns the index of the successor in ``targets``, an array of such
    indices (one for each lane, when lanes disagree), a 1-tuple of an array (lanes that part and
    stay), BLOCKED or EXITED. inputs, kinds: kinds of the live registers before and after it.
    written: bit set of the registers that it stores. hits: how many warps have run it. next,
    parted: the successors found so far, for groups that stay whole and for parts of them.
    """

    __slots__ = (
        "hits",
        "inputs",
        "instructions",
        "kinds",
        "mode",
        "next",
        "parted",
        "pc",
        "run",
        "sites",
        "targets",
        "written",
    )

    def __init__(
        self,
        pc: int,
        mode: Mode,
        run: Callable[[Any, Any], Any],
        instructions: list[Instruction],
        sites: list[Instruction],
        targets: list[int],
        inputs: dict[int, str],
        kinds: dict[int, str],
        written: int,
    ) -> None:
        self.pc = pc
        self.mode = mode
        self.run = run
        self.instructions = instructions
        self.sites = sites
        self.targets = targets
        self.inputs = inputs
        self.kinds = kinds
        self.written = written
        self.next: list[Variant | None] = [None] * len(targets)
        self.parted: dict[tuple[int, Mode, bool], Variant] = {}
        self.hits = 0


class Code:
    """All compiled code of one kernel."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.flow = Flow(entry)
        self.places = layout(entry)
        self.variants: dict[tuple[int, Mode, str], Variant] = {}

    def variant(self, pc: int, mode: Mode, kinds: str) -> Variant:
        """The code at ``pc``; ``kinds`` has one letter for each register of ``live_in(pc)``."""
        key = pc, mode, kinds
        found = self.variants.get(key)
        if found is None:
            live = dict(zip(self.flow.live_in(pc), kinds, strict=True))
            found = self.variants[key] = self.compile(pc, mode, live)
        return found

    def successor(self, variant: Variant, choice: int) -> Variant:
        """The variant that follows ``variant`` when no lanes part."""
        found = variant.next[choice]
        if found is None:
            pc = variant.targets[choice]
            kinds = "".join(variant.kinds.get(n, "-") for n in self.flow.live_in(pc))
            found = variant.next[choice] = self.variant(pc, variant.mode, kinds)
        return found

    def compile(self, pc: int, mode: Mode, kinds: dict[int, str]) -> Variant:
        """Generate and compile the region that begins at ``pc``."""
        end = self.flow.region_end(pc, _CUTS[mode])
        instructions = self.entry.instructions[pc:end]
        last = instructions[-1]
        jumps = last.row.control is Control.JUMP
        targets = self.flow.targets(last) if jumps else [end]
        emitter = Emitter(self.entry, self.places, mode, kinds, dict(_BASE_NAMESPACE))
        live = sorted({n for target in targets for n in self.flow.live_in(target)})
        for instruction in instructions:
            emitter.instruction = instruction
            if instruction is last:
                emitter.live_out = live
            instruction.row.generate(emitter, instruction)
        if not jumps:
            emitter.store()
            emitter.line("return 0")
        name = f"{self.entry.name}:{last.line}"
        source = "def run(r, g):\n" + "\n".join(" " + line for line in emitter.lines)
        try:
            exec(compile(source, name, "exec"), emitter.namespace)
        except SyntaxError as error:  # pragma: no cover - a bug of a generator
            raise EmulatorError(f"generated code is broken: {error}\n{source}") from error
        out = dict(kinds)
        out.update(emitter.stored)
        written = 0
        for number in emitter.stored:
            written |= 1 << number
        return Variant(
            pc,
            mode,
            emitter.namespace["run"],
            instructions,
            emitter.sites,
            targets,
            kinds,
            out,
            written,
        )
