"""The TMA warps: K, then Q and V, and the zeroing of value rows past a request's end.

Every copy signals the leader CTA's barrier, which counts the bytes of all CTAs; a stage is free in
each of them when the MMA's commit arrives there.

Values of a request's partly filled last tile must be zeroed before an MMA reads them: their bytes
go to a barrier of their own CTA, on which its tail warp waits; their usual barrier only turns.
These barriers are a ring over the tails of all items.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from mlakern.config import KEY_TILE
from mlakern.kernels.blackwell.layout import (
    BLOCK_COLUMNS,
    CTA_ROWS,
    LATENT_BLOCKS,
    O_STEP,
    Q_BLOCK_BYTES,
    Q_TILE_BYTES,
    V_BLOCK_BYTES,
    WARP,
    KeyGroup,
)
from mlakern.kernels.blackwell.work import Cta, Items, Work, lane_index, ring
from mlakern.kernels.device import ceil_div, divmod_positive, shuffle

# A page coordinate outside every pool: the box arrives as zeros and its bytes still count.
NO_PAGE = -1
CHUNK_BYTES = 16  # of one lane's store
LANES_PER_ROW = BLOCK_COLUMNS // CHUNK_BYTES


@cute.jit
def load_k(cta: Cta) -> None:
    """Latent and rope columns of this CTA's keys of each tile, group by group."""
    operands = cta.layout.operands
    elected = prims.elect_sync()
    items = Items.of_cluster(cta)
    done, tails = Int32(0), Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        work = Work.of_item(cta, index)
        tail_full = _tail_full(cta, tails)
        pages = _page_numbers(cta, work, work.first)
        for i in cutlass.range(work.count, unroll=1):
            stage, parity = ring(done + i, operands.k_stages)
            tail = work.has_tail & (i == work.count - 1)
            for group in operands.key_groups:
                cta.wait(f"{group.name}_empty", parity ^ 1, stage)
                _load_k_group(cta, group, pages, stage, elected, tail, tail_full)
            pages = _page_numbers(cta, work, work.first + i + 1)
        done = done + work.count
        tails = tails + Int32(work.has_tail)
    for group in operands.key_groups:
        drain(cta, f"{group.name}_empty", done, operands.k_stages)


@cute.jit
def load_qv(cta: Cta) -> None:
    """The query tile of each item once; then each tile's values, where they are not the keys."""
    items = Items.of_cluster(cta)
    elected = prims.elect_sync()
    done, queries, tails = Int32(0), Int32(0), Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        work = Work.of_item(cta, index)
        if work.count > 0:
            cta.wait("q_empty", (queries & 1) ^ 1)
            if elected:
                _load_q(cta, work)
            queries = queries + 1
        if cutlass.const_expr(not cta.layout.operands.shares_values):
            _load_values(cta, work, done, _tail_full(cta, tails), elected)
        done = done + work.count
        tails = tails + Int32(work.has_tail)
    if cutlass.const_expr(not cta.layout.operands.shares_values):
        drain(cta, "v_empty", done, cta.layout.operands.v_stages)
    drain(cta, "q_empty", queries, 1)


@cute.jit
def zero_tail(cta: Cta) -> None:
    """Overwrites the value rows of keys >= seq_len in a request's partly filled last tile.

    Their probabilities are 0, but 0 * NaN is NaN and the cache may hold anything there. Pages past
    the end arrive as zeros already.
    """
    items = Items.of_cluster(cta)
    done, tails = Int32(0), Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        work = Work.of_item(cta, index)
        done = done + work.count
        if work.has_tail:
            turn, parity = ring(tails, cta.layout.operands.value_stages)
            cta.wait("tail_full", parity, turn)
            stage, _ = ring(done - 1, cta.layout.operands.value_stages)
            _zero_rows(cta, stage, work.key_end)
            prims.fence_proxy("async_shared", space="cta")
            cute.arch.sync_warp()
            if prims.elect_sync():
                cta.arrive_leader("tail_zeroed", turn)
            tails = tails + 1


@cute.jit
def drain(cta: Cta, name: str, uses: Int32, stages: int) -> None:
    """Waits until every stage that was used is free: no commit may reach a CTA that has exited."""
    for back in cutlass.range_constexpr(stages):
        use = uses - 1 - back
        if use >= 0:
            stage, parity = ring(use, stages)
            cta.wait(name, parity, stage)


