"""Device code of the hardware probes; see hardware_probes.py."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from mlakern.config import KernelConfig
from mlakern.kernels.arguments import Arguments, placeholders
from mlakern.kernels.combine import Combine
from mlakern.kernels.device import exp2, log2, wait
from mlakern.kernels.planner import Planner
from mlakern.kernels.program import DTYPES
from mlakern.signature import Kind, Parameter, combine_signature, planner_signature

SHARED_BYTES = 16384


def named(kernel: Any, name: str) -> Any:
    kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    return kernel


def box_host(rank: int) -> Any:
    """Zeroes shared memory, copies one TMA box into it, writes all of it out."""
    coordinates = [Parameter(f"c{n}", Kind.INT32, "coordinate") for n in range(rank)]
    signature = (
        Parameter("source", Kind.TENSOR_MAP, "the map"),
        Parameter("out", Kind.POINTER, "all of shared memory"),
        *coordinates,
        Parameter("offset", Kind.INT32, "where the box goes"),
        Parameter("bytes", Kind.INT32, "size of the box"),
    )

    @cute.kernel
    def boxes(args: Arguments) -> None:
        lane = Int32(cute.arch.thread_idx()[0])
        shared = cutlass.Array(
            cutlass.Uint8,
            (SHARED_BYTES + 128,),
            space=cutlass.AddressSpace.smem,
            alignment=1024,
        )
        words = cutlass.Pointer(shared.data_ptr(0).ir_value(), dtype=Int32)
        for n in cutlass.range(SHARED_BYTES // 128, unroll=1):
            (words + (n * 32 + lane)).store(Int32(0))
        barrier = shared.subview(SHARED_BYTES)
        if lane == 0:
            prims.mbarrier_init(barrier, 1)
            prims.fence_mbarrier_init()
        prims.fence_proxy("async_shared", space="cta")
        prims.barrier_cta_sync_aligned()
        if lane == 0:
            prims.mbarrier_arrive_expect_tx(barrier, args.bytes)
            prims.cp_async_bulk_tensor_shared_cluster_global(
                shared.data_ptr(args.offset),
                args.source.get_ptr(),
                tuple(getattr(args, c.name) for c in coordinates),
                barrier,
                [],
            )
        wait(barrier, 0)
        for n in cutlass.range(SHARED_BYTES // 128, unroll=1):
            (args.out + (n * 32 + lane)).store((words + (n * 32 + lane)).load())

    named(boxes, "probe_boxes")

    @cute.jit
    def launch(stream: Any) -> None:
        boxes(placeholders(signature, {"out": Int32})).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream
        )

    return launch


def math_host() -> Any:
    """Each function and conversion of every value, as 32-bit codes."""
    names = ("values", "ex2", "lg2", "rcp", "e4m3", "f16", "bf16")
    signature = tuple(Parameter(name, Kind.POINTER, "one word each") for name in names)

    @cute.kernel
    def math(args: Arguments) -> None:
        index = Int32(cute.arch.block_idx()[0]) * 128 + Int32(cute.arch.thread_idx()[0])
        value = (args.values + index).load()
        (args.ex2 + index).store(exp2(value))
        (args.lg2 + index).store(log2(value))
        (args.rcp + index).store(cute.arch.rcp_approx(value))
        pair = prims.cvt_f32x2_to_f8x2(
            value, value * 0.5, cutlass.Float8E4M3FN, rnd="rn", sat="satfinite"
        )
        (args.e4m3 + index).store(Int32(pair))
        vector = cutlass.Vector.from_elements((value, value * 0.5), Float32)
        (args.f16 + index).store(vector.to(cutlass.Float16).bitcast(Int32)[0])
        (args.bf16 + index).store(vector.to(cutlass.BFloat16).bitcast(Int32)[0])

    named(math, "probe_math")
    types = dict.fromkeys(names, Int32) | dict.fromkeys(("values", "ex2", "lg2", "rcp"), Float32)

    @cute.jit
    def launch(stream: Any) -> None:
        math(placeholders(signature, types)).launch(
            grid=(1, 1, 1), block=(128, 1, 1), stream=stream
        )

    return launch


def combine_host(partial: str, out: str) -> Any:
    """The package's combine kernel on its own."""
    config = KernelConfig(partial_dtype=partial, out_dtype=out)
    combine = Combine(config)
    named(Combine.kernel, "probe_combine")
    types = {
        "seq_lens": Int32,
        "block_split_kvs": Int32,
        "out": DTYPES[out],
        "lse": Float32,
        "partial_out": DTYPES[partial],
        "partial_lse": Float32,
    }

    @cute.jit
    def launch(stream: Any) -> None:
        combine.kernel(placeholders(combine_signature(config), types)).launch(
            grid=(1, 1, 1), block=Combine.block, stream=stream
        )

    return launch


def planner_host() -> Any:
    """The package's work-list planner on its own."""
    config = KernelConfig(schedule="work_list")
    planner = Planner(config)
    named(Planner.kernel, "probe_planner")

    @cute.jit
    def launch(stream: Any) -> None:
        types = {"seq_lens": Int32, "work_list": Int32}
        planner.kernel(placeholders(planner_signature(config), types)).launch(
            grid=(1, 1, 1), block=Planner.block, stream=stream
        )

    return launch
