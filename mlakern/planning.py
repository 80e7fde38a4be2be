"""How a decode call is launched: grids, clusters, workspace and work list.

Pure functions of the shapes and the number of multiprocessors. The device code follows the same
rules (mlakern.division, mlakern.masks, mlakern.work_list); the runtime launches with exactly these
numbers and the manifest states them as expressions (mlakern.launch_rules).

Schedules "grid" and "persistent" divide each request's key tiles into `splits` runs, or into as
many as the caller asks for each request; "work_list" gives each cluster an even share of all tiles.
Each run leaves a partial result in the workspace and the combine kernel merges them; a request of
one run has its final result already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlakern import work_list
from mlakern.config import LATENT_DIM, MAX_HEADS, MAX_SEQ_LEN_Q, MAX_SPLITS, KernelConfig
from mlakern.division import (
    CTAS_PER_TILE,
    Division,
    ceil_div,
    fold_factor,
    heuristic_splits,
    most_key_tiles,
    most_splits,
    query_tile_count,
    round_up,
)
from mlakern.limits import (
    MAX_BATCH,
    MAX_LISTED_TILES,
    MAX_MULTIPROCESSORS,
    MAX_SEQ_LEN,
    check_range,
)
from mlakern.manifest import Dim3
from mlakern.masks import Mask

PARTIAL_BYTES = {"float32": 4, "float16": 2}
WORKSPACE_ALIGNMENT = 256
# A unit has at most a partial for each cluster, and the combine kernel merges at most MAX_SPLITS.
MAX_LIST_CLUSTERS = MAX_SPLITS - 1


@dataclass(frozen=True)
class Workspace:
    """Where the arrays lie, in bytes from the start of the caller's buffer; see Plan."""

    partial_out_offset: int
    partial_lse_offset: int
    work_list_offset: int
    size: int


def workspace_layout(
    slots: int, tile_rows: int, partial_dtype: str, list_words: int = 0
) -> Workspace:
    """partial_out [slots, tile_rows, 512], partial_lse [slots, tile_rows], then the work list."""
    rows = slots * tile_rows
    lse = round_up(rows * LATENT_DIM * PARTIAL_BYTES[partial_dtype], WORKSPACE_ALIGNMENT)
    words = round_up(lse + rows * 4, WORKSPACE_ALIGNMENT)
    return Workspace(0, lse, words, round_up(words + list_words * 4, WORKSPACE_ALIGNMENT))


