"""What mlakern show --performance and --sass print."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from mlakern.cli.common import output
from mlakern.performance import pipes
from mlakern.performance.profile import MainLoop, Profile
from mlakern.performance.report import BATCH, SEQ_LEN


def print_report(document: dict[str, Any]) -> None:
    """The report of mlakern.performance.report as tables."""
    resources = document["resources"]
    values = "keys' tiles" if not resources["v_stages"] else f"{resources['v_stages']} stages"
    output.print(
        f"{document['name']}\n"
        f"{resources['registers']} registers, {resources['spill_bytes']} bytes spilled, "
        f"{resources['shared_bytes']} bytes of shared memory (K {resources['k_stages']} stages, "
        f"V {values}), cubin {resources['cubin_bytes']} bytes",
        markup=False,
    )
    output.print(_loop_table(document["loops"]))
    output.print(_tile_table(document))
    output.print(_prediction_table(document))


def print_sass(profile: Profile) -> None:
    """Every main loop, an instruction on a line with its pipe before it."""
    for loop in profile.loops.values():
        output.print(f"{loop.role}: {_pipes(loop)}", markup=False, soft_wrap=True)
        for instruction in loop.way:
            pipe = pipes.pipe_of(instruction)
            output.print(f"  {pipe:8} {instruction}", markup=False, soft_wrap=True)


def _pipes(loop: MainLoop) -> str:
    counts = ", ".join(f"{count} {pipe}" for pipe, count in loop.counts.items())
    return f"{loop.instructions} instructions ({counts})"


def _loop_table(loops: dict[str, Any]) -> Table:
    names = [pipe for pipe in (*pipes.PIPES, pipes.UNIFORM, pipes.OTHER) if _used(loops, pipe)]
    title = "instructions of a warp for one key tile (all: if every branch were taken)"
    table = Table("role", title=title, title_justify="left")
    for name in ("sum", "all", *names):
        table.add_column(name, justify="right")
    for role, loop in loops.items():
        counts = (str(loop["pipes"].get(name, "")) for name in names)
        table.add_row(role, str(loop["instructions"]), str(loop["longest"]), *counts)
    return table


def _used(loops: dict[str, Any], pipe: str) -> bool:
    return any(pipe in loop["pipes"] for loop in loops.values())


def _tile_table(document: dict[str, Any]) -> Table:
    tile = document["key_tile"]
    title = (
        f"a key tile in one CTA: {tile['flops']} FLOPs, {tile['memory_bytes']} bytes from memory, "
        f"{tile['copied_bytes']} copied, {tile['operand_bytes']} read by products; "
        f"clocks on {document['machine']}"
    )
    table = Table(title=title, title_justify="left")
    for name in tile["clocks"]:
        table.add_column(name, justify="right")
    table.add_row(*(str(value) for value in tile["clocks"].values()))
    return table


def _prediction_table(document: dict[str, Any]) -> Table:
    first = document["predictions"][0]
    title = (
        "bound from below with one query token: how busy each resource is\n"
        f"(clocks: of one multiprocessor for a key tile; µs: {BATCH} requests of {SEQ_LEN} keys)"
    )
    table = Table(title=title, title_justify="left")
    for name in ("heads", "query tiles", "limit", "clocks", "µs", *first["shares"]):
        table.add_column(name, justify="right")
    for row in document["predictions"]:
        cells = (row["heads"], row["query_tiles"], row["limit"], row["bound_clocks"])
        shares = (f"{share:.0%}" for share in row["shares"].values())
        table.add_row(*map(str, cells), f"{row['bound_microseconds']:.1f}", *shares)
    return table
