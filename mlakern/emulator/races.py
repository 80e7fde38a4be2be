"""A race detector: two accesses to the same place, one of them a write, that nothing orders.

It follows happens-before by vector clocks (race_clocks.py) and remembers who touched each place
last (race_shadow.py). It does not depend on the order in which the emulator happened to run things:
an asynchronous operation counts from its issue until somebody has waited for its completion.

What orders accesses:

- program order within a warp, except for what is asynchronous: tcgen05.ld and .st are over at
  tcgen05.wait::ld and ::st, bulk copies when their mbarrier or bulk group has been waited for,
  tcgen05.mma when a tcgen05.commit issued after it has been waited for, the reads of a
  wgmma.mma_async at the wgmma.wait_group for its group. MMAs of one CTA's pipe are in order with
  each other.
- arrive (release) and wait (acquire) of mbarriers, named barriers and the cluster's barrier.
- A generic write and a later asynchronous access (TMA, MMA) need fence.proxy.async between them,
  by the writer or by whoever has learnt of the write.
- An access to tensor memory after a wait also needs tcgen05.fence::after_thread_sync, as in all
  examples of the PTX ISA. Some shipped kernels do without; for them ``tcgen05_fences=False`` takes
  an acquiring wait for enough.
- Using an mbarrier needs its initialisation before; by TMA or a commit also a
  fence.mbarrier_init or fence.proxy.async by the initialising warp.

Not covered: lanes of one warp among each other, global memory.

Sources: PTX ISA, "Memory Consistency Model", "Async proxy", "tcgen05 memory consistency model",
"mbarrier".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator.observer import (
    Access,
    Barrier,
    Cells,
    Fence,
    IntArray,
    SharedRegion,
    Site,
    Ticket,
    Warps,
)
from mlakern.emulator.race_clocks import PROXIED, SEEN, TENSOR, Clocks, Knowledge, Phases
from mlakern.emulator.race_report import Describer, Race, RaceError, barrier_name
from mlakern.emulator.race_shadow import (
    MAX_SITES,
    READERS,
    Conflict,
    Judge,
    Shadow,
    Stamps,
    Where,
    agent_of,
    epoch_of,
    site_of,
    stamp,
)
from mlakern.emulator.tmem import EXCLUSIVE_COLUMNS, LANES


@dataclass(frozen=True)
class _Completion:
    """A ticket: what is known once an operation has completed, and who issued it."""

    knowledge: Knowledge
    site: Site
    warp: int


@dataclass
class _Initialised:
    """An mbarrier's initialisation: by which warp, in which epoch, fenced for other proxies?"""

    site: Site
    warp: int
    epoch: int
    fenced: bool = False


