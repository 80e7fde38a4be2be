"""mlakern build."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mlakern.build import runner
from mlakern.build.runner import Outcome
from mlakern.cli.common import ConfigName, ExitCode, console, emit_json, json_option, output, stop
from mlakern.config import KernelConfig
from mlakern.manifest import Manifest
from mlakern.matrix import BuildItem, MatrixError, load_matrix
from mlakern.store import StoreError, read_entry, user_cache

_MATRIX = Path("build_matrix.yaml")


@click.command()
@click.option("--matrix", type=click.Path(path_type=Path), help=f"Matrix file [{_MATRIX}].")
@click.option("--set", "sets", multiple=True, help="Set of the matrix; may repeat [default].")
@click.option(
    "--config", "configs", multiple=True, type=ConfigName(), help="Build this one; may repeat."
)
@click.option("--arch", "archs", multiple=True, help="Only this architecture; may repeat.")
@click.option("--shard", default="1/1", metavar="I/N", help="Only the I-th of N shares.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compiler processes [one for each CPU].")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=runner.TIMEOUT,
    show_default=True,
    help="Seconds for one configuration.",
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Store folder [user cache]."
)
@json_option
def build(
    matrix: Path | None,
    sets: tuple[str, ...],
    configs: tuple[KernelConfig, ...],
    archs: tuple[str, ...],
    shard: str,
    jobs: int | None,
    timeout: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compile configurations into a store.

    They come from sets of a matrix file, or from --config. What the store already holds is not
    compiled again. A configuration that fails costs no other; the exit status is then 1.
    """
    if configs and (matrix or sets or archs or shard != "1/1"):
        raise click.UsageError("--config excludes --matrix, --set, --arch and --shard")
    root = out or _cache()
    if configs:
        items: Sequence[BuildItem] = [BuildItem(config) for config in dict.fromkeys(configs)]
    else:
        try:
            items = load_matrix(matrix or _MATRIX).select(sets or ("default",), archs, shard)
        except MatrixError as error:
            stop(ExitCode.USAGE, str(error))
    start = time.monotonic()
    outcomes = _run(items, root, jobs, timeout)
    seconds = time.monotonic() - start
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if as_json:
        emit_json(
            {
                "store": str(root),
                "seconds": round(seconds, 3),
                "results": [_document(outcome) for outcome in outcomes],
            }
        )
    else:
        _print_table(outcomes)
        output.print(_totals(outcomes, root, seconds), markup=False, soft_wrap=True)
    for outcome in failed:
        console.rule(f"[red]{outcome.config.name}")
        console.print(outcome.error, outcome.log, sep="\n", markup=False)
    if failed:
        click.get_current_context().exit(ExitCode.FAILED)


def _run(items: Sequence[BuildItem], root: Path, jobs: int | None, timeout: float) -> list[Outcome]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("building", total=len(items))

        def advance(outcome: Outcome) -> None:
            progress.update(task, advance=1, description=outcome.config.name)

        try:
            return runner.build(
                items,
                root,
                jobs=jobs,
                timeout=timeout,
                progress=advance,
                compiler=runner.COMPILER,
            )
        except StoreError as error:
            stop(ExitCode.UNAVAILABLE, str(error))
        except importlib.metadata.PackageNotFoundError as error:
            stop(
                ExitCode.UNAVAILABLE,
                f"{error.name} is not installed; try pip install 'mlakern[build]'",
            )


def _cache() -> Path:
    root = user_cache()
    if root is None:
        stop(ExitCode.UNAVAILABLE, "no user cache folder here; try --out or $MLAKERN_CACHE_DIR")
    return root.path


def _manifest(outcome: Outcome) -> Manifest | None:
    try:
        return read_entry(outcome.path, "").manifest if outcome.path else None
    except StoreError:
        return None


def _document(outcome: Outcome) -> dict[str, Any]:
    manifest = _manifest(outcome)
    return {
        "name": outcome.config.name,
        "status": outcome.status,
        "seconds": round(outcome.seconds, 3),
        "path": str(outcome.path) if outcome.path else None,
        "error": outcome.error or None,
        "cubin_bytes": manifest.cubin.size if manifest else None,
        "registers": {k.role: k.registers for k in manifest.kernels} if manifest else None,
        "spill_bytes": (
            {k.role: k.spill_stores + k.spill_loads for k in manifest.kernels} if manifest else None
        ),
    }


def _print_table(outcomes: Sequence[Outcome]) -> None:
    table = Table("configuration", "result")
    for name in ("registers", "spilled B", "shared B", "cubin KiB", "s"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        manifest = _manifest(outcome)
        cells = ["", "", "", ""]
        if manifest:
            kernel = manifest.kernel("attention")
            cells = [
                str(kernel.registers),
                str(kernel.spill_stores + kernel.spill_loads),
                str(kernel.dynamic_shared + kernel.static_shared),
                str(manifest.cubin.size // 1024),
            ]
        colour = "red" if outcome.status == "failed" else "green"
        table.add_row(
            outcome.config.name, f"[{colour}]{outcome.status}", *cells, f"{outcome.seconds:.1f}"
        )
    output.print(table)


def _totals(outcomes: Sequence[Outcome], root: Path, seconds: float) -> str:
    """How many there are, and what they weigh."""
    present = [manifest for outcome in outcomes if (manifest := _manifest(outcome))]
    lines = [f"{len(present)} of {len(outcomes)} present in {root}, after {seconds:.0f} s"]
    if present:
        largest = max(present, key=lambda manifest: manifest.cubin.size)
        total = sum(manifest.cubin.size for manifest in present)
        lines.append(
            f"cubins: {total / 1e6:.1f} MB, the largest {largest.cubin.size / 1e3:.1f} kB "
            f"({largest.config.name})"
        )
    return "\n".join(lines)
