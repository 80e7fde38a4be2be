"""The combine kernel: merges the partial results of a split run by their LSEs.

One CTA of 128 threads for each output row, four columns a thread. Warp 0 turns the base-2 LSEs of
the row's runs into weights 2^(lse - total) * output_scale; meanwhile every thread already loads its
columns of the first runs. A weight of 0 never multiplies: such a partial may hold anything.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from mlakern.config import LATENT_DIM, MAX_SPLITS
from mlakern.kernels.arguments import Arguments
from mlakern.kernels.device import (
    FULL_MASK,
    NEG_INF,
    ceil_div,
    divmod_positive,
    exp2,
    log2,
    store_row,
)
from mlakern.kernels.splits import key_tiles, tiles_per_run

WARP = 32
THREADS = 128
COLUMNS = LATENT_DIM // THREADS  # of one thread
SET = 4  # partials loaded together
EARLY_SETS = 4  # sets loaded before the weights are known: 64 registers


class Combine:
    """Merge of one configuration's partials; grid (Sq * H, B)."""

    block = (THREADS, 1, 1)
    shared_bytes = MAX_SPLITS * 4

    @cute.kernel
    def kernel(self, args: Arguments) -> None:
        weights = cutlass.Array(
            Float32, (MAX_SPLITS,), space=cutlass.AddressSpace.smem, alignment=16
        ).data_ptr(0)
        # The next kernel may start its prologue; it waits for this one before it reads results.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        thread = Int32(cute.arch.thread_idx()[0])
        row_in_request, request, _ = cute.arch.block_idx()
        row = Int64(request) * args.seq_len_q * args.num_heads + row_in_request
        runs = _runs_with_keys(args, request)
        first_partial = row * args.splits
        column = thread * COLUMNS
        partials = args.partial_out + (first_partial * LATENT_DIM + column)

        early = [_zeros() for _ in range(EARLY_SETS * SET)]
        for number in cutlass.range_constexpr(EARLY_SETS):
            if number * SET < runs:
                loaded = _load_set(partials, Int32(number * SET), runs)
                for n in cutlass.range_constexpr(SET):
                    early[number * SET + n] = loaded[n]
        if thread < WARP:
            _weigh(args, row, runs, weights)
        prims.barrier_cta_sync_aligned()

        total = [Float32(0.0)] * COLUMNS
        for number in cutlass.range_constexpr(EARLY_SETS):
            if number * SET < runs:
                total = _add_set(
                    total, early[number * SET : (number + 1) * SET], weights, number * SET
                )
        for first in cutlass.range(EARLY_SETS * SET, runs, SET, unroll=1):
            total = _add_set(total, _load_set(partials, first, runs), weights, first)
        _store(args, request, row_in_request, column, total)


def _runs_with_keys(args: Arguments, request: Int32) -> Int32:
    """Number of runs that hold key tiles; attention wrote no others."""
    tiles = key_tiles(args.seq_lens[request])
    per_run = tiles_per_run(tiles, args.splits)
    return ceil_div(tiles, cutlass.max(per_run, 1))


@cute.jit
def _weigh(args: Arguments, row: Int64, runs: Int32, weights: cutlass.Pointer) -> None:
    """Weights of the runs, 0 up to the end of the last set; the row's LSE. Warp 0 runs this."""
    lane = Int32(cute.arch.lane_idx())
    partial_lse = args.partial_lse + row * args.splits
    lses = []
    top = Float32(NEG_INF)
    for n in cutlass.range_constexpr(MAX_SPLITS // WARP):
        lse = Float32(NEG_INF)
        if n * WARP + lane < runs:
            lse = (partial_lse + (n * WARP + lane)).load()
        lses.append(lse)
        top = cute.arch.fmax(top, lse)
    top = _warp_reduce(top, cute.arch.fmax)
    reference = cutlass.select_(top == NEG_INF, Float32(0.0), top)
    total = Float32(0.0)
    for lse in lses:
        total = total + exp2(lse - reference)
    total = _warp_reduce(total, lambda a, b: a + b)
    row_lse = reference + log2(total)  # log2(0) = -inf: a row without keys
    for n, lse in enumerate(lses):
        seen = lse > NEG_INF
        weight = exp2(lse - row_lse) * args.output_scale
        (weights + (n * WARP + lane)).store(cutlass.select_(seen, weight, Float32(0.0)))
    if Boolean(args.lse.toint() != 0) & (lane == 0):
        (args.lse + row).store(row_lse * args.lse_factor)


def _warp_reduce(value: Float32, operation: Any) -> Float32:
    for offset in (16, 8, 4, 2, 1):
        value = operation(value, prims.shfl_sync(FULL_MASK, value, offset, 31, "bfly"))
    return value


def _zeros() -> list[Float32]:
    return [Float32(0.0)] * COLUMNS


def _load_set(partials: cutlass.Pointer, first: Int32, runs: Int32) -> list[list[Float32]]:
    """This thread's columns of SET runs; past the last run it repeats, with weight 0."""
    result = []
    for n in range(SET):
        run = cutlass.min(first + n, runs - 1)
        values = (partials + run * LATENT_DIM).load(
            COLUMNS * partials.dtype.width // 8, count=COLUMNS
        )
        values = values.to(Float32)
        result.append([values[c] for c in range(COLUMNS)])
    return result


def _add_set(
    total: list[Float32], values: list[list[Float32]], weights: cutlass.Pointer, first: Any
) -> list[Float32]:
    for n in range(SET):
        weight = (weights + (first + n)).load()
        used = weight != 0.0
        total = [
            t + weight * cutlass.select_(used, v, Float32(0.0))
            for t, v in zip(total, values[n], strict=True)
        ]
    return total


def _store(
    args: Arguments, request: Int32, row_in_request: Int32, column: Int32, values: list[Float32]
) -> None:
    token, head = divmod_positive(row_in_request, args.num_heads)
    offset = Int64(request) * args.out_stride_batch
    offset += Int64(token) * args.out_stride_token + Int64(head) * args.out_stride_head
    store_row(args.out + (offset + column), values, COLUMNS * args.out.dtype.width // 8)
