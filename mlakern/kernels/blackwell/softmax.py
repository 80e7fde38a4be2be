"""The softmax warps: scores to probabilities.

A row's 128 scores of a tile lie in two threads, 64 in warp w and 64 in warp w + 2; they exchange
the row maximum through shared memory and keep separate sums. Per tile and thread: 64 scores from
tensor memory, 64 maxima, 32 packed multiply-adds, 64 exponentials, 32 packed additions, 32
conversions of pairs, 4 stores of 16 bytes.

The maximum in use lags: it moves only when a new one exceeds it by more than rescale_threshold (in
log2 units), and then the accumulator is multiplied by `factor`. A row that has seen no key has the
maximum -inf; 0 stands in for it in the exponent.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.experimental import primitives as prims

from mlakern.config import KEY_TILE
from mlakern.kernels.blackwell.layout import (
    CTA_ROWS,
    P_TILE_BYTES,
    PAIR_BARRIER,
    WARP,
)
from mlakern.kernels.blackwell.loads import drain
from mlakern.kernels.blackwell.work import Cta, Items, Row, Work, lane_index, ring, warp_in_group
from mlakern.kernels.device import NEG_INF, ceil_div, e4m3_pairs, exp2, store_vectors

HALF_KEYS = KEY_TILE // 2  # scores of one thread in a tile


@dataclass(frozen=True)
class Thread:
    """The scores of one thread: a row of the CTA and half of a tile's keys."""

    row: Int32
    first_key: Int32  # 0 or 64
    scores: Int32  # tensor memory address of its warp's lanes

    @classmethod
    def current(cls, base: Int32) -> Thread:
        warp = warp_in_group()
        row = (warp & 1) * WARP + lane_index()
        return cls(row, (warp >> 1) * HALF_KEYS, base + (warp * WARP << 16))

    @property
    def slot(self) -> Int32:
        """Of its statistics in shared memory: rows of the first half, then of the second."""
        return self.first_key + self.row

    @property
    def partner_slot(self) -> Int32:
        return HALF_KEYS - self.first_key + self.row


@dataclass(frozen=True)
class Visible:
    """The keys that the thread's row sees, and the tiles that need no mask: [low, high)."""

    begin: Int32
    end: Int32
    low: Int32
    high: Int32

    @classmethod
    def of_row(cls, cta: Cta, work: Work, thread: Thread) -> Visible:
        mask, seq_len = cta.mask, work.seq_len
        token = Row.of(cta, work, thread.row).token
        end = mask.end(work.request, seq_len, token)
        return cls(
            mask.begin(seq_len, token),
            cutlass.min(end, seq_len),  # padding rows have tokens past Sq
            ceil_div(mask.greatest_begin(seq_len), KEY_TILE),
            cutlass.max(mask.least_end(work.request, seq_len), 0) // KEY_TILE,
        )


@cute.jit
def run(cta: Cta, base: Int32) -> None:
    """Every tile of every item; after each item its row statistics."""
    thread = Thread.current(base)
    items = Items.of_cluster(cta)
    done, results = Int32(0), Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        work = Work.of_item(cta, index)
        visible = Visible.of_row(cta, work, thread)
        row_max, row_sum = Float32(NEG_INF), Float32(0.0)
        for i in cutlass.range(work.count, unroll=1):
            tile = work.first + i
            row_max, row_sum = _tile(cta, thread, visible, tile, done + i, row_max, row_sum)
        if work.count > 0:
            _publish_statistics(cta, thread, results, row_max, row_sum)
            results = results + 1
        done = done + work.count
    drain(cta, "p_empty", done, cta.layout.shared.p_stages)


@cute.jit
def _tile(
    cta: Cta,
    thread: Thread,
    visible: Visible,
    tile: Int32,
    turn: Int32,
    old_max: Float32,
    old_sum: Float32,
) -> tuple[Float32, Float32]:
    """Key tile `tile` of the request, the cluster's `turn`-th: the new maximum and sum."""
    args = cta.args
    scores, tile_max = _load_scores(cta, thread, turn)
    if (tile >= visible.high) | (tile < visible.low):
        scores = _masked(cta, thread, visible, tile, scores)
        if cutlass.const_expr(cta.layout.max_in_load):
            tile_max = _maximum(scores)
    if cutlass.const_expr(not cta.layout.max_in_load):
        tile_max = _maximum(scores)
    tile_max = _exchange_max(cta, thread, turn, tile_max)

    scale = args.softmax_scale_log2
    new_max = cute.arch.fmax(old_max, tile_max)
    # -inf - -inf is NaN, which compares false: such a row keeps its -inf.
    moved = (new_max - old_max) * scale > args.rescale_threshold
    row_max = cutlass.select_(moved, new_max, old_max)
    factor = cutlass.select_(moved, exp2((old_max - new_max) * scale), Float32(1.0))
    if thread.first_key == 0:
        _publish_factor(cta, thread, turn, factor)

    used_max = cutlass.select_(row_max == NEG_INF, Float32(0.0), row_max)
    offset = args.p_prescale_log2 - used_max * scale
    probabilities = _probabilities(scores, scale, offset)
    row_sum = old_sum * factor + _sum(probabilities)
    _store_probabilities(cta, thread, turn, probabilities)
    return row_max, row_sum


