"""What a cluster works on: its items one after another, and the CTA that works on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from mlakern import work_list
from mlakern.config import KEY_TILE, KernelConfig
from mlakern.kernels.arguments import Arguments
from mlakern.kernels.blackwell.layout import CTA_ROWS, WARP, AttentionLayout
from mlakern.kernels.device import arrive_remote, ceil_div, divmod_positive, wait
from mlakern.kernels.masks import Mask
from mlakern.kernels.splits import Runs

LEADER = 0


@dataclass(frozen=True)
class Cta:
    """One CTA: its layout, shared memory, rank in the cluster and the kernel's arguments."""

    layout: AttentionLayout
    args: Arguments
    shared: cutlass.Array  # uint8[layout.shared.size], 1024-byte aligned
    rank: Int32

    @property
    def config(self) -> KernelConfig:
        return self.layout.config

    @property
    def mask(self) -> Mask:
        return Mask(self.config.mask, self.args)

    def barrier(self, name: str, stage: Any = 0) -> cutlass.Array:
        return self.shared.subview(self.layout.shared.barrier(name) + 8 * stage)

    def wait(self, name: str, parity: Any, stage: Any = 0) -> None:
        wait(self.barrier(name, stage), parity)

    def arrive(self, name: str, stage: Any = 0) -> None:
        prims.mbarrier_arrive(self.barrier(name, stage))

    def arrive_leader(self, name: str, stage: Any = 0) -> None:
        """One arrival at the leader CTA's barrier, from any CTA."""
        if self.layout.operands.ctas == 1:
            self.arrive(name, stage)
        else:
            arrive_remote(self.barrier(name, stage), LEADER)

    def leads(self) -> Boolean:
        return Boolean(self.rank == LEADER)

    def expect_bytes(self, barrier: cutlass.Array, bytes_per_cta: int) -> None:
        """The leader's arrival at a barrier that counts the bytes of all CTAs."""
        _expect_bytes(self, barrier, bytes_per_cta)

    def floats(self, offset: int) -> cutlass.Pointer:
        """float32 pointer to this byte offset of shared memory."""
        return cutlass.Pointer(self.shared.data_ptr(offset).ir_value(), dtype=cutlass.Float32)

    def tmem_base(self) -> Int32:
        """Address of the allocated tensor memory; valid after the allocation was announced."""
        at = self.layout.shared.tmem_address
        return cutlass.Pointer(self.shared.data_ptr(at).ir_value(), dtype=Int32).load()


@cute.jit
def _expect_bytes(cta: Cta, barrier: cutlass.Array, bytes_per_cta: int) -> None:
    if cta.leads():
        prims.mbarrier_arrive_expect_tx(barrier, cta.layout.operands.ctas * bytes_per_cta)


@dataclass(frozen=True)
class Items:
    """The work items of this CTA's cluster: first, first + step, … below end."""

    first: Any
    end: Any
    step: Any

    @classmethod
    def of_cluster(cls, cta: Cta) -> Items:
        """Every role calls this and walks the same items."""
        args, schedule = cta.args, cta.config.schedule
        if schedule == "grid":
            return cls(0, 1, 1)
        x = cute.arch.block_idx()[0]
        cluster, _ = divmod_positive(x, Int32(cta.layout.operands.ctas))
        if schedule == "persistent":
            clusters, _ = divmod_positive(cute.arch.grid_dim()[0], Int32(cta.layout.operands.ctas))
            return cls(cluster, args.batch * args.query_tiles * args.splits, clusters)
        begins = args.work_list + cluster
        return cls(begins.load(), (begins + 1).load(), 1)


