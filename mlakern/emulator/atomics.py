"""Atomic operations on memory (PTX ISA, "atom", "red"): lane after lane, in ascending order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator import access
from mlakern.emulator.addresses import OFFSET_MASK, RANK_SHIFT, SHARED
from mlakern.emulator.observer import Access
from mlakern.emulator.values import FLOAT, SIGNED, UNSIGNED

if TYPE_CHECKING:
    from mlakern.emulator.group import Group
    from mlakern.emulator.observer import Site

OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b,
    "min": min,
    "max": max,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda _, b: b,
    "inc": lambda old, b: 0 if old >= b else old + 1,
    "dec": lambda old, b: b if old == 0 or old > b else old - 1,
    "cas": lambda old, b, c: c if old == b else old,
}


def atomic(
    g: Group, space: str, address: Any, name: str, kind: str, operands: list[Any], site: Site
) -> Any:
    """Apply an operation for each lane and return the old values (an int for one lane).

    kind: the PTX type. operands: ints or arrays of unsigned bits.
    """
    size = int(kind[1:]) // 8
    width = g.width
    addresses = [address] * width if type(address) is int else address.tolist()
    columns = [[o] * width if type(o) is int else o.tolist() for o in operands]
    function = OPERATIONS[name]
    old = []
    for lane, place in enumerate(addresses):
        memory, offset = _memory(g, space, place)
        before = memory.load(offset, size, 1)
        after = function(_typed(before, kind), *(_typed(column[lane], kind) for column in columns))
        memory.store(offset, size, _bits(after, kind))
        old.append(before)
    _observe(g, space, addresses, size, site)
    return old[0] if width == 1 else np.array(old, UNSIGNED[8 * size])


def _memory(g: Group, space: str, address: int) -> tuple[Any, int]:
    if space == "shared" or (space == "" and access.window(address) == SHARED):
        address &= 0xFFFFFFFF
        return g.cta.cluster.cta(address >> RANK_SHIFT).shared, address & OFFSET_MASK
    return g.cta.launch.memory, address


def _typed(bits: int, kind: str) -> Any:
    """Unsigned bits as a Python int or numpy float of the type."""
    width = int(kind[1:])
    if kind[0] == "f":
        return np.array(bits, UNSIGNED[width]).view(FLOAT[width])[()]
    if kind[0] == "s":
        return int(np.array(bits, UNSIGNED[width]).view(SIGNED[width]))
    return bits


def _bits(value: Any, kind: str) -> int:
    width = int(kind[1:])
    if kind[0] == "f":
        return int(np.array(value, FLOAT[width]).view(UNSIGNED[width]))
    return int(value) & ((1 << width) - 1)


def _observe(g: Group, space: str, addresses: list[int], size: int, site: Site) -> None:
    observer = g.cta.launch.observer
    if observer is None or not (
        space == "shared" or (space == "" and access.window(addresses[0]) == SHARED)
    ):
        return
    words = np.array([a & 0xFFFFFFFF for a in addresses], np.uint32)
    rank = int(words[0]) >> RANK_SHIFT
    offsets = words & np.uint32(OFFSET_MASK)
    observer.shared(site, g.lane_warps(), rank, offsets, size, Access.ATOMIC)
