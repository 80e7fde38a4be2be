"""Device side of the split rule (host side: mlakern.planning).

A request's key tiles are divided into runs of ceil(tiles / splits); trailing runs may be empty. A
request with one run, or none, needs no partial results: its first run stores the final result.
Attention and combine both call this, so that they always agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from mlakern.kernels.arguments import Arguments
from mlakern.kernels.device import ceil_div
from mlakern.kernels.masks import Mask


@dataclass(frozen=True)
class Runs:
    """The division of one request: tiles from `first_tile`, `per_run` in a run, `count` runs."""

    first_tile: Int32
    tiles: Int32
    per_run: Int32
    count: Int32  # runs that hold keys

    @classmethod
    def of_request(cls, mask: Mask, args: Arguments, request: Int32) -> Runs:
        first, tiles = mask.key_tiles((args.seq_lens + request).load())
        per_run = ceil_div(tiles, requested_splits(args, request))
        return cls(first, tiles, per_run, ceil_div(tiles, cutlass.max(per_run, 1)))


@cute.jit
def requested_splits(args: Arguments, request: Int32) -> Int32:
    """The request's own number of splits if the caller gave one, at most `splits`."""
    splits = args.splits
    if args.block_split_kvs.toint() != 0:
        own = (args.block_split_kvs + request).load()
        splits = cutlass.max(cutlass.min(own, splits), 1)
    return splits
