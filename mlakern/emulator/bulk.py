"""Copies by the tensor memory accelerator, as instructions see them (PTX ISA, "cp.async.bulk",
"cp.async.bulk.tensor"): destinations of a multicast, barriers to signal, bulk groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator import mbarrier, tensormap_image, tma
from mlakern.emulator.addresses import GLOBAL, OFFSET_MASK, PARAM, RANK_SHIFT, WINDOW_SHIFT
from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import SharedRegion
from mlakern.tensormap import TensorMap

if TYPE_CHECKING:
    from mlakern.emulator.asynchronous import Work
    from mlakern.emulator.cta import Cta
    from mlakern.emulator.group import Group
    from mlakern.emulator.mbarrier import MBarrier
    from mlakern.emulator.observer import Ticket
    from mlakern.emulator.program import Instruction

_LOW = (1 << WINDOW_SHIFT) - 1


def tensor_map(
    g: Group, address: int, coordinates: list[int]
) -> tuple[TensorMap, list[int], str | None]:
    """The tensor map at a generic address: a kernel parameter, or 128 bytes of global memory.

    Returns it, signed coordinates in its elements (pairs of 4-bit ones are one), and the name of
    their type where an encoded map tells.
    """
    signed = [c - (1 << 32) if c >> 31 else c for c in coordinates]
    launch = g.cta.launch
    place = address >> WINDOW_SHIFT << WINDOW_SHIFT
    if address % 64:
        raise Fault(f"tensor map at {address:#x}: need 64-byte alignment")
    if place == PARAM:
        found = launch.tensor_maps.get(address & _LOW)
        if found is not None:
            return found, signed, None
        image = bytes(launch.parameters.data[address & _LOW :][:128])
    elif place == GLOBAL:
        data, at = launch.memory.span(address, 128, write=False)
        image = bytes(data[at : at + 128])
    else:
        raise Fault(f"tensor map at {address:#x}: need a parameter or global memory")
    if tensormap_image.holds_nibbles(image):
        signed[0] //= 2
    return tensormap_image.decode(image), signed, tensormap_image.element_type(image)


def _destinations(g: Group, address: int, mask: int | None) -> list[tuple[Cta, int]]:
    """The CTAs that a load writes to, with the offset in their shared memory."""
    cluster = g.cta.cluster
    offset = address & OFFSET_MASK
    if mask is None:
        return [(cluster.cta(address >> RANK_SHIFT), offset)]
    ranks = [rank for rank in range(16) if mask >> rank & 1]
    if not ranks:
        raise Fault("multicast mask is 0")
    return [(cluster.cta(rank), offset) for rank in ranks]


def _signals(
    g: Group, barrier: int, ranks: list[int], multicast: bool, pair: bool
) -> list[MBarrier]:
    """The mbarrier that each destination's bytes complete on.

    A multicast signals the barrier at the same offset in each destination, or with cta_group::2
    in the CTA of the destination's pair that has the parity of the given barrier's.
    """
    if not multicast:
        return [mbarrier.find(g, barrier)]
    offset = barrier & OFFSET_MASK
    parity = barrier >> RANK_SHIFT & 1
    found = []
    for rank in ranks:
        owner = (rank & ~1) | parity if pair else rank
        found.append(mbarrier.find(g, owner << RANK_SHIFT | offset))
    return found


def load_tensor(
    g: Group,
    destination: int,
    map_address: int,
    coordinates: list[int],
    barrier: int,
    mask: int | None,
    pair: bool,
    instruction: Instruction,
) -> None:
    """cp.async.bulk.tensor from global to shared memory."""
    described, signed, _ = tensor_map(g, map_address, coordinates)
    at = destination & OFFSET_MASK
    if at % tma.SHARED_ALIGNMENT:
        raise Fault(f"destination {destination:#x}: need {tma.SHARED_ALIGNMENT}-byte alignment")
    memory = g.cta.launch.memory

    def fetch() -> Any:
        return tma.read_box(described, signed, memory)

    def place(cta: Cta, data: Any) -> None:
        tma.write_shared(data, described, cta.shared.data, cta.shared.written, at)

    copy = _Load(described.box_bytes, at, tma.shared_granules(described, at), fetch, place)
    _issue(g, copy, destination, barrier, mask, pair, instruction)


def load_bytes(
    g: Group,
    destination: int,
    source: int,
    size: int,
    barrier: int,
    mask: int | None,
    from_shared: bool,
    instruction: Instruction,
) -> None:
    """cp.async.bulk from global, or from this CTA's shared memory to another's."""
    at = destination & OFFSET_MASK
    check_bulk(destination, source, size)
    if from_shared:
        origin = g.cta.cluster.cta(source >> RANK_SHIFT & 0xFF)
        start = source & OFFSET_MASK

        def fetch() -> Any:
            return np.array(shared_bytes(origin, start, size))
    else:
        memory = g.cta.launch.memory

        def fetch() -> Any:
            data, index = memory.span(source, size, write=False)
            return data[index : index + size].copy()

    def place(cta: Cta, data: Any) -> None:
        _bounds(cta, at, size)
        cta.shared.data[at : at + size] = data
        cta.shared.written[at : at + size] = 0xFF

    copy = _Load(size, at, slice(at >> 2, (at + size) >> 2), fetch, place)
    _issue(g, copy, destination, barrier, mask, False, instruction)


@dataclass(frozen=True, slots=True)
class _Load:
    """A copy into shared memory: ``fetch`` reads the bytes, ``place`` writes them in a CTA."""

    size: int
    at: int
    granules: slice
    fetch: Any
    place: Any


def _issue(
    g: Group,
    copy: _Load,
    destination: int,
    barrier: int,
    mask: int | None,
    pair: bool,
    instruction: Instruction,
) -> None:
    targets = _destinations(g, destination, mask)
    ranks = [cta.rank for cta, _ in targets]
    signals = _signals(g, barrier, ranks, mask is not None, pair)
    signals = signals if len(signals) == len(targets) else signals * len(targets)
    observer = g.cta.launch.observer
    tickets: list[Ticket] = [None] * len(targets)
    if observer is not None:
        warp = g.cluster_warps()[0]
        for number, (cta, _) in enumerate(targets):
            region = SharedRegion(cta.rank, copy.granules)
            tickets[number] = observer.bulk_load(instruction, warp, signals[number].name, [region])

    def action() -> None:
        data = copy.fetch()
        for (cta, _), signal, ticket in zip(targets, signals, tickets, strict=True):
            copy.place(g.cta.cluster.cta(cta.rank), data)
            mbarrier.deliver(signal, copy.size, ticket)

    touched = tuple({*ranks, *(signal.cta.rank for signal in signals)})
    g.cta.cluster.asynchronous.copy(g, instruction, touched, action)


def store_tensor(
    g: Group,
    map_address: int,
    coordinates: list[int],
    source: int,
    instruction: Instruction,
) -> None:
    """cp.async.bulk.tensor from shared to global memory, in the thread's current bulk group."""
    described, signed, _ = tensor_map(g, map_address, coordinates)
    cta = g.cta.cluster.cta(source >> RANK_SHIFT)
    at = source & OFFSET_MASK
    if at % tma.SHARED_ALIGNMENT:
        raise Fault(f"source {source:#x}: need {tma.SHARED_ALIGNMENT}-byte alignment")
    memory = g.cta.launch.memory

    def action() -> None:
        box = tma.read_shared(described, cta.shared.data, cta.shared.written, at)
        tma.write_box(described, signed, box, memory)

    issue_store(g, cta, tma.shared_granules(described, at), action, instruction)


