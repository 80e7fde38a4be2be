"""A row softmax in plain CuTe: float16 in, bfloat16 out, 128 threads a row."""

# No `from __future__ import annotations`: the DSL reads the annotations of its functions.

from pathlib import Path
from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, cute
from cutlass.base_dsl.compiler import DumpDir

ROWS, THREADS, WARPS = 5, 128, 4


@cute.kernel
def softmax(x: cute.Tensor, y: cute.Tensor, columns: Int32):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    partial = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS))
    top = Float32(-1e30)
    for i in range(thread, columns, THREADS):
        top = cute.arch.fmax(top, x[row, i].to(Float32))
    for step in cutlass.range_constexpr(5):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
    if thread % 32 == 0:
        partial[thread // 32] = top
    cute.arch.sync_threads()
    top = cute.arch.fmax(
        cute.arch.fmax(partial[0], partial[1]), cute.arch.fmax(partial[2], partial[3])
    )
    cute.arch.sync_threads()
    total = Float32(0)
    for i in range(thread, columns, THREADS):
        total += cute.math.exp(x[row, i].to(Float32) - top, fastmath=True)
    for step in cutlass.range_constexpr(5):
        total += cute.arch.shuffle_sync_bfly(total, 1 << step)
    if thread % 32 == 0:
        partial[thread // 32] = total
    cute.arch.sync_threads()
    total = partial[0] + partial[1] + partial[2] + partial[3]
    for i in range(thread, columns, THREADS):
        weight = cute.math.exp(x[row, i].to(Float32) - top, fastmath=True)
        y[row, i] = (weight / total).to(BFloat16)


@cute.jit
def host(x: cute.Tensor, y: cute.Tensor, columns: Int32, stream: Any):
    softmax(x, y, columns).launch(grid=[ROWS, 1, 1], block=[THREADS, 1, 1], stream=stream)


def ptx(arch: str, columns: int, folder: Path) -> str:
    """The PTX for rows of `columns` elements."""
    tensors = [
        cute.runtime.make_fake_compact_tensor(dtype, (ROWS, columns), stride_order=(1, 0))
        for dtype in (Float16, BFloat16)
    ]
    compile_with = cute.compile[cute.GPUArch(arch), cute.KeepPTX(True), DumpDir(str(folder))]
    compile_with(host, *tensors, Int32(columns), cute.runtime.make_fake_stream())
    (file,) = folder.glob("*.ptx")
    return file.read_text()
