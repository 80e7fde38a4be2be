"""mlakern budgets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mlakern.cli.common import (
    ExitCode,
    console,
    emit_json,
    json_option,
    output,
    stop,
    store_option,
)
from mlakern.matrix import MatrixError, load_matrix
from mlakern.performance.budgets import (
    FILE_NAME,
    SIZE_TOLERANCE,
    Budget,
    BudgetError,
    Excess,
    excesses,
    read,
    write,
)
from mlakern.performance.disassembly import DisassemblyError
from mlakern.performance.profile import profile
from mlakern.store import Entry, MissingKernelError, StoreError, open_store


@click.command()
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=FILE_NAME,
    show_default=True,
    help="The budgets.",
)
@click.option("--update", is_flag=True, help="Write the file anew instead of comparing.")
@click.option("--matrix", type=click.Path(path_type=Path), default="build_matrix.yaml")
@click.option("--set", "sets", multiple=True, help="Set of the matrix; may repeat [release].")
@click.option("--jobs", type=click.IntRange(min=1), help="Disassemblers [one for each CPU].")
@store_option
@json_option
def budgets(
    path: Path,
    update: bool,
    matrix: Path,
    sets: tuple[str, ...],
    jobs: int | None,
    store_path: Path | None,
    as_json: bool,
) -> None:
    """Compare built kernels with their budgets: size, registers, spills, main loops.

    Exit status 1 if one is above its budget or has none, 3 if a kernel of the set is not built.
    """
    try:
        items = load_matrix(matrix).select(sets or ("release",))
        known = {} if update else read(path)
    except (MatrixError, BudgetError) as error:
        stop(ExitCode.USAGE, str(error))
    store = open_store(store_path)
    try:
        entries = [store.find(item.config) for item in items]
        measured = _measure(entries, jobs or len(os.sched_getaffinity(0)))
    except MissingKernelError as error:
        stop(ExitCode.UNAVAILABLE, f"build the set first: {error}")
    except (StoreError, DisassemblyError) as error:
        stop(ExitCode.UNAVAILABLE, str(error))
    if update:
        write(path, measured)
        _finish(as_json, [], f"{len(measured)} budgets written to {path}")
        return
    above = list(_excesses(measured, known))
    _finish(as_json, above, f"{len(measured)} kernels compared with {path}")
    if above:
        click.get_current_context().exit(ExitCode.FAILED)


def _measure(entries: Sequence[Entry], jobs: int) -> dict[str, Budget]:
    def measure(entry: Entry) -> tuple[str, Budget]:
        found = profile(entry.manifest, entry.load_cubin())
        return entry.manifest.config.name, Budget.of(found)

    # Threads: the time goes into nvdisasm's processes.
    with ThreadPoolExecutor(jobs) as pool, console.status("disassembling"):
        return dict(pool.map(measure, entries))


def _excesses(measured: dict[str, Budget], known: dict[str, Budget]) -> Iterator[Excess]:
    for name, budget in measured.items():
        if name in known:
            yield from excesses(name, budget, known[name])
        else:
            yield Excess(name, "cubin_bytes", budget.cubin_bytes, None)


def _finish(as_json: bool, above: Sequence[Excess], message: str) -> None:
    if as_json:
        emit_json({"status": "failed" if above else "ok", "above": [_row(each) for each in above]})
        return
    if above:
        title = f"above budget (cubin_bytes: by more than {SIZE_TOLERANCE:.0%})"
        table = Table("kernel", "what", title=title, title_justify="left")
        for name in ("got", "budget", "growth"):
            table.add_column(name, justify="right")
        for each in above:
            growth = "" if each.growth is None else f"+{each.growth:.1%}"
            budget = "none" if each.budget is None else str(each.budget)
            table.add_row(each.name, each.item, str(each.got), budget, growth)
        output.print(table)
        message += "; if the growth is meant, run with --update and commit the file"
    output.print(message, markup=False, soft_wrap=True)


def _row(excess: Excess) -> dict[str, Any]:
    return {
        "name": excess.name,
        "item": excess.item,
        "got": excess.got,
        "budget": excess.budget,
    }
