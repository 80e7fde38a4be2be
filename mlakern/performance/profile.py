"""The main loops of an attention kernel: one iteration of each role is one key tile.

A role's loop is recognised by an instruction that only it can hold:

    softmax      the load of 64 scores from tensor memory             LDTM…x64
    mma          the products                                         UTC*MMA
    correction   the store of a rescaled accumulator                  STTM
    load_k, _v   copies of boxes of three dimensions                  UTMALDG.3D (queries: 5D)

Counted is the way through the loop of a tile that needs no mask and whose waits succeed at once;
correction has two: the maximum stays, or it moves ("rescale").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlakern.manifest import Manifest
from mlakern.performance import pipes
from mlakern.performance.disassembly import (
    DisassemblyError,
    Function,
    Instruction,
    disassemble,
    functions,
)
from mlakern.performance.loops import FlowGraph, Loop

_SCORES = r"LDTM\..*x64"
_PRODUCT = r"UTC[A-Z]MMA"
_CORRECTED = r"STTM"
_COPY = r"UTMALDG\.3D"


@dataclass(frozen=True)
class MainLoop:
    """One role's work on a key tile. longest: instructions if every branch of it were taken."""

    role: str
    way: tuple[Instruction, ...]
    longest: int

    @property
    def instructions(self) -> int:
        return len(self.way)

    @property
    def counts(self) -> dict[str, int]:
        """Instructions for each pipe (mlakern.performance.pipes)."""
        return pipes.count(self.way)

    @property
    def operations(self) -> dict[str, int]:
        """Operations of one lane for each pipe."""
        return pipes.operations(self.way)


@dataclass(frozen=True)
class Profile:
    """The machine code of one configuration. sizes: instructions of each entry, by role."""

    manifest: Manifest
    sizes: Mapping[str, int]
    loops: Mapping[str, MainLoop]


def profile(manifest: Manifest, cubin: bytes) -> Profile:
    """What the cubin's code does; DisassemblyError if a main loop is not where it must be."""
    found = functions(disassemble(cubin))
    attention = manifest.kernel("attention").entry
    return Profile(
        manifest=manifest,
        sizes={kernel.role: len(found[kernel.entry].instructions) for kernel in manifest.kernels},
        loops=main_loops(found[attention]),
    )


def main_loops(function: Function) -> dict[str, MainLoop]:
    """The main loops by role: softmax, mma, correction, rescale, load_k and, if any, load_v."""
    graph = FlowGraph(function)
    loop = {
        role: _only(graph, role, opcode)
        for role, opcode in (("softmax", _SCORES), ("mma", _PRODUCT), ("correction", _CORRECTED))
    }
    ways = {
        "softmax": (loop["softmax"], rf"{_SCORES}|MUFU"),
        "mma": (loop["mma"], _PRODUCT),
        "correction": (loop["correction"], None),
        "rescale": (loop["correction"], _CORRECTED),
    }
    result = {role: _main_loop(graph, role, *way) for role, way in ways.items()}
    copies = [_main_loop(graph, "load_k", each, _COPY) for each in _loops(graph, "load", _COPY)]
    # K is the larger tile: it has the rope part.
    copies.sort(key=lambda each: -each.counts["tma"])
    for role, each in zip(("load_k", "load_v"), copies, strict=False):
        result[role] = MainLoop(role, each.way, each.longest)
    return result


def _main_loop(graph: FlowGraph, role: str, loop: Loop, through: str | None) -> MainLoop:
    return MainLoop(role, graph.way(loop, through), len(graph.longest_way(loop)))


def _only(graph: FlowGraph, role: str, opcode: str) -> Loop:
    loops = _loops(graph, role, opcode)
    if len(loops) != 1:
        raise DisassemblyError(
            f"{graph.function.name}: main loop of {role}: got {len(loops)} loops with {opcode}, "
            "need 1"
        )
    return loops[0]


def _loops(graph: FlowGraph, role: str, opcode: str) -> tuple[Loop, ...]:
    try:
        return graph.innermost(opcode)
    except ValueError as error:
        raise DisassemblyError(f"main loop of {role}: {error}") from None
