"""The race detector, driven by events: each rule once with and once without its ordering."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlakern.emulator.observer import Access, Barrier, Cells, Fence, SharedRegion, Site
from mlakern.emulator.races import RaceDetector, RaceError

FULL = Barrier("mbarrier", 0, 8)
FREE = Barrier("mbarrier", 0, 16)
NAMED = Barrier("named", 0, 1)
REGION = SharedRegion(0, slice(256, 512))  # bytes 1024 to 2047
D = Cells(0, slice(0, 128), 0, 64)
LINE = iter(range(1, 1 << 30))


def site(text: str) -> Site:
    return Site(text, next(LINE))


class Machine:
    """A detector and short names for the events of a cluster: two CTAs of eight warps."""

    def __init__(self, tcgen05_fences: bool = False, collect: bool = False) -> None:
        self.detector = RaceDetector(tcgen05_fences, collect)
        self.detector.begin(2, 8, 4096)

    def store(self, warp: int, address: int = 1024, size: int = 4) -> None:
        self.detector.shared(site("st.shared"), warp, 0, address, size, Access.WRITE)

    def load(self, warp: int, address: int = 1024, size: int = 4) -> None:
        self.detector.shared(site("ld.shared"), warp, 0, address, size, Access.READ)

    def atomic(self, warp: int, address: int = 1024) -> None:
        self.detector.shared(site("atom.shared"), warp, 0, address, 4, Access.ATOMIC)

    def tma(self, warp: int, barrier: Barrier = FULL, region: SharedRegion = REGION) -> object:
        return self.detector.bulk_load(site("cp.async.bulk.tensor"), warp, barrier, [region])

    def mma(self, warp: int, d: Cells = D, region: SharedRegion = REGION) -> None:
        self.detector.mma(site("tcgen05.mma"), warp, [region], [d], [d])

    def commit(self, warp: int) -> object:
        return self.detector.commit(site("tcgen05.commit"), warp)

    def finish(self, ticket: object, barrier: Barrier) -> None:
        """The asynchronous operation completes the phase of the barrier."""
        self.detector.arrive_ticket(ticket, barrier)
        self.detector.complete(barrier)

    def wait(self, warp: int, barrier: Barrier, acquire: bool = True) -> None:
        self.detector.wait(site("mbarrier.try_wait"), [warp], barrier, acquire)

    def signal(self, warp: int, barrier: Barrier, release: bool = True) -> None:
        self.detector.arrive(site("mbarrier.arrive"), [warp], barrier, release)
        self.detector.complete(barrier)

    def order(self, first: int, then: int) -> None:
        """Everything by warp ``first`` so far happens before what ``then`` does next."""
        self.signal(first, NAMED)
        self.wait(then, NAMED)

    def fence(self, warp: int, kind: Fence) -> None:
        self.detector.fence([warp], kind)

    def ld(self, warp: int, cells: Cells = D) -> None:
        self.detector.tmem_load(site("tcgen05.ld"), warp, cells)

    def st(self, warp: int, cells: Cells = D) -> None:
        self.detector.tmem_store(site("tcgen05.st"), warp, cells)

    def wait_ld(self, warp: int) -> None:
        self.detector.tmem_wait([warp], loads=True)

    def wait_st(self, warp: int) -> None:
        self.detector.tmem_wait([warp], loads=False)


@pytest.fixture
def m() -> Machine:
    return Machine()


def race_of(action) -> str:
    with pytest.raises(RaceError) as caught:
        action()
    return str(caught.value)


# Warps and barriers


def test_a_report_names_everything() -> None:
    detector = RaceDetector()
    detector.begin(2, 8, 4096)
    detector.shared(Site("st.shared.b32 [%r1], %r2", 10), 3, 0, 1028, 4, Access.WRITE)
    with pytest.raises(RaceError) as caught:
        detector.shared(Site("ld.shared.b32 %r3, [%r1]", 20), 9, 0, 1028, 4, Access.READ)
    assert str(caught.value) == (
        "race, read after write, on shared memory of CTA 0 at 0x404:\n"
        "  st.shared.b32 [%r1], %r2 (line 10) by warp 3 of CTA 0\n"
        "  ld.shared.b32 %r3, [%r1] (line 20) by warp 1 of CTA 1\n"
        "  missing: a barrier from it to warp 1 of CTA 1"
    )
    assert caught.value.race.lines == (10, 20)


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        ("store", "load", "read after write"),
        ("load", "store", "write after read"),
        ("store", "store", "write after write"),
        ("atomic", "load", "read after write"),
        ("store", "atomic", "write after write"),
        ("load", "atomic", "write after read"),
    ],
)
def test_conflicts_need_a_barrier(m: Machine, first: str, then: str, kind: str) -> None:
    getattr(m, first)(0)
    assert kind in race_of(lambda: getattr(m, then)(1))
    ordered = Machine()
    getattr(ordered, first)(0)
    ordered.order(0, 1)
    getattr(ordered, then)(1)


def test_no_conflict_no_race(m: Machine) -> None:
    m.load(0)
    m.load(1)
    m.store(2, 1028)
    m.store(3, 1032, size=8)
    m.atomic(4, 1040)
    m.atomic(5, 1040)
    m.detector.shared(site("st.shared"), 6, 1, 1024, 4, Access.WRITE)  # the other CTA's memory


def test_order_is_transitive_and_directed(m: Machine) -> None:
    m.store(0)
    m.order(0, 1)
    m.order(1, 2)
    m.load(2)
    assert "write after read" in race_of(lambda: m.store(0))  # nothing came back to warp 0


def test_an_arrival_covers_only_what_came_before(m: Machine) -> None:
    m.order(0, 1)
    m.store(0)
    assert "read after write" in race_of(lambda: m.load(1))


def test_a_wait_sees_the_completed_phase_only(m: Machine) -> None:
    m.signal(1, FULL)
    m.store(0)
    m.detector.arrive(site("mbarrier.arrive"), [0], FULL)  # of the next phase, not complete
    m.wait(2, FULL)
    race_of(lambda: m.load(2))
    m.detector.complete(FULL)
    m.wait(2, FULL)
    m.load(2)


def test_relaxed_operations_need_fences() -> None:
    for release, fence_before, acquire, fence_after in (
        (False, False, True, False),
        (True, False, False, False),
        (False, True, True, False),
        (True, False, False, True),
        (False, True, False, True),
    ):
        m = Machine()
        m.store(0)
        if fence_before:
            m.fence(0, Fence.THREAD)
        m.signal(0, FULL, release)
        m.wait(1, FULL, acquire)
        if fence_after:
            m.fence(1, Fence.THREAD)
        if (release or fence_before) and (acquire or fence_after):
            m.load(1)
        else:
            race_of(lambda machine=m: machine.load(1))


def test_a_bundle_judges_each_warp(m: Machine) -> None:
    warps = np.repeat(np.arange(4), 32)
    addresses = 1024 + 16 * np.arange(128)
    m.detector.shared(site("st.shared.v4"), warps, 0, addresses, 16, Access.WRITE)
    m.load(2, int(addresses[64 + 31]) + 12)  # warp 2 reads its own
    text = race_of(lambda: m.load(2, int(addresses[31]) + 12))
    assert "at 0x5fc" in text
    assert "by warp 0 of CTA 0" in text
    text = race_of(
        lambda: m.detector.shared(site("ld.shared"), warps, 0, np.full(128, 1024), 4, Access.READ)
    )
    assert "by warp 1 of CTA 0\n  missing" in text


def test_two_warps_write_the_same_place_in_one_instruction(m: Machine) -> None:
    warps = np.repeat(np.arange(2), 32)
    text = race_of(
        lambda: m.detector.shared(site("st"), warps, 0, np.full(64, 1024), 4, Access.WRITE)
    )
    assert "write after write" in text
    m.detector.shared(site("atom"), warps, 0, np.full(64, 2048), 4, Access.ATOMIC)


@pytest.mark.parametrize("culprit", range(4))
def test_four_unordered_readers_are_remembered(culprit: int) -> None:
    m = Machine()
    readers = (0, 4, 1, 9)  # two of them would like the same slot
    for reader in readers:
        m.load(reader)
    for reader in readers:
        if reader != readers[culprit]:
            m.order(reader, 15)
    text = race_of(lambda: m.store(15))
    reader = readers[culprit]
    assert f"by warp {reader % 8} of CTA {reader // 8}\n  st.shared" in text


# The asynchronous proxy


def test_a_bulk_load_is_over_when_its_barrier_is(m: Machine) -> None:
    ticket = m.tma(0)
    text = race_of(lambda: m.load(0))  # the issuing warp itself must wait
    assert "by the loads that complete on mbarrier 0x8 of CTA 0" in text
    assert "missing: a wait for mbarrier 0x8 of CTA 0" in text
    m.finish(ticket, FULL)
    race_of(lambda: m.load(1))
    m.wait(1, FULL)
    m.load(1)
    m.order(1, 2)
    m.load(2)


def test_a_second_load_into_the_same_stage_needs_the_first_to_be_over(m: Machine) -> None:
    ticket = m.tma(0)
    assert "write after write" in race_of(lambda: m.tma(0))
    m.finish(ticket, FULL)
    m.wait(0, FULL)
    m.tma(0)


def test_a_generic_write_needs_a_proxy_fence_before_the_mma(m: Machine) -> None:
    m.store(1)
    m.order(1, 0)
    assert "missing: fence.proxy.async between" in race_of(lambda: m.mma(0))


@pytest.mark.parametrize("fencing", [0, 1])
def test_either_side_may_execute_the_proxy_fence(m: Machine, fencing: int) -> None:
    m.store(1)
    if fencing == 1:
        m.fence(1, Fence.PROXY_ASYNC)
    m.order(1, 0)
    if fencing == 0:
        m.fence(0, Fence.PROXY_ASYNC)
    m.mma(0)


def test_a_proxy_fence_covers_only_earlier_writes(m: Machine) -> None:
    m.fence(1, Fence.PROXY_ASYNC)
    m.store(1)
    m.order(1, 0)
    assert "fence.proxy.async" in race_of(lambda: m.mma(0))


def test_a_proxy_fence_is_no_barrier(m: Machine) -> None:
    m.store(1)
    m.fence(1, Fence.PROXY_ASYNC)
    assert "missing: a barrier from it to warp 0" in race_of(lambda: m.mma(0))


def test_overwriting_by_tma_what_was_read_needs_no_proxy_fence(m: Machine) -> None:
    m.load(1)
    m.order(1, 0)
    m.tma(0)


def test_overwriting_by_tma_what_was_written_does(m: Machine) -> None:
    m.store(1)
    m.order(1, 0)
    assert "fence.proxy.async" in race_of(lambda: m.tma(0))


def test_an_operand_is_free_after_a_commit_that_was_waited_for(m: Machine) -> None:
    m.mma(0)
    ticket = m.commit(0)
    text = race_of(lambda: m.tma(1))
    assert "by the tensor pipe of CTA 0" in text
    assert "missing: tcgen05.commit after it" in text
    m.finish(ticket, FREE)
    m.wait(1, FREE)
    m.tma(1)


def test_a_commit_covers_earlier_mmas_only(m: Machine) -> None:
    other = SharedRegion(0, np.arange(600, 700))
    m.mma(0)
    ticket = m.commit(0)
    m.mma(0, region=other)
    m.finish(ticket, FREE)  # arrives late, after another MMA
    m.wait(1, FREE)
    m.tma(1)
    text = race_of(lambda: m.tma(1, FREE, other))
    assert "shared memory of CTA 0 at 0x960" in text


def test_a_commit_carries_what_the_issuing_warp_knew(m: Machine) -> None:
    m.finish(m.tma(2), FULL)
    m.wait(0, FULL)
    m.mma(0)
    m.finish(m.commit(0), FREE)
    m.wait(1, FREE)
    m.load(1)  # the operand was there before the MMA read it
    race_of(lambda: m.load(3))


def test_a_bulk_store_reads_until_it_has_been_waited_for(m: Machine) -> None:
    m.store(0)
    assert "fence.proxy.async" in race_of(
        lambda: m.detector.bulk_store(site("cp.async.bulk"), 0, [REGION])
    )
    m.fence(0, Fence.PROXY_ASYNC)
    ticket = m.detector.bulk_store(site("cp.async.bulk"), 0, [REGION])
    assert "missing: cp.async.bulk.wait_group by warp 0" in race_of(lambda: m.store(0))
    m.detector.join(0, ticket)
    m.store(0)


# Tensor memory


def test_d_may_be_loaded_after_the_commit(m: Machine) -> None:
    m.mma(0)
    assert "on tensor memory of CTA 0 at column 0, lane 0" in race_of(lambda: m.ld(1))
    m.finish(m.commit(0), FULL)
    m.wait(1, FULL)
    m.ld(1)


def test_mmas_of_one_pipe_are_in_order_those_of_two_are_not(m: Machine) -> None:
    m.mma(0)
    m.mma(0)
    m.mma(3)
    assert "by the tensor pipe of CTA 0" in race_of(lambda: m.mma(8))


def test_a_load_is_open_until_wait_ld(m: Machine) -> None:
    m.ld(1)
    m.order(1, 0)
    text = race_of(lambda: m.mma(0))
    assert "write after read" in text
    assert "missing: tcgen05.wait::ld by warp 1 of CTA 0" in text
    m.wait_ld(1)
    race_of(lambda: m.mma(0))  # after the arrival
    m.order(1, 0)
    m.mma(0)


def test_a_store_needs_wait_st(m: Machine) -> None:
    m.st(1)
    m.st(1)
    assert "missing: tcgen05.wait::st between them" in race_of(lambda: m.ld(1))
    m.wait_ld(1)
    race_of(lambda: m.ld(1))
    m.wait_st(1)
    m.ld(1)
    assert "missing: tcgen05.wait::ld between them" in race_of(lambda: m.st(1))


def test_a_warpgroup_loads_its_quadrants(m: Machine) -> None:
    m.st(6, Cells(0, slice(64, 96), 10, 2))
    m.wait_st(6)
    warps = np.repeat(np.arange(4, 8), 32)
    text = race_of(lambda: m.detector.tmem_load(site("tcgen05.ld"), np.roll(warps, 32), D))
    assert "at column 10, lane 64" in text
    assert "by warp 5 of CTA 0 (asynchronous)" in text
    ordered = Machine()
    ordered.st(6, Cells(0, slice(64, 96), 10, 2))
    ordered.wait_st(6)
    ordered.detector.tmem_load(site("tcgen05.ld"), warps, D)


def test_scattered_lanes(m: Machine) -> None:
    lanes = np.array([0, 5, 33])
    m.st(1, Cells(0, lanes, 7, 2))
    m.ld(2, Cells(0, np.array([1, 4, 32]), 7, 2))
    assert "at column 8, lane 33" in race_of(lambda: m.ld(2, Cells(0, np.array([1, 33]), 8, 1)))


def test_deallocation_waits_for_everything(m: Machine) -> None:
    m.ld(1)
    m.wait_ld(1)
    race_of(lambda: m.detector.tmem_free(site("tcgen05.dealloc"), 0, D))
    m.order(1, 0)
    m.detector.tmem_free(site("tcgen05.dealloc"), 0, D)


def test_the_fence_after_a_wait_is_demanded_unless_told_otherwise() -> None:
    for fence, relaxed in ((False, False), (True, False), (False, True), (True, True)):
        m = Machine(tcgen05_fences=True)
        m.mma(0)
        m.finish(m.commit(0), FULL)
        m.wait(1, FULL, acquire=not relaxed)
        if fence:
            m.fence(1, Fence.AFTER_THREAD_SYNC)
            m.ld(1)
        else:
            text = race_of(lambda machine=m: machine.ld(1))
            if not relaxed:
                assert "missing: tcgen05.fence::after_thread_sync" in text


def test_relaxed_arrival_after_before_thread_sync_covers_tensor_memory_only() -> None:
    m = Machine()
    m.ld(1)
    m.store(1)
    m.wait_ld(1)
    m.fence(1, Fence.BEFORE_THREAD_SYNC)
    m.signal(1, FULL, release=False)
    m.wait(0, FULL)
    m.st(0)
    race_of(lambda: m.load(0))


# mbarriers


def test_an_mbarrier_is_used_after_its_initialisation(m: Machine) -> None:
    m.detector.barrier_init(Site("mbarrier.init", 5), 0, FULL)
    text = race_of(lambda: m.wait(1, FULL))
    assert "use of an mbarrier" in text
    assert "mbarrier 0x8 of CTA 0" in text
    assert "mbarrier.init (line 5) by warp 0 of CTA 0" in text
    m.order(0, 1)
    m.wait(1, FULL)
    assert "missing: fence.mbarrier_init" in race_of(lambda: m.tma(1))
    m.fence(0, Fence.MBARRIER_INIT)
    m.tma(1)


def test_a_commit_to_an_mbarrier_not_yet_initialised_for_its_warp(m: Machine) -> None:
    m.detector.barrier_init(site("mbarrier.init"), 1, FREE)
    m.fence(1, Fence.MBARRIER_INIT)
    m.mma(0)
    ticket = m.commit(0)
    assert "missing: a barrier from it to warp 0" in race_of(
        lambda: m.detector.arrive_ticket(ticket, FREE)
    )


# The detector itself


def test_collecting_reports_each_pair_of_instructions_once() -> None:
    m = Machine(collect=True)
    write, read = Site("st", 1), Site("ld", 2)
    for _ in range(3):
        m.detector.shared(write, 0, 0, 1024, 4, Access.WRITE)
        m.detector.shared(read, 1, 0, 1024, 4, Access.READ)
    lines = {(race.kind, race.lines) for race in m.detector.races}
    assert len(m.detector.races) == len(lines)
    assert ("read after write", (1, 2)) in lines


def test_many_barriers_grow_the_clocks(m: Machine) -> None:
    barriers = [Barrier("mbarrier", 0, 8 * index) for index in range(200)]
    tickets = [
        m.tma(0, barrier, SharedRegion(0, slice(index, index + 1)))
        for index, barrier in enumerate(barriers)
    ]
    for ticket, barrier in zip(tickets, barriers, strict=True):
        m.finish(ticket, barrier)
    for index in (0, 100, 199):
        race_of(lambda at=index: m.load(1, 4 * at))
        m.wait(1, barriers[index])
        m.load(1, 4 * index)


def test_begin_forgets_the_last_cluster(m: Machine) -> None:
    m.store(0)
    m.detector.begin(2, 8, 4096)
    m.load(1)


# Against a reference: reachability in the graph of all events

WARPS = 4
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["load", "store"]), st.integers(0, WARPS - 1), st.integers(0, 2)),
    st.tuples(st.sampled_from(["arrive", "wait"]), st.integers(0, WARPS - 1), st.integers(0, 1)),
)


def first_race(program: list[tuple[str, int, int]]) -> int | None:
    """Index of the first access that some earlier conflicting one does not reach."""
    before: list[set[int]] = []
    last: dict[int, int] = {}
    arrivals: dict[int, set[int]] = {0: set(), 1: set()}
    for index, (name, warp, what) in enumerate(program):
        reached: set[int] = set()
        if warp in last:
            reached |= before[last[warp]] | {last[warp]}
        if name == "wait":
            for arrival in arrivals[what]:
                reached |= before[arrival] | {arrival}
        before.append(reached)
        last[warp] = index
        if name == "arrive":
            arrivals[what].add(index)
        if name in ("load", "store"):
            for earlier, (other, _, place) in enumerate(program[:index]):
                conflict = other in ("load", "store") and place == what
                if conflict and "store" in (name, other) and earlier not in reached:
                    return index
    return None


@settings(max_examples=400, deadline=None)
@given(st.lists(OPERATIONS, min_size=4, max_size=24))
def test_random_programs_race_where_the_graph_says(program: list[tuple[str, int, int]]) -> None:
    m = Machine()
    found = None
    for index, (name, warp, what) in enumerate(program):
        try:
            if name == "load":
                m.load(warp, 1024 + 4 * what)
            elif name == "store":
                m.store(warp, 1024 + 4 * what)
            elif name == "arrive":
                m.signal(warp, Barrier("named", 0, what))
            else:
                m.wait(warp, Barrier("named", 0, what))
        except RaceError:
            found = index
            break
    assert found == first_race(program)