@dataclass(frozen=True)
class Plan:
    """The launch-time division of one decode shape; see :func:`plan`.

    window_left: of the window mask, else -1. fold: query tokens of a folded tile (0 with packed
    rows). query_tiles: for each request. splits: runs of each request, or the most of any; 1 with a
    work list. clusters: of the attention grid.
    """

    config: KernelConfig
    batch: int
    max_seq_len: int
    num_heads: int
    seq_len_q: int
    window_left: int
    multiprocessors: int
    fold: int
    query_tiles: int
    splits: int
    clusters: int

    @property
    def tile_rows(self) -> int:
        """Rows of a query tile that exist; only the last packed tile may have fewer."""
        if self.config.pack_q:
            return min(self.config.tile_m, self.seq_len_q * self.num_heads)
        return self.fold * self.num_heads

    @property
    def units(self) -> int:
        """Query tiles of all requests."""
        return self.batch * self.query_tiles

    @property
    def slots(self) -> int:
        """Partial results that the workspace holds, each of tile_rows rows."""
        if self.config.schedule == "work_list":
            return work_list.most_slots(self.clusters)
        return self.units * self.splits if self.splits > 1 else 0

    @property
    def work_list_words(self) -> int:
        """int32 words of the work list; 0 for the other schedules."""
        if self.config.schedule != "work_list":
            return 0
        return work_list.size_words(self.clusters, self.units)

    @property
    def workspace(self) -> Workspace:
        return workspace_layout(
            self.slots, self.tile_rows, self.config.partial_dtype, self.work_list_words
        )

    @property
    def workspace_size(self) -> int:
        """Bytes that the workspace needs for this plan."""
        return self.workspace.size

    @property
    def attention_grid(self) -> Dim3:
        ctas = CTAS_PER_TILE[self.config.tile_m]
        if self.config.schedule == "grid":
            return (ctas * self.query_tiles, self.splits, self.batch)
        return (ctas * self.clusters, 1, 1)

    @property
    def combine_bands(self) -> int:
        """CTAs of each output row in the combine kernel, which few rows would leave idle.

        0: every request has its final result from the attention kernel.
        """
        if self.slots == 0:
            return 0
        return 2 if self.batch * self.seq_len_q * self.num_heads < self.multiprocessors else 1

    def grid(self, role: str) -> Dim3 | None:
        """The grid of the kernel with this role (mlakern.signature); None: not launched."""
        rows = self.seq_len_q * self.num_heads
        grids: dict[str, Dim3 | None] = {
            "planner": (1, 1, 1) if self.config.schedule == "work_list" else None,
            "attention": self.attention_grid,
            "combine": (rows, self.batch, 1) if self.combine_bands == 1 else None,
            "combine_bands2": (rows, self.batch, 2) if self.combine_bands == 2 else None,
        }
        return grids[role]

    def work_list(self, seq_lens: Sequence[int]) -> list[int]:
        """The work list of these lengths as int32 words, for a caller who plans on the host."""
        tiles = self._key_tiles(seq_lens)
        return work_list.build(
            [of_request.start for of_request in tiles],
            [len(of_request) for of_request in tiles],
            self.query_tiles,
            self.clusters,
        )

    def division(
        self, seq_lens: Sequence[int], block_split_kvs: Sequence[int] | None = None
    ) -> Division:
        """The runs of these lengths; block_split_kvs: a number of splits for each request."""
        tiles = self._key_tiles(seq_lens)
        if self.config.schedule == "work_list":
            words = self.work_list(seq_lens)
            runs = work_list.runs(words, self.batch, self.query_tiles, self.clusters)
            return Division(self.tile_rows, runs)
        wanted = [self.splits] * self.batch if block_split_kvs is None else block_split_kvs
        splits = [min(max(count, 1), self.splits) for count in wanted]
        return Division.even(tiles, splits, self.query_tiles, self.tile_rows)

    def even_splits(self, seq_lens: Sequence[int]) -> list[int]:
        """Splits for each request (block_split_kvs) that make runs of all requests alike long.

        The longest request gets all of the plan's splits, the others no longer runs than that.
        """
        tiles = [len(of_request) for of_request in self._key_tiles(seq_lens)]
        per = max(1, ceil_div(max(tiles), self.splits))
        return [max(1, ceil_div(count, per)) for count in tiles]

    def _key_tiles(self, seq_lens: Sequence[int]) -> list[range]:
        batch, longest = _shape_of(seq_lens)
        if batch != self.batch or longest > self.max_seq_len:
            raise ValueError(
                f"seq_lens: got {batch} up to {longest}, need {self.batch} up to the plan's "
                f"max_seq_len {self.max_seq_len}"
            )
        mask = Mask(self.config.mask, window_left=self.window_left)
        return [mask.key_tiles(int(length), self.seq_len_q) for length in seq_lens]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready facts of the plan."""
        workspace = self.workspace
        return {
            "config": self.config.name,
            "batch": self.batch,
            "max_seq_len": self.max_seq_len,
            "num_heads": self.num_heads,
            "seq_len_q": self.seq_len_q,
            "window_left": self.window_left,
            "multiprocessors": self.multiprocessors,
            "fold": self.fold,
            "query_tiles": self.query_tiles,
            "tile_rows": self.tile_rows,
            "splits": self.splits,
            "clusters": self.clusters,
            "workspace": {
                "partial_out_offset": workspace.partial_out_offset,
                "partial_lse_offset": workspace.partial_lse_offset,
                "work_list_offset": workspace.work_list_offset,
                "size": workspace.size,
            },
            "grids": {
                role: list(grid)
                for role in ("planner", "attention", "combine", "combine_bands2")
                if (grid := self.grid(role)) is not None
            },
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
    window_left: int = -1,
    splits: int | None = None,
    min_split_kv: int | None = None,
    fold: int | None = None,
) -> Plan:
    """Plan a decode of `seq_lens` (host integers), or of `batch` requests up to `max_seq_len`.

    A plan made for max_seq_len stays right for any shorter lengths: a replayed CUDA graph may
    change them in place. window_left: of mask window, the same as in the call. splits: a fixed
    count (1 to 256) instead of the heuristic. fold: query tokens of a folded tile instead of as
    many as fit; packed rows have none.

    Raises ValueError that names the argument, what it got and what it needs.
    """
    if seq_lens is not None:
        batch, max_seq_len = _agreed(_shape_of(seq_lens), batch, max_seq_len)
    if batch is None or max_seq_len is None:
        raise ValueError("seq_lens: got none, need host lengths, or batch= and max_seq_len=")
    check_range("batch", batch, 1, MAX_BATCH)
    _check_shape(max_seq_len, num_heads, seq_len_q, multiprocessors)
    Mask(config.mask, window_left=window_left).check_tokens(seq_len_q)
    fold, query_tiles = _query_tiles(config, num_heads, seq_len_q, fold)
    tiles = most_key_tiles(max_seq_len, seq_len_q, window_left)
    resident = max(1, multiprocessors // CTAS_PER_TILE[config.tile_m])
    if config.schedule == "work_list":
        _check_listed(batch * query_tiles * tiles, splits, min_split_kv)
        splits, clusters = 1, min(resident, MAX_LIST_CLUSTERS)
    else:
        if min_split_kv is not None:
            check_range("min_split_kv", min_split_kv, 1, MAX_SEQ_LEN)
        if splits is None:
            splits = heuristic_splits(
                tiles, batch, query_tiles, multiprocessors, config.tile_m, min_split_kv
            )
        check_range("splits", splits, 1, MAX_SPLITS)
        items = batch * query_tiles * splits
        clusters = min(items, resident) if config.schedule == "persistent" else items
    return Plan(
        config=config,
        batch=batch,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        seq_len_q=seq_len_q,
        window_left=window_left,
        multiprocessors=multiprocessors,
        fold=fold,
        query_tiles=query_tiles,
        splits=splits,
        clusters=clusters,
    )


def workspace_bound(
    config: KernelConfig,
    *,
    max_batch: int,
    max_seq_len: int,
    num_heads: int,
    multiprocessors: int,
    seq_len_q: int = 1,
    window_left: int = -1,
) -> int:
    """Bytes that suffice for every plan of up to max_batch requests of up to max_seq_len keys.

    A small batch is split more than a large one and may need more than the largest batch does, so
    an engine that allocates once asks for this. Holds for the heuristic's splits.
    """
    check_range("max_batch", max_batch, 1, MAX_BATCH)
    shape: dict[str, Any] = {
        "num_heads": num_heads,
        "seq_len_q": seq_len_q,
        "multiprocessors": multiprocessors,
        "window_left": window_left,
        "max_seq_len": max_seq_len,
    }
    largest = plan(config, batch=max_batch, **shape)
    if config.schedule == "work_list":
        return largest.workspace_size  # grows with the batch
    tiles = most_key_tiles(max_seq_len, seq_len_q, window_left)
    size = 0
    # With more requests than multiprocessors nothing is split.
    for batch in range(1, min(max_batch, multiprocessors) + 1):
        splits = most_splits(tiles, batch, largest.query_tiles, multiprocessors, config.tile_m)
        size = max(size, plan(config, batch=batch, splits=splits, **shape).workspace_size)
    return size


def _query_tiles(
    config: KernelConfig, num_heads: int, seq_len_q: int, fold: int | None
) -> tuple[int, int]:
    """(fold, query tiles of a request)."""
    if config.pack_q:
        if fold is not None:
            raise ValueError(f"fold: got {fold} with packed rows, need folded ones")
        return 0, query_tile_count(num_heads, seq_len_q, config.tile_m, pack_q=True)
    largest = fold_factor(num_heads, seq_len_q, config.tile_m)
    fold = largest if fold is None else fold
    if not 1 <= fold <= largest or seq_len_q % fold:
        raise ValueError(
            f"fold: got {fold}, need a divisor of seq_len_q {seq_len_q} up to {largest}"
        )
    return fold, seq_len_q // fold


def _check_listed(tiles: int, splits: int | None, min_split_kv: int | None) -> None:
    for name, value in (("splits", splits), ("min_split_kv", min_split_kv)):
        if value is not None:
            raise ValueError(f"{name}: got {value} with schedule work_list, which needs none")
    if tiles > MAX_LISTED_TILES:
        raise ValueError(
            f"max_seq_len: got {tiles} key tiles over all query tiles, need <= {MAX_LISTED_TILES} "
            "for schedule work_list; try schedule grid"
        )


def _shape_of(seq_lens: Sequence[int]) -> tuple[int, int]:
    """(number of requests, the longest)."""
    lengths = [int(length) for length in seq_lens]
    if not lengths:
        raise ValueError("seq_lens: got no request, need at least one")
    if min(lengths) < 0:
        raise ValueError(f"seq_lens: got {min(lengths)}, need >= 0")
    return len(lengths), max(lengths)


def _agreed(shape: tuple[int, int], batch: int | None, max_seq_len: int | None) -> tuple[int, int]:
    """Batch and max_seq_len of the given lengths, in agreement with what was given beside them."""
    count, longest = shape
    if batch is not None and batch != count:
        raise ValueError(f"batch: got {batch} with {count} seq_lens, need them equal")
    if max_seq_len is not None and max_seq_len < longest:
        raise ValueError(
            f"max_seq_len: got {max_seq_len}, need >= {longest}, the longest of seq_lens"
        )
    return count, longest if max_seq_len is None else max_seq_len


def _check_shape(max_seq_len: int, num_heads: int, seq_len_q: int, multiprocessors: int) -> None:
    check_range("max_seq_len", max_seq_len, 0, MAX_SEQ_LEN)
    check_range("num_heads", num_heads, 1, MAX_HEADS)
    check_range("seq_len_q", seq_len_q, 1, MAX_SEQ_LEN_Q)
    check_range("multiprocessors", multiprocessors, 1, MAX_MULTIPROCESSORS)
