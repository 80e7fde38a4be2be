"""Cluster launch control: a running cluster takes over the work of one that has not begun (PTX ISA,
"clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel").

Clusters run one after the other here, so that the one that asks gets the next one. The 16 bytes of
the answer are opaque; here the lower word is %ctaid.x and .y of the cancelled cluster's first CTA,
the upper word its %ctaid.z and, in the top half, 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlakern.emulator import mbarrier
from mlakern.emulator.addresses import OFFSET_MASK, RANK_SHIFT
from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import SharedRegion

if TYPE_CHECKING:
    from mlakern.emulator.group import Group
    from mlakern.emulator.launch import Launch
    from mlakern.emulator.program import Instruction

ANSWER_BYTES = 16


def try_cancel(
    g: Group, address: int, barrier: int, everywhere: bool, instruction: Instruction
) -> None:
    """clusterlaunchcontrol.try_cancel by one thread. everywhere: the answer goes to all CTAs of the
    cluster, at the same offsets.
    """
    offset = address & OFFSET_MASK
    if offset % ANSWER_BYTES:
        raise Fault(f"answer at shared address {address:#x}: need {ANSWER_BYTES}-byte alignment")
    cluster = g.cta.cluster
    ranks = range(len(cluster.ctas)) if everywhere else (address >> RANK_SHIFT,)
    low, high = _answer(g.cta.launch)
    observer = g.cta.launch.observer
    for rank in ranks:
        where = barrier & OFFSET_MASK | rank << RANK_SHIFT if everywhere else barrier
        signal = mbarrier.find(g, where)
        ticket = None
        if observer is not None:
            region = SharedRegion(rank, slice(offset >> 2, (offset + ANSWER_BYTES) >> 2))
            warp = g.cluster_warps()[0]
            ticket = observer.bulk_load(instruction, warp, signal.name, [region])

        def action(
            rank: int = rank, signal: mbarrier.MBarrier = signal, ticket: object = ticket
        ) -> None:
            cluster.cta(rank).shared.store(offset, 8, [low, high])
            mbarrier.deliver(signal, ANSWER_BYTES, ticket)

        cluster.asynchronous.copy(g, instruction, (rank, signal.cta.rank), action)


def _answer(launch: Launch) -> tuple[int, int]:
    index = launch.take_cluster()
    if index is None:
        return 0, 0
    x, y, z = (i * size for i, size in zip(index, launch.cluster, strict=True))
    return x | y << 32, z | 1 << 32
