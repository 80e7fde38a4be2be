"""Device side of the split rule (host side: mlakern.planning).

A request's key tiles are divided into `splits` runs of ceil(tiles / splits); trailing runs may be
empty. Attention and combine both call this, so that they always agree.
"""

from __future__ import annotations

from cutlass import Int32

from mlakern.config import KEY_TILE
from mlakern.kernels.device import ceil_div


def key_tiles(seq_len: Int32) -> Int32:
    """Number of key tiles that hold keys."""
    return ceil_div(seq_len, KEY_TILE)


def tiles_per_run(tiles: Int32, splits: Int32) -> Int32:
    return ceil_div(tiles, splits)
