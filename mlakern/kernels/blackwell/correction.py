"""The correction warps: rescale the accumulator when a maximum moves; store the result.

Thread t of warp w owns row (w mod 2) * 32 + t and, of each 256 output columns, the half w // 2: two
times 128 columns of tensor memory.

Before the product of a tile the accumulator may be touched only when the product before it is
complete. If no row of a warp moved, it lets a tile go while the one before still runs; it has then
seen the one before that complete, so that each barrier of a pair of two is never more than one
phase ahead of its waiters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from mlakern.config import LATENT_DIM
from mlakern.kernels.blackwell.layout import CTA_ROWS, O_STEP, O_STEPS, WARP
from mlakern.kernels.blackwell.work import Cta, Items, Row, Work, lane_index, ring, warp_in_group
from mlakern.kernels.device import FULL_MASK, NEG_INF, log2, store_row

CHUNK = 32  # accumulator columns in registers at a time


@dataclass(frozen=True)
class Thread:
    """The accumulator cells of one thread."""

    row: Int32
    half: Int32
    lanes: Int32  # tensor memory address of its warp's lanes

    @classmethod
    def current(cls, base: Int32) -> Thread:
        warp = warp_in_group()
        row, half = (warp & 1) * WARP + lane_index(), warp >> 1
        return cls(row, half, base + (warp * WARP << 16))

    def cells(self, column: Any) -> cutlass.Array:
        return prims.make_tmem_ptr(self.lanes + column, Float32)

    def output_column(self, column: int) -> Int32:
        """Output column of accumulator column `column`: half of each step's columns are here."""
        step, in_step = divmod(column, O_STEP // 2)
        return self.half * (O_STEP // 2) + (step * O_STEP + in_step)


@cute.jit
def run(cta: Cta, base: Int32) -> None:
    """Corrects before each product, then stores the item's result."""
    thread = Thread.current(base)
    items = Items.of_cluster(cta)
    done, results = Int32(0), Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        work = Work.of_item(cta, index)
        for i in cutlass.range(work.count, unroll=1):
            _correct(cta, thread, done + i, i > 0)
        done = done + work.count
        if work.count > 0:
            row_sum, row_max = _statistics(cta, thread, results)
            results = results + 1
            _wait_product(cta, done - 2)
            _wait_product(cta, done - 1)
            prims.tcgen05_fence("after_thread_sync")
            _store_result(cta, work, thread, row_sum, row_max)
        elif work.stores:
            _store_empty(cta, work, thread)


@cute.jit
def _correct(cta: Cta, thread: Thread, turn: Int32, accumulates: Boolean) -> None:
    """Makes the accumulator ready for the cluster's `turn`-th product."""
    stage, parity = ring(turn, 2)
    cta.wait("factor_full", parity, stage)
    slots = cta.floats(cta.layout.shared.factor) + stage * CTA_ROWS
    factor = (slots + thread.row).load()
    cute.arch.sync_warp()
    if prims.elect_sync():
        cta.arrive("factor_empty", stage)
    _wait_product(cta, turn - 2)
    if accumulates & prims.vote_sync(FULL_MASK, factor != 1.0, "any"):
        _wait_product(cta, turn - 1)
        prims.tcgen05_fence("after_thread_sync")
        _rescale(cta, thread, factor)
    prims.tcgen05_fence("before_thread_sync")
    cute.arch.sync_warp()
    if prims.elect_sync():
        cta.arrive_leader("o_ready", stage)


@cute.jit
def _statistics(cta: Cta, thread: Thread, results: Int32) -> tuple[Float32, Float32]:
    """(sum, maximum) of the thread's row over the item."""
    shared = cta.layout.shared
    cta.wait("sum_full", results & 1)
    sums = cta.floats(shared.row_sum)
    row_sum = (sums + thread.row).load() + (sums + CTA_ROWS + thread.row).load()
    row_max = (cta.floats(shared.final_max) + thread.row).load()
    cute.arch.sync_warp()
    if prims.elect_sync():
        cta.arrive("sum_empty")
    return row_sum, row_max


@cute.jit
def _wait_product(cta: Cta, turn: Int32) -> None:
    """Waits until the cluster's `turn`-th product is complete; negative: there was none."""
    if turn >= 0:
        stage, parity = ring(turn, 2)
        cta.wait("o_full", parity, stage)


@cute.jit
def _store_empty(cta: Cta, work: Work, thread: Thread) -> None:
    """The result of a request without keys: zeros and -inf."""
    row = Row.of(cta, work, thread.row)
    if row.exists:
        zeros = [Float32(0.0)] * CHUNK
        for column in cutlass.range_constexpr(0, O_STEPS * O_STEP // 2, CHUNK):
            pointer = _output(cta, work, row) + thread.output_column(column)
            store_row(pointer, zeros, 16)
        _store_lse(cta, work, thread, row, Float32(NEG_INF))


def _rescale(cta: Cta, thread: Thread, factor: Float32) -> None:
    for column in range(0, O_STEPS * cta.layout.tmem.o_step_columns, CHUNK):
        cells = thread.cells(cta.layout.tmem.o(0) + column)
        values = prims.tcgen05_ld("32x32b", cells, num=CHUNK)
        prims.tcgen05_wait("load")
        scaled = cutlass.Vector.from_elements(tuple(_scale(values, factor)), Float32)
        prims.tcgen05_st("32x32b", cells, scaled)
    prims.tcgen05_wait("store")


def _scale(values: cutlass.Vector, factor: Float32) -> list[Float32]:
    """The chunk times the factor, multiplied in pairs."""
    scaled: list[Float32] = []
    for j in range(0, CHUNK, 2):
        scaled += cute.arch.mul_packed_f32x2((values[j], values[j + 1]), (factor, factor))
    return scaled


@cute.jit
def _store_result(cta: Cta, work: Work, thread: Thread, row_sum: Float32, row_max: Float32) -> None:
    """The final result of a request that is not split, else a normalised partial."""
    args = cta.args
    row = Row.of(cta, work, thread.row)
    seen = row_sum > 0.0
    inverse = cutlass.select_(seen, cute.arch.rcp_approx(row_sum), Float32(0.0))
    # The running maximum in the units of log2, less the lift of the probabilities.
    shift = row_max * args.softmax_scale_log2 - args.p_prescale_log2
    lse = cutlass.select_(seen, log2(row_sum) + shift, Float32(NEG_INF))
    if work.final:
        inverse = inverse * args.output_scale
    for column in cutlass.range_constexpr(0, O_STEPS * cta.layout.tmem.o_step_columns, CHUNK):
        cells = thread.cells(cta.layout.tmem.o(0) + column)
        values = prims.tcgen05_ld("32x32b", cells, num=CHUNK)
        prims.tcgen05_wait("load")
        scaled = _scale(values, inverse)
        if row.exists:
            at = thread.output_column(column)
            if work.final:
                store_row(_output(cta, work, row) + at, scaled, 16)
            else:
                index = (work.partial_row + row.in_tile) * LATENT_DIM + at
                store_row(args.partial_out + index, scaled, 32)
    if row.exists:
        if work.final:
            _store_lse(cta, work, thread, row, lse * args.lse_factor)
        elif thread.half == 0:
            (args.partial_lse + (work.partial_row + row.in_tile)).store(lse)


def _output(cta: Cta, work: Work, row: Row) -> cutlass.Pointer:
    args = cta.args
    offset = Int64(work.request) * args.out_stride_batch
    offset += Int64(row.token) * args.out_stride_token + Int64(row.head) * args.out_stride_head
    return args.out + offset


@cute.jit
def _store_lse(cta: Cta, work: Work, thread: Thread, row: Row, lse: Float32) -> None:
    """One thread of the two that share a row; a null pointer: not wanted."""
    args = cta.args
    wanted = args.lse.toint() != 0
    if Boolean(wanted) & (thread.half == 0):
        (args.lse + row.index(args, work.request)).store(lse)
