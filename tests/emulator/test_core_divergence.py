"""Random programs of nested branches and loops, against an interpreter of one thread at a time.

Registers are split, merged, inherited and turned into scalars all over the place here; the
interpreter knows nothing of warps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from ptx_programs import run

from mlakern.emulator import Options

REGISTERS = 6
M32 = (1 << 32) - 1
OPERATIONS = {
    "add.u32": lambda a, b: (a + b) & M32,
    "sub.u32": lambda a, b: (a - b) & M32,
    "mul.lo.u32": lambda a, b: a * b & M32,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "max.u32": max,
}
COMPARISONS = {
    "eq": lambda a, b: a == b,
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
}


@dataclass
class Assign:
    operation: str
    out: int
    left: int
    right: int | str  # a register or a literal

    def execute(self, state: list[int]) -> None:
        right = int(self.right) if isinstance(self.right, str) else state[self.right]
        state[self.out] = OPERATIONS[self.operation](state[self.left], right)


@dataclass
class If:
    """Compares register & 15 with a literal, so that the outcome varies; bodies may be empty."""

    register: int
    comparison: str
    literal: int
    then: list[Statement]
    other: list[Statement]

    def execute(self, state: list[int]) -> None:
        taken = COMPARISONS[self.comparison](state[self.register] & 15, self.literal)
        for statement in self.then if taken else self.other:
            statement.execute(state)


@dataclass
class Loop:
    """Runs (register & mask) + 1 times; the count is taken before the loop."""

    register: int
    mask: int
    body: list[Statement]

    def execute(self, state: list[int]) -> None:
        for _ in range((state[self.register] & self.mask) + 1):
            for statement in self.body:
                statement.execute(state)


Statement = Assign | If | Loop


def statements(source: random.Random, depth: int, count: int) -> list[Statement]:
    made: list[Statement] = []
    for _ in range(count):
        kind = source.random()
        if depth and kind < 0.3:
            made.append(
                If(
                    source.randrange(REGISTERS),
                    source.choice(list(COMPARISONS)),
                    source.randrange(16),
                    statements(source, depth - 1, source.randrange(1, 4)),
                    statements(source, depth - 1, source.randrange(3)),
                )
            )
        elif depth and kind < 0.45:
            body = statements(source, depth - 1, source.randrange(1, 4))
            made.append(Loop(source.randrange(REGISTERS), source.choice([1, 3]), body))
        else:
            right = source.choice([source.randrange(REGISTERS), str(source.randrange(1000))])
            made.append(
                Assign(
                    source.choice(list(OPERATIONS)),
                    source.randrange(REGISTERS),
                    source.randrange(REGISTERS),
                    right,
                )
            )
    return made


@dataclass
class Writer:
    lines: list[str] = field(default_factory=list)
    labels: int = 0
    counters: int = 0

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def block(self, body: list[Statement]) -> None:
        for statement in body:
            if isinstance(statement, Assign):
                self.assign(statement)
            elif isinstance(statement, If):
                self.branch(statement)
            else:
                self.loop(statement)

    def assign(self, s: Assign) -> None:
        right = s.right if isinstance(s.right, str) else f"%r{s.right}"
        self.lines.append(f"{s.operation} %r{s.out}, %r{s.left}, {right};")

    def branch(self, s: If) -> None:
        other, end = self.label(), self.label()
        self.lines += [
            f"and.b32 %r90, %r{s.register}, 15;",
            f"setp.{s.comparison}.u32 %p1, %r90, {s.literal};",
            f"@!%p1 bra {other};",
        ]
        self.block(s.then)
        self.lines += [f"bra.uni {end};", f"{other}:"]
        self.block(s.other)
        self.lines.append(f"{end}:")

    def loop(self, s: Loop) -> None:
        top = self.label()
        counter = 20 + self.counters
        self.counters += 1
        self.lines += [
            f"and.b32 %r{counter}, %r{s.register}, {s.mask};",
            f"add.u32 %r{counter}, %r{counter}, 1;",
            f"{top}:",
        ]
        self.block(s.body)
        self.lines += [
            f"sub.u32 %r{counter}, %r{counter}, 1;",
            f"setp.ne.u32 %p2, %r{counter}, 0;",
            f"@%p2 bra {top};",
        ]


@pytest.mark.parametrize("seed", range(60))
def test_random_program(seed: int) -> None:
    source = random.Random(seed)
    body = statements(source, 3, 6)
    after = statements(source, 2, 3)
    writer = Writer()
    writer.block(body)
    # All lanes are together again here: exchange with a neighbour, then go on.
    writer.lines += ["bar.warp.sync -1;", "shfl.sync.bfly.b32 %r3, %r3, 1, 31, -1;"]
    writer.block(after)
    threads = source.choice([32, 64, 128, 160, 100])
    out = np.zeros((threads, REGISTERS), np.uint32)
    start = [
        "mov.u32 %r0, %tid.x;",
        "mov.u32 %r1, 12345;",
        "shr.u32 %r2, %r0, 5;",
        "mul.lo.u32 %r3, %r0, 2654435761;",
        "mov.u32 %r4, %laneid;",
        "mov.u32 %r5, 7;",
        "mov.u32 %r91, %tid.x;",
    ]
    end = [f"mad.wide.u32 %rd40, %r91, {4 * REGISTERS}, %rd1;"]
    end += [f"st.global.u32 [%rd40+{4 * n}], %r{n};" for n in range(REGISTERS)] + ["ret;"]
    options = Options(seed=seed) if seed % 2 else None
    run("\n".join(start + writer.lines + end), {"out": out}, block=threads, options=options)

    states = [[t, 12345, t // 32, t * 2654435761 & M32, t % 32, 7] for t in range(threads)]
    for state in states:
        for statement in body:
            statement.execute(state)
    partners = [t ^ 1 for t in range(threads)]
    exchanged = [states[p][3] for p in partners]
    for state, value in zip(states, exchanged, strict=True):
        state[3] = value
        for statement in after:
            statement.execute(state)
    np.testing.assert_array_equal(out, np.array(states, np.uint32))
