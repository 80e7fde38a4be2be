"""mlakern prune."""

from __future__ import annotations

from pathlib import Path

import click

from mlakern.build.publish import StoreWriter
from mlakern.cli.common import ExitCode, emit_json, json_option, output, stop
from mlakern.store import user_cache


@click.command()
@click.option(
    "--store",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Store folder [user cache].",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def prune(store: Path | None, yes: bool, as_json: bool) -> None:
    """Remove what can serve no more from one store folder.

    That is: entries of other kernel sources, damaged ones, leftovers of builds that were killed.
    """
    if as_json and not yes:
        raise click.UsageError("--json does not ask; add --yes")
    cache = user_cache()
    root = store or (cache.path if cache else None)
    if root is None:
        stop(ExitCode.UNAVAILABLE, "no user cache folder here; try --store or $MLAKERN_CACHE_DIR")
    writer = StoreWriter(root)
    garbage = writer.garbage()
    if not as_json:
        for item in garbage:
            output.print(f"{item.path}: {item.reason}", markup=False)
        output.print(f"{len(garbage)} to remove in {root}", markup=False)
        if garbage and not (yes or click.confirm("Remove them?")):
            return
    writer.remove(garbage)
    if as_json:
        removed = [{"path": str(item.path), "reason": item.reason} for item in garbage]
        emit_json({"store": str(root), "removed": removed})
