"""The work-list planner on the device: one CTA writes what mlakern.work_list.build returns.

So a captured graph follows lengths that change in place. Positions count key tiles over all units
laid end to end; a cut is where a cluster's share begins. Three passes over the requests, 256 at a
time: the total, who owns each cut, and the items. Everything a unit needs of the cuts before it is
two counts: cuts inside units (each adds an item) and units with a cut inside (each adds a slot).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.experimental import primitives as prims

from mlakern import work_list
from mlakern.config import KernelConfig
from mlakern.kernels.arguments import Arguments
from mlakern.kernels.device import FULL_MASK, ceil_div, divmod_positive
from mlakern.kernels.masks import Mask

THREADS = 256
WARPS = THREADS // 32
MAX_CLUSTERS = 255
CUTS = MAX_CLUSTERS + 1  # one more: the end

# Words of shared memory.
_SCAN = 0  # one for each warp, then the carry of the chunks before
_POSITION = _SCAN + WARPS + 1
_INSIDE = _POSITION + CUTS  # tiles of its unit before it; in the end 1: it lies inside the unit
_UNIT = _INSIDE + CUTS  # of an inside cut its unit; else the unit that begins there
_AFTER = _UNIT + CUTS  # tiles of its unit after it
_CUTS_BEFORE = _AFTER + CUTS  # cuts inside units, before this one
_SPLITS_BEFORE = _CUTS_BEFORE + CUTS  # units with a cut inside, by the cuts before this one
_WORDS = _SPLITS_BEFORE + CUTS


@dataclass(frozen=True)
class Requests:
    """A thread's request of a chunk: where its units begin and what each is long."""

    number: Int32
    start: Int32
    length: Int32  # of one unit
    first_tile: Int32
    tiles: Int32
    exists: Any


class Planner:
    """The planner of one configuration's mask; grid (1, 1, 1)."""

    name = "mla_decode_planner"
    block = (THREADS, 1, 1)
    shared_bytes = 4 * _WORDS

    def __init__(self, config: KernelConfig) -> None:
        self.config = config

    @cute.kernel
    def kernel(self, args: Arguments) -> None:
        words = cutlass.Array(
            Int32, (_WORDS,), space=cutlass.AddressSpace.smem, alignment=16
        ).data_ptr(0)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        mask = Mask(self.config.mask, args)
        thread = Int32(cute.arch.thread_idx()[0])
        chunks = ceil_div(args.batch, THREADS)

        _clear_cuts(args, words, thread)
        total = Int32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            _, total = _requests(args, mask, words, thread, chunk, total)
        share = ceil_div(total, args.clusters)
        carry = Int32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            request, carry = _requests(args, mask, words, thread, chunk, carry)
            if request.exists:
                _own_cuts(args, words, request, share)
        prims.barrier_cta_sync_aligned()
        if thread == 0:
            _count_cuts(args, words)
        prims.barrier_cta_sync_aligned()

        _write_clusters(args, words, thread)
        carry = Int32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            request, carry = _requests(args, mask, words, thread, chunk, carry)
            if request.exists:
                _write_units(args, words, request, share)


@cute.jit
def _requests(
    args: Arguments, mask: Mask, words: Any, thread: Int32, chunk: Int32, carry: Int32
) -> tuple[Requests, Int32]:
    """The thread's request of the chunk, and the total up to the chunk's end."""
    number = chunk * THREADS + thread
    first_tile, tiles, length = Int32(0), Int32(0), Int32(0)
    exists = number < args.batch
    if exists:
        first_tile, tiles = mask.key_tiles((args.seq_lens + number).load())
        length = cutlass.max(tiles, 1)
    inclusive = _scan(words, thread, length * args.query_tiles)
    start = carry + inclusive - length * args.query_tiles
    chunk_total = (words + (_SCAN + WARPS)).load()
    prims.barrier_cta_sync_aligned()
    return Requests(number, start, length, first_tile, tiles, exists), carry + chunk_total


@cute.jit
def _scan(words: Any, thread: Int32, value: Int32) -> Int32:
    """Inclusive sum over the block; the block's total at word _SCAN + WARPS."""
    lane, warp = thread & 31, thread >> 5
    for step in cutlass.range_constexpr(5):
        other = prims.shfl_sync(FULL_MASK, value, 1 << step, 0, "up")
        value = cutlass.select_(lane >= (1 << step), value + other, value)
    if lane == 31:
        (words + (_SCAN + warp)).store(value)
    prims.barrier_cta_sync_aligned()
    before, total = Int32(0), Int32(0)
    for n in cutlass.range_constexpr(WARPS):
        part = (words + (_SCAN + n)).load()
        before = cutlass.select_(n < warp, before + part, before)
        total = total + part
    if thread == 0:
        (words + (_SCAN + WARPS)).store(total)
    prims.barrier_cta_sync_aligned()
    return before + value


@cute.jit
def _clear_cuts(args: Arguments, words: Any, thread: Int32) -> None:
    """Cuts that nobody owns lie at the end: behind the last unit."""
    for cut in cutlass.range(thread, args.clusters + 1, THREADS, unroll=1):
        (words + (_POSITION + cut)).store(Int32(0x7FFFFFFF))
        (words + (_INSIDE + cut)).store(Int32(0))
        (words + (_AFTER + cut)).store(Int32(0))
        (words + (_UNIT + cut)).store(args.batch * args.query_tiles)


