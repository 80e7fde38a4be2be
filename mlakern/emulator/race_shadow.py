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
_WORTH_A_LOOK = 256  # cells


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

    def late(self, stamps: Stamps) -> Late | None:
        """True for accesses that may still happen at the time of the current one; None: no such."""
        if stamps.size > _WORTH_A_LOOK:
            # Mostly one instruction touched all columns of a lane: then one column stands for them.
            one = stamps[:1] if stamps.ndim == 1 else stamps[..., :1, :]
            if (stamps == one).all() and self._late(one) is None:
                return None
        return self._late(stamps)

    def _late(self, stamps: Stamps) -> Late | None:
        agents = stamps >> _AGENT_SHIFT
        late: Late = (stamps & _EPOCH) > self.known.take(agents + self.row)
        if not late.any():
            return None
        late &= agents != self.exempt
        return late if late.any() else None


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

    def read(
        self, where: Where, mine: Stamps, writes: Judge, reads: Judge, slot: Stamps | int = 0
    ) -> Conflict | None:
        """Record a read of cells. mine: its stamp, or one for each cell.

        writes, reads: judges of earlier writes and of earlier reads (which only make room).
        slot: where to remember the read first. Agents that read the same cells in one instruction
        need different ones.
        """
        earlier = self._write[where]
        late = writes.late(earlier)
        if late is not None:
            return _first(earlier, late, wrote=True)
        place = (slot, *where)
        occupied = self._reads[place]
        late = reads.late(occupied)
        if late is not None:
            self._make_room(slot, where, occupied, late, reads)
        self._reads[place] = mine
        return None

    def write(
        self, where: Where, mine: Stamps, writes: Judge, reads: Judge, atomic: bool = False
    ) -> Conflict | None:
        """Record a write; atomics are not ordered with each other and need not be."""
        earlier = self._write[where]
        late = writes.late(earlier)
        if late is not None:
            if atomic:
                late &= (earlier & _ATOMIC) == 0
            if late.any():
                return _first(earlier, late, wrote=True)
        everyone = (slice(None), *where)
        readers = self._reads[everyone]
        if readers.any():
            late = reads.late(readers)
            if late is not None:
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
        self, slot: Stamps | int, where: Where, occupied: Stamps, late: Late, reads: Judge
    ) -> None:
        """Move reads that the new reader does not know of to slots that it may use."""
        for other in range(READERS):
            place = (other, *where)
            entries = self._reads[place]
            taken = reads.late(entries)
            free = late & (slot != other)
            if taken is not None:
                free &= ~taken
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
