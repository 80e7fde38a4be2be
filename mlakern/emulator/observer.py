"""How the machine tells a race detector what happens.

The machine calls one method for each access and each synchronisation; it never asks anything back
except the ticket of an asynchronous operation.

Vocabulary:

- A *warp* is its index in the cluster: ``cta_rank * warps_per_cta + warp_in_cta``.
- ``warps`` of an access is that index for each address: an int, or an array that broadcasts
  against the addresses (a bundle of four warps passes one entry for each active lane).
- A *site* is the instruction. Build it once, when code is generated.
- A shared-memory *region* of an asynchronous operation is given in 4-byte granules
  (offset >> 2) of one CTA: a slice, or an array of granule indices.
- A *cells* value is a rectangle of tensor memory; one cell is a lane and a 32-bit column.
- A *barrier* is whatever threads wait on: an mbarrier, a named barrier or the cluster's barrier.
- A *ticket* stands for everything an asynchronous operation has done once it completes. The
  machine keeps the ticket that the issue returned and hands it back when the completion arrives
  at a barrier, or when a warp waits for it; a delayed completion changes nothing here.

Order of calls: an access is reported when its instruction is issued (asynchronous ones included:
they may happen at any time up to their completion). ``arrive`` comes before ``complete``, the
completion of a phase before any ``wait`` that it lets through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.integer[Any]]
Warps: TypeAlias = "int | IntArray"
Region: TypeAlias = "slice | IntArray"
Ticket: TypeAlias = object


@dataclass(frozen=True)
class Site:
    """An instruction of the program; only a report formats it."""

    text: str
    line: int


class Access(Enum):
    READ = "read"
    WRITE = "write"
    ATOMIC = "atomic"


class Fence(Enum):
    """What a fence orders (PTX ISA, membar/fence and tcgen05.fence)."""

    THREAD = "fence / membar"
    PROXY_ASYNC = "fence.proxy.async"
    MBARRIER_INIT = "fence.mbarrier_init.release.cluster"
    BEFORE_THREAD_SYNC = "tcgen05.fence::before_thread_sync"
    AFTER_THREAD_SYNC = "tcgen05.fence::after_thread_sync"


class Barrier(NamedTuple):
    """``kind``: "mbarrier" (where: shared offset), "named" (where: number) or "cluster" (0, 0)."""

    kind: str
    cta: int
    where: int


class Cells(NamedTuple):
    """Lanes (a slice or lane numbers) × columns [column, column + width) of one CTA."""

    cta: int
    lanes: slice | IntArray
    column: int
    width: int


class SharedRegion(NamedTuple):
    """Granules of the shared memory of one CTA."""

    cta: int
    granules: Region


class Observer(Protocol):
    """Everything the machine reports."""

    def begin(self, ctas: int, warps_per_cta: int, shared_bytes: int) -> None:
        """A cluster starts; ``shared_bytes`` bounds every shared offset of a CTA."""

    def end(self) -> None:
        """The cluster has finished."""

    # Generic proxy

    def shared(
        self,
        site: Site,
        warps: Warps,
        cta: int,
        addresses: int | IntArray,
        size: int,
        access: Access,
    ) -> None:
        """Threads access ``size`` bytes at each address (byte offsets in CTA ``cta``)."""

    # Asynchronous proxy

    def bulk_load(
        self, site: Site, warp: int, barrier: Barrier, writes: Sequence[SharedRegion]
    ) -> Ticket:
        """TMA or bulk copy into shared memory, completing on ``barrier`` by transaction bytes."""

    def bulk_store(self, site: Site, warp: int, reads: Sequence[SharedRegion]) -> Ticket:
        """TMA or bulk copy out of shared memory; waiting for its bulk group is a ``join``."""

    def wgmma(self, site: Site, warp: int, reads: Sequence[SharedRegion]) -> Ticket:
        """wgmma.mma_async reads operands for one of its warps; waiting for its group is a
        ``join``."""

    def mma(
        self,
        site: Site,
        warp: int,
        shared: Sequence[SharedRegion],
        reads: Sequence[Cells],
        writes: Sequence[Cells],
    ) -> None:
        """tcgen05.mma (or cp, shift) is issued. ``reads``: A in tensor memory and, when it is an
        input, D. Regions of both CTAs for cta_group::2."""

    def commit(self, site: Site, warp: int) -> Ticket:
        """tcgen05.commit: the ticket covers every earlier mma of the issuing warp's CTA."""

    def tmem_load(self, site: Site, warps: Warps, cells: Cells) -> None:
        """tcgen05.ld. ``warps``: an int, or one entry for each lane of ``cells``."""

    def tmem_store(self, site: Site, warps: Warps, cells: Cells) -> None:
        """tcgen05.st; as :meth:`tmem_load`."""

    def tmem_wait(self, warps: Iterable[int], loads: bool) -> None:
        """tcgen05.wait::ld (``loads``) or tcgen05.wait::st."""

    def tmem_free(self, site: Site, warp: int, cells: Cells) -> None:
        """tcgen05.dealloc: every access to the columns must be over."""

    # Synchronisation

    def barrier_init(self, site: Site, warp: int, barrier: Barrier) -> None:
        """mbarrier.init."""

    def arrive(
        self, site: Site, warps: Iterable[int], barrier: Barrier, release: bool = True
    ) -> None:
        """Threads of these warps arrive (``release`` is false for .relaxed)."""

    def arrive_ticket(self, ticket: Ticket, barrier: Barrier) -> None:
        """An asynchronous operation arrives: transaction bytes of a load, or a commit."""

    def complete(self, barrier: Barrier) -> None:
        """The current phase of the barrier completes."""

    def wait(
        self, site: Site, warps: Iterable[int], barrier: Barrier, acquire: bool = True
    ) -> None:
        """Threads of these warps have waited successfully for the latest completed phase."""

    def join(self, warp: int, ticket: Ticket) -> None:
        """The warp has waited for an asynchronous operation itself (cp.async.bulk.wait_group)."""

    def fence(self, warps: Iterable[int], kind: Fence) -> None:
        """Threads of these warps execute a fence."""
