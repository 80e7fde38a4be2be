"""Loops in machine code: natural loops of the flow graph, and ways through them.

A loop's blocks are those of the compiler's out-of-line code too (a failed wait, for instance), so a
loop is not the instructions between two labels. A *way* is one iteration: blocks from the head of
the loop to a branch back to it, each at most once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from mlakern.performance.disassembly import Function, Instruction


@dataclass(frozen=True)
class Loop:
    """A natural loop: the index of its head and of all its blocks in the flow graph."""

    head: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class FlowGraph:
    """The basic blocks of a function; block 0 is the entry."""

    function: Function

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index of each block's first instruction."""
        instructions = self.function.instructions
        leaders = {0, *self.function.labels.values()}
        leaders |= {
            at + 1
            for at, instruction in enumerate(instructions)
            if instruction.target or not instruction.falls_through
        }
        return tuple(sorted(at for at in leaders if at < len(instructions)))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        block_at = {start: block for block, start in enumerate(self.starts)}
        result = []
        for block in range(len(self.starts)):
            last = self.block(block)[-1]
            following = []
            if last.target is not None:
                following.append(block_at[self.function.labels[last.target]])
            if last.falls_through and block + 1 < len(self.starts):
                following.append(block + 1)
            result.append(tuple(dict.fromkeys(following)))
        return tuple(result)

    @cached_property
    def dominators(self) -> tuple[frozenset[int], ...]:
        """Of each block the blocks on every way to it; of an unreachable one all blocks."""
        everything = frozenset(range(len(self.starts)))
        predecessors: list[list[int]] = [[] for _ in self.starts]
        for block, following in enumerate(self.successors):
            for successor in following:
                predecessors[successor].append(block)
        result = [frozenset({0}), *[everything] * (len(self.starts) - 1)]
        changed = True
        while changed:
            changed = False
            for block in range(1, len(result)):
                common = frozenset.intersection(
                    everything, *(result[before] for before in predecessors[block])
                )
                if (updated := common | {block}) != result[block]:
                    result[block] = updated
                    changed = True
        return tuple(result)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Every natural loop, by head; loops of one head are one."""
        bodies: dict[int, set[int]] = {}
        for block, following in enumerate(self.successors):
            for head in following:
                if self._goes_back(block, head) and self._reachable(block):
                    bodies.setdefault(head, {head}).update(self._body(head, block))
        return tuple(Loop(head, frozenset(body)) for head, body in sorted(bodies.items()))

    def block(self, number: int) -> tuple[Instruction, ...]:
        ends = (*self.starts[1:], len(self.function.instructions))
        return self.function.instructions[self.starts[number] : ends[number]]

    def innermost(self, opcode: str) -> tuple[Loop, ...]:
        """The innermost loops around each instruction whose opcode matches, by head.

        Raises ValueError if one stands in no loop.
        """
        pattern = re.compile(opcode)
        found: dict[int, Loop] = {}
        for number in range(len(self.starts)):
            if not any(pattern.match(instruction.opcode) for instruction in self.block(number)):
                continue
            around = [loop for loop in self.loops if number in loop.blocks]
            if not around:
                raise ValueError(f"{self.function.name}: {opcode} stands outside of any loop")
            loop = min(around, key=lambda loop: len(loop.blocks))
            found[loop.head] = loop
        return tuple(found[head] for head in sorted(found))

    def way(self, loop: Loop, through: str | None = None) -> tuple[Instruction, ...]:
        """The shortest way through a loop among those with the most opcodes that match `through`.

        So no wait fails and no rare branch is taken, unless what `through` names lies there.
        """
        pattern = re.compile(through) if through else None

        def cost(number: int) -> tuple[int, int]:
            block = self.block(number)
            matches = sum(bool(pattern.match(i.opcode)) for i in block) if pattern else 0
            return -matches, len(block)

        return self._cheapest(loop, cost)

    def longest_way(self, loop: Loop) -> tuple[Instruction, ...]:
        """The way with the most instructions: every branch taken, each wait failing once."""
        return self._cheapest(loop, lambda number: (-len(self.block(number)), 0))

    def _cheapest(
        self, loop: Loop, cost: Callable[[int], tuple[int, int]]
    ) -> tuple[Instruction, ...]:
        best: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {}
        finished = []
        for number in self._ordered(loop):
            if number == loop.head:
                before: tuple[tuple[int, int], tuple[int, ...]] = ((0, 0), ())
            elif number in best:
                before = best[number]
            else:
                continue
            own = cost(number)
            total = (before[0][0] + own[0], before[0][1] + own[1])
            blocks = (*before[1], number)
            for successor in self.successors[number]:
                if successor == loop.head:
                    finished.append((total, blocks))
                elif successor in loop.blocks and not self._goes_back(number, successor):
                    best[successor] = min(best.get(successor, (total, blocks)), (total, blocks))
        return tuple(i for number in min(finished)[1] for i in self.block(number))

    def _ordered(self, loop: Loop) -> list[int]:
        """The loop's blocks, each after those before it on a way."""
        order: list[int] = []
        visited: set[int] = set()

        def visit(number: int) -> None:
            visited.add(number)
            for successor in self.successors[number]:
                inside = successor in loop.blocks and successor not in visited
                if inside and not self._goes_back(number, successor):
                    visit(successor)
            order.append(number)

        visit(loop.head)
        return order[::-1]

    def _goes_back(self, block: int, successor: int) -> bool:
        return successor in self.dominators[block]

    def _reachable(self, block: int) -> bool:
        return len(self.dominators[block]) < len(self.starts) or len(self.starts) == 1

    def _body(self, head: int, latch: int) -> set[int]:
        body, pending = {head, latch}, [latch]
        while pending:
            number = pending.pop()
            if number == head:
                continue
            for before in self._predecessors(number):
                if before not in body:
                    body.add(before)
                    pending.append(before)
        return body

    def _predecessors(self, number: int) -> Iterable[int]:
        return [b for b, following in enumerate(self.successors) if number in following]
