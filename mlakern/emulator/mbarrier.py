"""mbarrier objects: phases, pending arrivals, transaction counts (PTX ISA, "mbarrier").

A phase completes when its pending arrivals and its transaction count are both zero; the count of
bytes may pass below zero for a moment. A phase is numbered from 0; try_wait.parity(P) succeeds
when the current phase has another parity than P, that is when the latest phase of parity P has
completed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import Barrier

if TYPE_CHECKING:
    from mlakern.emulator.cta import Cta
    from mlakern.emulator.group import Group
    from mlakern.emulator.observer import Site, Ticket

MAX_COUNT = (1 << 20) - 1
MAX_BYTES = (1 << 20) - 1


class MBarrier:
    """One mbarrier.

    count: arrivals of a phase. pending: arrivals still missing. bytes: transaction bytes still
    missing. phase: the current phase. delivered: the latest phase that asynchronous bytes belong
    to; observed: the latest phase that a thread has seen completed.
    """

    __slots__ = (
        "bytes",
        "count",
        "cta",
        "delivered",
        "name",
        "observed",
        "offset",
        "pending",
        "phase",
        "waiters",
    )

    def __init__(self, cta: Cta, offset: int, count: int) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise Fault(f"mbarrier.init: got count {count}, need 1 to {MAX_COUNT}")
        self.cta = cta
        self.offset = offset
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0
        self.delivered = self.observed = -1
        self.waiters: list[Group] = []
        self.name = Barrier("mbarrier", cta.rank, offset)

    def state(self) -> str:
        return (
            f"mbarrier at shared offset {self.offset:#x} of CTA rank {self.cta.rank}: "
            f"phase {self.phase} (parity {self.phase & 1}), "
            f"pending {self.pending} of {self.count} arrivals, {self.bytes} transaction bytes"
        )

    def arrive(self, arrivals: int) -> None:
        """Count arrivals; completes the phase if they were the last thing missing."""
        if arrivals > self.pending:
            raise Fault(f"{arrivals} arrivals, more than are pending: {self.state()}")
        self.pending -= arrivals
        self.advance()

    def drop(self, arrivals: int) -> None:
        """Arrive, and expect that many arrivals less in all later phases."""
        if arrivals > self.count:
            raise Fault(f"arrive_drop of {arrivals}: {self.state()}")
        self.count -= arrivals
        self.arrive(arrivals)

    def expect(self, size: int) -> None:
        """Raise the transaction count. The phase cannot complete by this alone."""
        self._add(size)

    def deliver(self, size: int) -> None:
        """Transaction bytes of an asynchronous operation have arrived."""
        self.delivered = self.phase
        self._add(-size)
        self.advance()

    def _add(self, size: int) -> None:
        self.bytes += size
        if abs(self.bytes) > MAX_BYTES:
            raise Fault(f"transaction count beyond ±{MAX_BYTES}: {self.state()}")

    def advance(self) -> None:
        """Complete the phase if nothing is missing."""
        cluster = self.cta.cluster
        cluster.events += 1
        if self.pending or self.bytes:
            return
        self.phase += 1
        self.pending = self.count
        observer = self.cta.launch.observer
        if observer is not None:
            observer.complete(self.name)
        if self.waiters:
            waiters, self.waiters = self.waiters, []
            for group in waiters:
                cluster.wake(group)


@dataclass(frozen=True, slots=True)
class PhaseWait:
    """A group that waits for a phase of an mbarrier."""

    barrier: MBarrier
    phase: int
    what: str

    def describe(self) -> str:
        return f"waits for {self.what}; {self.barrier.state()}"


def find(g: Group, address: int) -> MBarrier:
    """The mbarrier at a shared address of the cluster."""
    cta = g.cta.cluster.cta(address >> 24)
    barrier = cta.mbarriers.get(address & 0xFFFFFF)
    if barrier is None:
        raise Fault(f"no mbarrier was initialised at shared address {address:#x}")
    return barrier


def init(g: Group, address: int, count: int, site: Site) -> None:
    """mbarrier.init, for one lane or for lanes that agree."""
    if address & 7:
        raise Fault(f"mbarrier at shared address {address:#x}: need 8-byte alignment")
    cta = g.cta.cluster.cta(address >> 24)
    offset = address & 0xFFFFFF
    cta.shared.store(offset, 8, 0)
    cta.mbarriers[offset] = barrier = MBarrier(cta, offset, count)
    observer = g.cta.launch.observer
    if observer is not None:
        observer.barrier_init(site, g.cluster_warps()[0], barrier.name)


def invalidate(g: Group, address: int) -> None:
    """mbarrier.inval."""
    barrier = find(g, address)
    del barrier.cta.mbarriers[barrier.offset]


def arrive(
    g: Group, address: int, count: int, expected: int, drop: bool, release: bool, site: Site
) -> int:
    """``count`` arrivals of every lane, after adding ``expected`` bytes for each; returns a state.

    The state is the number of the phase arrived at, for test_wait and try_wait without .parity.
    """
    barrier = find(g, address)
    phase = barrier.phase
    observer = g.cta.launch.observer
    if observer is not None:
        observer.arrive(site, g.cluster_warps(), barrier.name, release)
    if expected:
        barrier.expect(expected * g.width)
    if drop:
        barrier.drop(count * g.width)
    else:
        barrier.arrive(count * g.width)
    return phase


def expect(g: Group, address: int, size: int) -> None:
    """mbarrier.expect_tx."""
    find(g, address).expect(size * g.width)


def complete(g: Group, address: int, size: int) -> None:
    """mbarrier.complete_tx: as if an asynchronous operation had delivered bytes."""
    find(g, address).deliver(size * g.width)


def wait_parity(g: Group, address: int, parity: int, acquire: bool, site: Site) -> bool | None:
    """try_wait.parity and test_wait.parity: True, False when the time limit has passed, or None
    when the group has to wait (it then runs the instruction again).
    """
    if parity not in (0, 1):
        raise Fault(f"mbarrier parity: got {parity}, need 0 or 1")
    barrier = find(g, address)
    missed = g.token
    if missed is not None:
        g.token = None
        if barrier.phase >= missed.phase + 2:
            raise Fault(
                f"missed phase: this thread waited for phase {missed.phase}, and phase "
                f"{missed.phase + 1} completed before it could see that; {barrier.state()}"
            )
    if barrier.phase & 1 != parity:
        return succeed(g, barrier, acquire, site)
    return hold(g, barrier, barrier.phase, f"parity {parity}")


def wait_state(g: Group, address: int, state: int, acquire: bool, site: Site) -> bool | None:
    """try_wait and test_wait of the phase whose state an arrival returned."""
    barrier = find(g, address)
    g.token = None
    if barrier.phase > state:
        return succeed(g, barrier, acquire, site)
    return hold(g, barrier, state, f"the phase of state {state}")


def succeed(g: Group, barrier: MBarrier, acquire: bool, site: Site) -> bool:
    barrier.observed = barrier.phase - 1
    g.timed_out = False
    observer = g.cta.launch.observer
    if observer is not None:
        observer.wait(site, g.cluster_warps(), barrier.name, acquire)
    return True


def hold(g: Group, barrier: MBarrier, phase: int, what: str) -> bool | None:
    """Put the group to sleep until a phase completes, unless its time limit has passed."""
    if g.timed_out:
        g.timed_out = False
        return False
    g.waiting = g.token = PhaseWait(barrier, phase, what)
    barrier.waiters.append(g)
    return None


def deliver(barrier: MBarrier, size: int, ticket: Ticket) -> None:
    """An asynchronous copy completes ``size`` bytes."""
    observer = barrier.cta.launch.observer
    if observer is not None:
        observer.arrive_ticket(ticket, barrier.name)
    barrier.deliver(size)


def commit(barrier: MBarrier, ticket: Ticket) -> None:
    """tcgen05.commit arrives once."""
    observer = barrier.cta.launch.observer
    if observer is not None:
        observer.arrive_ticket(ticket, barrier.name)
    barrier.arrive(1)
