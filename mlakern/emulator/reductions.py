"""Bulk copies that reduce into their destination (PTX ISA, "cp.reduce.async.bulk", .tensor)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator import bulk, formats, mbarrier, tma
from mlakern.emulator.addresses import OFFSET_MASK, RANK_SHIFT
from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import SharedRegion

if TYPE_CHECKING:
    from mlakern.emulator.group import Group
    from mlakern.emulator.program import Instruction

_INTEGERS: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
_FLOATS: dict[str, Any] = {"add": np.add, "min": np.fmin, "max": np.fmax}
_BITS: dict[str, Any] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def combine(old: Any, new: Any, operation: str, kind: str) -> Any:
    """``old`` and ``new``, arrays of uint8, combined element by element, as uint8.

    kind: u32, s32, u64, s64, b32, b64, f16, bf16, f32 or f64. Raises Fault for what does not exist.
    """
    if kind in ("f16", "bf16"):
        widen = formats.f16_to_f32 if kind == "f16" else formats.bf16_to_f32
        narrow = formats.f32_to_f16 if kind == "f16" else formats.f32_to_bf16
        function = _FLOATS.get(operation)
        if function is not None:
            total = function(widen(old.view(np.uint16)), widen(new.view(np.uint16)))
            return narrow(total).view(np.uint8)
    elif kind[0] == "f":
        function = _FLOATS.get(operation)
        if function is not None:
            dtype = np.dtype(f"f{int(kind[1:]) // 8}")
            return function(old.view(dtype), new.view(dtype)).view(np.uint8)
    else:
        dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
        a, b = old.view(dtype), new.view(dtype)
        function = _BITS.get(operation) or _INTEGERS.get(operation)
        if function is not None:
            return function(a, b).view(np.uint8)
        if operation == "inc":
            return np.where(a >= b, dtype.type(0), a + dtype.type(1)).view(np.uint8)
        if operation == "dec":
            return np.where((a == 0) | (a > b), b, a - dtype.type(1)).view(np.uint8)
    raise Fault(f"no reduction .{operation} of type .{kind}")


def reduce_tensor(
    g: Group,
    map_address: int,
    coordinates: list[int],
    source: int,
    operation: str,
    instruction: Instruction,
) -> None:
    """cp.reduce.async.bulk.tensor from shared to global memory, in the thread's bulk group."""
    described, signed, kind = bulk.tensor_map(g, map_address, coordinates)
    if kind is None:
        raise Fault("a reduction needs an encoded tensor map, which tells the type of its elements")
    cta = g.cta.cluster.cta(source >> RANK_SHIFT)
    at = source & OFFSET_MASK
    memory = g.cta.launch.memory

    def action() -> None:
        box = tma.read_shared(described, cta.shared.data, cta.shared.written, at)
        old = tma.read_box(described, signed, memory)
        tma.write_box(described, signed, combine(old, box, operation, kind), memory)

    bulk.issue_store(g, cta, tma.shared_granules(described, at), action, instruction)


def reduce_bytes(
    g: Group,
    destination: int,
    source: int,
    size: int,
    operation: str,
    kind: str,
    instruction: Instruction,
) -> None:
    """cp.reduce.async.bulk from shared to global memory, in the thread's bulk group."""
    bulk.check_bulk(destination, source, size)
    cta = g.cta.cluster.cta(source >> RANK_SHIFT)
    at = source & OFFSET_MASK
    memory = g.cta.launch.memory

    def action() -> None:
        data, index = memory.span(destination, size, write=True)
        old = data[index : index + size].copy()
        new = bulk.shared_bytes(cta, at, size).copy()
        data[index : index + size] = combine(old, new, operation, kind)

    bulk.issue_store(g, cta, slice(at >> 2, (at + size) >> 2), action, instruction)


def reduce_shared(
    g: Group,
    destination: int,
    source: int,
    size: int,
    barrier: int,
    operation: str,
    kind: str,
    instruction: Instruction,
) -> None:
    """cp.reduce.async.bulk from this CTA's shared memory to another's, which an mbarrier there
    learns of."""
    bulk.check_bulk(destination, source, size)
    cluster = g.cta.cluster
    origin, target = (cluster.cta(place >> RANK_SHIFT) for place in (source, destination))
    start, at = source & OFFSET_MASK, destination & OFFSET_MASK
    signal = mbarrier.find(g, barrier)
    observer = g.cta.launch.observer
    ticket: object = None
    if observer is not None:
        region = SharedRegion(target.rank, slice(at >> 2, (at + size) >> 2))
        ticket = observer.bulk_load(instruction, g.cluster_warps()[0], signal.name, [region])

    def action(ticket: object) -> None:
        old = bulk.shared_bytes(target, at, size).copy()
        new = bulk.shared_bytes(origin, start, size).copy()
        cluster.cta(target.rank).shared.data[at : at + size] = combine(old, new, operation, kind)
        mbarrier.deliver(signal, size, ticket)

    cluster.asynchronous.copy(g, instruction, (origin.rank, target.rank), partial(action, ticket))
