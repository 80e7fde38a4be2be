"""Fences, and operations that go lane by lane where the lanes of a group disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator.observer import Fence, Site

if TYPE_CHECKING:
    from mlakern.emulator.group import Group


def fence(g: Group, kind: Fence) -> None:
    """Tell the observer of a fence; values do not need one."""
    observer = g.cta.launch.observer
    if observer is not None:
        observer.fence(g.cluster_warps(), kind)


class Lane:
    """One lane of a group, where a function of groups is applied to each lane."""

    __slots__ = ("_warp", "cta", "width")

    def __init__(self, group: Group, warp: int) -> None:
        self.cta = group.cta
        self.width = 1
        self._warp = warp

    def cluster_warps(self) -> list[int]:
        return [self._warp]


def lanes_of(g: Group) -> Iterator[Lane]:
    """The lanes of a group, one by one."""
    for warp in np.broadcast_to(g.lane_warps(), g.width).tolist():
        yield Lane(g, warp)


def wait_lanes(
    g: Group, wait: Callable[..., bool | None], where: Any, what: Any, acquire: bool, site: Site
) -> Any:
    """Wait on mbarriers that differ between lanes.

    Lanes that agree go through ``wait`` together; others must part first: a 1-tuple of choices.
    """
    same = (where == where[0]) & (what == what[0])
    if same.all():
        return wait(g, int(where[0]), int(what[0]), acquire, site)
    return ((~same).astype(np.int64),)
