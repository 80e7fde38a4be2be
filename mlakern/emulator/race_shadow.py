"""Who touched what last: shadow state of one memory for a race detector.

Each cell (a 4-byte granule of shared memory, a 32-bit cell of tensor memory) remembers its last
write and up to four reads since then, each as one integer, a stamp:

    [0:32) epoch   [32:51) site   [51] atomic   [52:63) agent       0: nothing

A new read takes the place of one that its agent knows of. Where four reads do not know of each
other the fifth takes the place of one of them, and a race with that one may be missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Stamps: TypeAlias = NDArray[np.int64]
Late: TypeAlias = NDArray[np.bool_]
Where: TypeAlias = tuple[Any, ...]  # a numpy index, one entry for each dimension of the memory

READERS = 4
MAX_SITES = 1 << 19
MAX_AGENTS = 1 << 11

_SITE_SHIFT = 32
_ATOMIC = 1 << 51
_AGENT_SHIFT = 52
_EPOCH = (1 << _SITE_SHIFT) - 1


def stamp(agent: Stamps | int, epoch: Stamps | int, site: int, atomic: bool = False) -> Stamps:
    """Pack an access; arrays of agents and epochs give an array."""
    packed = np.asarray(agent, np.int64) << _AGENT_SHIFT
    return packed | np.asarray(epoch, np.int64) | (site << _SITE_SHIFT) + _ATOMIC * atomic


def agent_of(packed: int) -> int:
    return packed >> _AGENT_SHIFT


def epoch_of(packed: int) -> int:
    return packed & _EPOCH


def site_of(packed: int) -> int:
    return packed >> _SITE_SHIFT & MAX_SITES - 1


@dataclass(frozen=True)
class Judge:
    """Decides which earlier accesses the current one is not ordered after.

    known: epochs known, one row of agents for each possible reader, flattened.
    row: where the current reader's row begins; an array for several readers, one for each cell.
    exempt: agent whose accesses are in order with the current one anyway, or -1.
    """

    known: Stamps
    row: Stamps | int
    exempt: Stamps | int = -1

    def late(self, stamps: Stamps) -> Late:
        """True for accesses that may still happen at the time of the current one."""
        agents = stamps >> _AGENT_SHIFT
        late: Late = (stamps & _EPOCH) > self.known.take(agents + self.row)
        if late.any():
            late &= agents != self.exempt
        return late


@dataclass(frozen=True)
class Conflict:
    """An earlier access (its stamp) that is not ordered before the current one.

    cell: flat position among the cells of the current access. wrote: the earlier one is a write.
    """

    stamp: int
    cell: int
    wrote: bool


class Shadow:
    """State of a memory of the given shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._write: Stamps = np.zeros(shape, np.int64)
        self._reads: Stamps = np.zeros((READERS, *shape), np.int64)

    def read(self, where: Where, mine: Stamps, writes: Judge, reads: Judge) -> Conflict | None:
        """Record a read of cells. mine: its stamp, or one for each cell.

        writes, reads: judges of earlier writes and of earlier reads (which only make room).
        """
        earlier = self._write[where]
        late = writes.late(earlier)
        if late.any():
            return _first(earlier, late, wrote=True)
        # The four warps of a warpgroup read the same cells in one instruction: a slot for each.
        slot = (mine >> _AGENT_SHIFT) // 3 % READERS
        place = (int(slot) if slot.ndim == 0 else slot, *where)
        occupied = self._reads[place]
        late = reads.late(occupied)
        if late.any():
            self._make_room(slot, where, occupied, late, reads)
        self._reads[place] = mine
        return None

    def write(
        self, where: Where, mine: Stamps, writes: Judge, reads: Judge, atomic: bool = False
    ) -> Conflict | None:
        """Record a write; atomics are not ordered with each other and need not be."""
        earlier = self._write[where]
        late = writes.late(earlier)
        if late.any():
            if atomic:
                late &= (earlier & _ATOMIC) == 0
            if late.any():
                return _first(earlier, late, wrote=True)
        everyone = (slice(None), *where)
        readers = self._reads[everyone]
        if readers.any():
            late = reads.late(readers)
            if late.any():
                return _first(readers, late, wrote=False)
            self._reads[everyone] = 0
        self._write[where] = mine
        if mine.ndim and not atomic:
            # Another agent wrote the same cell in this very instruction.
            final = self._write[where]
            other = final != mine
            if other.any():
                return _first(final, other, wrote=True)
        return None

    def _make_room(
        self, slot: Stamps, where: Where, occupied: Stamps, late: Late, reads: Judge
    ) -> None:
        """Move reads that are not known to the new reader to slots that it may use."""
        for other in range(READERS):
            place = (other, *where)
            entries = self._reads[place]
            free = late & ~reads.late(entries) & (slot != other)
            if free.any():
                self._reads[place] = np.where(free, occupied, entries)
                late = late & ~free
            if not late.any():
                return


def _first(stamps: Stamps, late: Late, wrote: bool) -> Conflict:
    position = int(np.argmax(late))
    packed = int(stamps.reshape(-1)[position])
    if not wrote:
        position %= stamps[0].size
    return Conflict(packed, position, wrote)
