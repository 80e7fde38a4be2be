"""The correction warps: rescale the accumulator when a maximum moves; store the result.

Before the product of tile i the accumulator may be touched only when that of tile i - 1 is complete.
If no row of a warp moved, it lets tile i go while i - 1 still runs; it has then seen i - 2 complete,
so that each barrier of a pair of two is never more than one phase ahead of its waiters.

Thread t of warp w owns row (w mod 2) * 32 + t and, of each 256 output columns, the half w // 2: two
times 128 columns of tensor memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from mlakern.config import LATENT_DIM
from mlakern.kernels.blackwell.layout import CTA_ROWS, O_STEP, O_STEPS, WARP
from mlakern.kernels.blackwell.work import Cta, Row, Work, lane_index, warp_in_group
from mlakern.kernels.device import FULL_MASK, NEG_INF, log2, store_row

CHUNK = 32  # accumulator columns in registers at a time


@dataclass(frozen=True)
class Thread:
    """The accumulator cells of one thread."""

    row: Int32
    half: Int32
    slot: Int32  # of its statistics in shared memory
    lanes: Int32  # tensor memory address of its warp's lanes

    @classmethod
    def current(cls, base: Int32) -> Thread:
        warp = warp_in_group()
        row, half = (warp & 1) * WARP + lane_index(), warp >> 1
        return cls(row, half, half * CTA_ROWS + row, base + (warp * WARP << 16))

    def cells(self, column: Any) -> cutlass.Array:
        return prims.make_tmem_ptr(self.lanes + column, Float32)


@cute.jit
def run(cta: Cta, work: Work, base: Int32) -> None:
    """Rescales before each product but the first, then stores the run's result."""
    if work.count > 0:
        _run(cta, work, base)
    else:
        _store_empty(cta, work)


@cute.jit
def _run(cta: Cta, work: Work, base: Int32) -> None:
    thread = Thread.current(base)
    for i in cutlass.range(1, work.count, unroll=1):
        stage = i & 1
        cta.wait("factor_full", (i - 1) >> 1 & 1, stage)
        factor = (cta.floats(cta.layout.shared.factor) + stage * 128 + thread.slot).load()
        cute.arch.sync_warp()
        if prims.elect_sync():
            cta.arrive("factor_empty", stage)
        if i > 1:
            _wait_product(cta, i - 2)
        if prims.vote_sync(FULL_MASK, factor != 1.0, "any"):
            _wait_product(cta, i - 1)
            prims.tcgen05_fence("after_thread_sync")
            _rescale(cta, thread, factor)
        prims.tcgen05_fence("before_thread_sync")
        cute.arch.sync_warp()
        if prims.elect_sync():
            cta.arrive_leader("o_ready", stage)

    cta.wait("sum_full", 0)
    shared = cta.layout.shared
    sums = cta.floats(shared.row_sum)
    row_sum = (sums + thread.row).load() + (sums + CTA_ROWS + thread.row).load()
    row_max = (cta.floats(shared.row_max) + (work.count & 1) * 128 + thread.slot).load()
    if work.count > 1:
        _wait_product(cta, work.count - 2)
    _wait_product(cta, work.count - 1)
    prims.tcgen05_fence("after_thread_sync")
    _store_result(cta, work, thread, row_sum, row_max)


@cute.jit
def _store_empty(cta: Cta, work: Work) -> None:
    """The result of a request without keys: zeros and -inf. Empty runs of a split store nothing."""
    thread = Thread.current(Int32(0))
    row = Row.of(cta, work, thread.row)
    if (cta.args.splits == 1) & row.exists:
        zeros = [Float32(0.0)] * CHUNK
        for column in cutlass.range_constexpr(0, O_STEPS * O_STEP // 2, CHUNK):
            pointer = _output(cta, work, row) + _output_column(thread, column)
            store_row(pointer, zeros, 16)
        _store_lse(cta, work, thread, row, Float32(NEG_INF))


def _wait_product(cta: Cta, i: Int32) -> None:
    """Waits until O += P(i) V(i) is complete."""
    cta.wait("o_full", i >> 1 & 1, i & 1)


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
    """The final result if there is one split, else a normalised partial."""
    args = cta.args
    row = Row.of(cta, work, thread.row)
    seen = row_sum > 0.0
    inverse = cutlass.select_(seen, cute.arch.rcp_approx(row_sum), Float32(0.0))
    # The running maximum in the units of log2, less the lift of the probabilities.
    shift = row_max * args.softmax_scale_log2 - args.p_prescale_log2
    lse = cutlass.select_(seen, log2(row_sum) + shift, Float32(NEG_INF))
    final = args.splits == 1
    if final:
        inverse = inverse * args.output_scale
    for column in cutlass.range_constexpr(0, O_STEPS * cta.layout.tmem.o_step_columns, CHUNK):
        values = prims.tcgen05_ld("32x32b", thread.cells(cta.layout.tmem.o(0) + column), num=CHUNK)
        prims.tcgen05_wait("load")
        scaled = _scale(values, inverse)
        if row.exists:
            at = _output_column(thread, column)
            if final:
                store_row(_output(cta, work, row) + at, scaled, 16)
            else:
                store_row(_partial(cta, work, row) + at, scaled, 32)
    if row.exists:
        if final:
            _store_lse(cta, work, thread, row, lse * args.lse_factor)
        elif thread.half == 0:
            index = row.index(args, work.request) * args.splits + work.split
            (args.partial_lse + index).store(lse)


def _output_column(thread: Thread, column: int) -> Int32:
    """Output column of accumulator column `column`: a thread has half of each step's columns."""
    step, in_step = divmod(column, O_STEP // 2)
    return thread.half * (O_STEP // 2) + (step * O_STEP + in_step)


def _output(cta: Cta, work: Work, row: Row) -> cutlass.Pointer:
    args = cta.args
    offset = Int64(work.request) * args.out_stride_batch
    offset += Int64(row.token) * args.out_stride_token + Int64(row.head) * args.out_stride_head
    return args.out + offset


def _partial(cta: Cta, work: Work, row: Row) -> cutlass.Pointer:
    args = cta.args
    index = row.index(args, work.request) * args.splits + work.split
    return args.partial_out + index * LATENT_DIM


@cute.jit
def _store_lse(cta: Cta, work: Work, thread: Thread, row: Row, lse: Float32) -> None:
    """One thread of the two that share a row; a null pointer: not wanted."""
    args = cta.args
    wanted = args.lse.toint() != 0
    if Boolean(wanted) & (thread.half == 0):
        (args.lse + row.index(args, work.request)).store(lse)
