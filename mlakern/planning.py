"""How a decode call is cut into work: query tiles, KV runs, workspace and grids.

Pure functions of the shapes and the number of multiprocessors. The device code follows the same
rules (tiles, runs, workspace layout); the runtime launches with exactly these numbers.

Requests of K keys have ceil(K / 128) key tiles. With `splits` runs, run s covers `per =
ceil(tiles / splits)` tiles from s * per; each run leaves one partial result in the workspace and
the combine kernel merges them. One split writes the final result and needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlakern.config import (
    KEY_TILE,
    LATENT_DIM,
    MAX_HEADS,
    MAX_SEQ_LEN_Q,
    MAX_SPLITS,
    KernelConfig,
)
from mlakern.manifest import Dim3, Region
from mlakern.manifest import Workspace as WorkspaceRule
from mlakern.numerics import MAX_P_LOG2

CTAS_PER_TILE = {64: 1, 128: 2}
# More runs than this cost more in the combine kernel than they gain.
MAX_HEURISTIC_SPLITS = {64: 64, 128: 32}
PARTIAL_BYTES = {"float32": 4, "float16": 2}
WORKSPACE_ALIGNMENT = 256
MAX_BATCH = 65535  # gridDim.z
MAX_MULTIPROCESSORS = 2**16  # far above any device; catches swapped arguments
MAX_SEQ_LEN = 2**31 - KEY_TILE  # key positions are int32, rounded up to tiles

# Inclusive ranges of the bounded run-time values.
LIMITS: Mapping[str, tuple[float, float]] = {
    "batch": (1, MAX_BATCH),
    "num_heads": (1, MAX_HEADS),
    "seq_len_q": (1, MAX_SEQ_LEN_Q),
    "seq_lens": (0, MAX_SEQ_LEN),
    "splits": (1, MAX_SPLITS),
    "rescale_threshold + p_prescale_log2": (0, MAX_P_LOG2),
}


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


def fold_factor(num_heads: int, seq_len_q: int, tile_m: int) -> int:
    """Query tokens of one folded tile: the largest divisor F of seq_len_q with F*H <= tile_m.

    One token always fits a tile of 128 rows; H > 64 does not fit tile_m 64 (ValueError).
    """
    if num_heads > tile_m:
        raise ValueError(
            f"num_heads: got {num_heads} with tile_m {tile_m} and folded rows, need <= {tile_m}; "
            "try tile_m 128"
        )
    return max(f for f in range(1, seq_len_q + 1) if seq_len_q % f == 0 and f * num_heads <= tile_m)


def query_tile_count(num_heads: int, seq_len_q: int, tile_m: int, pack_q: bool) -> int:
    """Query tiles of one request."""
    if pack_q:
        return ceil_div(num_heads * seq_len_q, tile_m)
    return seq_len_q // fold_factor(num_heads, seq_len_q, tile_m)


def choose_pack_q(num_heads: int, seq_len_q: int, tile_m: int = 128) -> bool:
    """Whether packed rows take fewer query tiles than folded ones (else folded: any strides)."""
    _check_range("num_heads", num_heads, 1, MAX_HEADS)
    _check_range("seq_len_q", seq_len_q, 1, MAX_SEQ_LEN_Q)
    if num_heads > tile_m:
        return True  # not even one token can be folded
    packed = query_tile_count(num_heads, seq_len_q, tile_m, pack_q=True)
    return packed < query_tile_count(num_heads, seq_len_q, tile_m, pack_q=False)


def run_tiles(tiles: int, splits: int, split: int) -> range:
    """The key tiles of run `split`; empty for a trailing run that has none left."""
    per = ceil_div(tiles, splits)
    return range(min(split * per, tiles), min((split + 1) * per, tiles))


def most_splits(
    max_seq_len: int, batch: int, query_tiles: int, multiprocessors: int, tile_m: int = 128
) -> int:
    """The most runs the heuristic gives to a request of up to max_seq_len keys.

    `room` counts query tiles with all their CTAs (a cluster), so that the runs of the whole batch
    are resident at once.
    """
    tiles = max(1, ceil_div(max_seq_len, KEY_TILE))
    room = max(1, multiprocessors // batch // (query_tiles * CTAS_PER_TILE[tile_m]))
    return min(tiles, room, MAX_HEURISTIC_SPLITS[tile_m])


def heuristic_splits(
    max_seq_len: int,
    batch: int,
    query_tiles: int,
    multiprocessors: int,
    tile_m: int = 128,
    min_split_kv: int | None = None,
) -> int:
    """Runs that fill the multiprocessors in one wave, with no trailing run empty at max_seq_len.

    min_split_kv: keys that each run but the last must at least have.
    """
    tiles = max(1, ceil_div(max_seq_len, KEY_TILE))
    wanted = most_splits(max_seq_len, batch, query_tiles, multiprocessors, tile_m)
    per = max(ceil_div(tiles, wanted), ceil_div(min_split_kv or 1, KEY_TILE))
    return ceil_div(tiles, per)


@dataclass(frozen=True)
class Workspace:
    """Where the partial results lie, in bytes from the start of the caller's buffer."""

    partial_out_offset: int
    partial_lse_offset: int
    size: int