def _load_scores(cta: Cta, thread: Thread, turn: Int32) -> tuple[list[Float32], Float32]:
    """The thread's 64 scores and, where the load computes it, their maximum (else anything).

    Frees the stage for a later product.
    """
    tmem = cta.layout.tmem
    stage, parity = ring(turn, tmem.s_stages)
    cta.wait("s_full", parity, stage)
    prims.tcgen05_fence("after_thread_sync")
    cells = prims.make_tmem_ptr(thread.scores + stage * tmem.s_columns, Float32)
    maximum = Float32(NEG_INF)
    if cta.layout.max_in_load:
        scores, maximum = prims.tcgen05_ld_red("32x32b", cells, "max", num=HALF_KEYS)
    else:
        scores = prims.tcgen05_ld("32x32b", cells, num=HALF_KEYS)
    prims.tcgen05_wait("load")
    prims.tcgen05_fence("before_thread_sync")
    _arrive_leader_once(cta, "s_empty", stage)
    return [scores[j] for j in range(HALF_KEYS)], maximum


@cute.jit
def _arrive_leader_once(cta: Cta, name: str, stage: Int32) -> None:
    """One arrival for the whole warp, after all its lanes have come here."""
    cute.arch.sync_warp()
    if prims.elect_sync():
        cta.arrive_leader(name, stage)


def _masked(
    cta: Cta, thread: Thread, visible: Visible, tile: Int32, scores: list[Float32]
) -> list[Float32]:
    """The scores, -inf where the row does not see the key."""
    first = tile * KEY_TILE + thread.first_key
    begin, end = visible.begin - first, visible.end - first
    result = []
    for j, score in enumerate(scores):
        seen = Int32(j) < end
        if cta.mask.has_begin:
            seen = seen & (Int32(j) >= begin)
        result.append(cutlass.select_(Boolean(seen), score, Float32(NEG_INF)))
    return result


def _maximum(values: list[Float32]) -> Float32:
    """Four chains, so that their latencies overlap."""
    chains = list(values[:4])
    for at in range(4, len(values), 4):
        chains = [cute.arch.fmax(c, v) for c, v in zip(chains, values[at:], strict=False)]
    return cute.arch.fmax(
        cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3])
    )


def _exchange_max(cta: Cta, thread: Thread, turn: Int32, own: Float32) -> Float32:
    """The maximum of both halves of the row.

    Two sets of slots by tile parity: a thread writes a slot again only after a later exchange of
    the other set has shown that its partner has read it.
    """
    slots = cta.floats(cta.layout.shared.row_max) + (turn & 1) * 128
    (slots + thread.slot).store(own)
    prims.barrier_cta_sync(PAIR_BARRIER + (warp_in_group() & 1), thread_count=2 * WARP)
    return cute.arch.fmax(own, (slots + thread.partner_slot).load())


@cute.jit
def _publish_factor(cta: Cta, thread: Thread, turn: Int32, factor: Float32) -> None:
    """Hands the row's factor to the correction warps, before the exponentials."""
    stage, parity = ring(turn, 2)
    cta.wait("factor_empty", parity ^ 1, stage)
    (cta.floats(cta.layout.shared.factor) + stage * CTA_ROWS + thread.row).store(factor)
    cute.arch.sync_warp()
    if prims.elect_sync():
        cta.arrive("factor_full", stage)


def _probabilities(scores: list[Float32], scale: Float32, offset: Float32) -> list[Float32]:
    """2^(score * scale + offset), multiply-adds in pairs."""
    result = []
    for pair in zip(scores[0::2], scores[1::2], strict=True):
        exponents = cute.arch.fma_packed_f32x2(pair, (scale, scale), (offset, offset))
        result += [exp2(exponent) for exponent in exponents]
    return result


def _sum(values: list[Float32]) -> Float32:
    """Two packed chains."""
    chains = [(values[0], values[1]), (values[2], values[3])]
    for at in range(4, len(values), 4):
        chains = [
            cute.arch.add_packed_f32x2(chain, (values[at + 2 * n], values[at + 2 * n + 1]))
            for n, chain in enumerate(chains)
        ]
    low, high = cute.arch.add_packed_f32x2(chains[0], chains[1])
    return low + high


def _store_probabilities(
    cta: Cta, thread: Thread, turn: Int32, probabilities: list[Float32]
) -> None:
    """As e4m3 into the P tile, 128-byte swizzled: chunk c of row r lies at chunk c ^ (r mod 8)."""
    stage, parity = ring(turn, cta.layout.shared.p_stages)
    words = e4m3_pairs(probabilities)
    cta.wait("p_empty", parity ^ 1, stage)
    row_start = cta.layout.shared.p + stage * P_TILE_BYTES + thread.row * KEY_TILE
    for quarter in range(HALF_KEYS // 16):
        chunk = ((thread.first_key >> 4) + quarter) ^ (thread.row & 7)
        at = cta.shared.data_ptr(row_start + chunk * 16)
        pointer = cutlass.Pointer(at.ir_value(), dtype=cutlass.Int16)
        store_vectors(pointer, words[8 * quarter : 8 * quarter + 8], cutlass.Int16, 16)
    prims.fence_proxy("async_shared", space="cta")
    _arrive_leader_once(cta, "p_full", stage)


@cute.jit
def _publish_statistics(
    cta: Cta, thread: Thread, results: Int32, row_max: Float32, row_sum: Float32
) -> None:
    """Hands the item's final sums and maxima to the correction warps."""
    shared = cta.layout.shared
    cta.wait("sum_empty", (results & 1) ^ 1)
    (cta.floats(shared.row_sum) + thread.slot).store(row_sum)
    if thread.first_key == 0:
        (cta.floats(shared.final_max) + thread.row).store(row_max)
    cute.arch.sync_warp()
    if prims.elect_sync():
        cta.arrive("sum_full")
