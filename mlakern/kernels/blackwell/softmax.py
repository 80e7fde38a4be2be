"""The softmax warps: scores to probabilities.

A row's 128 scores of a tile lie in two threads, 64 in warp w and 64 in warp w + 2; they exchange
the row maximum through shared memory and keep separate sums. Per tile and thread: 64 scores from
tensor memory, 64 maxima, 32 packed multiply-adds, 64 exponentials, 32 packed additions, 32 conversions of
pairs, 4 stores of 16 bytes.

The maximum in use lags: it moves only when a new one exceeds it by more than rescale_threshold (in
log2 units), and then the accumulator is multiplied by `factor`. A row that has seen no key has the
maximum -inf; 0 stands in for it in the exponent.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from mlakern.config import KEY_TILE
from mlakern.kernels.blackwell.layout import CTA_KEYS, P_TILE_BYTES, PAIR_BARRIER, WARP
from mlakern.kernels.blackwell.work import Cta, Row, Work, lane_index, warp_in_group
from mlakern.kernels.device import NEG_INF, e4m3_pairs, exp2, store_vectors
from mlakern.kernels.masks import least_visible_end, visible_end


@cute.jit
def run(cta: Cta, work: Work, base: Int32) -> None:
    """All tiles of the run: first those that need no mask, then the others."""
    if work.count > 0:
        _run(cta, work, base)


@cute.jit
def _run(cta: Cta, work: Work, base: Int32) -> None:
    args, config = cta.args, cta.layout.config
    warp, lane = warp_in_group(), lane_index()
    row = (warp & 1) * WARP + lane
    first_key = (warp >> 1) * CTA_KEYS
    token = Row.of(cta, work, row).token
    end = visible_end(config.mask, args, work.seq_len, token)
    end = cutlass.min(end, work.seq_len)  # padding rows have tokens past Sq
    whole_tiles = cutlass.max(least_visible_end(config.mask, args, work.seq_len), 0) // KEY_TILE
    unmasked = cutlass.max(cutlass.min(whole_tiles - work.first, work.count), 0)

    row_max, row_sum = Float32(NEG_INF), Float32(0.0)
    for i in cutlass.range(unmasked, unroll=1):
        row_max, row_sum = _tile(cta, base, i, row, first_key, row_max, row_sum, None)
    for i in cutlass.range(unmasked, work.count, unroll=1):
        visible = end - (work.first + i) * KEY_TILE - first_key
        row_max, row_sum = _tile(cta, base, i, row, first_key, row_max, row_sum, visible)

    slot = _slot(row, first_key)
    (cta.floats(cta.layout.shared.row_sum) + slot).store(row_sum)
    # The LSE needs the maximum; the exchange slots of the tile that does not come are free.
    (cta.floats(cta.layout.shared.row_max) + (work.count & 1) * 128 + slot).store(row_max)
    cute.arch.sync_warp()
    if prims.elect_sync():
        cta.arrive("sum_full")
    _drain(cta, work.count)


@cute.jit
def _tile(
    cta: Cta,
    base: Int32,
    i: Int32,
    row: Int32,
    first_key: Int32,
    old_max: Float32,
    old_sum: Float32,
    visible: Int32 | None,
) -> tuple[Float32, Float32]:
    """One tile; `visible`: how many of the thread's 64 keys its row sees (None: all)."""
    args = cta.args
    stage, parity = i & 1, i >> 1 & 1
    scores = _load_scores(cta, base, stage, parity)
    if cutlass.const_expr(visible is not None):
        scores = [
            cutlass.select_(Int32(j) < visible, score, Float32(NEG_INF))
            for j, score in enumerate(scores)
        ]
    tile_max = _exchange_max(cta, i, row, first_key, _maximum(scores))

    scale = args.softmax_scale_log2
    new_max = cute.arch.fmax(old_max, tile_max)
    # -inf - -inf is NaN, which compares false: such a row keeps its -inf.
    moved = (new_max - old_max) * scale > args.rescale_threshold
    row_max = cutlass.select_(moved, new_max, old_max)
    factor = cutlass.select_(moved, exp2((old_max - new_max) * scale), Float32(1.0))
    if i > 0:
        _publish_factor(cta, i, row, first_key, factor)

    used_max = cutlass.select_(row_max == NEG_INF, Float32(0.0), row_max)
    offset = args.p_prescale_log2 - used_max * scale
    probabilities = _probabilities(scores, scale, offset)
    row_sum = old_sum * factor + _sum(probabilities)
    _store_probabilities(cta, i, row, first_key, probabilities)
    return row_max, row_sum