def workspace_layout(rows: int, splits: int, partial_dtype: str) -> Workspace:
    """The layout for rows = batch * seq_len_q * num_heads output rows; one split needs none."""
    if splits == 1:
        return Workspace(0, 0, 0)
    partials = rows * splits
    lse_offset = round_up(partials * LATENT_DIM * PARTIAL_BYTES[partial_dtype], WORKSPACE_ALIGNMENT)
    return Workspace(0, lse_offset, round_up(lse_offset + partials * 4, WORKSPACE_ALIGNMENT))


@dataclass(frozen=True)
class Plan:
    """The launch-time division of one decode shape; see :func:`plan`.

    fold: query tokens of a folded tile (0 with packed rows). query_tiles: for each request.
    """

    config: KernelConfig
    batch: int
    max_seq_len: int
    num_heads: int
    seq_len_q: int
    fold: int
    query_tiles: int
    splits: int
    workspace: Workspace

    @property
    def workspace_size(self) -> int:
        """Bytes that the workspace needs for this plan."""
        return self.workspace.size

    @property
    def attention_grid(self) -> Dim3:
        ctas = CTAS_PER_TILE[self.config.tile_m] * self.query_tiles
        return (ctas, self.splits, self.batch)

    @property
    def combine_grid(self) -> Dim3 | None:
        """None: one split, nothing to combine."""
        if self.splits == 1:
            return None
        return (self.seq_len_q * self.num_heads, self.batch, 1)

    def grid(self, role: str) -> Dim3 | None:
        """The grid of the kernel with this role ("attention" or "combine"); None: not launched."""
        return {"attention": self.attention_grid, "combine": self.combine_grid}[role]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready facts of the plan."""
        return {
            "config": self.config.name,
            "batch": self.batch,
            "max_seq_len": self.max_seq_len,
            "num_heads": self.num_heads,
            "seq_len_q": self.seq_len_q,
            "fold": self.fold,
            "query_tiles": self.query_tiles,
            "splits": self.splits,
            "workspace": {
                "partial_out_offset": self.workspace.partial_out_offset,
                "partial_lse_offset": self.workspace.partial_lse_offset,
                "size": self.workspace.size,
            },
            "attention_grid": list(self.attention_grid),
            "combine_grid": list(self.combine_grid) if self.combine_grid else None,
        }


def plan(
    config: KernelConfig,
    seq_lens: Sequence[int] | None = None,
    *,
    num_heads: int,
    multiprocessors: int,
    seq_len_q: int = 1,
    batch: int | None = None,
    max_seq_len: int | None = None,
    splits: int | None = None,
    min_split_kv: int | None = None,
    fold: int | None = None,
) -> Plan:
    """Plan a decode of `seq_lens` (host integers), or of `batch` requests up to `max_seq_len`.

    A plan made for max_seq_len stays right for any shorter lengths: a replayed CUDA graph may
    change them in place. splits: a fixed count (1 to 256) instead of the heuristic. fold: query
    tokens of a folded tile instead of as many as fit; packed rows have none.

    Raises ValueError that names the argument, what it got and what it needs.
    """
    if seq_lens is not None:
        batch, max_seq_len = _shape_of(seq_lens, batch, max_seq_len)
    if batch is None or max_seq_len is None:
        raise ValueError("seq_lens: got none, need host lengths, or batch= and max_seq_len=")
    _check_range("batch", batch, 1, MAX_BATCH)
    _check_shape(max_seq_len, num_heads, seq_len_q, multiprocessors)
    if min_split_kv is not None:
        _check_range("min_split_kv", min_split_kv, 1, MAX_SEQ_LEN)
    if config.pack_q:
        if fold is not None:
            raise ValueError(f"fold: got {fold} with packed rows, need folded ones")
        fold, query_tiles = 0, ceil_div(num_heads * seq_len_q, config.tile_m)
    else:
        largest = fold_factor(num_heads, seq_len_q, config.tile_m)
        fold = largest if fold is None else fold
        if not 1 <= fold <= largest or seq_len_q % fold:
            raise ValueError(
                f"fold: got {fold}, need a divisor of seq_len_q {seq_len_q} up to {largest}"
            )
        query_tiles = seq_len_q // fold
    if splits is None:
        splits = heuristic_splits(
            max_seq_len, batch, query_tiles, multiprocessors, config.tile_m, min_split_kv
        )
    _check_range("splits", splits, 1, MAX_SPLITS)
    return Plan(
        config=config,
        batch=batch,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        seq_len_q=seq_len_q,
        fold=fold,
        query_tiles=query_tiles,
        splits=splits,
        workspace=workspace_layout(batch * seq_len_q * num_heads, splits, config.partial_dtype),
    )


def grid_rules(config: KernelConfig) -> dict[str, tuple[str, str, str]]:
    """Plan.grid for each role as expressions of argument names, for the manifest.

    Combine is launched only when splits > 1.
    """
    rows = f"(num_heads * seq_len_q + {config.tile_m - 1}) // {config.tile_m}"
    tiles = rows if config.pack_q else "seq_len_q // fold"
    return {
        "attention": (f"{CTAS_PER_TILE[config.tile_m]} * ({tiles})", "splits", "batch"),
        "combine": ("seq_len_q * num_heads", "batch", "1"),
    }


def workspace_rule(config: KernelConfig) -> WorkspaceRule:
    """workspace_layout as expressions of argument names, for the manifest."""
    partials = ("batch", "seq_len_q", "num_heads", "splits")
    count = " * ".join(partials)
    align = WORKSPACE_ALIGNMENT
    out_bytes = f"{count} * {LATENT_DIM * PARTIAL_BYTES[config.partial_dtype]}"
    lse_offset = f"({out_bytes} + {align - 1}) // {align} * {align}"
    size = f"({lse_offset} + {count} * 4 + {align - 1}) // {align} * {align} * (splits > 1)"
    regions = (
        Region("partial_out", config.partial_dtype, (*partials, str(LATENT_DIM)), "0"),
        Region("partial_lse", "float32", partials, lse_offset),
    )
    return WorkspaceRule(regions, size, align)


def workspace_bound(
    config: KernelConfig,
    *,
    max_batch: int,
    max_seq_len: int,
    num_heads: int,
    multiprocessors: int,
    seq_len_q: int = 1,
) -> int:
    """Bytes that suffice for every plan of up to max_batch requests of up to max_seq_len keys.

    A small batch is split more than a large one and may need more than the largest batch does, so
    an engine that allocates once asks for this. Holds for the heuristic's splits.
    """
    _check_range("max_batch", max_batch, 1, MAX_BATCH)
    _check_shape(max_seq_len, num_heads, seq_len_q, multiprocessors)
    query_tiles = query_tile_count(num_heads, seq_len_q, config.tile_m, config.pack_q)
    largest = 0
    # With more requests than multiprocessors nothing is split.
    for batch in range(1, min(max_batch, multiprocessors) + 1):
        splits = most_splits(max_seq_len, batch, query_tiles, multiprocessors, config.tile_m)
        rows = batch * seq_len_q * num_heads
        largest = max(largest, workspace_layout(rows, splits, config.partial_dtype).size)
    return largest


def _shape_of(
    seq_lens: Sequence[int], batch: int | None, max_seq_len: int | None
) -> tuple[int, int]:
    lengths = [int(length) for length in seq_lens]
    if not lengths:
        raise ValueError("seq_lens: got no request, need at least one")
    if min(lengths) < 0:
        raise ValueError(f"seq_lens: got {min(lengths)}, need >= 0")
    if batch is not None and batch != len(lengths):
        raise ValueError(f"batch: got {batch} with {len(lengths)} seq_lens, need them equal")
    if max_seq_len is not None and max_seq_len < max(lengths):
        raise ValueError(
            f"max_seq_len: got {max_seq_len}, need >= {max(lengths)}, the longest of seq_lens"
        )
    return len(lengths), max(lengths) if max_seq_len is None else max_seq_len


def _check_shape(max_seq_len: int, num_heads: int, seq_len_q: int, multiprocessors: int) -> None:
    _check_range("max_seq_len", max_seq_len, 0, MAX_SEQ_LEN)
    _check_range("num_heads", num_heads, 1, MAX_HEADS)
    _check_range("seq_len_q", seq_len_q, 1, MAX_SEQ_LEN_Q)
    _check_range("multiprocessors", multiprocessors, 1, MAX_MULTIPROCESSORS)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, need an integer from {low} to {high}")
