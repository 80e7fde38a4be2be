"""The TMA warps: K, then Q and V, and the zeroing of value rows past a request's end.

Every copy of a pair's operand signals the leader CTA's barrier, which counts the bytes of both
CTAs; a stage is free in both when the MMA's commit arrives in both.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from mlakern.config import KEY_TILE
from mlakern.kernels.blackwell.layout import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    CTA_KEYS,
    CTA_PAIR,
    CTA_ROWS,
    LATENT_BLOCKS,
    O_STEP,
    O_STEPS,
    QK_TILE_BYTES,
    V_BLOCK_BYTES,
    V_BLOCK_COLUMNS,
    V_TILE_BYTES,
    WARP,
)
from mlakern.kernels.blackwell.work import LEADER, Cta, Items, Work, lane_index, ring
from mlakern.kernels.device import ceil_div, divmod_positive, shuffle

# A page coordinate outside every pool: the box arrives as zeros and its bytes still count.
NO_PAGE = -1


@cute.jit
def load_k(cta: Cta) -> None:
    """Latent and rope columns of this CTA's 64 keys of each tile."""
    elected = prims.elect_sync()
    items = Items.of_cluster(cta)
    done = Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        work = Work.of_item(cta, index)
        pages = _page_numbers(cta, work, work.first)
        for i in cutlass.range(work.count, unroll=1):
            stage, parity = ring(done + i, cta.layout.shared.k_stages)
            cta.wait("k_empty", parity ^ 1, stage)
            if elected & (cta.rank == LEADER):
                full = cta.barrier("k_full", stage)
                prims.mbarrier_arrive_expect_tx(full, CTA_PAIR * QK_TILE_BYTES)
            _load_k_tile(cta, pages, stage, elected)
            pages = _page_numbers(cta, work, work.first + i + 1)
        done = done + work.count
    _drain(cta, "k_empty", done, cta.layout.shared.k_stages)


@cute.jit
def load_qv(cta: Cta) -> None:
    """The query tile of each item once, then this CTA's halves of each tile's value columns."""
    shared = cta.layout.shared
    elected = prims.elect_sync()
    items = Items.of_cluster(cta)
    done, queries = Int32(0), Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        work = Work.of_item(cta, index)
        if work.count > 0:
            cta.wait("q_empty", (queries & 1) ^ 1)
            if elected:
                _load_q(cta, work)
            queries = queries + 1
        pages = _page_numbers(cta, work, work.first)
        tail = work.has_tail
        for i in cutlass.range(work.count, unroll=1):
            stage, parity = ring(done + i, shared.v_stages)
            cta.wait("v_empty", parity ^ 1, stage)
            if tail & (i == work.count - 1):
                # Rows past the end must be zeroed before the MMA reads them: the bytes go to this
                # CTA's own barrier, on which its tail warp waits; the pair's barrier only turns.
                if elected:
                    prims.mbarrier_arrive_expect_tx(cta.barrier("v_tail_full"), V_TILE_BYTES)
                    if cta.rank == LEADER:
                        cta.arrive("v_full", stage)
                _load_v_tile(cta, pages, stage, elected, True)
            else:
                if elected & (cta.rank == LEADER):
                    full = cta.barrier("v_full", stage)
                    prims.mbarrier_arrive_expect_tx(full, CTA_PAIR * V_TILE_BYTES)
                _load_v_tile(cta, pages, stage, elected, False)
            pages = _page_numbers(cta, work, work.first + i + 1)
        done = done + work.count
    _drain(cta, "v_empty", done, shared.v_stages)
    _drain(cta, "q_empty", queries, 1)


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
            cta.wait("v_tail_full", tails & 1)
            stage, _ = ring(done - 1, cta.layout.shared.v_stages)
            _zero_rows(cta, stage, work.key_end)
            prims.fence_proxy("async_shared", space="cta")
            cute.arch.sync_warp()
            if prims.elect_sync():
                cta.arrive_leader("v_tail_zeroed")
            tails = tails + 1


