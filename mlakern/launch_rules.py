"""The plan as expressions, for the manifest: what a launcher in another language evaluates.

The expressions use the names of the arguments (mlakern.signature, with their meanings), `fold` (the
launcher's choice: a divisor of seq_len_q with fold * num_heads <= tile_m) and `multiprocessors`.
"""

from __future__ import annotations

from mlakern.config import LATENT_DIM, KernelConfig
from mlakern.division import CTAS_PER_TILE
from mlakern.manifest import Region, Workspace
from mlakern.planning import MAX_LIST_CLUSTERS, PARTIAL_BYTES, WORKSPACE_ALIGNMENT
from mlakern.work_list import ITEM_WORDS


def derived_rules(config: KernelConfig) -> dict[str, str]:
    """Arguments that follow from others."""
    rows = "num_heads * seq_len_q"
    rules = {"query_tiles": "seq_len_q // fold", "tile_rows": "fold * num_heads"}
    if config.pack_q:
        rules = {
            "query_tiles": f"({rows} + {config.tile_m - 1}) // {config.tile_m}",
            "tile_rows": f"min({config.tile_m}, {rows})",
        }
    resident = f"max(1, multiprocessors // {CTAS_PER_TILE[config.tile_m]})"
    if config.schedule == "persistent":
        rules["clusters"] = f"min(batch * query_tiles * splits, {resident})"
    if config.schedule == "work_list":
        rules["clusters"] = f"min({MAX_LIST_CLUSTERS}, {resident})"
    return rules


def grid_rules(config: KernelConfig) -> dict[str, tuple[str, str, str]]:
    """Plan.grid for each role."""
    ctas = CTAS_PER_TILE[config.tile_m]
    if config.schedule == "grid":
        attention = (f"{ctas} * query_tiles", "splits", "batch")
    else:
        attention = (f"{ctas} * clusters", "1", "1")
    combine = ("seq_len_q * num_heads", "batch")
    return {
        "planner": ("1", "1", "1"),
        "attention": attention,
        "combine": (*combine, "1"),
        "combine_bands2": (*combine, "2"),
    }


def launch_conditions(config: KernelConfig) -> dict[str, str]:
    """When the kernel of each role is launched; the planner only without a list of the caller's."""
    divided = "clusters > 1" if config.schedule == "work_list" else "splits > 1"
    rows = "batch * seq_len_q * num_heads"
    return {
        "planner": "True",
        "attention": "True",
        "combine": f"{divided} and {rows} >= multiprocessors",
        "combine_bands2": f"{divided} and {rows} < multiprocessors",
    }


def workspace_rule(config: KernelConfig) -> Workspace:
    """planning.workspace_layout for each plan of the configuration."""
    slots = "batch * query_tiles * splits * (splits > 1)"
    if config.schedule == "work_list":
        slots = "2 * (clusters - 1)"
    rows = f"{slots} * tile_rows"
    lse = _aligned(f"{rows} * {LATENT_DIM * PARTIAL_BYTES[config.partial_dtype]}")
    end = _aligned(f"{lse} + {rows} * 4")
    regions = (
        Region("partial_out", config.partial_dtype, (slots, "tile_rows", str(LATENT_DIM)), "0"),
        Region("partial_lse", "float32", (slots, "tile_rows"), lse),
    )
    if config.schedule != "work_list":
        return Workspace(regions, end, WORKSPACE_ALIGNMENT)
    units = "batch * query_tiles"
    items = f"(clusters + {ITEM_WORDS} + 2 * {units}) // {ITEM_WORDS} * {ITEM_WORDS}"
    words = f"({items} + {ITEM_WORDS} * ({units} + clusters - 1))"
    listed = Region("work_list", "int32", (words,), end)
    return Workspace((*regions, listed), _aligned(f"{end} + {words} * 4"), WORKSPACE_ALIGNMENT)


def _aligned(expression: str) -> str:
    """The expression rounded up to the workspace's alignment."""
    align = WORKSPACE_ALIGNMENT
    return f"({expression} + {align - 1}) // {align} * {align}"
