"""mlakern list and show: what is in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from mlakern.cli.common import (
    ConfigName,
    ExitCode,
    console,
    emit_json,
    json_option,
    output,
    stop,
    store_option,
)
from mlakern.config import KernelConfig
from mlakern.manifest import Kernel, Manifest, SchemaError
from mlakern.store import Entry, Root, Store, StoreError, dotted, open_store, read_entry


@dataclass(frozen=True)
class Listed:
    """One folder of the store. state: "serves", "shadowed", "stale", "foreign" or "damaged"."""

    root: Root
    path: Path
    state: str
    error: str = ""
    entry: Entry | None = None


def listing(store: Store, *, check_files: bool = False) -> list[Listed]:
    """Every folder with its state; check_files: compare the files with the manifests too.

    The first intact entry of a configuration in the search order serves, if it was built from the
    installed kernel sources; a later one is shadowed. A foreign one is of another package version.
    """
    rows: list[Listed] = []
    served: set[KernelConfig] = set()
    for root, path in store.directories():
        try:
            entry = read_entry(path, root.origin)
            if check_files:
                entry.verify()
        except SchemaError as error:
            rows.append(Listed(root, path, "foreign", str(error)))
            continue
        except StoreError as error:
            rows.append(Listed(root, path, "damaged", str(error)))
            continue
        config = entry.manifest.config
        state = "stale" if not entry.is_current else "shadowed" if config in served else "serves"
        if state == "serves":
            served.add(config)
        rows.append(Listed(root, path, state, entry=entry))
    return rows


@click.command("list")
@store_option
@json_option
def list_kernels(store_path: Path | None, as_json: bool) -> None:
    """List the kernels that are present, in the order in which they are searched.

    serves: what a load returns. shadowed: an earlier one serves. stale: built from other kernel
    sources than the installed ones, never served. foreign: of another package version.
    """
    store = open_store(store_path)
    rows = listing(store)
    if as_json:
        emit_json([document_of(row) for row in rows])
        return
    if not rows:
        console.print(f"no kernels in {store.places}", markup=False)
        return
    table = Table("kernel", "state", "from")
    for name in ("arch", "registers", "shared B", "cubin KiB"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = ["", "", "", ""]
        if row.entry:
            manifest = row.entry.manifest
            kernel = manifest.kernel("attention")
            cells = [
                manifest.config.arch,
                str(kernel.registers),
                str(kernel.dynamic_shared + kernel.static_shared),
                str(manifest.cubin.size // 1024),
            ]
        table.add_row(escape(row.path.name), row.state, row.root.origin, *cells)
    output.print(table)


@click.command()
@click.argument("config", type=ConfigName(), metavar="NAME")
@click.option(
    "--performance", is_flag=True, help="Instructions of the main loops, and what limits."
)
@click.option("--sass", is_flag=True, help="The main loops' instructions.")
@store_option
@json_option
def show(
    config: KernelConfig, performance: bool, sass: bool, store_path: Path | None, as_json: bool
) -> None:
    """Describe the kernel that serves the configuration NAME.

    With --json its manifest, with --performance --json the performance report.
    """
    if sass and as_json:
        raise click.UsageError("--sass excludes --json; try --performance --json")
    try:
        entry = open_store(store_path).find(config)
        if performance or sass:
            _show_performance(entry, performance, sass, as_json)
            return
    except StoreError as error:
        stop(ExitCode.UNAVAILABLE, str(error))
    if as_json:
        click.echo(entry.manifest.dumps(), nl=False)
        return
    output.print(_summary(entry), markup=False)
    for kernel in entry.manifest.kernels:
        output.print(_parameter_table(kernel))


def _show_performance(entry: Entry, performance: bool, sass: bool, as_json: bool) -> None:
    from mlakern.cli.performance import print_report, print_sass
    from mlakern.performance.disassembly import DisassemblyError
    from mlakern.performance.profile import profile
    from mlakern.performance.report import report

    try:
        measured = profile(entry.manifest, entry.load_cubin())
    except DisassemblyError as error:
        stop(ExitCode.UNAVAILABLE, str(error))
    if as_json:
        emit_json(report(measured))
        return
    if performance:
        print_report(report(measured))
    if sass:
        print_sass(measured)


def document_of(row: Listed) -> dict[str, Any]:
    """JSON-ready facts of a folder."""
    manifest = row.entry.manifest if row.entry else None
    return {
        "path": str(row.path),
        "origin": row.root.origin,
        "state": row.state,
        "error": row.error or None,
        "name": manifest.config.name if manifest else None,
        "arch": manifest.config.arch if manifest else None,
        "cubin_bytes": manifest.cubin.size if manifest else None,
        "registers": {k.role: k.registers for k in manifest.kernels} if manifest else None,
    }


def _summary(entry: Entry) -> str:
    manifest: Manifest = entry.manifest
    made_by = manifest.provenance
    axes = ", ".join(f"{axis} {value}" for axis, value in manifest.config.as_dict().items())
    tools = ", ".join(f"{tool} {version}" for tool, version in made_by.toolchain.items())
    lines = [
        manifest.config.name,
        f"  axes       {axes}",
        f"  place      {entry.path} ({entry.origin})",
        f"  cubin      {manifest.cubin.size} bytes, SHA-256 {manifest.cubin.sha256}",
        f"  driver     CUDA {dotted(manifest.min_driver)} or later",
        f"  made by    mlakern {made_by.package_version}, {tools}",
        f"  workspace  {manifest.workspace.size} bytes, aligned to {manifest.workspace.alignment}",
    ]
    return "\n".join(lines)


def _parameter_table(kernel: Kernel) -> Table:
    title = (
        f"{kernel.role}: {kernel.entry}\n"
        f"grid ({', '.join(kernel.grid)}), block {kernel.block}, cluster {kernel.cluster}\n"
        f"{kernel.registers} registers, {kernel.spill_stores + kernel.spill_loads} bytes spilled, "
        f"{kernel.dynamic_shared} + {kernel.static_shared} bytes of shared memory"
    )
    table = Table("parameter", "kind", title=title, title_justify="left")
    table.add_column("offset", justify="right")
    table.add_column("size", justify="right")
    table.add_column("meaning")
    for parameter in kernel.parameters:
        table.add_row(
            parameter.name,
            parameter.kind,
            str(parameter.offset),
            str(parameter.size),
            escape(parameter.meaning),
        )
    return table
