"""The TMA warps: K, then Q and V, and the zeroing of value rows past a request's end.

Every copy of a pair's operand signals the leader CTA's barrier, which counts the bytes of both
CTAs; a stage is free in both when the MMA's commit arrives in both.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
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
from mlakern.kernels.blackwell.work import LEADER, Cta, Work, lane_index
from mlakern.kernels.device import ceil_div, divmod_positive, shuffle

# A page coordinate outside every pool: the box arrives as zeros and its bytes still count.
NO_PAGE = -1


@cute.jit
def load_k(cta: Cta, work: Work) -> None:
    """Latent and rope columns of this CTA's 64 keys of each tile."""
    args, shared = cta.args, cta.layout.shared
    box_rows = cta.layout.k_box_rows
    elected = prims.elect_sync()
    stage, parity = Int32(0), Int32(1)
    pages = _page_numbers(cta, work, work.first)
    for i in cutlass.range(work.count, unroll=1):
        cta.wait("k_empty", parity, stage)
        if elected & (cta.rank == LEADER):
            full = cta.barrier("k_full", stage)
            prims.mbarrier_arrive_expect_tx(full, CTA_PAIR * QK_TILE_BYTES)
        for box in cutlass.range_constexpr(CTA_KEYS // box_rows):
            page, row = _page_of(cta, pages, cta.rank * CTA_KEYS + box * box_rows)
            if elected:
                full = cta.barrier("k_full", stage)
                tile = shared.k + stage * QK_TILE_BYTES
                at = tile + box * box_rows * BLOCK_COLUMNS
                for block in cutlass.range_constexpr(LATENT_BLOCKS):
                    coordinates = (block * BLOCK_COLUMNS, row, page)
                    _copy(cta, at + block * BLOCK_BYTES, args.c_latent, coordinates, full)
                rope = tile + LATENT_BLOCKS * BLOCK_BYTES + box * box_rows * (BLOCK_COLUMNS // 2)
                _copy(cta, rope, args.c_rope, (0, row, page), full)
        pages = _page_numbers(cta, work, work.first + i + 1)
        stage, parity = advance(stage, parity, shared.k_stages)
    _drain(cta, "k_empty", work.count, shared.k_stages)


@cute.jit
def load_qv(cta: Cta, work: Work) -> None:
    """The query tile once, then this CTA's halves of the value columns of each tile."""
    shared = cta.layout.shared
    elected = prims.elect_sync()
    if elected:
        _load_q(cta, work)
    stage, parity = Int32(0), Int32(1)
    pages = _page_numbers(cta, work, work.first)
    bulk = work.count
    if has_tail(work):
        bulk = work.count - 1
    for i in cutlass.range(bulk, unroll=1):
        cta.wait("v_empty", parity, stage)
        if elected & (cta.rank == LEADER):
            full = cta.barrier("v_full", stage)
            prims.mbarrier_arrive_expect_tx(full, CTA_PAIR * V_TILE_BYTES)
        _load_v_tile(cta, pages, stage, elected, False)
        pages = _page_numbers(cta, work, work.first + i + 1)
        stage, parity = advance(stage, parity, shared.v_stages)
    if bulk < work.count:
        # Rows past the end must be zeroed before the MMA reads them: the bytes go to this CTA's
        # own barrier, on which its tail warp waits; the pair's barrier only turns its phase.
        cta.wait("v_empty", parity, stage)
        if elected:
            prims.mbarrier_arrive_expect_tx(cta.barrier("v_tail_full"), V_TILE_BYTES)
            if cta.rank == LEADER:
                cta.arrive("v_full", stage)
        _load_v_tile(cta, pages, stage, elected, True)
    _drain(cta, "v_empty", work.count, shared.v_stages)


@cute.jit
def zero_tail(cta: Cta, work: Work) -> None:
    """Overwrites the value rows of keys >= seq_len in the request's partly filled last tile.

    Their probabilities are 0, but 0 * NaN is NaN and the cache may hold anything there. Pages past
    the end arrive as zeros already.
    """
    shared, page_size = cta.layout.shared, cta.layout.config.page_size
    if has_tail(work):
        cta.wait("v_tail_full", 0)
        _, stage = divmod_positive(work.count - 1, Int32(shared.v_stages))
        first_row = work.seq_len - (work.first + work.count - 1) * KEY_TILE
        end_row = ceil_div(first_row, page_size) * page_size
        tile = shared.v + stage * V_TILE_BYTES
        zero = cutlass.Vector.from_elements((Int32(0),) * 4, Int32)
        lanes_per_row = V_BLOCK_COLUMNS // 16
        rows_per_store = WARP // lanes_per_row
        in_step, chunk = divmod_positive(lane_index(), Int32(lanes_per_row))
        row = first_row + in_step
        while row < end_row:
            for step in cutlass.range_constexpr(O_STEPS):
                at = tile + step * V_BLOCK_BYTES + row * V_BLOCK_COLUMNS + chunk * 16
                word = cutlass.Pointer(cta.shared.data_ptr(at).ir_value(), dtype=Int32)
                word.store(zero, alignment=16)
            row = row + rows_per_store
        prims.fence_proxy("async_shared", space="cta")
        cute.arch.sync_warp()
        if prims.elect_sync():
            cta.arrive_leader("v_tail_zeroed")


def has_tail(work: Work) -> Boolean:
    """Whether the run ends in a tile that the request fills only in part."""
    _, rest = divmod_positive(work.seq_len, Int32(KEY_TILE))
    return Boolean((work.count > 0) & work.holds_last & (rest != 0))


def advance(stage: Int32, parity: Int32, stages: int) -> tuple[Int32, Int32]:
    """The next stage of a ring; the parity flips when it wraps."""
    following = stage + 1
    wrapped = following == stages
    return (
        cutlass.select_(wrapped, Int32(0), following),
        cutlass.select_(wrapped, parity ^ 1, parity),
    )


@cute.jit
def _load_q(cta: Cta, work: Work) -> None:
    args, shared, config = cta.args, cta.layout.shared, cta.layout.config
    if work.count > 0:
        full = cta.barrier("q_full")
        if cta.rank == LEADER:
            prims.mbarrier_arrive_expect_tx(full, CTA_PAIR * QK_TILE_BYTES)
        tile, first_row = work.query_tile, cta.rank * CTA_ROWS
        if cutlass.const_expr(config.pack_q):
            tile, first_row = Int32(0), work.query_tile * config.tile_m + first_row
        row = Int32(0)
        while row < CTA_ROWS:
            outer, inner = divmod_positive(first_row + row, args.q_row_extent)
            if cutlass.const_expr(config.pack_q):
                outer, inner = Int32(0), first_row + row
            at = shared.q + row * BLOCK_COLUMNS
            for block in cutlass.range_constexpr(LATENT_BLOCKS):
                coordinates = (block * BLOCK_COLUMNS, inner, outer, tile, work.request)
                _copy(cta, at + block * BLOCK_BYTES, args.q_latent, coordinates, full)
            rope = shared.q + LATENT_BLOCKS * BLOCK_BYTES + row * (BLOCK_COLUMNS // 2)
            _copy(cta, rope, args.q_rope, (0, inner, outer, tile, work.request), full)
            row = row + args.q_box_rows


@cute.jit
def _load_v_tile(cta: Cta, pages: Int32, stage: Int32, elected: Boolean, tail: bool) -> None:
    """All 128 keys of a tile, two blocks of 128 columns."""
    box_rows = cta.layout.k_box_rows
    for box in cutlass.range_constexpr(KEY_TILE // box_rows):
        page, row = _page_of(cta, pages, Int32(box * box_rows))
        if elected:
            at = cta.layout.shared.v + stage * V_TILE_BYTES + box * box_rows * V_BLOCK_COLUMNS
            for step in cutlass.range_constexpr(O_STEPS):
                column = step * O_STEP + cta.rank * V_BLOCK_COLUMNS
                full = cta.barrier("v_tail_full" if tail else "v_full", 0 if tail else stage)
                coordinates = (column, row, page)
                target = at + step * V_BLOCK_BYTES
                _copy(cta, target, cta.args.c_latent, coordinates, full, pair=not tail)


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
    page_size = cta.layout.config.page_size
    pages_in_tile = KEY_TILE // page_size
    lane = lane_index()
    index = tile * pages_in_tile + lane
    page = Int32(NO_PAGE)
    if (lane < pages_in_tile) & (index < ceil_div(work.seq_len, page_size)):
        row = cutlass.Int64(work.request) * cta.args.block_table_stride
        page = (cta.args.block_tables + (row + index)).load()
    return page


def _page_of(cta: Cta, pages: Int32, key: Any) -> tuple[Int32, Int32]:
    """(page number, row in the page) of key `key` of the tile."""
    index, row = divmod_positive(Int32(key), Int32(cta.layout.config.page_size))
    return shuffle(pages, index), row


@cute.jit
def _drain(cta: Cta, name: str, uses: Int32, stages: int) -> None:
    """Waits until every stage that was used is free: no commit may reach a CTA that has exited."""
    for back in cutlass.range_constexpr(stages):
        use = uses - 1 - back
        if use >= 0:
            turn, stage = divmod_positive(use, Int32(stages))
            cta.wait(name, turn & 1, stage)
