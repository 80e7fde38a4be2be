"""cp.async: copies of 4, 8 or 16 bytes by each lane from global to shared memory (PTX ISA,
"cp.async").

They are done when they are issued, or, with delayed work, at the wait for their group at the
latest. To a race detector they are stores of their warp.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator import mbarrier
from mlakern.emulator.access import load_global, store_shared
from mlakern.emulator.errors import Fault
from mlakern.emulator.values import UNSIGNED

if TYPE_CHECKING:
    from mlakern.emulator.asynchronous import Work
    from mlakern.emulator.group import Group
    from mlakern.emulator.observer import Site
    from mlakern.emulator.program import Instruction


def copy(
    g: Group, destination: Any, source: Any, size: int, filled: Any, instruction: Instruction
) -> None:
    """Copy the first ``filled`` bytes (None: all) of each lane's ``size``; the others are zero.

    Arguments but size are ints, or arrays where lanes differ.
    """
    action = partial(_copy, g, destination, source, size, filled, instruction)
    if not g.cta.cluster.asynchronous.delayed:
        action()
        return
    work = g.cta.cluster.asynchronous.copy(g, instruction, (g.cta.rank,), action)
    for lane in g.lanes.tolist():
        g.bundle.small_copies.setdefault(lane, [[]])[-1].append(work)


def _copy(g: Group, destination: Any, source: Any, size: int, filled: Any, site: Site) -> None:
    width, count = (4, 1) if size == 4 else (8, size // 8)
    if filled is None or (type(filled) is int and filled == size):
        values = load_global(g, source, width, count, site)
    else:
        values = _partial(g, source, size, width, filled)
        if type(destination) is int and g.width == 1:
            values = [int(each[0]) for each in values]
        values = values if count > 1 else values[0]
    store_shared(g, destination, width, values, site)


def _partial(g: Group, source: Any, size: int, width: int, filled: Any) -> list[Any]:
    """Arrays of words, of lanes that copy different numbers of bytes."""
    data = np.zeros((g.width, size), np.uint8)
    sizes = np.broadcast_to(np.asarray(filled), g.width).tolist()
    addresses = np.broadcast_to(np.asarray(source, np.uint64), g.width).tolist()
    memory = g.cta.launch.memory
    for lane, (address, wanted) in enumerate(zip(addresses, sizes, strict=True)):
        if wanted > size:
            raise Fault(f"cp.async of {wanted} bytes of {size}", lane)
        if wanted:
            if address % size:
                raise Fault(f"cp.async from {address:#x}: need {size}-byte alignment", lane)
            found, index = memory.span(address, wanted, write=False)
            data[lane, :wanted] = found[index : index + wanted]
    words = data.view(UNSIGNED[8 * width])
    return list(np.ascontiguousarray(words.T))


def commit_group(g: Group) -> None:
    """cp.async.commit_group."""
    for lane in g.lanes.tolist():
        groups = g.bundle.small_copies.get(lane)
        if groups is not None:
            groups.append([])


def wait_group(g: Group, pending: int) -> None:
    """cp.async.wait_group: complete all but the latest ``pending`` groups of each thread."""
    for lane in g.lanes.tolist():
        groups = g.bundle.small_copies.get(lane)
        if groups is not None:
            due = max(len(groups) - 1 - pending, 0)
            for group in groups[:due]:
                _complete(g, group)
            g.bundle.small_copies[lane] = groups[due:]


def wait_all(g: Group) -> None:
    """cp.async.wait_all."""
    for lane in g.lanes.tolist():
        for group in g.bundle.small_copies.pop(lane, ()):
            _complete(g, group)


def _complete(g: Group, group: list[Work | None]) -> None:
    for work in group:
        if work is not None:
            g.cta.cluster.asynchronous.finish(work)


def arrive(g: Group, address: int, counted: bool, site: Site) -> None:
    """cp.async.mbarrier.arrive: arrive once the thread's earlier copies are done.

    counted: .noinc; otherwise the arrival is one more than the barrier expects.
    """
    for lane in g.lanes.tolist() if g.bundle.small_copies else ():
        for group in g.bundle.small_copies.get(lane, ()):
            _complete(g, group)
    if counted:
        mbarrier.arrive(g, address, 1, 0, False, True, site)
    else:
        mbarrier.find(g, address)
