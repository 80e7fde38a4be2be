"""The combine kernel: merges the partial results of a split run by their LSEs.

One CTA of 128 threads for each output row and band of columns. Warp 0 turns the base-2 LSEs of the
row's runs into weights 2^(lse - total) * output_scale; meanwhile every thread already loads its
columns of the first runs. A weight of 0 never multiplies: such a partial may hold anything. Rows of
a request that was not split already have their result, and their CTAs leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from mlakern import work_list
from mlakern.config import LATENT_DIM, MAX_SPLITS, KernelConfig
from mlakern.kernels.arguments import Arguments
from mlakern.kernels.device import (
    FULL_MASK,
    NEG_INF,
    divmod_positive,
    exp2,
    log2,
    store_row,
)
from mlakern.kernels.masks import Mask
from mlakern.kernels.splits import Runs

WARP = 32
THREADS = 128
SET = 4  # partials loaded together
EARLY_SETS = 4  # sets loaded before the weights are known


@dataclass(frozen=True)
class Partials:
    """Where the partial results of a row's unit lie: `count` slots from `first_slot`."""

    first_slot: Int32
    count: Int32

    @classmethod
    def of_unit(
        cls, config: KernelConfig, args: Arguments, request: Int32, query_tile: Int32
    ) -> Partials:
        unit = request * args.query_tiles + query_tile
        if config.schedule == "work_list":
            units = args.batch * args.query_tiles
            # The list begins with the clusters' first items; the attention grid has as many.
            at = args.work_list + work_list.partials_offset(args.clusters)
            slots = args.work_list + work_list.slots_offset(args.clusters, units)
            return cls((slots + unit).load(), (at + unit).load())
        runs = Runs.of_request(Mask(config.mask, args), args, request)
        return cls(unit * args.splits, runs.count)


class Combine:
    """Merge of one configuration's partials; grid (Sq * H, B, bands)."""

    name = "mla_decode_combine"
    block = (THREADS, 1, 1)
    shared_bytes = MAX_SPLITS * 4

    def __init__(self, config: KernelConfig, bands: int = 1) -> None:
        self.config = config
        self.columns = LATENT_DIM // bands // THREADS  # of one thread

    @cute.kernel
    def kernel(self, args: Arguments) -> None:
        weights = cutlass.Array(
            Float32, (MAX_SPLITS,), space=cutlass.AddressSpace.smem, alignment=16
        ).data_ptr(0)
        # The next kernel may start its prologue; it waits for this one before it reads results.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        position, request, band = cute.arch.block_idx()
        query_tile, row = divmod_positive(position, args.tile_rows)
        partials = Partials.of_unit(self.config, args, request, query_tile)
        if partials.count > 1:
            self.merge(args, weights, partials, row, request, position, band)

    @cute.jit
    def merge(
        self,
        args: Arguments,
        weights: cutlass.Pointer,
        partials: Partials,
        row: Int32,
        request: Int32,
        position: Int32,
        band: Int32,
    ) -> None:
        thread = Int32(cute.arch.thread_idx()[0])
        column = (band * THREADS + thread) * self.columns
        first_row = Int64(partials.first_slot) * args.tile_rows + row
        source = args.partial_out + (first_row * LATENT_DIM + column)
        stride = Int64(args.tile_rows) * LATENT_DIM
        runs = partials.count

        early = [_zeros(self.columns) for _ in range(EARLY_SETS * SET)]
        for number in cutlass.range_constexpr(EARLY_SETS):
            if number * SET < runs:
                loaded = _load_set(source, stride, Int32(number * SET), runs, self.columns)
                for n in cutlass.range_constexpr(SET):
                    early[number * SET + n] = loaded[n]
        if thread < WARP:
            output_row = (Int64(request) * args.seq_len_q * args.num_heads) + position
            _weigh(args, first_row, output_row, runs, weights, band)
        prims.barrier_cta_sync_aligned()

        total = _zeros(self.columns)
        for number in cutlass.range_constexpr(EARLY_SETS):
            if number * SET < runs:
                values = early[number * SET : (number + 1) * SET]
                total = _add_set(total, values, weights, number * SET)
        for first in cutlass.range(EARLY_SETS * SET, runs, SET, unroll=1):
            values = _load_set(source, stride, first, runs, self.columns)
            total = _add_set(total, values, weights, first)
        _store(args, request, position, column, total)


@cute.jit
def _weigh(
    args: Arguments,
    first_row: Int64,
    output_row: Int64,
    runs: Int32,
    weights: cutlass.Pointer,
    band: Int32,
) -> None:
    """Weights of the runs, 0 up to the end of the last set; the row's LSE. Warp 0 runs this."""
    lane = Int32(cute.arch.lane_idx())
    lses = []
    top = Float32(NEG_INF)
    for n in cutlass.range_constexpr(MAX_SPLITS // WARP):
        lse = Float32(NEG_INF)
        run = n * WARP + lane
        if run < runs:
            lse = (args.partial_lse + (first_row + Int64(run) * args.tile_rows)).load()
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
        weight = exp2(lse - row_lse) * args.output_scale
        weight = cutlass.select_(lse > NEG_INF, weight, Float32(0.0))
        (weights + (n * WARP + lane)).store(weight)
    if Boolean(args.lse.toint() != 0) & (lane == 0) & (band == 0):
        (args.lse + output_row).store(row_lse * args.lse_factor)


def _warp_reduce(value: Float32, operation: Any) -> Float32:
    for offset in (16, 8, 4, 2, 1):
        value = operation(value, prims.shfl_sync(FULL_MASK, value, offset, 31, "bfly"))
    return value


def _zeros(columns: int) -> list[Float32]:
    return [Float32(0.0)] * columns


def _load_set(
    source: cutlass.Pointer, stride: Int64, first: Int32, runs: Int32, columns: int
) -> list[list[Float32]]:
    """This thread's columns of SET runs; past the last run it repeats, with weight 0."""
    result = []
    for n in range(SET):
        run = cutlass.min(first + n, runs - 1)
        alignment = columns * source.dtype.width // 8
        values = (source + run * stride).load(alignment, count=columns).to(Float32)
        result.append([values[c] for c in range(columns)])
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
    args: Arguments, request: Int32, position: Int32, column: Int32, values: list[Float32]
) -> None:
    token, head = divmod_positive(position, args.num_heads)
    offset = Int64(request) * args.out_stride_batch
    offset += Int64(token) * args.out_stride_token + Int64(head) * args.out_stride_head
    store_row(args.out + (offset + column), values, len(values) * args.out.dtype.width // 8)
