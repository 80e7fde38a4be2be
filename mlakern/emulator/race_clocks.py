"""Vector clocks of everything that accesses memory in a cluster.

An *agent* is something whose accesses happen in order, or complete together: a warp, the
tcgen05.ld (and .st) operations of a warp, the tensor pipe that a CTA issues to, the bulk loads that
complete on one mbarrier, the bulk stores of a warp. Each agent counts epochs; whoever has waited
for epoch e of an agent *knows* e.

A warp keeps what it knows on three planes, because knowing that an access is over is not enough:

    SEEN      the access happened before
    PROXIED   and, if it was a generic write, the asynchronous proxy sees it (fence.proxy.async)
    TENSOR    and it is ordered with later tcgen05 operations of this warp

A barrier collects what its arrivals know, and gives what the completed phase had to those who wait.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator.observer import Fence

SEEN, PROXIED, TENSOR = 0, 1, 2
PLANES = 3

Knowledge: TypeAlias = NDArray[np.int64]  # [planes, agents]
Name: TypeAlias = tuple[str, Any]  # kind of agent, and what distinguishes it

_FIRST_CAPACITY = 128
_WARP_AGENTS = 3


class Clocks:
    """What each warp and each tensor pipe of a cluster knows.

    Agent numbers: a warp w is 3 w, its tensor-memory loads 3 w + 1, its stores 3 w + 2; others are
    numbered as they appear. Rows: warps, then one tensor pipe for each CTA.
    """

    def __init__(self, warps: int, ctas: int, tcgen05_fences: bool) -> None:
        self.warps = warps
        self._tcgen05_fences = tcgen05_fences
        self._published: dict[int, Knowledge] = {}  # what a warp's relaxed arrivals release
        self._unacquired: dict[int, Knowledge] = {}  # what its relaxed waits have met
        self._names: dict[Name, int] = {}
        self._capacity = max(_FIRST_CAPACITY, 2 * _WARP_AGENTS * warps)
        self._agents = _WARP_AGENTS * warps
        self.know = np.zeros((PLANES, warps + ctas, self._capacity), np.int64)
        self.epoch = np.ones(self._capacity, np.int64)
        for warp in range(warps):
            self.know[:, warp, self.warp(warp)] = 1
            self.know[PROXIED, warp, self.warp(warp)] = 0

    @staticmethod
    def warp(warp: int) -> int:
        return _WARP_AGENTS * warp

    @staticmethod
    def loads(warp: int) -> int:
        return _WARP_AGENTS * warp + 1

    @staticmethod
    def stores(warp: int) -> int:
        return _WARP_AGENTS * warp + 2

    def is_generic(self, agent: int) -> bool:
        """A warp itself: its accesses to shared memory go through the generic proxy."""
        return agent < _WARP_AGENTS * self.warps and agent % _WARP_AGENTS == 0

    def issuer(self, agent: int) -> int | None:
        """The warp whose tcgen05.ld or .st the agent stands for, if that is what it is."""
        if agent < _WARP_AGENTS * self.warps and agent % _WARP_AGENTS:
            return agent // _WARP_AGENTS
        return None

    def named(self, name: Name) -> int:
        """The agent of this name, numbered at its first appearance."""
        agent = self._names.get(name)
        if agent is None:
            agent = self._names[name] = self._agents
            self._agents += 1
            if agent == self._capacity:
                self._grow()
        return agent

    def name(self, agent: int) -> Name:
        """The name that :meth:`named` gave a number to."""
        return next(name for name, number in self._names.items() if number == agent)

    def pipe_row(self, cta: int) -> int:
        return self.warps + cta

    def complete(self, agent: int, knowledge: Knowledge) -> None:
        """Add to knowledge that all of an agent's operations so far are over."""
        knowledge[:, agent] = self.epoch[agent]
        self.epoch[agent] += 1

    def release(self, warp: int, relaxed: bool) -> Knowledge:
        """What an arrival of the warp publishes; relaxed: no more than a fence did before."""
        if relaxed:
            return self._published.get(warp, self.blank())
        message: Knowledge = self.know[:, warp].copy()
        self._tick(warp)
        return message

    def acquire(self, warp: int, message: Knowledge, relaxed: bool) -> None:
        """A wait of the warp succeeds; relaxed: it has learnt once it executes a fence."""
        if relaxed:
            met = self.fit(self._unacquired.get(warp, message))
            self._unacquired[warp] = np.maximum(met, self.fit(message))
        else:
            self.learn(warp, message)

    def fence(self, warp: int, kind: Fence) -> None:
        know = self.know[:, warp]
        if kind is Fence.PROXY_ASYNC:
            np.maximum(know[PROXIED], know[SEEN], out=know[PROXIED])
        elif kind is Fence.AFTER_THREAD_SYNC:
            np.maximum(know[TENSOR], know[SEEN], out=know[TENSOR])
            if warp in self._unacquired:  # after a relaxed wait it orders tensor memory only
                met = self.fit(self._unacquired[warp])
                np.maximum(know[TENSOR], met[SEEN], out=know[TENSOR])
        elif kind is Fence.BEFORE_THREAD_SYNC:
            released = self.fit(self._published.get(warp, self.blank())).copy()
            asynchronous = ~self._generic_agents()
            released[:, asynchronous] = know[:, asynchronous]
            self._published[warp] = released
        else:
            if kind is Fence.THREAD and warp in self._unacquired:
                self.learn(warp, self._unacquired.pop(warp))
            self._published[warp] = know.copy()
        self._tick(warp)

    def learn(self, warp: int, message: Knowledge) -> None:
        """Take over what somebody published."""
        message = self.fit(message)
        know = self.know[:, warp]
        np.maximum(know[:TENSOR], message[:TENSOR], out=know[:TENSOR])
        if not self._tcgen05_fences:
            np.maximum(know[TENSOR], message[SEEN], out=know[TENSOR])

    def fit(self, message: Knowledge) -> Knowledge:
        """A message from before the last growth, in today's width."""
        if message.shape[1] == self._capacity:
            return message
        wide = np.zeros((PLANES, self._capacity), np.int64)
        wide[:, : message.shape[1]] = message
        return wide

    def blank(self) -> Knowledge:
        return np.zeros((PLANES, self._capacity), np.int64)

    def _tick(self, warp: int) -> None:
        """Later accesses of the warp are not covered by what it has published so far."""
        agent = self.warp(warp)
        self.epoch[agent] += 1
        self.know[SEEN, warp, agent] = self.know[TENSOR, warp, agent] = self.epoch[agent]

    def _generic_agents(self) -> NDArray[np.bool_]:
        """Mask of the warps themselves over all agents."""
        mask = np.zeros(self._capacity, np.bool_)
        mask[0 : _WARP_AGENTS * self.warps : _WARP_AGENTS] = True
        return mask

    def _grow(self) -> None:
        planes, rows, capacity = self.know.shape
        wide = np.zeros((planes, rows, 2 * capacity), np.int64)
        wide[:, :, :capacity] = self.know
        self.know = wide
        self.epoch = np.concatenate([self.epoch, np.ones(capacity, np.int64)])
        self._capacity = 2 * capacity


class Phases:
    """What the arrivals at one barrier have published, and what its completed phase had."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._arrived = clocks.blank()
        self._completed = clocks.blank()

    def arrive(self, message: Knowledge) -> None:
        self._arrived = self._clocks.fit(self._arrived)
        np.maximum(self._arrived, self._clocks.fit(message), out=self._arrived)

    def complete(self) -> None:
        # Arrivals are read-modify-writes of one object: a phase includes the ones before it.
        self._completed = self._arrived.copy()

    @property
    def completed(self) -> Knowledge:
        return self._completed
