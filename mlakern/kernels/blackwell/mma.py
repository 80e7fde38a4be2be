"""The MMA warp: tensor memory, and both products of a tile from one thread of the leader.

S(i) of tile i runs `lead` tiles ahead of O += P(i) V(i), so that the tensor cores work on S(i + 1)
or S(i + 2) while the softmax warps turn S(i) into P(i).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, cute
from cutlass.experimental import primitives as prims

from mlakern.config import KEY_TILE, ROPE_DIM
from mlakern.kernels.blackwell.layout import (
    BLOCK_COLUMNS,
    CTA_ROWS,
    GROUP_64B,
    GROUP_128B,
    LATENT_BLOCKS,
    MMA_K,
    O_STEP,
    O_STEPS,
    P_TILE_BYTES,
    Q_BLOCK_BYTES,
    V_BLOCK_BYTES,
)
from mlakern.kernels.blackwell.work import Cta, Items, Work, ring

BOTH_CTAS = 0b11


def allocate(cta: Cta) -> None:
    """Allocates all of tensor memory, in both CTAs of a pair; the address goes to shared memory."""
    at = cta.shared.data_ptr(cta.layout.shared.tmem_address)
    slot = cutlass.Pointer(at.ir_value(), dtype=Int32)
    columns, exclusive = cta.layout.tmem.columns, _exclusive(cta)
    prims.tcgen05_alloc(slot, columns, group=_group(cta), is_exclusive=exclusive)
    prims.tcgen05_relinquish_alloc_permit(group=_group(cta))


def release(cta: Cta, base: Int32) -> None:
    """Frees tensor memory; both CTAs of a pair must be done with it."""
    pointer = prims.make_tmem_ptr(base, Float32)
    columns, exclusive = cta.layout.tmem.columns, _exclusive(cta)
    prims.tcgen05_dealloc(pointer, columns, group=_group(cta), is_exclusive=exclusive)


@cute.jit
def issue(cta: Cta, base: Int32) -> None:
    """Both products of every tile of every item; one thread of the leader CTA runs this."""
    lead = cta.layout.lead
    items = Items.of_cluster(cta)
    done, queries, tails = Int32(0), Int32(0), Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        work = Work.of_item(cta, index)
        if work.count > 0:
            cta.wait("q_full", queries & 1)
            queries = queries + 1
        for i in cutlass.range(work.count + cutlass.min(work.count, 1) * lead, unroll=1):
            if i < work.count:
                last = i == work.count - 1
                _first_product(cta, base, done + i, work.has_tail & last, tails)
                if last:
                    _commit(cta, cta.barrier("q_empty"))
            j = i - lead
            if j >= 0:
                last = j == work.count - 1
                _second_product(cta, base, done + j, j > 0, work.has_tail & last, tails)
        tails = tails + Int32(work.has_tail)
        done = done + work.count


@cute.jit
def _first_product(cta: Cta, base: Int32, turn: Int32, tail: Boolean, tails: Int32) -> None:
    """S = Q K^T of the cluster's `turn`-th tile: 18 instructions of N 128 and K 32."""
    shared, tmem, operands = cta.layout.shared, cta.layout.tmem, cta.layout.operands
    stage, parity = ring(turn, tmem.s_stages)
    k_stage, k_parity = ring(turn, operands.k_stages)
    cta.wait("s_empty", parity ^ 1, stage)
    if cutlass.const_expr(operands.shares_values):
        if tail:
            _await_tail(cta, tails)
    target = prims.make_tmem_ptr(base + stage * tmem.s_columns, Float32)
    tile = shared.k + k_stage * operands.k_tile_bytes
    for number, group in enumerate(operands.key_groups):
        cta.wait(f"{group.name}_full", k_parity, k_stage)
        prims.tcgen05_fence("after_thread_sync")
        for block in (*group.blocks, *([LATENT_BLOCKS] if group.rope else [])):
            at = shared.q + block * Q_BLOCK_BYTES, tile + block * operands.k_block_bytes
            fresh = number == 0 and block == 0
            _score_block(cta, target, *at, block == LATENT_BLOCKS, fresh)
    _commit(cta, cta.barrier("s_full", stage))
    for group in operands.key_groups:
        if cutlass.const_expr(group.rope):
            _commit(cta, cta.barrier(f"{group.name}_empty", k_stage))


def _score_block(cta: Cta, target: Any, q: Any, k: Any, rope: bool, fresh: bool) -> None:
    """One block of columns; `fresh`: its first instruction starts the sum."""
    group = GROUP_64B if rope else GROUP_128B
    swizzle = prims.Tcgen05SmemSwizzle.SWIZZLE_64B if rope else _SWIZZLE_128B
    a, b = _descriptor(cta, q, group, swizzle), _descriptor(cta, k, group, swizzle)
    shape = _shape(cta, KEY_TILE)
    for column in range(0, ROPE_DIM if rope else BLOCK_COLUMNS, MMA_K):
        _mma(
            cta,
            target,
            a.advance_start_address(column),
            b.advance_start_address(column),
            shape,
            not (fresh and column == 0),
        )


