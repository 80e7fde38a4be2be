"""The MMA warp: tensor memory, and both products of the CTA pair from one thread of the leader.

S(i) of tile i runs two tiles ahead of O += P(i) V(i), so that the tensor cores work on S(i + 2)
while the softmax warps turn S(i) into P(i).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute
from cutlass.experimental import primitives as prims

from mlakern.config import KEY_TILE, ROPE_DIM
from mlakern.kernels.blackwell.layout import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    GROUP_64B,
    GROUP_128B,
    LATENT_BLOCKS,
    MMA_K,
    O_STEP,
    O_STEPS,
    P_TILE_BYTES,
    QK_TILE_BYTES,
    V_BLOCK_BYTES,
    V_BLOCK_COLUMNS,
    V_TILE_BYTES,
)
from mlakern.kernels.blackwell.work import Cta, Items, Work, ring

BOTH_CTAS = 0b11
LEAD = 2  # tiles by which S runs ahead


def allocate(cta: Cta) -> None:
    """Allocates all of tensor memory in both CTAs; the address goes to shared memory."""
    at = cta.shared.data_ptr(cta.layout.shared.tmem_address)
    slot = cutlass.Pointer(at.ir_value(), dtype=Int32)
    prims.tcgen05_alloc(slot, cta.layout.tmem.columns, group="cta_2")
    prims.tcgen05_relinquish_alloc_permit(group="cta_2")


def release(cta: Cta, base: Int32) -> None:
    """Frees tensor memory; both CTAs must be done with it."""
    pointer = prims.make_tmem_ptr(base, Float32)
    prims.tcgen05_dealloc(pointer, cta.layout.tmem.columns, group="cta_2")


@cute.jit
def issue(cta: Cta, base: Int32) -> None:
    """Both products of every tile of every item; one thread of the leader CTA runs this."""
    items = Items.of_cluster(cta)
    done, queries, tails = Int32(0), Int32(0), Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        work = Work.of_item(cta, index)
        if work.count > 0:
            cta.wait("q_full", queries & 1)
            queries = queries + 1
        tail = work.has_tail
        for i in cutlass.range(work.count + cutlass.min(work.count, 1) * LEAD, unroll=1):
            if i < work.count:
                _first_product(cta, base, done + i)
                if i == work.count - 1:
                    _commit(cta.barrier("q_empty"))
            j = i - LEAD
            if j >= 0:
                _await_values(cta, done + j)
                if tail & (j == work.count - 1):
                    cta.wait("v_tail_zeroed", tails & 1)
                    tails = tails + 1
                _second_product(cta, base, done + j, j > 0)
        done = done + work.count


@cute.jit
def _first_product(cta: Cta, base: Int32, turn: Int32) -> None:
    """S = Q K^T of the cluster's `turn`-th tile: 18 instructions of M 128, N 128, K 32."""
    shared, tmem = cta.layout.shared, cta.layout.tmem
    stage, parity = ring(turn, tmem.s_stages)
    k_stage, k_parity = ring(turn, shared.k_stages)
    cta.wait("s_empty", parity ^ 1, stage)
    cta.wait("k_full", k_parity, k_stage)
    prims.tcgen05_fence("after_thread_sync")
    target = prims.make_tmem_ptr(base + stage * tmem.s_columns, Float32)
    shape = prims.Tcgen05InstrDesc.build(
        a_dtype=Float8E4M3FN, b_dtype=Float8E4M3FN, c_dtype=Float32, m_dim=128, n_dim=KEY_TILE
    )
    q, k = shared.q, shared.k + k_stage * QK_TILE_BYTES
    for block in cutlass.range_constexpr(LATENT_BLOCKS + 1):
        rope = block == LATENT_BLOCKS
        group = GROUP_64B if rope else GROUP_128B
        swizzle = prims.Tcgen05SmemSwizzle.SWIZZLE_64B if rope else _SWIZZLE_128B
        a = _descriptor(cta, q + block * BLOCK_BYTES, group, swizzle)
        b = _descriptor(cta, k + block * BLOCK_BYTES, group, swizzle)
        for k_byte in cutlass.range_constexpr(0, ROPE_DIM if rope else BLOCK_COLUMNS, MMA_K):
            _mma(
                target,
                a.advance_start_address(k_byte),
                b.advance_start_address(k_byte),
                shape,
                block > 0 or k_byte > 0,
            )
    _commit(cta.barrier("s_full", stage))
    _commit(cta.barrier("k_empty", k_stage))


@cute.jit
def _await_values(cta: Cta, turn: Int32) -> None:
    stage, parity = ring(turn, cta.layout.shared.v_stages)
    cta.wait("v_full", parity, stage)


@cute.jit
def _second_product(cta: Cta, base: Int32, turn: Int32, accumulate: Any) -> None:
    """O (+)= P V: for each 256 output columns 4 instructions of M 128, N 256, K 32."""
    shared, tmem = cta.layout.shared, cta.layout.tmem
    stage, parity = ring(turn, shared.p_stages)
    v_stage, _ = ring(turn, shared.v_stages)
    cta.wait("p_full", parity, stage)
    o_stage, o_parity = ring(turn, 2)
    cta.wait("o_ready", o_parity, o_stage)
    prims.tcgen05_fence("after_thread_sync")
    shape = prims.Tcgen05InstrDesc.build(
        a_dtype=Float8E4M3FN,
        b_dtype=Float8E4M3FN,
        c_dtype=Float32,
        b_major=1,
        m_dim=128,
        n_dim=O_STEP,
    )
    p = _descriptor(cta, shared.p + stage * P_TILE_BYTES, GROUP_128B, _SWIZZLE_128B)
    for step in cutlass.range_constexpr(O_STEPS):
        target = prims.make_tmem_ptr(base + tmem.o(step), Float32)
        at = shared.v + v_stage * V_TILE_BYTES + step * V_BLOCK_BYTES
        v = _descriptor(cta, at, GROUP_128B, _SWIZZLE_128B)
        for key in cutlass.range_constexpr(0, KEY_TILE, MMA_K):
            _mma(
                target,
                p.advance_start_address(key),
                v.advance_start_address(key * V_BLOCK_COLUMNS),
                shape,
                accumulate if key == 0 else True,
            )
    _commit(cta.barrier("v_empty", v_stage))
    _commit(cta.barrier("p_empty", stage))
    _commit(cta.barrier("o_full", o_stage))


_SWIZZLE_128B = prims.Tcgen05SmemSwizzle.SWIZZLE_128B


def _descriptor(cta: Cta, offset: Any, group: int, swizzle: Any) -> prims.Tcgen05SmemDesc:
    """Matrix descriptor of a swizzled block; one swizzle span wide, so no leading offset."""
    return prims.Tcgen05SmemDesc.build(
        cta.shared.data_ptr(offset),
        leading_byte_offset=16,
        stride_byte_offset=group,
        layout=swizzle,
    )


def _mma(target: Any, a: Any, b: Any, shape: Any, accumulate: Any) -> None:
    prims.tcgen05_mma("f8f6f4", "cta_2", target, a, b, shape, accumulate)


def _commit(barrier: Any) -> None:
    """Arrives at the barrier of both CTAs when all products issued so far are complete."""
    prims.tcgen05_commit(barrier, multicast_mask=BOTH_CTAS, group="cta_2")
