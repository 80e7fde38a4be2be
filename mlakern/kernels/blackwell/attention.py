"""The attention kernel: set-up, one role for each warp, tear-down."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.experimental import primitives as prims

from mlakern.kernels.arguments import Arguments
from mlakern.kernels.blackwell import correction, loads, mma, softmax
from mlakern.kernels.blackwell.layout import WARP, AttentionLayout
from mlakern.kernels.blackwell.work import LEADER, Cta


class Attention:
    """Split-KV attention of one configuration; `kernel` is the device function."""

    name = "mla_decode_attention"

    def __init__(self, layout: AttentionLayout) -> None:
        self.layout = layout

    @cute.kernel
    def kernel(self, args: Arguments) -> None:
        layout = self.layout
        warps = layout.warps
        warp = cute.arch.make_warp_uniform(Int32(cute.arch.thread_idx()[0]) // WARP)
        shared = cutlass.Array(
            cutlass.Uint8,
            (layout.shared.size,),
            space=cutlass.AddressSpace.smem,
            alignment=1024,
        )
        paired = layout.operands.ctas == 2
        cta = Cta(layout, args, shared, prims.cluster_ctarank() if paired else Int32(LEADER))
        base = _set_up(cta, warp)
        # Everything above may overlap the previous kernel; its results are read only from here on.
        cute.arch.griddepcontrol_wait()

        # Each role works out the items for itself: values that live across all roles would spill.
        if warp < warps.softmax.stop:
            prims.setmaxregister(warps.softmax_registers, "increase")
            softmax.run(cta, base)
        elif warp < warps.correction.stop:
            prims.setmaxregister(warps.correction_registers, "increase")
            correction.run(cta, base)
        else:
            prims.setmaxregister(warps.other_registers, "decrease")
            if warp == warps.mma:
                if cta.rank == LEADER:
                    if prims.elect_sync():
                        mma.issue(cta, base)
                # All lanes wait for the one that issues: the next kernel is let in at the end.
                cute.arch.sync_warp()
                cute.arch.griddepcontrol_launch_dependents()
            elif warp == warps.load_k:
                loads.load_k(cta)
            elif warp == warps.load_qv:
                loads.load_qv(cta)
            else:
                loads.zero_tail(cta)

        # No CTA leaves, and no tensor memory is freed, while its peer may still use it. Relaxed: a
        # release would hold the CTA until its output has reached the L2, and every arrival at a
        # peer's barrier is awaited there, or comes before one of the same warp that is.
        prims.tcgen05_fence("before_thread_sync")
        _sync(cta)
        prims.tcgen05_fence("after_thread_sync")
        if warp == warps.mma:
            mma.release(cta, base)


@cute.jit
def _set_up(cta: Cta, warp: Int32) -> Int32:
    """Barriers and tensor memory; returns the address of tensor memory."""
    layout, args = cta.layout, cta.args
    if warp == layout.warps.load_k:
        if prims.elect_sync():
            for tensor_map in (args.q_latent, args.q_rope, args.c_latent, args.c_rope):
                prims.prefetch_tensormap(tensor_map.get_ptr(), space="param")
            for barrier in layout.shared.barrier_list:
                for stage in cutlass.range_constexpr(barrier.stages):
                    prims.mbarrier_init(cta.barrier(barrier.name, stage), barrier.arrivals)
            prims.fence_mbarrier_init()
    # The peer's barriers and tensor memory are used from here on: both CTAs must be running. The
    # fence above has released the barriers' initial state.
    _sync(cta)
    if warp == layout.warps.mma:
        mma.allocate(cta)
    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync_aligned()
    prims.tcgen05_fence("after_thread_sync")
    return cta.tmem_base()


def _sync(cta: Cta) -> None:
    """All threads of all CTAs that share a tile."""
    if cta.layout.operands.ctas == 2:
        prims.barrier_cluster_arrive_relaxed_aligned()
        prims.barrier_cluster_wait_aligned()
    else:
        prims.barrier_cta_sync_aligned()
