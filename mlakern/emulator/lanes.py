"""Exchange between the lanes of each warp of a group.

Groups may hold parts of warps; what a lane that is not in the group would contribute is left out,
and reading from one is a fault.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator.errors import Fault

if TYPE_CHECKING:
    from mlakern.emulator.group import Group

WARP = 32
FULL_WARP = (1 << WARP) - 1


def shuffle(g: Group, values: Any, mode: str, operand: Any, clamp: Any) -> tuple[Any, Any]:
    """shfl.sync: the values that lanes read, and whether their source lane was in range."""
    if operand.ndim == clamp.ndim == 0 and g.width == WARP * len(g.warps):
        source, valid = _whole_warps(mode, int(operand), int(clamp), g.width)
        return values[source], valid
    lane = g.lanes % WARP
    source, valid = _sources(lane, mode, operand.astype(np.int64), clamp.astype(np.int64))
    place = g.lanes - lane + source
    index = np.searchsorted(g.lanes, place).clip(0, g.width - 1)
    absent = np.flatnonzero(g.lanes[index] != place)
    if len(absent):
        raise Fault("shuffle from a lane that does not take part", int(absent[0]))
    return values[index], np.broadcast_to(valid, values.shape)


@lru_cache(maxsize=256)
def _whole_warps(mode: str, operand: int, clamp: int, width: int) -> tuple[Any, Any]:
    """Sources among the lanes of whole warps, and their validity; the same for every warp."""
    lane = np.arange(width)
    source, valid = _sources(lane % WARP, mode, operand, clamp)
    return lane - lane % WARP + source, np.broadcast_to(valid, lane.shape)


def _sources(lane: Any, mode: str, operand: Any, clamp: Any) -> tuple[Any, Any]:
    """Source lanes in the warp (PTX ISA, shfl.sync); a lane's own where out of range."""
    operand = operand & 31
    segment, limit = clamp >> 8 & 31, clamp & 31
    highest = (lane & segment) | (limit & ~segment)
    lowest = lane & segment
    if mode == "up":
        source = lane - operand
        valid = source >= highest
    elif mode == "down":
        source = lane + operand
        valid = source <= highest
    elif mode == "bfly":
        source = lane ^ operand
        valid = source <= highest
    else:
        source = lowest | (operand & ~segment)
        valid = source <= highest
    return np.where(valid, source, lane), valid


def _rows(g: Group, values: Any, missing: Any) -> Any:
    """Values as [warps, 32]; lanes outside the group hold ``missing``."""
    if g.width == WARP * len(g.warps):
        return values.reshape(-1, WARP)
    out = np.full((len(g.warps), WARP), missing, values.dtype)
    warps = np.searchsorted(np.array(g.warps), g.bundle.first_warp + g.lanes // WARP)
    out[warps, g.lanes % WARP] = values
    return out


def spread(g: Group, values: Any) -> Any:
    """One value for each warp, given to each of its lanes."""
    if g.width == WARP * len(g.warps):
        return np.repeat(values, WARP)
    warps = np.searchsorted(np.array(g.warps), g.bundle.first_warp + g.lanes // WARP)
    return values[warps]


def vote_all(g: Group, source: Any) -> Any:
    return _rows(g, source, True).all(axis=1)


def vote_any(g: Group, source: Any) -> Any:
    return _rows(g, source, False).any(axis=1)


def vote_uni(g: Group, source: Any) -> Any:
    return vote_all(g, source) | ~vote_any(g, source)


VOTES = {"all": vote_all, "any": vote_any, "uni": vote_uni}


def ballot(g: Group, source: Any) -> Any:
    """A bit for each lane whose predicate holds."""
    packed = np.packbits(_rows(g, source, False), axis=1, bitorder="little")
    return packed.view(np.uint32).reshape(-1)


def active(g: Group) -> Any:
    """The lanes of each warp that are in the group."""
    return ballot(g, np.ones(g.width, np.bool_))


def elect(g: Group) -> Any:
    """True for the lowest lane of each warp."""
    warps = g.lanes // WARP
    out = np.ones(g.width, np.bool_)
    out[1:] = warps[1:] != warps[:-1]
    return out


def leaders(g: Group) -> Any:
    """The lane number that `elect` chooses in each warp."""
    return (g.lanes[elect(g)] % WARP).astype(np.uint32)


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduce(g: Group, values: Any, name: str, absolute: bool, nan: bool) -> Any:
    """redux.sync over each warp, as unsigned bits."""
    function: Any = REDUCTIONS[name]
    if values.dtype.kind == "f":
        values = np.abs(values) if absolute else values
        function = function if nan else {"min": np.fmin, "max": np.fmax}[name]
    if g.width == WARP * len(g.warps):
        found = function.reduce(values.reshape(-1, WARP), axis=1, dtype=values.dtype)
    else:
        warps = g.lanes // WARP
        starts = np.flatnonzero(elect(g))
        assert (np.diff(warps) >= 0).all()
        found = function.reduceat(values, starts)
    return found.view(np.uint32)


def match_any(g: Group, values: Any) -> Any:
    """For each lane the lanes of its warp with the same value."""
    out = np.empty(g.width, np.uint32)
    warps = g.lanes // WARP
    bits = (np.uint64(1) << (g.lanes % WARP).astype(np.uint64)).astype(np.uint32)
    for lane in range(g.width):
        same = (warps == warps[lane]) & (values == values[lane])
        out[lane] = np.bitwise_or.reduce(bits[same])
    return out


def match_all(g: Group, values: Any) -> Any:
    """The lanes of the warp if they all have the same value, else 0."""
    matched = match_any(g, values)
    everyone = spread(g, active(g))
    return np.where(matched == everyone, everyone, np.uint32(0))