def _tail_full(cta: Cta, tails: Int32) -> cutlass.Array:
    turn, _ = ring(tails, cta.layout.operands.value_stages)
    return cta.barrier("tail_full", turn)


@cute.jit
def _zero_rows(cta: Cta, stage: Int32, first_row: Int32) -> None:
    """The rows from first_row to the end of its page, in every value block of the stage."""
    shared, page_size = cta.layout.shared, cta.config.page_size
    end_row = ceil_div(first_row, page_size) * page_size
    tile = shared.v + stage * shared.value_tile_bytes
    zero = cutlass.Vector.from_elements((Int32(0),) * 4, Int32)
    in_step, chunk = divmod_positive(lane_index(), Int32(LANES_PER_ROW))
    for first in cutlass.range(first_row, end_row, WARP // LANES_PER_ROW, unroll=1):
        row = first + in_step
        if row < end_row:
            for block in cutlass.range_constexpr(cta.layout.operands.value_blocks):
                at = tile + block * V_BLOCK_BYTES + row * BLOCK_COLUMNS + chunk * CHUNK_BYTES
                word = cutlass.Pointer(cta.shared.data_ptr(at).ir_value(), dtype=Int32)
                word.store(zero, alignment=CHUNK_BYTES)


@cute.jit
def _load_q(cta: Cta, work: Work) -> None:
    """This CTA's 64 rows; rows past the tile's end arrive as zeros."""
    args, shared = cta.args, cta.layout.shared
    full = cta.barrier("q_full")
    cta.expect_bytes(full, Q_TILE_BYTES)
    for row in cutlass.range(0, CTA_ROWS, args.q_box_rows, unroll=1):
        in_tile = cta.rank * CTA_ROWS + row
        if cutlass.const_expr(cta.config.pack_q):
            outer, tile = Int32(0), Int32(0)
            inner = work.query_tile * args.tile_rows + in_tile
        else:
            outer, inner = divmod_positive(in_tile, args.q_row_extent)
            tile = work.query_tile
        at = shared.q + row * BLOCK_COLUMNS
        for block in cutlass.range_constexpr(LATENT_BLOCKS):
            coordinates = (block * BLOCK_COLUMNS, inner, outer, tile, work.request)
            _copy(cta, at + block * Q_BLOCK_BYTES, args.q_latent, coordinates, full)
        rope = shared.q + LATENT_BLOCKS * Q_BLOCK_BYTES + row * (BLOCK_COLUMNS // 2)
        _copy(cta, rope, args.q_rope, (0, inner, outer, tile, work.request), full)


@cute.jit
def _load_k_group(
    cta: Cta,
    group: KeyGroup,
    pages: Int32,
    stage: Int32,
    elected: Boolean,
    tail: Boolean,
    tail_full: cutlass.Array,
) -> None:
    """One group of a K tile; in a tail its latent blocks count at the tail's barrier."""
    operands = cta.layout.operands
    full = cta.barrier(f"{group.name}_full", stage)
    if cutlass.const_expr(operands.shares_values and not group.rope):
        if tail:
            if elected:
                prims.mbarrier_arrive(full)
                # Only now that the stage is free is the tail before last done with its barrier.
                if cutlass.const_expr(group is operands.key_groups[0]):
                    values = operands.value_blocks * V_BLOCK_BYTES
                    prims.mbarrier_arrive_expect_tx(tail_full, values)
            _copy_k_boxes(cta, group, pages, stage, elected, tail_full)
        else:
            if elected:
                cta.expect_bytes(full, operands.group_bytes(group))
            _copy_k_boxes(cta, group, pages, stage, elected, full)
    else:
        if elected:
            cta.expect_bytes(full, operands.group_bytes(group))
        _copy_k_boxes(cta, group, pages, stage, elected, full)


@cute.jit
def _copy_k_boxes(
    cta: Cta, group: KeyGroup, pages: Int32, stage: Int32, elected: Boolean, full: Any
) -> None:
    args, operands, box_rows = cta.args, cta.layout.operands, cta.layout.box_rows
    tile = cta.layout.shared.k + stage * operands.k_tile_bytes
    for box in cutlass.range_constexpr(operands.keys // box_rows):
        first = box * box_rows
        page, row = _page_of(cta, pages, cta.rank * operands.keys + first)
        if elected:
            for block in group.blocks:
                at = tile + block * operands.k_block_bytes + first * BLOCK_COLUMNS
                _copy(cta, at, args.c_latent, (block * BLOCK_COLUMNS, row, page), full)
            if cutlass.const_expr(group.rope):
                rope = tile + LATENT_BLOCKS * operands.k_block_bytes
                at = rope + first * (BLOCK_COLUMNS // 2)
                _copy(cta, at, args.c_rope, (0, row, page), full)


@cute.jit
def _load_values(
    cta: Cta, work: Work, done: Int32, tail_full: cutlass.Array, elected: Boolean
) -> None:
    """This CTA's halves of the value columns of the item's tiles."""
    operands = cta.layout.operands
    tile_bytes = cta.layout.shared.value_tile_bytes
    pages = _page_numbers(cta, work, work.first)
    for i in cutlass.range(work.count, unroll=1):
        stage, parity = ring(done + i, operands.v_stages)
        cta.wait("v_empty", parity ^ 1, stage)
        full = cta.barrier("v_full", stage)
        if work.has_tail & (i == work.count - 1):
            if elected:
                prims.mbarrier_arrive_expect_tx(tail_full, tile_bytes)
                if cta.leads():
                    prims.mbarrier_arrive(full)
            _copy_v_boxes(cta, pages, stage, elected, tail_full, False)
        else:
            if elected:
                cta.expect_bytes(full, tile_bytes)
            _copy_v_boxes(cta, pages, stage, elected, full, True)
        pages = _page_numbers(cta, work, work.first + i + 1)


@cute.jit
def _copy_v_boxes(
    cta: Cta, pages: Int32, stage: Int32, elected: Boolean, full: Any, pair: bool
) -> None:
    """All 128 keys of a tile, for each step of 256 columns this CTA's block of 128."""
    shared, box_rows = cta.layout.shared, cta.layout.box_rows
    for box in cutlass.range_constexpr(KEY_TILE // box_rows):
        page, row = _page_of(cta, pages, Int32(box * box_rows))
        if elected:
            at = shared.v + stage * shared.value_tile_bytes + box * box_rows * BLOCK_COLUMNS
            for step in cutlass.range_constexpr(cta.layout.operands.value_blocks):
                column = step * O_STEP + cta.rank * BLOCK_COLUMNS
                target = at + step * V_BLOCK_BYTES
                _copy(cta, target, cta.args.c_latent, (column, row, page), full, pair)


def _copy(
    cta: Cta, offset: Any, tensor_map: Any, coordinates: Any, full: Any, pair: bool = True
) -> None:
    """One TMA box; with `pair` a pair's bytes are counted by the leader CTA's barrier."""
    prims.cp_async_bulk_tensor_shared_cluster_global(
        cta.shared.data_ptr(offset),
        tensor_map.get_ptr(),
        coordinates,
        full,
        [],
        group="cta_2" if pair and cta.layout.operands.ctas == 2 else None,
    )


@cute.jit
def _page_numbers(cta: Cta, work: Work, tile: Int32) -> Int32:
    """Lane j: the page of the tile's keys from j * page_size; NO_PAGE past the request's last page.

    Reads nothing past the last page in use. Loaded a tile ahead of its copies.
    """
    page_size = cta.config.page_size
    pages_in_tile = KEY_TILE // page_size
    lane = lane_index()
    index = tile * pages_in_tile + lane
    page = Int32(NO_PAGE)
    if (lane < pages_in_tile) & (index < work.page_count(page_size)):
        row = Int64(work.request) * cta.args.block_table_stride
        page = (cta.args.block_tables + (row + index)).load()
    return page


def _page_of(cta: Cta, pages: Int32, key: Any) -> tuple[Int32, Int32]:
    """(page number, row in the page) of key `key` of the tile."""
    index, row = divmod_positive(Int32(key), Int32(cta.config.page_size))
    return shuffle(pages, index), row
