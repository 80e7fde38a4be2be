"""CTAs and clusters: their memories and barriers, and the scheduler of a cluster's bundles."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from mlakern.emulator.addresses import RANK_SHIFT
from mlakern.emulator.asynchronous import Asynchronous
from mlakern.emulator.barriers import ClusterBarrier, NamedBarrier
from mlakern.emulator.bundle import BUNDLE_THREADS, Bundle
from mlakern.emulator.errors import DeadlockError, EmulatorError, Fault
from mlakern.emulator.mbarrier import MBarrier, PhaseWait
from mlakern.emulator.memory import SharedMemory
from mlakern.emulator.tensorcore import MmaCta
from mlakern.emulator.tmem import TensorMemory

if TYPE_CHECKING:
    from mlakern.emulator.group import Group
    from mlakern.emulator.launch import Launch
    from mlakern.emulator.tensor import PairAllocation

Index = tuple[int, int, int]
_STALLS = 2  # rounds in which every time limit passes without an event before it is a deadlock


class Cta:
    """One CTA: shared and tensor memory, barriers, threads.

    index: %ctaid. rank: %cluster_ctarank. base: address of its shared memory. number: linear index.
    """

    def __init__(self, cluster: Cluster, rank: int, index: Index, cluster_index: Index) -> None:
        launch = cluster.launch
        self.cluster = cluster
        self.launch = launch
        self.rank = rank
        self.index = index
        self.cluster_index = cluster_index
        x, y, _ = launch.grid
        self.number = index[0] + x * (index[1] + y * index[2])
        self.base = rank << RANK_SHIFT
        self.base_word = np.uint32(self.base)
        self.shared = SharedMemory(launch.shared_bytes, rank)
        self.tensor = TensorMemory(launch.machine.tensor_columns, launch.options.poison)
        if launch.options.poison:
            self.shared.poison()
        self.operands = MmaCta(self.shared.data, self.shared.written, self.tensor)
        self.tensor_waiters: list[Group] = []
        self.pair_allocation: PairAllocation | None = None
        self.mbarriers: dict[int, MBarrier] = {}
        self.named_barriers: dict[int, NamedBarrier] = {}
        self.threads_alive = launch.threads
        self.bundles = [
            Bundle(self, first, min(BUNDLE_THREADS, launch.threads - first))
            for first in range(0, launch.threads, BUNDLE_THREADS)
        ]

    @property
    def exited(self) -> bool:
        return self.threads_alive == 0

    def named_barrier(self, number: int) -> NamedBarrier:
        found = self.named_barriers.get(number)
        if found is None:
            found = self.named_barriers[number] = NamedBarrier(self, number)
        return found

    def threads_exit(self, group: Group) -> None:
        """Threads end; the last ones of the CTA must leave nothing behind."""
        self.threads_alive -= group.width
        self.cluster.threads_alive -= group.width
        self.cluster.events += 1
        if self.exited:
            self._check_exit(group)
        self.cluster.settle_barrier()

    def _check_exit(self, group: Group) -> None:
        where = f"{group.name_of(None)}: the CTA exits"
        if self.tensor.allocations:
            held = ", ".join(f"{n} columns at {at}" for at, n in self.tensor.allocations.items())
            raise EmulatorError(f"{where} with tensor memory not deallocated: {held}")
        for barrier in self.mbarriers.values():
            if barrier.delivered > barrier.observed:
                raise EmulatorError(
                    f"{where} while asynchronous copies may still write to it: nobody waited for "
                    f"phase {barrier.delivered}; {barrier.state()}"
                )
        pending = self.cluster.asynchronous.pending_at(self.rank)
        if pending:
            raise EmulatorError(f"{where} with asynchronous work outstanding: {pending}")


class Cluster:
    """The CTAs of one cluster, and the scheduler that runs them to their end.

    index: %clusterid. events: counts what may let somebody proceed; a deadlock has none.
    """

    def __init__(self, launch: Launch, index: Index) -> None:
        self.launch = launch
        self.index = index
        self.events = 0
        self.clock = 0
        self.barrier = ClusterBarrier()
        self.threads_alive = launch.threads * launch.cluster_size
        self.random = random.Random(launch.options.seed) if launch.options.shuffles else None
        self.asynchronous = Asynchronous(self, launch.options.delay)
        self.queue: deque[Bundle] = deque()
        self.ctas: list[Cta] = []
        sizes = launch.cluster
        for rank in range(launch.cluster_size):
            inside = (
                rank % sizes[0],
                rank // sizes[0] % sizes[1],
                rank // (sizes[0] * sizes[1]),
            )
            at = tuple(i * s + j for i, s, j in zip(index, sizes, inside, strict=True))
            self.ctas.append(Cta(self, rank, (at[0], at[1], at[2]), inside))
        for cta in self.ctas:
            for bundle in cta.bundles:
                self.enqueue(bundle)

    def cta(self, rank: int) -> Cta:
        """The CTA of a shared address; a Fault if there is none or it has exited."""
        if rank >= len(self.ctas):
            raise Fault(f"shared address of CTA rank {rank} in a cluster of {len(self.ctas)}")
        cta = self.ctas[rank]
        if cta.threads_alive == 0:
            raise Fault(f"access to the shared memory of CTA rank {rank}, which has exited")
        return cta

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def enqueue(self, bundle: Bundle) -> None:
        if not bundle.queued:
            bundle.queued = True
            self.queue.append(bundle)

    def wake(self, group: Group) -> None:
        """Let a sleeping group run its instruction again."""
        group.waiting = None
        self.enqueue(group.bundle)

    def settle_barrier(self) -> None:
        """Complete the cluster barrier if every thread that is left has arrived."""
        barrier = self.barrier
        self.events += 1
        if barrier.arrived < self.threads_alive or not self.threads_alive:
            return
        barrier.arrived = 0
        barrier.generation += 1
        if self.launch.observer is not None:
            self.launch.observer.complete(barrier.name)
        waiters, barrier.waiters = barrier.waiters, []
        for group in waiters:
            self.wake(group)

    def run(self) -> None:
        """Run all threads to their end. Raises DeadlockError when none of them can go on."""
        stalls, events = 0, -1
        while True:
            self._drain()
            if not self.threads_alive:
                self.asynchronous.drain()
                return
            if self.asynchronous.step():
                continue
            stalls = stalls + 1 if self.events == events else 0
            events = self.events
            if stalls > _STALLS or not self._pass_time_limits():
                raise DeadlockError(self._report())

    def _drain(self) -> None:
        """Run bundles, in turn or at random, until none can."""
        queue = self.queue
        while queue:
            if self.random is None:
                bundle = queue.popleft()
                more = bundle.run()
            else:
                queue.rotate(self.random.randrange(len(queue)))
                bundle = queue.popleft()
                self.asynchronous.maybe_step(self.random)
                more = bundle.run(self.random.randrange(1, 40))
            bundle.queued = False
            if more or any(group.waiting is None for group in bundle.groups):
                self.enqueue(bundle)

    def _pass_time_limits(self) -> bool:
        """Let every try_wait return false once; False if there are none."""
        found = False
        for cta in self.ctas:
            for bundle in cta.bundles:
                for group in bundle.groups:
                    if isinstance(group.waiting, PhaseWait):
                        group.waiting.barrier.waiters.remove(group)
                        group.token = None
                        group.timed_out = True
                        self.wake(group)
                        found = True
        return found

    def _report(self) -> str:
        lines = [f"deadlock in cluster {self.index} of {self.launch.entry.name}:"]
        for cta in self.ctas:
            for bundle in cta.bundles:
                for group in sorted(bundle.groups, key=lambda g: int(g.lanes[0])):
                    wait = group.waiting.describe() if group.waiting else "can run"
                    instruction = group.variant.instructions[0]
                    lines.append(
                        f"  {group.name_of(None)}, PTX line {instruction.line}: "
                        f"{instruction.text}: {wait}"
                    )
        return "\n".join(lines)
