"""mlakern plan: how a decode step would be cut into work. Needs no GPU and no numpy."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table

from mlakern.cli.axes import IntegerList, axis_options, config_from, given_axes
from mlakern.cli.common import ConfigName, emit_json, json_option, output
from mlakern.config import KernelConfig
from mlakern.division import choose_pack_q
from mlakern.planning import Plan
from mlakern.planning import plan as make_plan


@click.command()
@click.argument("config", required=False, type=ConfigName())
@axis_options
@click.option("--seq-lens", type=IntegerList(), help="Keys of each request.")
@click.option("--batch", type=int, help="Requests, with --max-seq-len instead of --seq-lens.")
@click.option("--max-seq-len", type=int, help="The longest request.")
@click.option("--heads", "num_heads", type=int, default=128, show_default=True)
@click.option("--seq-len-q", type=int, default=1, show_default=True, help="Query tokens.")
@click.option("--multiprocessors", type=int, default=148, show_default=True, help="148: B200.")
@click.option("--window-left", type=int, default=-1, help="Mask window: keys of history.")
@click.option("--splits", type=int, help="KV runs [the heuristic's].")
@click.option("--min-split-kv", type=int, help="Keys that a run at least has.")
@json_option
def plan(config: KernelConfig | None, as_json: bool, **options: Any) -> None:
    """Print splits, clusters, grids and workspace of a decode step.

    Without CONFIG, --pack-q or --no-pack-q the rows are packed if that takes fewer query tiles.
    """
    axes = given_axes(options)
    try:
        if config is None and "pack_q" not in axes:
            heads, tokens = options["num_heads"], options["seq_len_q"]
            axes["pack_q"] = choose_pack_q(heads, tokens, axes.get("tile_m", 128))
        made = make_plan(config_from(config, axes), **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        emit_json(made.as_dict())
    else:
        output.print(_table(made))


def _table(made: Plan) -> Table:
    table = Table("", "", title=made.config.name, show_header=False, title_justify="left")
    workspace = made.workspace
    rows = "packed" if made.config.pack_q else f"{made.fold} tokens folded"
    regions = f"LSEs at {workspace.partial_lse_offset}"
    if made.work_list_words:
        regions += f", work list at {workspace.work_list_offset}"
    grids = made.as_dict()["grids"]
    facts = {
        "requests": f"{made.batch}, up to {made.max_seq_len} keys",
        "query": f"{made.num_heads} heads, {made.seq_len_q} tokens",
        "query tiles": f"{made.query_tiles} of {made.config.tile_m} rows, {rows}",
        "splits": str(made.splits),
        "clusters": str(made.clusters),
        **{f"{role} grid": " × ".join(map(str, grid)) for role, grid in grids.items()},
        "workspace": f"{workspace.size} bytes, {regions}",
    }
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table