@cute.jit
def _own_cuts(args: Arguments, words: Any, request: Requests, share: Int32) -> None:
    """The cuts in [start, end) of the request's units."""
    end = request.start + request.length * args.query_tiles
    last = cutlass.min(ceil_div(end, share), args.clusters + 1)
    for cut in cutlass.range(ceil_div(request.start, share), last, unroll=1):
        position = cut * share
        query_tile, before = divmod_positive(position - request.start, request.length)
        (words + (_POSITION + cut)).store(position)
        (words + (_INSIDE + cut)).store(before)
        (words + (_AFTER + cut)).store(request.length - before)
        (words + (_UNIT + cut)).store(request.number * args.query_tiles + query_tile)


@cute.jit
def _count_cuts(args: Arguments, words: Any) -> None:
    """Moves the cuts (work_list.cut_move) and counts them; one thread runs this: at most 256."""
    cuts, splits, split_unit, move = Int32(0), Int32(0), Int32(-1), Int32(0)
    for cut in cutlass.range(args.clusters + 1, unroll=1):
        before, after = (words + (_INSIDE + cut)).load(), (words + (_AFTER + cut)).load()
        unit = (words + (_UNIT + cut)).load()
        up = (before != 0) & (after == 1) & (move != -1)
        down = (before == 1) & (after != 0) & ~up
        move = cutlass.select_(up, Int32(1), cutlass.select_(down, Int32(-1), Int32(0)))
        inside = (before != 0) & (move == 0)
        position = (words + (_POSITION + cut)).load()
        (words + (_POSITION + cut)).store(position + move)
        (words + (_INSIDE + cut)).store(Int32(inside))
        (words + (_UNIT + cut)).store(cutlass.select_(up, unit + 1, unit))
        (words + (_CUTS_BEFORE + cut)).store(cuts)
        (words + (_SPLITS_BEFORE + cut)).store(splits)
        if inside:
            cuts = cuts + 1
            splits = cutlass.select_(unit != split_unit, splits + 1, splits)
            split_unit = unit


@cute.jit
def _write_clusters(args: Arguments, words: Any, thread: Int32) -> None:
    """The first item of each cluster: items begin where units and inside cuts are."""
    for cut in cutlass.range(thread, args.clusters + 1, THREADS, unroll=1):
        inside = (words + (_INSIDE + cut)).load()
        unit = (words + (_UNIT + cut)).load()
        first = unit + inside + (words + (_CUTS_BEFORE + cut)).load()
        (args.work_list + cut).store(first)


@cute.jit
def _write_units(args: Arguments, words: Any, request: Requests, share: Int32) -> None:
    """Partials, slots and items of the request's units."""
    units = args.batch * args.query_tiles
    for query_tile in cutlass.range(args.query_tiles, unroll=1):
        unit = request.number * args.query_tiles + query_tile
        start = request.start + query_tile * request.length
        end = start + request.length
        low, _ = divmod_positive(start, share)
        low = low + 1
        high = cutlass.min(ceil_div(end, share), args.clusters + 1)
        item = unit + (words + (_CUTS_BEFORE + cutlass.min(low, args.clusters))).load()
        slot = item - unit + (words + (_SPLITS_BEFORE + cutlass.min(low, args.clusters))).load()
        pieces = Int32(1)
        for cut in cutlass.range(low, high, unroll=1):
            pieces = pieces + (words + (_INSIDE + cut)).load()
        split = pieces > 1
        partials = args.work_list + work_list.partials_offset(args.clusters)
        slots = args.work_list + work_list.slots_offset(args.clusters, units)
        (partials + unit).store(pieces)
        (slots + unit).store(cutlass.select_(split, slot, Int32(0)))

        position, piece = start, Int32(0)
        for cut in cutlass.range(low, high, unroll=1):
            if (words + (_INSIDE + cut)).load() != 0:
                following = (words + (_POSITION + cut)).load()
                _write_item(args, request, query_tile, item + piece, position, following, start,
                            slot + piece)  # fmt: skip
                position = following
                piece = piece + 1
        last_slot = cutlass.select_(split, slot + piece, Int32(work_list.FINAL))
        _write_item(args, request, query_tile, item + piece, position, end, start, last_slot)


def _write_item(
    args: Arguments,
    request: Requests,
    query_tile: Int32,
    item: Int32,
    low: Int32,
    high: Int32,
    start: Int32,
    slot: Int32,
) -> None:
    units = args.batch * args.query_tiles
    at = work_list.items_offset(args.clusters, units) + item * work_list.ITEM_WORDS
    count = cutlass.select_(request.tiles > 0, high - low, Int32(0))
    zero = Int32(0)
    head = (query_tile, request.number, request.first_tile + low - start, count)
    for n, words in enumerate((head, (slot, zero, zero, zero))):
        vector = cutlass.Vector.from_elements(words, Int32)
        (args.work_list + (at + 4 * n)).store(vector, alignment=16)
