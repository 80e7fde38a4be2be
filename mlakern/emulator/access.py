"""Loads, stores and atomics of generated code, by state space.

An address is an int when all lanes agree on it, else an array. Shared addresses are ``rank << 24 |
offset``, generic ones carry their window in the top byte (`addresses.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator.addresses import (
    GLOBAL,
    LOCAL,
    OFFSET_MASK,
    PARAM,
    RANK_SHIFT,
    SHARED,
    WINDOW_SHIFT,
)
from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import Access
from mlakern.emulator.values import UNSIGNED

if TYPE_CHECKING:
    from mlakern.emulator.cta import Cta
    from mlakern.emulator.group import Group
    from mlakern.emulator.observer import Site

_LOW_24 = np.uint32(OFFSET_MASK)
_BELOW_WINDOW = (1 << WINDOW_SHIFT) - 1


def _shared(g: Group, address: int) -> Cta:
    """The CTA whose shared memory an address lies in."""
    return g.cta.cluster.cta(address >> RANK_SHIFT)


def load_shared(g: Group, address: Any, size: int, count: int, site: Site) -> Any:
    if type(address) is int:
        cta, offset = _shared(g, address), address & OFFSET_MASK
        found = cta.shared.load(offset, size, count)
    else:
        cta = _shared(g, int(address[0]))
        offset = address - cta.base_word
        try:
            found = cta.shared.load_lanes(offset, size, count)
        except Fault:
            if not _several(address):
                raise
            return _load_several(g, address, size, count, site)
    observer = g.cta.launch.observer
    if observer is not None:
        warps = g.lane_warps() if type(address) is not int else g.cluster_warps()[0]
        observer.shared(site, warps, cta.rank, offset, size * count, Access.READ)
    return found


def store_shared(g: Group, address: Any, size: int, values: Any, site: Site) -> None:
    row = size * (len(values) if type(values) is list else 1)
    if type(address) is int:
        cta, offset = _shared(g, address), address & OFFSET_MASK
        cta.shared.store(offset, size, last_lane(values))
    else:
        cta = _shared(g, int(address[0]))
        offset = address - cta.base_word
        try:
            cta.shared.store_lanes(offset, size, values)
        except Fault:
            if not _several(address):
                raise
            _store_several(g, address, size, values, site)
            return
    observer = g.cta.launch.observer
    if observer is not None:
        warps = g.lane_warps() if type(address) is not int else g.cluster_warps()[0]
        observer.shared(site, warps, cta.rank, offset, row, Access.WRITE)


def _several(address: Any) -> bool:
    """Whether lanes reach into several CTAs."""
    return bool((address >> RANK_SHIFT != address[0] >> RANK_SHIFT).any())


def _parts(g: Group, address: Any) -> Iterator[tuple[Cta, Any, Any]]:
    """For each CTA that lanes reach into: it, those lanes, and their offsets."""
    ranks = address >> RANK_SHIFT
    for rank in np.unique(ranks).tolist():
        index = np.flatnonzero(ranks == rank)
        yield g.cta.cluster.cta(rank), index, address[index] & _LOW_24


def _load_several(g: Group, address: Any, size: int, count: int, site: Site) -> Any:
    out = np.empty((count, g.width), UNSIGNED[8 * size])
    for cta, index, offset in _parts(g, address):
        found = cta.shared.load_lanes(offset, size, count)
        out[:, index] = found
        _report(g, site, cta, index, offset, size * count, Access.READ)
    return out[0] if count == 1 else list(out)


def _store_several(g: Group, address: Any, size: int, values: Any, site: Site) -> None:
    columns = values if type(values) is list else [values]
    dtype = UNSIGNED[8 * size]
    columns = [np.broadcast_to(np.asarray(c, dtype), g.width) for c in columns]
    for cta, index, offset in _parts(g, address):
        part = [column[index] for column in columns]
        cta.shared.store_lanes(offset, size, part if len(part) > 1 else part[0])
        _report(g, site, cta, index, offset, size * len(columns), Access.WRITE)


def _report(
    g: Group, site: Site, cta: Cta, index: Any, offset: Any, row: int, kind: Access
) -> None:
    observer = g.cta.launch.observer
    if observer is not None:
        warps = np.broadcast_to(g.lane_warps(), g.width)[index]
        observer.shared(site, warps, cta.rank, offset, row, kind)


def last_lane(values: Any) -> Any:
    """What stays in memory when every lane stores to one address."""
    if type(values) is list:
        return [last_lane(value) for value in values]
    return values if type(values) is int else int(values.reshape(-1)[-1])


def load_global(g: Group, address: Any, size: int, count: int, _site: Site) -> Any:
    memory = g.cta.launch.memory
    if type(address) is int:
        return memory.load(address, size, count)
    return memory.load_lanes(address, size, count)


def store_global(g: Group, address: Any, size: int, values: Any, _site: Site) -> None:
    memory = g.cta.launch.memory
    if type(address) is int:
        memory.store(address, size, last_lane(values))
    else:
        memory.store_lanes(address, size, values)


def load_param(g: Group, address: Any, size: int, count: int, _site: Site) -> Any:
    if type(address) is int:
        return g.cta.launch.parameters.load(address & _BELOW_WINDOW, size, count)
    return g.cta.launch.parameters.load_lanes(address & np.uint64(_BELOW_WINDOW), size, count)


def _local(g: Group, address: Any, row: int) -> tuple[Any, Any]:
    """Indices into the bundle's local memory: lanes, and the first byte of each access."""
    if type(address) is int:
        offset = np.full(g.width, address & _BELOW_WINDOW, np.int64)
    else:
        offset = (address & np.uint64(_BELOW_WINDOW)).astype(np.int64)
    size = g.bundle.local.shape[1]
    bad = np.flatnonzero((offset + row > size) | (offset % row != 0))
    if len(bad):
        lane = int(bad[0])
        raise Fault(
            f"access of {row} bytes at local address {int(offset[lane]):#x}: out of "
            f"the {size} bytes of local memory, or misaligned",
            lane,
        )
    return g.lanes[:, None], offset[:, None] + np.arange(row)