def store_bytes(
    g: Group, destination: int, source: int, size: int, instruction: Instruction
) -> None:
    """cp.async.bulk from shared to global memory."""
    check_bulk(destination, source, size)
    cta = g.cta.cluster.cta(source >> RANK_SHIFT)
    at = source & OFFSET_MASK
    memory = g.cta.launch.memory

    def action() -> None:
        data, index = memory.span(destination, size, write=True)
        data[index : index + size] = shared_bytes(cta, at, size)

    issue_store(g, cta, slice(at >> 2, (at + size) >> 2), action, instruction)


def issue_store(g: Group, cta: Cta, granules: slice, action: Any, instruction: Instruction) -> None:
    observer = g.cta.launch.observer
    ticket: Ticket = None
    if observer is not None:
        region = SharedRegion(cta.rank, granules)
        ticket = observer.bulk_store(instruction, g.cluster_warps()[0], [region])
    work = g.cta.cluster.asynchronous.copy(g, instruction, (cta.rank,), action)
    groups = _groups(g)
    groups[-1].append((work, ticket))


def _groups(g: Group) -> list[list[tuple[Work | None, Ticket]]]:
    """The bulk groups of the executing thread, oldest first; the last one is still open."""
    return g.bundle.bulk_groups.setdefault(int(g.lanes[0]), [[]])


def commit_group(g: Group) -> None:
    """cp.async.bulk.commit_group: close the current bulk group of each thread."""
    for lane in g.lanes.tolist():
        if lane in g.bundle.bulk_groups:
            g.bundle.bulk_groups[lane].append([])


def wait_group(g: Group, pending: int) -> None:
    """cp.async.bulk.wait_group: complete all but the latest ``pending`` groups of each thread."""
    observer = g.cta.launch.observer
    for lane in g.lanes.tolist():
        groups = g.bundle.bulk_groups.get(lane)
        if groups is None:
            continue
        closed = groups[:-1]
        due = closed[: len(closed) - pending] if pending else closed
        for work, _ in (item for group in due for item in group):
            if work is not None:
                g.cta.cluster.asynchronous.finish(work)
        if observer is not None:
            for _, ticket in (item for group in due for item in group):
                observer.join(g.cluster_warps()[0], ticket)
        g.bundle.bulk_groups[lane] = groups[len(due) :]


def check_bulk(destination: int, source: int, size: int) -> None:
    for name, value in (("destination", destination), ("source", source), ("size", size)):
        if value % 16:
            raise Fault(f"bulk copy: {name} {value:#x} is not a multiple of 16")


def _bounds(cta: Cta, at: int, size: int) -> None:
    if at + size > cta.shared.size:
        raise Fault(f"bulk copy of {size} bytes at shared offset {at:#x}: out of shared memory")


def shared_bytes(cta: Cta, at: int, size: int) -> Any:
    _bounds(cta, at, size)
    missing = np.flatnonzero(cta.shared.written[at : at + size] == 0)
    if len(missing):
        raise Fault(f"bulk copy reads shared offset {at + int(missing[0]):#x}: never written")
    return cta.shared.data[at : at + size]
