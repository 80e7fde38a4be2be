"""Which pipe of a multiprocessor an instruction uses, by the first part of its opcode.

The names of opcodes are those of the CUDA Binary Utilities manual ("Instruction Set Reference",
Blackwell). It does not say which pipe runs them; FFMA-like and integer multiply-adds share one,
comparisons, selections, logic and integer additions another, as the rows of the throughput table in
the CUDA Programming Guide ("Arithmetic Instructions") group them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mlakern.performance.disassembly import Instruction

PIPES = {
    "tensor": ("UTCQMMA", "UTCHMMA", "UTCOMMA", "UTCIMMA"),
    "mufu": ("MUFU", "F2I", "I2F", "F2F"),
    "fma": (
        *("FFMA", "FFMA2", "FMUL", "FMUL2", "FADD", "FADD2"),
        *("HFMA2", "HADD2", "HMUL2", "IMAD"),
    ),
    "alu": (
        *("FMNMX", "FMNMX3", "FSEL", "FSETP", "IABS", "IADD", "IADD3", "ISETP", "LEA", "LOP3"),
        *("MOV", "PLOP3", "PRMT", "SEL", "SHF", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3", "CS2R"),
    ),
    "convert": ("F2FP",),
    "shared": ("LDS", "STS", "LDSM", "STSM", "ATOMS", "STAS"),
    "tmem": ("LDTM", "STTM"),
    "global": ("LDG", "STG", "LD", "ST", "ATOMG", "REDG"),
    "tma": ("UTMALDG", "UTMACCTL", "UTMAPF"),
    "barrier": (
        *("SYNCS", "USYNCS", "UTCBAR", "BAR", "WARPSYNC", "ELECT", "FENCE", "MEMBAR", "DEPBAR"),
    ),
    "constant": ("LDC", "LDCU"),
    "branch": ("BRA", "BSSY", "BSYNC", "EXIT", "YIELD", "NANOSLEEP", "CALL", "RET", "JMP"),
}
# Everything on the uniform datapath that is named above belongs there; the rest is here.
UNIFORM, OTHER = "uniform", "other"
# Two operations of a lane in one instruction.
PACKED = ("FFMA2", "FMUL2", "FADD2")

_PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names}


def pipe_of(instruction: Instruction) -> str:
    """A key of PIPES, "uniform" for the rest of the uniform datapath, or "other" (NOP, S2R, …)."""
    name = instruction.name
    if name in _PIPE_OF:
        return _PIPE_OF[name]
    return UNIFORM if name.startswith("U") or name == "R2UR" else OTHER


def count(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Instructions for each pipe that has any, in the order of PIPES."""
    counts = Counter(pipe_of(instruction) for instruction in instructions)
    return {pipe: counts[pipe] for pipe in (*PIPES, UNIFORM, OTHER) if counts[pipe]}


def operations(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Operations of one lane for each pipe: a packed instruction counts twice."""
    counts: Counter[str] = Counter()
    for instruction in instructions:
        counts[pipe_of(instruction)] += 2 if instruction.name in PACKED else 1
    return dict(counts)
