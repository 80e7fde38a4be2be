"""ldmatrix and stmatrix: 8×8 matrices of 16-bit elements between shared memory and registers.

Lanes 8i … 8i+7 give the row addresses of matrix i; thread t holds elements (t / 4, 2(t % 4)) and
the one beside it, or of the transpose (PTX ISA, "ldmatrix", "stmatrix").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator.observer import Access

if TYPE_CHECKING:
    from mlakern.emulator.group import Group
    from mlakern.emulator.observer import Site


def load_matrices(g: Group, addresses: Any, count: int, transposed: bool, site: Site) -> Any:
    """``count`` registers, each of one matrix, for whole warps."""
    rows = _rows(addresses, count)
    cta = g.cta.cluster.cta(int(rows[0, 0]) >> 24)
    offsets = (rows - cta.base_word).reshape(-1)
    words = np.stack(cta.shared.load_lanes(offsets, 8, 2), axis=1)
    halves = words.view(np.uint16).reshape(-1, count, 8, 8)
    if transposed:
        halves = halves.swapaxes(2, 3)
    registers = np.ascontiguousarray(halves).view(np.uint32).reshape(-1, count, 32)
    _observe(g, offsets, cta.rank, count, Access.READ, site)
    return [np.ascontiguousarray(registers[:, n]).reshape(-1) for n in range(count)]


def store_matrices(g: Group, addresses: Any, values: Any, transposed: bool, site: Site) -> None:
    """The inverse of `load_matrices`."""
    count = len(values)
    rows = _rows(addresses, count)
    cta = g.cta.cluster.cta(int(rows[0, 0]) >> 24)
    offsets = (rows - cta.base_word).reshape(-1)
    registers = np.stack([v.reshape(-1, 32) for v in values], axis=1)
    halves = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, count, 8, 8)
    if transposed:
        halves = halves.swapaxes(2, 3)
    words = np.ascontiguousarray(halves).view(np.uint64).reshape(-1, 2)
    cta.shared.store_lanes(offsets, 8, [words[:, 0].copy(), words[:, 1].copy()])
    _observe(g, offsets, cta.rank, count, Access.WRITE, site)


def _rows(addresses: Any, count: int) -> Any:
    """Row addresses: [warps, 8 · count]."""
    return addresses.reshape(-1, 32)[:, : 8 * count]


def _observe(g: Group, offsets: Any, cta: int, count: int, access: Access, site: Site) -> None:
    observer = g.cta.launch.observer
    if observer is not None:
        warps = np.repeat(np.array(g.cluster_warps()), 8 * count)
        observer.shared(site, warps, cta, offsets, 16, access)


def transpose(values: Any) -> Any:
    """movmatrix: the 8×8 matrix in one register of each warp, transposed."""
    halves = values.view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1)
