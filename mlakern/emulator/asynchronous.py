"""Asynchronous work: copies and tensor-core operations that complete some time after their issue.

Eagerly (the default) work is done when it is issued, which gives the right results and exact
barrier phases. Delayed, it is kept: one queue for each tensor pipe, in order, and copies in any
order; the scheduler completes some of it now and then, by its seed, and the rest when nothing
else can run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlakern.emulator.errors import EmulatorError
from mlakern.emulator.hardware_error import HardwareError

if TYPE_CHECKING:
    from mlakern.emulator.cta import Cluster
    from mlakern.emulator.group import Group
    from mlakern.emulator.program import Instruction


@dataclass(slots=True)
class Work:
    """One operation: what it does, which CTAs' memory it touches, and who issued it."""

    action: Callable[[], None]
    ranks: tuple[int, ...]
    issuer: str
    instruction: Instruction
    done: bool = False

    def complete(self) -> None:
        try:
            self.action()
        except HardwareError as error:
            raise EmulatorError(
                f"{self.issuer}, PTX line {self.instruction.line}: {self.instruction.text}: {error}"
            ) from error
        self.done = True


class Asynchronous:
    """The work in flight of one cluster."""

    def __init__(self, cluster: Cluster, delayed: bool) -> None:
        self.cluster = cluster
        self.delayed = delayed
        self.pipes: dict[int, deque[Work]] = {}
        self.copies: list[Work] = []

    def tensor(
        self, g: Group, instruction: Instruction, ranks: tuple[int, ...], action: Callable[[], None]
    ) -> None:
        """An operation of the tensor pipe of the issuing CTA: after all earlier ones."""
        if not self.delayed:
            action()
            return
        work = Work(action, ranks, g.name_of(None), instruction)
        self.pipes.setdefault(g.cta.rank, deque()).append(work)

    def copy(
        self, g: Group, instruction: Instruction, ranks: tuple[int, ...], action: Callable[[], None]
    ) -> Work | None:
        """A copy, ordered after nothing; None if it is already done."""
        if not self.delayed:
            action()
            return None
        work = Work(action, ranks, g.name_of(None), instruction)
        self.copies.append(work)
        return work

    def maybe_step(self, source: random.Random) -> None:
        """Complete something with even odds."""
        if (self.copies or self.pipes) and source.random() < 0.5:
            self.step()

    def step(self) -> bool:
        """Complete one operation, chosen at random; False if there is none."""
        source = self.cluster.random
        queues: list[int | None] = [*self.pipes, *([None] if self.copies else [])]
        if not queues:
            return False
        rank = source.choice(queues) if source else queues[0]
        if rank is None:
            work = self.copies.pop(source.randrange(len(self.copies)) if source else 0)
        else:
            work = self.pipes[rank].popleft()
            if not self.pipes[rank]:
                del self.pipes[rank]
        work.complete()
        self.cluster.events += 1
        return True

    def finish(self, work: Work) -> None:
        """Complete operations until a given copy is done."""
        while not work.done and self.step():
            pass

    def drain(self) -> None:
        """Complete everything."""
        while self.step():
            pass

    def pending_at(self, rank: int) -> str:
        """An operation in flight that touches a CTA's memory, in words; "" if there is none."""
        for work in [*self.copies, *(work for pipe in self.pipes.values() for work in pipe)]:
            if rank in work.ranks:
                return f"{work.instruction.text} (PTX line {work.instruction.line})"
        return ""
