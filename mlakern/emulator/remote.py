"""Stores and reductions in another CTA's shared memory that complete on an mbarrier there (PTX ISA,
"st.async", "red.async").
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator import atomics, mbarrier
from mlakern.emulator.addresses import OFFSET_MASK, RANK_SHIFT
from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import Access, SharedRegion

if TYPE_CHECKING:
    from mlakern.emulator.group import Group
    from mlakern.emulator.program import Instruction


def _lists(g: Group, *values: Any) -> list[list[int]]:
    """Each value for each lane."""
    return [np.broadcast_to(np.asarray(value), g.width).tolist() for value in values]


def store(
    g: Group,
    address: Any,
    size: int,
    values: list[Any],
    barrier: Any,
    instruction: Instruction,
) -> None:
    """st.async by each lane of ``len(values)`` elements of ``size`` bytes."""
    addresses, barriers, *columns = _lists(g, address, barrier, *values)
    row = size * len(values)
    warps = np.broadcast_to(g.lane_warps(), g.width).tolist()
    for lane, (place, where) in enumerate(zip(addresses, barriers, strict=True)):
        signal = _signal(g, place, where, lane)
        rank, offset = place >> RANK_SHIFT, place & OFFSET_MASK
        observer = g.cta.launch.observer
        ticket: object = None
        if observer is not None:
            region = SharedRegion(rank, slice(offset >> 2, (offset + row) >> 2))
            ticket = observer.bulk_load(instruction, warps[lane], signal.name, [region])
        data = [column[lane] for column in columns]
        action = partial(_store, g, rank, offset, size, data, signal, ticket)
        g.cta.cluster.asynchronous.copy(g, instruction, (rank,), action)


def _store(
    g: Group,
    rank: int,
    offset: int,
    size: int,
    data: list[int],
    signal: mbarrier.MBarrier,
    ticket: object,
) -> None:
    shared = g.cta.cluster.cta(rank).shared
    shared.store(offset, size, data if len(data) > 1 else data[0])
    mbarrier.deliver(signal, size * len(data), ticket)


def reduce(
    g: Group,
    address: Any,
    operation: str,
    kind: str,
    value: Any,
    barrier: Any,
    instruction: Instruction,
) -> None:
    """red.async by each lane."""
    addresses, values, barriers = _lists(g, address, value, barrier)
    size = int(kind[1:]) // 8
    warps = np.broadcast_to(g.lane_warps(), g.width).tolist()
    for lane, (place, each, where) in enumerate(zip(addresses, values, barriers, strict=True)):
        signal = _signal(g, place, where, lane)
        rank, offset = place >> RANK_SHIFT, place & OFFSET_MASK
        observer = g.cta.launch.observer
        ticket: object = None
        if observer is not None:
            observer.shared(instruction, warps[lane], rank, offset, size, Access.ATOMIC)
            ticket = observer.bulk_load(instruction, warps[lane], signal.name, [])
        action = partial(_reduce, g, rank, offset, operation, kind, each, signal, ticket)
        g.cta.cluster.asynchronous.copy(g, instruction, (rank,), action)


def _reduce(
    g: Group,
    rank: int,
    offset: int,
    operation: str,
    kind: str,
    value: int,
    signal: mbarrier.MBarrier,
    ticket: object,
) -> None:
    shared = g.cta.cluster.cta(rank).shared
    atomics.apply(shared, offset, operation, kind, [value])
    mbarrier.deliver(signal, int(kind[1:]) // 8, ticket)


def _signal(g: Group, address: int, barrier: int, lane: int) -> mbarrier.MBarrier:
    if address >> RANK_SHIFT != barrier >> RANK_SHIFT:
        raise Fault(f"destination {address:#x} and mbarrier {barrier:#x} are in two CTAs", lane)
    return mbarrier.find(g, barrier)
