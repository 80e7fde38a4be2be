"""What one cluster works on, and what every role needs to know of its CTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental import primitives as prims

from mlakern.kernels.arguments import Arguments
from mlakern.kernels.blackwell.layout import CTA_PAIR, CTA_ROWS, WARP, AttentionLayout
from mlakern.kernels.device import arrive_remote, divmod_positive, wait
from mlakern.kernels.splits import key_tiles, tiles_per_run

LEADER = 0


@dataclass(frozen=True)
class Cta:
    """One CTA of the pair: its layout, shared memory, rank and the kernel's arguments."""

    layout: AttentionLayout
    args: Arguments
    shared: cutlass.Array  # uint8[layout.shared.size], 1024-byte aligned
    rank: Int32

    def barrier(self, name: str, stage: Any = 0) -> cutlass.Array:
        return self.shared.subview(self.layout.shared.barrier(name) + 8 * stage)

    def wait(self, name: str, parity: Any, stage: Any = 0) -> None:
        wait(self.barrier(name, stage), parity)

    def arrive(self, name: str, stage: Any = 0) -> None:
        prims.mbarrier_arrive(self.barrier(name, stage))

    def arrive_leader(self, name: str, stage: Any = 0) -> None:
        """One arrival at the leader CTA's barrier, from either CTA."""
        arrive_remote(self.barrier(name, stage), LEADER)

    def floats(self, offset: int) -> cutlass.Pointer:
        """float32 pointer to this byte offset of shared memory."""
        return cutlass.Pointer(self.shared.data_ptr(offset).ir_value(), dtype=cutlass.Float32)

    def tmem_base(self) -> Int32:
        """Address of the allocated tensor memory; valid after the allocation was announced."""
        at = self.layout.shared.tmem_address
        return cutlass.Pointer(self.shared.data_ptr(at).ir_value(), dtype=Int32).load()


@dataclass(frozen=True)
class Work:
    """One work item: a run of `count` key tiles from `first`, for one query tile of one request."""

    query_tile: Int32
    request: Int32
    split: Int32
    seq_len: Int32
    first: Int32
    count: Int32
    holds_last: Any  # the run ends with the request's last tile

    @classmethod
    def of_block(cls, args: Arguments) -> Work:
        """The item of this CTA in the grid (2 * query tiles, splits, requests)."""
        x, split, request = cute.arch.block_idx()
        seq_len = args.seq_lens[request]
        tiles = key_tiles(seq_len)
        per_run = tiles_per_run(tiles, args.splits)
        first = per_run * split
        count = cutlass.max(cutlass.min(per_run, tiles - first), 0)
        query_tile, _ = divmod_positive(x, Int32(CTA_PAIR))
        return cls(query_tile, request, split, seq_len, first, count, first + count == tiles)


@dataclass(frozen=True)
class Row:
    """A query row: its token and head, and whether it exists (padding rows do not)."""

    token: Int32
    head: Int32
    exists: Any

    @classmethod
    def of(cls, cta: Cta, work: Work, row: Int32) -> Row:
        """The row `row` (0 to 63) of this CTA."""
        args, config = cta.args, cta.layout.config
        row_in_tile = cta.rank * CTA_ROWS + row
        if config.pack_q:
            position = work.query_tile * config.tile_m + row_in_tile
            token, head = divmod_positive(position, args.num_heads)
            return cls(token, head, token < args.seq_len_q)
        in_fold, head = divmod_positive(row_in_tile, args.num_heads)
        return cls(work.query_tile * args.fold + in_fold, head, in_fold < args.fold)

    def index(self, args: Arguments, request: Int32) -> Int64:
        """Position in [B, Sq, H], in 64 bits."""
        return (Int64(request) * args.seq_len_q + self.token) * args.num_heads + self.head


def lane_index() -> Int32:
    return Int32(cute.arch.lane_idx())


def warp_in_group() -> Int32:
    """Index of this warp in its warpgroup: the quarter of tensor memory lanes it can reach."""
    return cute.arch.make_warp_uniform(Int32(cute.arch.thread_idx()[0]) // WARP) % 4
