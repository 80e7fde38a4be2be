"""Named barriers of a CTA and the barrier of a cluster (PTX ISA, "barrier", "barrier.cluster").

A group that arrives and finds the barrier incomplete keeps a token (`Arrival`) and sleeps; when
it runs the instruction again, the token tells that it has arrived and which generation it waits
for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import Barrier

if TYPE_CHECKING:
    from mlakern.emulator.cta import Cta
    from mlakern.emulator.group import Group
    from mlakern.emulator.observer import Site

WARP = 32
BARRIERS = 16


class NamedBarrier:
    """Barrier ``number`` of a CTA. arrived: threads of the current generation."""

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta = cta
        self.number = number
        self.expected = 0
        self.arrived = 0
        self.generation = 0
        self.waiters: list[Group] = []
        self.values: list[int] = []
        self.result: list[int] = []
        self.name = Barrier("named", cta.rank, number)

    def state(self) -> str:
        return (
            f"barrier {self.number} of CTA rank {self.cta.rank}: {self.arrived} of "
            f"{self.expected} threads have arrived"
        )

    def arrive(self, g: Group, threads: int, expected: int, site: Site) -> None:
        """Count threads; the last ones complete the generation and wake the others."""
        if expected % WARP or expected <= 0:
            raise Fault(f"barrier thread count: got {expected}, need a multiple of {WARP}")
        if self.arrived and self.expected != expected:
            raise Fault(f"barrier count {expected} differs from the other threads': {self.state()}")
        self.expected = expected
        if self.arrived + threads > expected:
            raise Fault(f"{threads} threads arrive, more than are missing: {self.state()}")
        observer = self.cta.launch.observer
        if observer is not None:
            observer.arrive(site, g.cluster_warps(), self.name)
        self.arrived += threads
        self.cta.cluster.events += 1
        if self.arrived == expected:
            self.arrived = 0
            self.generation += 1
            self.result, self.values = self.values, []
            if observer is not None:
                observer.complete(self.name)
            waiters, self.waiters = self.waiters, []
            for group in waiters:
                self.cta.cluster.wake(group)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A group that has arrived at a barrier and waits for the others."""

    barrier: NamedBarrier
    generation: int

    def describe(self) -> str:
        return f"waits at {self.barrier.state()}"


def number_and_count(g: Group, number: Any, count: Any) -> tuple[int, int]:
    number = int(number)
    if not 0 <= number < BARRIERS:
        raise Fault(f"barrier number: got {number}, need 0 to {BARRIERS - 1}")
    return number, g.cta.launch.threads_rounded if count is None else int(count)


def threads_of(g: Group, aligned: bool) -> int:
    """Threads that an arrival stands for; an aligned one is of whole warps."""
    return WARP * len(g.warps) if aligned else g.width


def sync(g: Group, number: Any, count: Any, aligned: bool, site: Site) -> Any:
    """barrier.sync: True when complete, None to wait, or an array that says how lanes must part.

    number, count: ints, or arrays where lanes differ; count None means every thread of the CTA.
    """
    if g.token is not None:
        token: Arrival = g.token
        if token.barrier.generation > token.generation:
            return _released(g, token.barrier, site)
        g.waiting = token
        token.barrier.waiters.append(g)
        return None
    if isinstance(number, np.ndarray):
        found = np.unique(number)
        if len(found) > 1:
            return _sync_several(g, number, found, count, site)
        number = found[0]
    if isinstance(count, np.ndarray):
        count = count[0]
    number, expected = number_and_count(g, number, count)
    barrier = g.cta.named_barrier(number)
    generation = barrier.generation
    barrier.arrive(g, threads_of(g, aligned), expected, site)
    if barrier.generation > generation:
        return _released(g, barrier, site)
    g.waiting = g.token = Arrival(barrier, generation)
    barrier.waiters.append(g)
    return None


