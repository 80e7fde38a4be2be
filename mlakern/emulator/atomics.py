"""Atomic operations on memory (PTX ISA, "atom", "red"): lane after lane, in ascending order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator import access, formats
from mlakern.emulator.addresses import OFFSET_MASK, RANK_SHIFT, SHARED
from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import Access
from mlakern.emulator.values import FLOAT, SIGNED, UNSIGNED

if TYPE_CHECKING:
    from mlakern.emulator.group import Group
    from mlakern.emulator.observer import Site

SIZES = {
    **{f"{letter}{width}": width // 8 for letter in "bus" for width in (16, 32, 64)},
    **{"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8},
}

OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b,
    "min": lambda old, b: _extreme(old, b, np.fmin),
    "max": lambda old, b: _extreme(old, b, np.fmax),
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda _, b: b,
    "inc": lambda old, b: 0 if old >= b else old + 1,
    "dec": lambda old, b: b if old == 0 or old > b else old - 1,
    "cas": lambda old, b, c: c if old == b else old,
}


def _extreme(old: Any, b: Any, of_floats: Callable[..., Any]) -> Any:
    """min or max; of floats the one that is a number."""
    if isinstance(old, int):
        return min(old, b) if of_floats is np.fmin else max(old, b)
    return of_floats(old, b)


def atomic(
    g: Group,
    space: str,
    address: Any,
    name: str,
    kind: str,
    operands: list[list[Any]],
    site: Site,
) -> list[Any]:
    """Apply an operation for each lane; returns the old values, for each element of the vector.

    kind: the PTX type of an element. operands: for each element its sources, ints or arrays of
    unsigned bits.
    """
    size = SIZES[kind]
    width = g.width
    addresses = [address] * width if type(address) is int else address.tolist()
    columns = [
        [[o] * width if type(o) is int else o.tolist() for o in element] for element in operands
    ]
    old: list[list[int]] = [[] for _ in operands]
    for lane, place in enumerate(addresses):
        memory, offset = _memory(g, space, place)
        if offset % (size * len(operands)):
            raise Fault(f"atomic at {place:#x}: need {size * len(operands)}-byte alignment", lane)
        for number, element in enumerate(columns):
            values = [column[lane] for column in element]
            old[number].append(apply(memory, offset + number * size, name, kind, values))
    _observe(g, space, addresses, size * len(operands), site)
    if width == 1:
        return [each[0] for each in old]
    return [np.array(each, UNSIGNED[8 * size]) for each in old]


def apply(memory: Any, offset: int, name: str, kind: str, values: list[int]) -> int:
    """One operation on memory; returns the old bits."""
    before: int = memory.load(offset, SIZES[kind], 1)
    packed = kind.endswith("x2")
    element = kind.removesuffix("x2")
    after = 0
    for half in range(1 + packed):
        shift = 16 * half
        mask = 0xFFFF if packed else (1 << 8 * SIZES[kind]) - 1
        parts = [_typed(bits >> shift & mask, element) for bits in (before, *values)]
        after |= _bits(OPERATIONS[name](*parts), element) << shift
    memory.store(offset, SIZES[kind], after)
    return before


def exchange_wide(
    g: Group, space: str, address: Any, name: str, operands: list[Any], site: Site
) -> list[Any]:
    """atom.exch.b128 and atom.cas.b128; operands and the result are pairs of 64-bit words."""
    width = g.width
    addresses = [address] * width if type(address) is int else address.tolist()
    columns = [[o] * width if type(o) is int else o.tolist() for o in operands]
    old: list[list[int]] = [[], []]
    for lane, place in enumerate(addresses):
        memory, offset = _memory(g, space, place)
        before = memory.load(offset, 8, 2)
        given = [column[lane] for column in columns]
        new = given[-2:]
        if name == "exch" or before == given[:2]:
            memory.store(offset, 8, new)
        for word, each in zip(before, old, strict=True):
            each.append(word)
    _observe(g, space, addresses, 16, site)
    if width == 1:
        return [each[0] for each in old]
    return [np.array(each, np.uint64) for each in old]


def _memory(g: Group, space: str, address: int) -> tuple[Any, int]:
    if space == "shared" or (space == "" and access.window(address) == SHARED):
        address &= 0xFFFFFFFF
        return g.cta.cluster.cta(address >> RANK_SHIFT).shared, address & OFFSET_MASK
    return g.cta.launch.memory, address


def _typed(bits: int, kind: str) -> Any:
    """Unsigned bits as a Python int or numpy float of the type."""
    if kind == "bf16":
        return formats.bf16_to_f32(np.array([bits], np.uint16))[0]
    width = int(kind[1:])
    if kind[0] == "f":
        return np.array(bits, UNSIGNED[width]).view(FLOAT[width])[()]
    if kind[0] == "s":
        return int(np.array(bits, UNSIGNED[width]).view(SIGNED[width]))
    return bits


def _bits(value: Any, kind: str) -> int:
    if kind == "bf16":
        return int(formats.f32_to_bf16(np.array([value], np.float32))[0])
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
    ranks, warps = words >> RANK_SHIFT, np.broadcast_to(g.lane_warps(), g.width)
    for rank in np.unique(ranks).tolist():
        here = ranks == rank
        offsets = words[here] & np.uint32(OFFSET_MASK)
        observer.shared(site, warps[here], rank, offsets, size, Access.ATOMIC)