def load_local(g: Group, address: Any, size: int, count: int, _site: Site) -> Any:
    lanes, index = _local(g, address, size * count)
    if not g.bundle.local_written[lanes, index].all():
        lane = int(np.argwhere(~g.bundle.local_written[lanes, index])[0][0])
        raise Fault("read of local memory never written", lane)
    words = g.bundle.local[lanes, index].view(UNSIGNED[8 * size])
    if g.width == 1:
        found = words[0].tolist()
        return found[0] if count == 1 else found
    return words[:, 0].copy() if count == 1 else list(np.ascontiguousarray(words.T))


def store_local(g: Group, address: Any, size: int, values: Any, _site: Site) -> None:
    columns = values if type(values) is list else [values]
    lanes, index = _local(g, address, size * len(columns))
    dtype = UNSIGNED[8 * size]
    words = np.empty((g.width, len(columns)), dtype)
    for number, column in enumerate(columns):
        words[:, number] = column
    g.bundle.local[lanes, index] = words.view(np.uint8)
    g.bundle.local_written[lanes, index] = True


def window(address: Any) -> int:
    """The window of a generic address, which all lanes must share."""
    if type(address) is int:
        return address >> WINDOW_SHIFT << WINDOW_SHIFT
    found = int(address[0]) >> WINDOW_SHIFT
    if ((address >> np.uint64(WINDOW_SHIFT)) != found).any():
        raise Fault("lanes of one generic access lie in different state spaces: not supported")
    return found << WINDOW_SHIFT


def shared_word(address: Any) -> Any:
    """A 64-bit shared address, generic or not, as 32 bits."""
    if type(address) is int:
        return address & 0xFFFFFFFF
    return address.astype(np.uint32)


def load_generic(g: Group, address: Any, size: int, count: int, site: Site) -> Any:
    place = window(address)
    if place == SHARED:
        return load_shared(g, shared_word(address), size, count, site)
    load = {GLOBAL: load_global, LOCAL: load_local, PARAM: load_param}.get(place)
    if load is None:
        raise Fault(f"generic address in no state space: {address}")
    return load(g, address, size, count, site)


def store_generic(g: Group, address: Any, size: int, values: Any, site: Site) -> None:
    place = window(address)
    if place == SHARED:
        store_shared(g, shared_word(address), size, values, site)
        return
    store = {GLOBAL: store_global, LOCAL: store_local}.get(place)
    if store is None:
        raise Fault(f"generic store outside global, shared and local memory: {address}")
    store(g, address, size, values, site)


LOADS = {
    "shared": load_shared,
    "global": load_global,
    "const": load_global,
    "local": load_local,
    "param": load_param,
    "": load_generic,
}
STORES = {
    "shared": store_shared,
    "global": store_global,
    "local": store_local,
    "": store_generic,
}