@dataclass(frozen=True)
class Work:
    """One work item: a run of `count` key tiles from `first`, for one query tile of one request.

    partial_row: of the item's first row among the partial results. final: the item stores the
    result itself. stores: it has something to store (trailing runs of a split have not).
    """

    query_tile: Int32
    request: Int32
    seq_len: Int32
    first: Int32
    count: Int32
    partial_row: Int64
    final: Boolean
    stores: Boolean

    @classmethod
    def of_item(cls, cta: Cta, index: Int32) -> Work:
        args, schedule = cta.args, cta.config.schedule
        if schedule == "work_list":
            return cls._listed(cta, index)
        if schedule == "grid":
            x, split, request = cute.arch.block_idx()
            query_tile, _ = divmod_positive(x, Int32(cta.layout.operands.ctas))
            return cls._of_split(cta, request, query_tile, split)
        # Query tiles of a run are neighbours: they read the same pages at the same time.
        rest, query_tile = divmod_positive(index, args.query_tiles)
        request, split = divmod_positive(rest, args.splits)
        return cls._of_split(cta, request, query_tile, split)

    @classmethod
    def _of_split(cls, cta: Cta, request: Int32, query_tile: Int32, split: Int32) -> Work:
        args = cta.args
        runs = Runs.of_request(cta.mask, args, request)
        skipped = runs.per_run * split
        count = cutlass.max(cutlass.min(runs.per_run, runs.tiles - skipped), 0)
        final = runs.count <= 1
        slot = (request * args.query_tiles + query_tile) * args.splits + split
        return cls(
            query_tile,
            request,
            (args.seq_lens + request).load(),
            runs.first_tile + skipped,
            count,
            Int64(slot) * args.tile_rows,
            Boolean(final),
            Boolean((count > 0) | (final & (split == 0))),
        )

    @classmethod
    def _listed(cls, cta: Cta, index: Int32) -> Work:
        args = cta.args
        units = args.batch * args.query_tiles
        at = work_list.items_offset(args.clusters, units) + index * work_list.ITEM_WORDS
        query_tile, request, first, count, slot = (
            (args.work_list + (at + word)).load() for word in range(5)
        )
        return cls(
            query_tile,
            request,
            (args.seq_lens + request).load(),
            first,
            count,
            Int64(slot) * args.tile_rows,
            Boolean(slot == work_list.FINAL),
            Boolean(True),
        )

    @property
    def has_tail(self) -> Boolean:
        """Whether the run ends in a tile that the request fills only in part."""
        return Boolean((self.count > 0) & (self.key_end < KEY_TILE))

    @property
    def key_end(self) -> Int32:
        """Keys of the run's last tile; more than a tile's where the request goes on."""
        return self.seq_len - (self.first + self.count - 1) * KEY_TILE

    def page_count(self, page_size: int) -> Int32:
        """Pages of the request that hold keys."""
        return ceil_div(self.seq_len, page_size)


@dataclass(frozen=True)
class Row:
    """A query row: its token and head, and whether it exists (padding rows do not).

    in_tile: its index among the tile's rows.
    """

    token: Int32
    head: Int32
    in_tile: Int32
    exists: Any

    @classmethod
    def of(cls, cta: Cta, work: Work, row: Int32) -> Row:
        """The row `row` (0 to 63) of this CTA."""
        args = cta.args
        in_tile = cta.rank * CTA_ROWS + row
        position = work.query_tile * args.tile_rows + in_tile
        token, head = divmod_positive(position, args.num_heads)
        exists = (in_tile < args.tile_rows) & (token < args.seq_len_q)
        return cls(token, head, in_tile, exists)

    def index(self, args: Arguments, request: Int32) -> Int64:
        """Position in [B, Sq, H], in 64 bits."""
        return (Int64(request) * args.seq_len_q + self.token) * args.num_heads + self.head


def lane_index() -> Int32:
    return Int32(cute.arch.lane_idx())


def warp_in_group() -> Int32:
    """Index of this warp in its warpgroup: the quarter of tensor memory lanes it can reach."""
    return cute.arch.make_warp_uniform(Int32(cute.arch.thread_idx()[0]) // WARP) & 3


def ring(turn: Int32, stages: int) -> tuple[Int32, Int32]:
    """(stage, parity of its use) of the `turn`-th use of a ring of stages, counted from 0."""
    if stages & (stages - 1) == 0:
        shift = stages.bit_length() - 1
        return turn & (stages - 1), (turn >> shift) & 1
    lap, stage = divmod_positive(turn, Int32(stages))
    return stage, lap & 1