@cute.jit
def _second_product(
    cta: Cta, base: Int32, turn: Int32, accumulate: Any, tail: Boolean, tails: Int32
) -> None:
    """O (+)= P V: for each 256 output columns 4 instructions of N 256 and K 32."""
    shared, tmem, operands = cta.layout.shared, cta.layout.tmem, cta.layout.operands
    stage, parity = ring(turn, shared.p_stages)
    v_stage, v_parity = ring(turn, operands.value_stages)
    if cutlass.const_expr(not operands.shares_values):
        cta.wait("v_full", v_parity, v_stage)
        if tail:
            _await_tail(cta, tails)
    cta.wait("p_full", parity, stage)
    o_stage, o_parity = ring(turn, 2)
    cta.wait("o_ready", o_parity, o_stage)
    prims.tcgen05_fence("after_thread_sync")
    shape = _shape(cta, O_STEP, b_major=1)
    p = _descriptor(cta, shared.p + stage * P_TILE_BYTES, GROUP_128B, _SWIZZLE_128B)
    tile = shared.v + v_stage * shared.value_tile_bytes
    step_bytes = operands.value_blocks // O_STEPS * V_BLOCK_BYTES
    for step, key, reuse in _second_product_order(operands.shares_values):
        target = prims.make_tmem_ptr(base + tmem.o(step), Float32)
        v = _descriptor(cta, tile + step * step_bytes, GROUP_128B, _SWIZZLE_128B, V_BLOCK_BYTES)
        _mma(
            cta,
            target,
            p.advance_start_address(key),
            v.advance_start_address(key * BLOCK_COLUMNS),
            shape,
            accumulate if key == 0 else True,
            reuse,
        )
        if cutlass.const_expr(operands.shares_values and key == KEY_TILE - MMA_K):
            _commit(cta, cta.barrier(f"{operands.key_groups[step].name}_empty", v_stage))
    if cutlass.const_expr(not operands.shares_values):
        _commit(cta, cta.barrier("v_empty", v_stage))
    _commit(cta, cta.barrier("p_empty", stage))
    _commit(cta, cta.barrier("o_full", o_stage))


def _second_product_order(shares_values: bool) -> list[tuple[int, int, str | None]]:
    """(step of output columns, first key, how the instruction uses the collector of P).

    A pair's steps take turns on each slice of P, which the second may find in the collector: P is
    read once, not twice. A single CTA goes step by step, to free a step's value blocks early.
    """
    keys = range(0, KEY_TILE, MMA_K)
    if shares_values:
        return [(step, key, None) for step in range(O_STEPS) for key in keys]
    uses = ["fill"] + ["use"] * (O_STEPS - 2) + ["lastuse"]
    return [(step, key, uses[step]) for key in keys for step in range(O_STEPS)]


def _await_tail(cta: Cta, tails: Int32) -> None:
    """Waits until the rows past the request's end are zero in all CTAs."""
    turn, parity = ring(tails, cta.layout.operands.value_stages)
    cta.wait("tail_zeroed", parity, turn)


_SWIZZLE_128B = prims.Tcgen05SmemSwizzle.SWIZZLE_128B


def _shape(cta: Cta, n: int, b_major: Any = 0) -> prims.Tcgen05InstrDesc:
    """Instruction descriptor over all CTAs' rows."""
    return prims.Tcgen05InstrDesc.build(
        a_dtype=Float8E4M3FN,
        b_dtype=Float8E4M3FN,
        c_dtype=Float32,
        b_major=b_major,
        m_dim=CTA_ROWS * cta.layout.operands.ctas,
        n_dim=n,
    )


def _descriptor(
    cta: Cta, offset: Any, group: int, swizzle: Any, next_block: int = 16
) -> prims.Tcgen05SmemDesc:
    """Matrix descriptor of swizzled blocks.

    group: bytes between groups of 8 rows. next_block: to the next span of an MN-major operand.
    """
    return prims.Tcgen05SmemDesc.build(
        cta.shared.data_ptr(offset),
        leading_byte_offset=next_block,
        stride_byte_offset=group,
        layout=swizzle,
    )


def _mma(
    cta: Cta, target: Any, a: Any, b: Any, shape: Any, accumulate: Any, reuse: str | None = None
) -> None:
    """A pair's M is 128; a single CTA's 64 rows take the weight-stationary form.

    reuse: what a pair's instruction does with A in the collector; None: nothing.
    """
    if cta.layout.operands.ctas == 2:
        prims.tcgen05_mma("f8f6f4", "cta_2", target, a, b, shape, accumulate, collector_op=reuse)
    else:
        prims.tcgen05_mma_ws("f8f6f4", target, a, b, shape, accumulate)


def _commit(cta: Cta, barrier: Any) -> None:
    """Arrives at the barrier of each CTA when all products issued so far are complete."""
    if cta.layout.operands.ctas == 2:
        prims.tcgen05_commit(barrier, multicast_mask=BOTH_CTAS, group="cta_2")
    else:
        prims.tcgen05_commit(barrier, group="cta_1")


def _group(cta: Cta) -> str:
    return f"cta_{cta.layout.operands.ctas}"


def _exclusive(cta: Cta) -> bool | None:
    """More columns than 512 can be had only all at once."""
    return True if cta.layout.tmem.columns > 512 else None