class RaceDetector:
    """An Observer that raises :class:`RaceError` at the first race.

    tcgen05_fences: see the module. collect: append to ``races`` instead, each pair of instructions
    once, and go on.
    """

    def __init__(self, tcgen05_fences: bool = True, collect: bool = False) -> None:
        self.races: list[Race] = []
        self._needs_fences = tcgen05_fences
        self._collect = collect
        self._reported: set[tuple[str, int, int]] = set()
        self._sites: list[Site] = []
        self._site_numbers: dict[int, int] = {}
        self.begin(1, 1, 0)

    # Life of a cluster

    def begin(self, ctas: int, warps_per_cta: int, shared_bytes: int) -> None:
        self._warps_per_cta = warps_per_cta
        self._clocks = Clocks(ctas * warps_per_cta, ctas, self._needs_fences)
        self._describe = Describer(self._clocks, warps_per_cta)
        self._shared = [Shadow(((shared_bytes + 3) // 4,)) for _ in range(ctas)]
        self._tensor: dict[int, Shadow] = {}
        self._barriers: dict[Barrier, Phases] = {}
        self._initialised: dict[Barrier, _Initialised] = {}

    def end(self) -> None:
        self.begin(1, 1, 0)

    # Accesses through the generic proxy

    def shared(
        self,
        site: Site,
        warps: Warps,
        cta: int,
        addresses: int | IntArray,
        size: int,
        access: Access,
    ) -> None:
        granules = np.asarray(addresses, np.int64).reshape(-1, 1) >> 2
        if size > 4:
            granules = granules + np.arange(size // 4)
        atomic = access is Access.ATOMIC
        # One row for all, or a column of rows beside the granules.
        rows: Any = warps if isinstance(warps, int) else warps.astype(np.int64).reshape(-1, 1)
        agents = self._clocks.warp(rows)
        mine = stamp(agents, self._clocks.epoch[agents], self._site(site), atomic)
        judge = self._judge(SEEN, rows)
        shadow = self._shared[cta]
        if access is Access.READ:
            # A warpgroup often reads the same words: each of its warps has a slot of its own.
            conflict = shadow.read((granules,), mine, judge, judge, rows % READERS)
        else:
            conflict = shadow.write((granules,), mine, judge, judge, atomic)
        if conflict:
            culprit = int(np.broadcast_to(mine, granules.shape).flat[conflict.cell])
            warp = agent_of(culprit) // 3
            place = f"shared memory of CTA {cta} at {int(granules.flat[conflict.cell]) * 4:#x}"
            self._report(conflict, culprit, access is Access.READ, place, warp, SEEN)

    # Asynchronous accesses

    def bulk_load(
        self, site: Site, warp: int, barrier: Barrier, writes: Sequence[SharedRegion]
    ) -> Ticket:
        self._check_usable(site, warp, barrier, self._clocks.know[SEEN, warp], asynchronous=True)
        return self._bulk(site, warp, self._clocks.named(("loads", barrier)), writes, read=False)

    def bulk_store(self, site: Site, warp: int, reads: Sequence[SharedRegion]) -> Ticket:
        return self._bulk(site, warp, self._clocks.named(("stores", warp)), reads, read=True)

    def wgmma(self, site: Site, warp: int, reads: Sequence[SharedRegion]) -> Ticket:
        return self._bulk(site, warp, self._clocks.named(("wgmma", warp)), reads, read=True)

    def mma(
        self,
        site: Site,
        warp: int,
        shared: Sequence[SharedRegion],
        reads: Sequence[Cells],
        writes: Sequence[Cells],
    ) -> None:
        clocks, cta = self._clocks, warp // self._warps_per_cta
        agent = clocks.named(("pipe", cta))
        pipe = clocks.know[:, clocks.pipe_row(cta)]
        np.maximum(pipe, clocks.know[:, warp], out=pipe)
        mine = stamp(agent, int(clocks.epoch[agent]), self._site(site))
        for region in shared:
            self._asynchronous(warp, region, mine, read=True, exempt=agent)
        for cells in reads:
            if not any(cells is written for written in writes):  # a write is judged as strictly
                self._cells(cells, warp, mine, agent, read=True)
        for cells in writes:
            self._cells(cells, warp, mine, agent, read=False)

    def commit(self, site: Site, warp: int) -> Ticket:
        clocks, cta = self._clocks, warp // self._warps_per_cta
        agent = clocks.named(("pipe", cta))
        knowledge = clocks.know[:, clocks.pipe_row(cta)].copy()
        clocks.complete(agent, knowledge)
        return _Completion(knowledge, site, warp)

    def tmem_load(self, site: Site, warps: Warps, cells: Cells) -> None:
        self._warps_cells(site, warps, cells, read=True)

    def tmem_store(self, site: Site, warps: Warps, cells: Cells) -> None:
        self._warps_cells(site, warps, cells, read=False)

    def tmem_wait(self, warps: Iterable[int], loads: bool) -> None:
        clocks = self._clocks
        for warp in warps:
            agent = clocks.loads(warp) if loads else clocks.stores(warp)
            clocks.complete(agent, clocks.know[:, warp])

    def tmem_free(self, site: Site, warp: int, cells: Cells) -> None:
        agent = self._clocks.warp(warp)
        mine = stamp(agent, int(self._clocks.epoch[agent]), self._site(site))
        self._cells(cells, warp, mine, -1, read=False, plane=SEEN)

    # Synchronisation

    def barrier_init(self, site: Site, warp: int, barrier: Barrier) -> None:
        epoch = int(self._clocks.epoch[self._clocks.warp(warp)])
        self._initialised[barrier] = _Initialised(site, warp, epoch)
        self._barriers[barrier] = Phases(self._clocks)

    def arrive(
        self, site: Site, warps: Iterable[int], barrier: Barrier, release: bool = True
    ) -> None:
        phases = self._phases(barrier)
        for warp in warps:
            self._check_usable(site, warp, barrier, self._clocks.know[SEEN, warp])
            phases.arrive(self._clocks.release(warp, relaxed=not release))

    def arrive_ticket(self, ticket: Ticket, barrier: Barrier) -> None:
        assert isinstance(ticket, _Completion)
        known = self._clocks.fit(ticket.knowledge)[SEEN]
        self._check_usable(ticket.site, ticket.warp, barrier, known, asynchronous=True)
        self._phases(barrier).arrive(ticket.knowledge)

    def complete(self, barrier: Barrier) -> None:
        self._phases(barrier).complete()

    def wait(
        self, site: Site, warps: Iterable[int], barrier: Barrier, acquire: bool = True
    ) -> None:
        clocks = self._clocks
        completed = self._phases(barrier).completed
        for warp in warps:
            self._check_usable(site, warp, barrier, clocks.know[SEEN, warp])
            clocks.acquire(warp, completed, relaxed=not acquire)

    def join(self, warp: int, ticket: Ticket) -> None:
        assert isinstance(ticket, _Completion)
        self._clocks.learn(warp, ticket.knowledge)

    def fence(self, warps: Iterable[int], kind: Fence) -> None:
        for warp in warps:
            self._clocks.fence(warp, kind)
            if kind in (Fence.PROXY_ASYNC, Fence.MBARRIER_INIT):
                for initialised in self._initialised.values():
                    initialised.fenced |= initialised.warp == warp

    # How accesses are judged and recorded

    def _bulk(
        self, site: Site, warp: int, agent: int, regions: Sequence[SharedRegion], read: bool
    ) -> _Completion:
        """A bulk copy: ordered after what its warp knows, not after the agent's other copies."""
        clocks = self._clocks
        mine = stamp(agent, int(clocks.epoch[agent]), self._site(site))
        for region in regions:
            self._asynchronous(warp, region, mine, read)
        knowledge = clocks.know[:, warp].copy()
        clocks.complete(agent, knowledge)
        return _Completion(knowledge, site, warp)

    def _asynchronous(
        self, warp: int, region: SharedRegion, mine: Stamps, read: bool, exempt: int = -1
    ) -> None:
        """An access to shared memory through the asynchronous proxy, issued by ``warp``."""
        where = (region.granules,)
        writes, reads = self._judge(PROXIED, warp, exempt), self._judge(SEEN, warp, exempt)
        shadow = self._shared[region.cta]
        conflict = (shadow.read if read else shadow.write)(where, mine, writes, reads)
        if conflict:
            granule = conflict.cell
            if isinstance(region.granules, slice):
                granule += region.granules.start
            else:
                granule = int(region.granules.flat[granule])
            place = f"shared memory of CTA {region.cta} at {granule * 4:#x}"
            self._report(conflict, int(mine), read, place, warp, PROXIED)

    def _warps_cells(self, site: Site, warps: Warps, cells: Cells, read: bool) -> None:
        """tcgen05.ld or .st; ``warps`` is one, or one for each lane of the cells."""
        rows: Any = warps if isinstance(warps, int) else warps.astype(np.int64)
        agents = self._clocks.loads(rows) if read else self._clocks.stores(rows)
        mine = stamp(agents, self._clocks.epoch[agents], self._site(site))
        self._cells(cells, rows, mine, -1 if read else agents, read)

    def _cells(
        self,
        cells: Cells,
        rows: Any,
        mine: Stamps,
        exempt: Any,
        read: bool,
        plane: int = TENSOR,
    ) -> None:
        """An access to tensor memory, issued by warp ``rows`` or by one warp for each lane."""
        shadow = self._tensor.get(cells.cta)
        if shadow is None:
            shadow = self._tensor[cells.cta] = Shadow((EXCLUSIVE_COLUMNS, LANES))
        columns, lanes = slice(cells.column, cells.column + cells.width), cells.lanes
        where: Where
        if isinstance(lanes, slice):
            where = (columns, lanes)
        else:
            where = (np.arange(columns.start, columns.stop)[:, None], lanes[None, :])
        judge = self._judge(plane, rows, exempt)
        # A quadrant's cells have one reader an instruction, so that any slot will do.
        conflict = (shadow.read if read else shadow.write)(where, mine, judge, judge)
        if conflict:
            every = np.arange(LANES)[lanes]
            column, position = divmod(conflict.cell, len(every))
            place = (
                f"tensor memory of CTA {cells.cta} at column {cells.column + column}, "
                f"lane {every[position]}"
            )
            culprit = int(np.broadcast_to(mine, len(every))[position])
            row = int(np.broadcast_to(rows, len(every))[position])
            self._report(conflict, culprit, read, place, row, plane)

    def _judge(self, plane: int, rows: int | Stamps, exempt: Stamps | int = -1) -> Judge:
        known = self._clocks.know[plane]
        return Judge(known.reshape(-1), rows * known.shape[1], exempt)

    def _phases(self, barrier: Barrier) -> Phases:
        phases = self._barriers.get(barrier)
        if phases is None:
            phases = self._barriers[barrier] = Phases(self._clocks)
        return phases

    def _site(self, site: Site) -> int:
        number = self._site_numbers.get(id(site))
        if number is None:
            number = self._site_numbers[id(site)] = len(self._sites)
            self._sites.append(site)  # keeps it alive, so that its id stays its own
            assert number < MAX_SITES
        return number

    # Reports

    def _check_usable(
        self,
        site: Site,
        warp: int,
        barrier: Barrier,
        known: NDArray[np.int64],
        asynchronous: bool = False,
    ) -> None:
        """An mbarrier is initialised before anybody uses it."""
        initialised = self._initialised.get(barrier)
        if initialised is None:
            return
        agent = self._clocks.warp(initialised.warp)
        if known[agent] < initialised.epoch:
            missing = f"missing: a barrier from it to {self._describe.warp(warp)}"
        elif asynchronous and not initialised.fenced:
            missing = "missing: fence.mbarrier_init (or fence.proxy.async) after the initialisation"
        else:
            return
        race = Race(
            kind="use of an mbarrier that is not initialised for it",
            place=barrier_name(barrier),
            earlier=self._describe.access(initialised.site, agent),
            later=self._describe.access(site, self._clocks.warp(warp)),
            missing=missing,
            lines=(initialised.site.line, site.line),
        )
        self._found(race)

    def _report(
        self, conflict: Conflict, mine: int, read: bool, place: str, row: int, plane: int
    ) -> None:
        agent, later = agent_of(conflict.stamp), agent_of(mine)
        sites = self._sites[site_of(conflict.stamp)], self._sites[site_of(mine)]
        verbs = "read" if read else "write", "write" if conflict.wrote else "read"
        plane = plane if conflict.wrote or plane == TENSOR else SEEN
        race = Race(
            kind=f"{verbs[0]} after {verbs[1]}",
            place=place,
            earlier=self._describe.access(sites[0], agent),
            later=self._describe.access(sites[1], later),
            missing=self._describe.missing(agent, epoch_of(conflict.stamp), row, plane),
            lines=(sites[0].line, sites[1].line),
        )
        self._found(race)

    def _found(self, race: Race) -> None:
        key = (race.kind, *race.lines)
        if not self._collect:
            raise RaceError(race)
        if key not in self._reported:
            self._reported.add(key)
            self.races.append(race)