@cute.jit
def _zero_rows(cta: Cta, stage: Int32, first_row: Int32) -> None:
    """The rows from first_row to the end of its page, in every block of the stage."""
    page_size = cta.config.page_size
    end_row = ceil_div(first_row, page_size) * page_size
    tile = cta.layout.shared.v + stage * V_TILE_BYTES
    zero = cutlass.Vector.from_elements((Int32(0),) * 4, Int32)
    lanes_per_row = V_BLOCK_COLUMNS // 16
    in_step, chunk = divmod_positive(lane_index(), Int32(lanes_per_row))
    for first in cutlass.range(first_row, end_row, WARP // lanes_per_row, unroll=1):
        row = first + in_step
        if row < end_row:
            for step in cutlass.range_constexpr(O_STEPS):
                at = tile + step * V_BLOCK_BYTES + row * V_BLOCK_COLUMNS + chunk * 16
                word = cutlass.Pointer(cta.shared.data_ptr(at).ir_value(), dtype=Int32)
                word.store(zero, alignment=16)


@cute.jit
def _load_q(cta: Cta, work: Work) -> None:
    """This CTA's 64 rows; rows past the tile's end arrive as zeros."""
    args, shared = cta.args, cta.layout.shared
    full = cta.barrier("q_full")
    if cta.rank == LEADER:
        prims.mbarrier_arrive_expect_tx(full, CTA_PAIR * QK_TILE_BYTES)
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
            _copy(cta, at + block * BLOCK_BYTES, args.q_latent, coordinates, full)
        rope = shared.q + LATENT_BLOCKS * BLOCK_BYTES + row * (BLOCK_COLUMNS // 2)
        _copy(cta, rope, args.q_rope, (0, inner, outer, tile, work.request), full)


@cute.jit
def _load_k_tile(cta: Cta, pages: Int32, stage: Int32, elected: Boolean) -> None:
    """Half of a tile's keys, all columns."""
    args, box_rows = cta.args, cta.layout.k_box_rows
    for box in cutlass.range_constexpr(CTA_KEYS // box_rows):
        page, row = _page_of(cta, pages, cta.rank * CTA_KEYS + box * box_rows)
        if elected:
            full = cta.barrier("k_full", stage)
            tile = cta.layout.shared.k + stage * QK_TILE_BYTES
            at = tile + box * box_rows * BLOCK_COLUMNS
            for block in cutlass.range_constexpr(LATENT_BLOCKS):
                coordinates = (block * BLOCK_COLUMNS, row, page)
                _copy(cta, at + block * BLOCK_BYTES, args.c_latent, coordinates, full)
            rope = tile + LATENT_BLOCKS * BLOCK_BYTES + box * box_rows * (BLOCK_COLUMNS // 2)
            _copy(cta, rope, args.c_rope, (0, row, page), full)


@cute.jit
def _load_v_tile(cta: Cta, pages: Int32, stage: Int32, elected: Boolean, tail: bool) -> None:
    """All 128 keys of a tile, two blocks of 128 columns."""
    box_rows = cta.layout.k_box_rows
    for box in cutlass.range_constexpr(KEY_TILE // box_rows):
        page, row = _page_of(cta, pages, Int32(box * box_rows))
        if elected:
            at = cta.layout.shared.v + stage * V_TILE_BYTES + box * box_rows * V_BLOCK_COLUMNS
            full = cta.barrier("v_tail_full") if tail else cta.barrier("v_full", stage)
            for step in cutlass.range_constexpr(O_STEPS):
                column = step * O_STEP + cta.rank * V_BLOCK_COLUMNS
                target = at + step * V_BLOCK_BYTES
                _copy(cta, target, cta.args.c_latent, (column, row, page), full, pair=not tail)


def _copy(
    cta: Cta, offset: Any, tensor_map: Any, coordinates: Any, full: Any, pair: bool = True
) -> None:
    """One TMA box; with `pair` its bytes are counted by the leader CTA's barrier."""
    prims.cp_async_bulk_tensor_shared_cluster_global(
        cta.shared.data_ptr(offset),
        tensor_map.get_ptr(),
        coordinates,
        full,
        [],
        group="cta_2" if pair else None,
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


@cute.jit
def _drain(cta: Cta, name: str, uses: Int32, stages: int) -> None:
    """Waits until every stage that was used is free: no commit may reach a CTA that has exited."""
    for back in cutlass.range_constexpr(stages):
        use = uses - 1 - back
        if use >= 0:
            stage, parity = ring(use, stages)
            cta.wait(name, parity, stage)