def _sync_several(g: Group, number: Any, found: Any, count: Any, site: Site) -> Any:
    """Warps of one bundle at different barriers: together if all complete at once, else apart."""
    shares = []
    for each in found.tolist():
        here = number == each
        threads = int(here.sum())
        expected = count[here][0] if isinstance(count, np.ndarray) else count
        _, expected = number_and_count(g, each, expected)
        barrier = g.cta.named_barrier(each)
        if barrier.arrived + threads != expected:
            return number
        shares.append((barrier, threads, expected))
    for barrier, threads, expected in shares:
        barrier.arrive(g, threads, expected, site)
        _released(g, barrier, site)
    return True


def _released(g: Group, barrier: NamedBarrier, site: Site) -> bool:
    g.token = None
    observer = g.cta.launch.observer
    if observer is not None:
        observer.wait(site, g.cluster_warps(), barrier.name)
    return True


def arrive(g: Group, number: Any, count: Any, site: Site) -> None:
    """barrier.arrive: count, do not wait."""
    numbers = np.broadcast_to(number, g.width)
    for each in np.unique(numbers).tolist():
        here = numbers == each
        expected = count[here][0] if isinstance(count, np.ndarray) else count
        each, expected = number_and_count(g, each, expected)
        g.cta.named_barrier(each).arrive(g, int(here.sum()), expected, site)


_REDUCE: dict[str, Callable[[list[int]], int]] = {
    "popc": sum,
    "and": lambda values: int(all(values)),
    "or": lambda values: int(any(values)),
}


def reduce(
    g: Group, number: int, count: Any, operation: str, source: Any, aligned: bool, site: Site
) -> Any:
    """barrier.red: as `sync`, and the reduction of a predicate over all threads; None to wait."""
    number, _ = number_and_count(g, number, count)
    barrier = g.cta.named_barrier(number)
    if g.token is None:
        barrier.values += np.broadcast_to(source, g.width).astype(int).tolist()
    if sync(g, number, count, aligned, site) is None:
        return None
    return _REDUCE[operation](barrier.result)


class ClusterBarrier:
    """The barrier of all threads of a cluster. Threads that have exited count as arrived."""

    def __init__(self) -> None:
        self.arrived = 0
        self.generation = 0
        self.waiters: list[Group] = []
        self.name = Barrier("cluster", 0, 0)


@dataclass(frozen=True, slots=True)
class ClusterWait:
    """A group in barrier.cluster.wait."""

    group: Group

    def describe(self) -> str:
        cluster = self.group.cta.cluster
        return (
            f"waits at the cluster barrier: {cluster.barrier.arrived} of "
            f"{cluster.threads_alive} threads have arrived"
        )


def cluster_arrive(g: Group, release: bool, site: Site) -> None:
    """barrier.cluster.arrive."""
    barrier = g.cta.cluster.barrier
    arrivals = g.bundle.cluster_arrivals
    if (arrivals[g.lanes] >= 0).any():
        lane = int(np.flatnonzero(arrivals[g.lanes] >= 0)[0])
        raise Fault("barrier.cluster.arrive twice without a wait between", lane)
    arrivals[g.lanes] = barrier.generation
    barrier.arrived += g.width
    observer = g.cta.launch.observer
    if observer is not None:
        observer.arrive(site, g.cluster_warps(), barrier.name, release)
    g.cta.cluster.settle_barrier()


def cluster_wait(g: Group, acquire: bool, site: Site) -> bool | None:
    """barrier.cluster.wait: True when complete, None to wait."""
    barrier = g.cta.cluster.barrier
    arrivals = g.bundle.cluster_arrivals[g.lanes]
    if (arrivals < 0).any():
        lane = int(np.flatnonzero(arrivals < 0)[0])
        raise Fault("barrier.cluster.wait without barrier.cluster.arrive", lane)
    if int(arrivals.max()) < barrier.generation:
        g.bundle.cluster_arrivals[g.lanes] = -1
        observer = g.cta.launch.observer
        if observer is not None:
            observer.wait(site, g.cluster_warps(), barrier.name, acquire)
        return True
    g.waiting = ClusterWait(g)
    barrier.waiters.append(g)
    return None
