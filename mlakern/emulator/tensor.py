"""tcgen05 instructions as the machine runs them: who issues, which CTAs and quadrants take part,
and in which order the tensor pipe completes work (PTX ISA, "TensorCore 5th Generation Family
Instructions").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator import mbarrier, tensorcore
from mlakern.emulator.addresses import OFFSET_MASK, RANK_SHIFT
from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import Access, Cells
from mlakern.emulator.tmem import Shape, reduce_columns

if TYPE_CHECKING:
    from mlakern.emulator.cta import Cta
    from mlakern.emulator.descriptors import Kind
    from mlakern.emulator.group import Group
    from mlakern.emulator.program import Instruction

_LANE_SHIFT = 16
_QUADRANT_SHIFT = 21
_WITHIN_QUADRANT = 0x1FFFFF


@dataclass(frozen=True, slots=True)
class AllocationWait:
    """A warp that waits for free columns of tensor memory."""

    cta: Cta
    columns: int

    def describe(self) -> str:
        held = ", ".join(f"{n} at {at}" for at, n in self.cta.tensor.allocations.items())
        pair = ", and for the pair's other CTA" if self.cta.pair_allocation else ""
        return (
            f"waits for {self.columns} columns of tensor memory{pair}; allocated: {held or 'none'}"
        )


@dataclass(slots=True)
class PairAllocation:
    """A tcgen05.alloc.cta_group::2 of one CTA; its address once both CTAs have asked."""

    columns: int
    address: int | None = None


def allocate(
    g: Group, address: int, columns: int, ctas: int, exclusive: bool, instruction: Instruction
) -> bool:
    """tcgen05.alloc by one warp: True when the address has been stored, False to wait."""
    _one_warp(g)
    if ctas == 2:
        found = _allocate_pair(g, columns, exclusive)
    else:
        found = g.cta.tensor.allocate(columns, exclusive)
    if found is None:
        g.waiting = AllocationWait(g.cta, columns)
        g.cta.tensor_waiters.append(g)
        return False
    cta = g.cta.cluster.cta(address >> RANK_SHIFT)
    cta.shared.store(address & OFFSET_MASK, 4, found)
    g.cta.cluster.events += 1
    observer = g.cta.launch.observer
    if observer is not None:
        warp, offset = g.cluster_warps()[0], address & OFFSET_MASK
        observer.shared(instruction, warp, cta.rank, offset, 4, Access.WRITE)
    return True


def _allocate_pair(g: Group, columns: int, exclusive: bool) -> int | None:
    """Allocate in both CTAs of the pair once a warp of each has asked for it."""
    cta, peer = g.cta, g.cta.cluster.cta(g.cta.rank ^ 1)
    mine = cta.pair_allocation = cta.pair_allocation or PairAllocation(columns)
    other = peer.pair_allocation
    if mine.address is None and other is not None and other.address is None:
        if other.columns != columns:
            raise Fault(f"{columns} columns for the pair, its other CTA asks for {other.columns}")
        found = [each.tensor.allocate(columns, exclusive) for each in (cta, peer)]
        if found[0] is None or found[1] is None:
            for each, where in zip((cta, peer), found, strict=True):
                if where is not None:
                    each.tensor.deallocate(where, columns)
            return None
        mine.address, other.address = found
        _wake_waiters(peer)
    if mine.address is not None:
        cta.pair_allocation = None
    return mine.address


def _wake_waiters(cta: Cta) -> None:
    waiters, cta.tensor_waiters = cta.tensor_waiters, []
    for group in waiters:
        cta.cluster.wake(group)


def deallocate(g: Group, address: int, columns: int, instruction: Instruction) -> None:
    """tcgen05.dealloc by one warp."""
    _one_warp(g)
    observer = g.cta.launch.observer
    if observer is not None:
        cells = Cells(g.cta.rank, slice(0, 128), address, columns)
        observer.tmem_free(instruction, g.cluster_warps()[0], cells)
    g.cta.tensor.deallocate(address, columns)
    _wake_waiters(g.cta)


def relinquish(g: Group) -> None:
    """tcgen05.relinquish_alloc_permit."""
    g.cta.tensor.relinquish()


def _one_warp(g: Group) -> None:
    if len(g.warps) != 1:
        raise Fault(f"{len(g.warps)} warps allocate or free tensor memory at once; one warp does")


@dataclass(frozen=True, slots=True)
class MmaForm:
    """What the text of a tcgen05.mma says.

    ctas: .cta_group. scales: factors a row of a block-scaled kind, else 0. shift: D as an input is
    multiplied by 2^-shift.
    """

    kind: Kind
    ctas: int
    weight_stationary: bool
    a_in_tensor: bool
    scales: int
    shift: int
    instruction: Instruction


def multiply(
    g: Group,
    form: MmaForm,
    d: int,
    a: int,
    b: int,
    word: int,
    accumulate: bool,
    scale_a: int = 0,
    scale_b: int = 0,
    masked: int = 0,
) -> None:
    """tcgen05.mma by one thread. masked: a bit for each lane of D that is not written."""
    extra = (form.scales, scale_a, scale_b, form.shift, masked)
    mma = tensorcore.decode(
        form.kind,
        word,
        a,
        b,
        d,
        accumulate,
        form.ctas,
        form.weight_stationary,
        form.a_in_tensor,
        g.cta.launch.machine.sm_107,
        *(extra if any(extra) else ()),
    )
    cluster, ranks = g.cta.cluster, pair_of(g, form.ctas)
    participants = [cluster.cta(each) for each in ranks]
    observer = g.cta.launch.observer
    if observer is not None:
        footprint = tensorcore.footprint(mma, ranks)
        observer.mma(form.instruction, g.cluster_warps()[0], *footprint)
    operands = [cta.operands for cta in participants]
    action = partial(tensorcore.execute, mma, operands)
    cluster.asynchronous.tensor(g, form.instruction, ranks, action)


def pair_of(g: Group, ctas: int) -> tuple[int, ...]:
    """Ranks of the CTAs that an instruction of .cta_group::``ctas`` works on."""
    rank = g.cta.rank
    if ctas == 2 and rank & 1:
        raise Fault(f"cta_group::2 is issued by CTA rank {rank}; the even CTA of the pair issues")
    return tuple(range(rank, rank + ctas))


def commit(g: Group, address: int, mask: int | None, instruction: Instruction) -> None:
    """tcgen05.commit by one thread: arrive once at each barrier after all earlier operations."""
    cluster = g.cta.cluster
    if mask is None:
        targets = [mbarrier.find(g, address)]
    else:
        offset = address & OFFSET_MASK
        ranks = [rank for rank in range(16) if mask >> rank & 1]
        if not ranks:
            raise Fault("multicast mask is 0")
        targets = [mbarrier.find(g, rank << RANK_SHIFT | offset) for rank in ranks]
    observer = g.cta.launch.observer
    ticket = observer.commit(instruction, g.cluster_warps()[0]) if observer is not None else None

    def action() -> None:
        for target in targets:
            cluster.cta(target.cta.rank)  # a fault if it has exited
            mbarrier.commit(target, ticket)

    touched = tuple(target.cta.rank for target in targets)
    cluster.asynchronous.tensor(g, instruction, touched, action)


def _places(g: Group, address: Any) -> list[tuple[tuple[int, ...], int]]:
    """Quadrants that access one address within their quadrant, and that address."""
    if g.width % 32:
        raise Fault("a tensor-memory access needs whole warps")
    words = np.broadcast_to(np.asarray(address, np.uint32), g.width).reshape(-1, 32)
    if (words != words[:, :1]).any():
        raise Fault("tensor-memory address differs within a warp")
    found: list[tuple[tuple[int, ...], int]] = []
    for warp, word in zip(g.warps, words[:, 0].tolist(), strict=True):
        quadrant, lane = warp % 4, word >> _LANE_SHIFT
        if word >> _QUADRANT_SHIFT not in (0, quadrant):
            raise Fault(
                f"tensor-memory address {word:#010x}: lane {lane} is not in the quadrant of warp "
                f"{warp} (lanes {32 * quadrant} to {32 * quadrant + 31})"
            )
        within = word & _WITHIN_QUADRANT
        if found and found[-1][1] == within:
            found[-1] = (*found[-1][0], quadrant), within
        else:
            found.append(((quadrant,), within))
    return found


def load(g: Group, shape: Shape, address: Any, instruction: Instruction) -> Any:
    """tcgen05.ld: one array for each register."""
    blocks = []
    tensor = g.cta.tensor
    observer = g.cta.launch.observer
    for quadrants, within in _places(g, address):
        blocks.append(tensor.load(shape, within, quadrants))
        if observer is not None:
            _tell(g, observer.tmem_load, shape, within, quadrants, instruction)
    return blocks[0].copy() if len(blocks) == 1 else np.concatenate(blocks, axis=1)


def load_reduced(
    g: Group,
    shape: Shape,
    address: Any,
    operation: str,
    kind: str,
    absolute: bool,
    nan: bool,
    instruction: Instruction,
) -> Any:
    """tcgen05.ld.red: the registers, then the reduction of each thread's own registers."""
    block = load(g, shape, address, instruction)
    return block, reduce_columns(block, operation, kind, absolute, nan)


def store(
    g: Group, shape: Shape, address: Any, values: list[Any], instruction: Instruction
) -> None:
    """tcgen05.st."""
    block = np.stack(values)
    start = 0
    observer = g.cta.launch.observer
    for quadrants, within in _places(g, address):
        end = start + 32 * len(quadrants)
        g.cta.tensor.store(shape, within, quadrants, block[:, start:end])
        start = end
        if observer is not None:
            _tell(g, observer.tmem_store, shape, within, quadrants, instruction)


def _tell(
    g: Group, report: Any, shape: Shape, within: int, quadrants: tuple[int, ...], site: Instruction
) -> None:
    lanes = g.cta.tensor.lanes(shape, within, quadrants)
    cells = Cells(g.cta.rank, lanes, within & 0xFFFF, shape.columns)
    warps = [w for w in g.cluster_warps() if w % g.cta.launch.warps % 4 in quadrants]
    report(site, warps[0] if len(warps) == 1 else np.repeat(warps, shape.lanes), cells)


def wait(g: Group, loads: bool) -> None:
    """tcgen05.wait::ld and ::st: values are already there; only an observer cares."""
    observer = g.cta.launch.observer
    if observer is not None:
        observer.tmem_wait(g.cluster_warps(), loads)