def _load_scores(cta: Cta, base: Int32, stage: Int32, parity: Int32) -> list[Float32]:
    """The thread's 64 scores; frees the stage for the product after next."""
    cta.wait("s_full", parity, stage)
    prims.tcgen05_fence("after_thread_sync")
    lanes = warp_in_group() * WARP << 16
    address = base + lanes + stage * cta.layout.tmem.s_columns
    scores = prims.tcgen05_ld("32x32b", prims.make_tmem_ptr(address, Float32), num=CTA_KEYS)
    prims.tcgen05_wait("load")
    prims.tcgen05_fence("before_thread_sync")
    _arrive_leader_once(cta, "s_empty", stage)
    return [scores[j] for j in range(CTA_KEYS)]


@cute.jit
def _arrive_leader_once(cta: Cta, name: str, stage: Int32) -> None:
    """One arrival for the whole warp, after all its lanes have come here."""
    cute.arch.sync_warp()
    if prims.elect_sync():
        cta.arrive_leader(name, stage)


def _maximum(values: list[Float32]) -> Float32:
    """Four chains, so that their latencies overlap."""
    chains = list(values[:4])
    for at in range(4, len(values), 4):
        chains = [cute.arch.fmax(c, v) for c, v in zip(chains, values[at:], strict=False)]
    return cute.arch.fmax(
        cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3])
    )


def _slot(row: Int32, first_key: Int32) -> Int32:
    """Where a thread's statistics lie: rows of the first half, then rows of the second."""
    return first_key + row


def _exchange_max(cta: Cta, i: Int32, row: Int32, first_key: Int32, own: Float32) -> Float32:
    """The maximum of both halves of the row.

    Two sets of slots by tile parity: a thread writes a slot again only after a later exchange of
    the other set has shown that its partner has read it.
    """
    slots = cta.floats(cta.layout.shared.row_max) + (i & 1) * 128
    (slots + _slot(row, first_key)).store(own)
    prims.barrier_cta_sync(PAIR_BARRIER + (warp_in_group() & 1), thread_count=2 * WARP)
    partner = (slots + _slot(row, CTA_KEYS - first_key)).load()
    return cute.arch.fmax(own, partner)


@cute.jit
def _publish_factor(cta: Cta, i: Int32, row: Int32, first_key: Int32, factor: Float32) -> None:
    """Hands the factor of tile i to the correction warps, before the exponentials."""
    stage = i & 1
    use = (i - 1) >> 1
    cta.wait("factor_empty", (use & 1) ^ 1, stage)
    slots = cta.floats(cta.layout.shared.factor) + stage * 128
    (slots + _slot(row, first_key)).store(factor)
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
    cta: Cta, i: Int32, row: Int32, first_key: Int32, probabilities: list[Float32]
) -> None:
    """As e4m3 into the P tile, 128-byte swizzled: chunk c of row r lies at chunk c ^ (r mod 8)."""
    stage, parity = i & 1, i >> 1 & 1
    words = e4m3_pairs(probabilities)
    cta.wait("p_empty", parity ^ 1, stage)
    row_start = cta.layout.shared.p + stage * P_TILE_BYTES + row * KEY_TILE
    for quarter in range(CTA_KEYS // 16):
        chunk = ((first_key >> 4) + quarter) ^ (row & 7)
        at = cta.shared.data_ptr(row_start + chunk * 16)
        pointer = cutlass.Pointer(at.ir_value(), dtype=cutlass.Int16)
        store_vectors(pointer, words[8 * quarter : 8 * quarter + 8], cutlass.Int16, 16)
    prims.fence_proxy("async_shared", space="cta")
    _arrive_leader_once(cta, "p_full", stage)


@cute.jit
def _drain(cta: Cta, count: Int32) -> None:
    """The last commits on P's stages must have arrived before the CTA may exit."""
    for back in cutlass.range_constexpr(2):
        use = count - 1 - back
        if use >= 0:
            cta.wait("p_empty", use >> 1 & 1, use & 1)
