"""Special registers (PTX ISA, "Special Registers"): how wide they are and how they are read."""

from __future__ import annotations

from dataclasses import dataclass

from mlakern.emulator.program import Entry


@dataclass(frozen=True, slots=True)
class SpecialRegister:
    """per_lane: one value for each lane, read by ``Group.special``; otherwise ``code`` reads it.

    stable: reading it twice gives the same value. axis: x, y or z of %tid, 0-based.
    """

    width: int
    per_lane: bool
    code: str = ""
    stable: bool = True
    axis: int | None = None

    def constant(self, entry: Entry) -> int | None:
        """The value where the kernel's block shape fixes it: %tid of a dimension of size 1."""
        if self.axis is not None and entry.reqntid and entry.reqntid[self.axis] == 1:
            return 0
        return None


def _table() -> dict[str, SpecialRegister]:
    table: dict[str, SpecialRegister] = {}
    for axis, letter in enumerate("xyz"):
        table[f"tid.{letter}"] = SpecialRegister(32, True, axis=axis)
        for name, source in {
            "ntid": "launch.block",
            "ctaid": "index",
            "nctaid": "launch.grid",
            "clusterid": "cluster.index",
            "nclusterid": "launch.clusters",
            "cluster_ctaid": "cluster_index",
            "cluster_nctaid": "launch.cluster",
        }.items():
            table[f"{name}.{letter}"] = SpecialRegister(32, False, f"g.cta.{source}[{axis}]")
    for name in ("laneid", "warpid", *(f"lanemask_{r}" for r in ("eq", "le", "lt", "ge", "gt"))):
        table[name] = SpecialRegister(32, True)
    for name, width, code in (
        ("nwarpid", 32, "g.cta.launch.warps"),
        ("cluster_ctarank", 32, "g.cta.rank"),
        ("cluster_nctarank", 32, "g.cta.launch.cluster_size"),
        ("is_explicit_cluster", 1, "g.cta.launch.cluster_size > 1"),
        ("dynamic_smem_size", 32, "g.cta.launch.dynamic_shared"),
        ("total_smem_size", 32, "g.cta.launch.shared_bytes"),
        ("aggr_smem_size", 32, "g.cta.launch.shared_bytes"),
        ("smid", 32, "g.cta.number"),
        ("nsmid", 32, "g.cta.launch.cta_count"),
        ("gridid", 64, "1"),
    ):
        table[name] = SpecialRegister(width, False, code)
    for name, width in (
        ("clock", 32),
        ("clock_hi", 32),
        ("clock64", 64),
        ("globaltimer", 64),
        ("globaltimer_lo", 32),
    ):
        table[name] = SpecialRegister(width, False, f"g.clock({width})", stable=False)
    return table


SPECIAL_REGISTERS = _table()
