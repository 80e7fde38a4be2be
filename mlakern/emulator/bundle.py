"""Bundles: up to four consecutive warps of a CTA, and how their groups of lanes take turns.

Among the groups of a bundle that can run, the one at the smallest program counter runs, until it
passes another group or meets it; compilers place the point where branches meet after them, so
this makes lanes converge again. A group that waits is passed over, so lanes make progress
independently of each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator.codegen import BLOCKED, EXITED
from mlakern.emulator.errors import EmulatorError, Fault
from mlakern.emulator.group import WARP, Group, Registers, merge, narrowed_kind, scalarise, split
from mlakern.emulator.hardware_error import HardwareError
from mlakern.emulator.runtime import ConvergenceWait
from mlakern.emulator.writer import Mode

if TYPE_CHECKING:
    from mlakern.emulator.asynchronous import Work
    from mlakern.emulator.cta import Cta
    from mlakern.emulator.observer import Ticket

BUNDLE_THREADS = 128
QUOTA = 400  # regions that a bundle runs before others get a turn
_NEVER = 1 << 60


class Bundle:
    """Threads [first_thread, first_thread + size) of a CTA.

    alive: bit set of the lanes that have not exited. cluster_arrivals: for each lane the generation
    of the cluster barrier at which it arrived, −1 when it is not between arrive and wait.
    """

    def __init__(self, cta: Cta, first_thread: int, size: int) -> None:
        self.cta = cta
        self.first_thread = first_thread
        self.size = size
        self.first_warp = first_thread // WARP
        self.warp_count = -(-size // WARP)
        self.alive = (1 << size) - 1
        self.code = cta.launch.code
        self.widths = cta.launch.widths
        self.cluster_arrivals = np.full(size, -1, np.int64)
        local = cta.launch.code.places.local_bytes
        self.local = np.zeros((size, local), np.uint8)
        self.local_written = np.full((size, local), cta.launch.options.poison)
        self.queued = False
        # Groups of wgmma in flight: the issuing warps with what their completion tells.
        self.wgmma_groups: list[list[tuple[int, Ticket]]] = [[]]
        # Groups of cp.async that may be in flight, of each lane; the last group is still open.
        self.small_copies: dict[int, list[list[Work | None]]] = {}
        self.bulk_groups: dict[int, list[list[Any]]] = {}
        first = Group(self, np.arange(size), Registers())
        self._enter(first, 0, {})
        self.groups = [first]

    def special(self, name: str) -> Any:
        """A special register of every lane."""
        return self.cta.launch.special(name, self.first_thread, self.size)

    def _enter(self, group: Group, pc: int, kinds: dict[int, str]) -> None:
        """Point a group at an instruction, with the code for its registers' present kinds."""
        text = "".join([kinds.get(number, "-") for number in self.code.flow.live_in(pc)])
        group.variant = self.code.variant(pc, group.mode, text)

    def run(self, quota: int = QUOTA) -> bool:
        """Run groups until none can or the quota is used up; True if some still can."""
        while True:
            ready = [group for group in self.groups if group.waiting is None]
            if not ready:
                return False
            if quota <= 0:
                return True
            group = min(ready, key=_pc)
            if len(self.groups) == 1:
                quota = self._run_alone(group, quota)
            elif not (group.mergeable and self._meet(group, self.groups)):
                quota = self._run_among(group, quota)

    def _run_alone(self, group: Group, quota: int) -> int:
        """Run the only group of the bundle until it stops, or parts."""
        variant, registers = group.variant, group.registers
        warps = len(group.warps)
        try:
            while quota > 0:
                quota -= 1
                variant.hits += warps
                choice = variant.run(registers, group)
                if type(choice) is not int:
                    self._part(group, choice)
                    return quota
                if choice < 0:
                    self._stop(group, choice)
                    return quota
                following = variant.next[choice]
                if following is None:
                    following = self.code.successor(variant, choice)
                group.variant = variant = following
        except HardwareError as error:
            raise self._located(group, error) from error
        return quota

    def _run_among(self, group: Group, quota: int) -> int:
        """Run one group of several until it stops, parts, or meets or passes another one."""
        others = [g for g in self.groups if g is not group]
        meeting = {g.variant.pc for g in others if g.mergeable}
        limit = min((g.variant.pc for g in others if g.waiting is None), default=_NEVER)
        variant, registers = group.variant, group.registers
        warps = len(group.warps)
        try:
            while quota > 0:
                quota -= 1
                variant.hits += warps
                choice = variant.run(registers, group)
                group.written |= variant.written
                if type(choice) is not int:
                    self._part(group, choice)
                    return quota
                if choice < 0:
                    self._stop(group, choice)
                    return quota
                group.apart = False
                following = variant.next[choice]
                if following is None:
                    following = self.code.successor(variant, choice)
                group.variant = variant = following
                if variant.pc in meeting:
                    self._meet(group, [g for g in others if g.origin is group.origin])
                    return quota
                if variant.pc > limit:
                    return quota
        except HardwareError as error:
            raise self._located(group, error) from error
        # Out of turn: somebody else goes first, or a polling loop would keep the bundle for itself.
        self.groups.remove(group)
        self.groups.append(group)
        return quota

    def _part(self, group: Group, choice: Any) -> None:
        """Split a group whose lanes go different ways; a 1-tuple means: split, but stay here."""
        stay = type(choice) is tuple
        variant = group.variant
        if stay:
            variant.hits -= len(group.warps)
        parts = split(group, choice[0] if stay else choice)
        group.kinds = variant.inputs if stay else variant.kinds
        self.groups.remove(group)
        for value, part in parts:
            part.apart = stay
            self._send(part, group, variant.pc if stay else variant.targets[value])
            self.groups.append(part)

    def _send(self, part: Group, whole: Group, pc: int) -> None:
        """Point a part of a group that has just been split at an instruction."""
        key = pc, part.mode, part.apart
        opens = part.mode is Mode.WARP and whole.mode is Mode.BUNDLE
        known = None if opens else whole.variant.parted.get(key)
        if known is not None:
            part.variant = known
            return
        kinds = {
            number: narrowed_kind(whole.kinds[number], self.widths[number], part.mode)
            for number in self.code.flow.live_in(pc)
        }
        if opens:
            scalarise(part, kinds)
        self._enter(part, pc, kinds)
        if not opens:
            whole.variant.parted[key] = part.variant

    def _meet(self, group: Group, others: list[Group]) -> bool:
        """Merge a group with those among ``others`` at the same instruction; True if there are any.

        A group that arrives somewhere merges with parts of the group that it was split from, which
        is cheap and puts that group together again; only when it is about to run, and such parts
        have not come, does it merge with others.
        """
        pc = group.variant.pc
        here = [g for g in others if g.variant.pc == pc and g.mergeable and g is not group]
        for other in here:
            self.groups.remove(other)
            self.groups.remove(group)
            self._forget(other)
            group, kinds = merge(group, other, self.code.flow.live_in(pc))
            self._enter(group, pc, kinds)
            self.groups.append(group)
        return bool(here)

    def _forget(self, group: Group) -> None:
        """Take a sleeping group off the lists of what it waits for."""
        barrier = getattr(group.waiting, "barrier", None)
        if barrier is not None and group in barrier.waiters:
            barrier.waiters.remove(group)
        if group in self.cta.cluster.barrier.waiters:
            self.cta.cluster.barrier.waiters.remove(group)

    def _stop(self, group: Group, choice: int) -> None:
        if choice == BLOCKED:
            group.variant.hits -= len(group.warps)
            return
        assert choice == EXITED
        self.groups.remove(group)
        self.alive &= ~group.mask
        for other in self.groups:
            if isinstance(other.waiting, ConvergenceWait):
                other.waiting = None
        self.cta.threads_exit(group)

    def _located(self, group: Group, error: HardwareError) -> EmulatorError:
        """The error with the instruction that raised it, from the line of generated code."""
        trace = error.__traceback__
        instruction = group.variant.instructions[0]
        while trace is not None:
            if trace.tb_frame.f_code.co_name == "run" and trace.tb_frame.f_code is (
                group.variant.run.__code__
            ):
                instruction = group.variant.sites[trace.tb_lineno - 2]
            trace = trace.tb_next
        lane = error.lane if isinstance(error, Fault) else None
        return EmulatorError(
            f"{group.name_of(lane)}, PTX line {instruction.line}: {instruction.text}: {error}"
        )


def _pc(group: Group) -> int:
    return group.variant.pc
