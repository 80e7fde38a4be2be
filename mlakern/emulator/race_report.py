"""What a race detector says: the two accesses, the place, and the ordering that is missing."""

from __future__ import annotations

from dataclasses import dataclass

from mlakern.emulator.errors import EmulatorError
from mlakern.emulator.observer import Barrier, Site
from mlakern.emulator.race_clocks import PROXIED, SEEN, TENSOR, Clocks


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders.

    kind: such as "read after write". place: memory, CTA and address. earlier, later: instruction,
    PTX line and agent, in the order in which the emulator ran them. missing: what would help.
    lines: PTX lines of both.
    """

    kind: str
    place: str
    earlier: str
    later: str
    missing: str
    lines: tuple[int, int]

    def __str__(self) -> str:
        return (
            f"race, {self.kind}, on {self.place}:\n"
            f"  {self.earlier}\n  {self.later}\n  {self.missing}"
        )


class RaceError(EmulatorError):
    """The first race that was found."""

    def __init__(self, race: Race) -> None:
        super().__init__(str(race))
        self.race = race


def barrier_name(barrier: Barrier) -> str:
    if barrier.kind == "mbarrier":
        return f"mbarrier {barrier.where:#x} of CTA {barrier.cta}"
    if barrier.kind == "named":
        return f"barrier {barrier.where} of CTA {barrier.cta}"
    return "the cluster's barrier"


class Describer:
    """Words for the agents of a cluster and for what is missing between two of them."""

    def __init__(self, clocks: Clocks, warps_per_cta: int) -> None:
        self._clocks = clocks
        self._warps_per_cta = warps_per_cta

    def warp(self, warp: int) -> str:
        return f"warp {warp % self._warps_per_cta} of CTA {warp // self._warps_per_cta}"

    def access(self, site: Site, agent: int) -> str:
        return f"{site.text} (line {site.line}) by {self._agent(agent)}"

    def missing(self, agent: int, epoch: int, row: int, plane: int) -> str:
        """What would have ordered the access (agent, epoch) before one by warp ``row``."""
        clocks = self._clocks
        if clocks.know[SEEN, row, agent] >= epoch:
            if plane == PROXIED:
                return "missing: fence.proxy.async between the generic write and this access"
            if plane == TENSOR:
                return "missing: tcgen05.fence::after_thread_sync before this access"
        barrier = f"a barrier from it to {self.warp(row)}"
        if clocks.is_generic(agent):
            return f"missing: {barrier}"
        issuer = clocks.issuer(agent)
        if issuer is not None:
            wait = "tcgen05.wait::ld" if agent == clocks.loads(issuer) else "tcgen05.wait::st"
            if issuer == row:
                return f"missing: {wait} between them"
            return f"missing: {wait} by {self.warp(issuer)}, or {barrier} after that"
        kind, detail = clocks.name(agent)
        if kind == "pipe":
            return f"missing: tcgen05.commit after it, and {barrier} that waits for this commit"
        if kind == "loads":
            return f"missing: a wait for {barrier_name(detail)}, or {barrier} after that"
        return f"missing: cp.async.bulk.wait_group by {self.warp(detail)}, or {barrier} after that"

    def _agent(self, agent: int) -> str:
        clocks = self._clocks
        if clocks.is_generic(agent):
            return self.warp(agent // 3)
        issuer = clocks.issuer(agent)
        if issuer is not None:
            return f"{self.warp(issuer)} (asynchronous)"
        kind, detail = clocks.name(agent)
        if kind == "pipe":
            return f"the tensor pipe of CTA {detail}"
        if kind == "loads":
            return f"the loads that complete on {barrier_name(detail)}"
        return f"the bulk stores of {self.warp(detail)}"
