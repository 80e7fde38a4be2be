"""How query rows and key tiles are divided: the rules that host and device share.

The rows of a request (token * H + head) fill query tiles; its key tiles, 128 keys each, are divided
into runs. With `splits` runs, each holds ceil(tiles / splits) tiles and trailing ones may be empty.
The device side is mlakern.kernels.splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlakern.config import KEY_TILE, MAX_HEADS, MAX_SEQ_LEN_Q
from mlakern.limits import check_range

CTAS_PER_TILE = {64: 1, 128: 2}
# More runs than this cost more in the combine kernel than they gain.
MAX_HEURISTIC_SPLITS = {64: 64, 128: 32}


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


def fold_factor(num_heads: int, seq_len_q: int, tile_m: int) -> int:
    """Query tokens of one folded tile: the largest divisor F of seq_len_q with F*H <= tile_m.

    One token always fits a tile of 128 rows; H > 64 does not fit tile_m 64 (ValueError).
    """
    if num_heads > tile_m:
        raise ValueError(
            f"num_heads: got {num_heads} with tile_m {tile_m} and folded rows, need <= {tile_m}; "
            "try tile_m 128"
        )
    return max(f for f in range(1, seq_len_q + 1) if seq_len_q % f == 0 and f * num_heads <= tile_m)


def query_tile_count(num_heads: int, seq_len_q: int, tile_m: int, pack_q: bool) -> int:
    """Query tiles of one request."""
    if pack_q:
        return ceil_div(num_heads * seq_len_q, tile_m)
    return seq_len_q // fold_factor(num_heads, seq_len_q, tile_m)


def choose_tile_m(arch: str, num_heads: int, seq_len_q: int) -> int:
    """The query tile that serves a request's rows in the fewest CTAs.

    Up to 64 rows fit one CTA of sm_100a's tile 64; in a pair half of the rows would be padding.
    """
    return 64 if arch == "sm_100a" and num_heads * seq_len_q <= 64 else 128


def choose_pack_q(num_heads: int, seq_len_q: int, tile_m: int = 128) -> bool:
    """Whether packed rows take fewer query tiles than folded ones (else folded: any strides)."""
    check_range("num_heads", num_heads, 1, MAX_HEADS)
    check_range("seq_len_q", seq_len_q, 1, MAX_SEQ_LEN_Q)
    if num_heads > tile_m:
        return True  # not even one token can be folded
    packed = query_tile_count(num_heads, seq_len_q, tile_m, pack_q=True)
    return packed < query_tile_count(num_heads, seq_len_q, tile_m, pack_q=False)


def run_tiles(tiles: range, splits: int, split: int) -> range:
    """The key tiles of run `split`; empty for a trailing run that has none left."""
    per = ceil_div(len(tiles), splits)
    return tiles[split * per : (split + 1) * per]


def most_key_tiles(max_seq_len: int, seq_len_q: int, window_left: int = -1) -> int:
    """The most key tiles that a request of up to max_seq_len keys is computed from; at least 1.

    window_left: keys of history, -1 for all. A window begins anywhere in its first tile.
    """
    tiles = max(1, ceil_div(max_seq_len, KEY_TILE))
    if window_left < 0:
        return tiles
    return min(tiles, ceil_div(window_left + seq_len_q - 1, KEY_TILE) + 1)


def most_splits(
    tiles: int, batch: int, query_tiles: int, multiprocessors: int, tile_m: int = 128
) -> int:
    """The most runs the heuristic gives to a request of up to `tiles` key tiles.

    `room` counts query tiles with all their CTAs (a cluster), so that the runs of the whole batch
    are resident at once.
    """
    room = max(1, multiprocessors // batch // (query_tiles * CTAS_PER_TILE[tile_m]))
    return min(tiles, room, MAX_HEURISTIC_SPLITS[tile_m])


def heuristic_splits(
    tiles: int,
    batch: int,
    query_tiles: int,
    multiprocessors: int,
    tile_m: int = 128,
    min_split_kv: int | None = None,
) -> int:
    """Runs that fill the multiprocessors in one wave, no trailing run empty with `tiles` tiles.

    min_split_kv: keys that each run but the last must at least have.
    """
    wanted = most_splits(tiles, batch, query_tiles, multiprocessors, tile_m)
    per = max(ceil_div(tiles, wanted), ceil_div(min_split_kv or 1, KEY_TILE))
    return ceil_div(tiles, per)


@dataclass(frozen=True)
class Division:
    """The runs of a whole batch.

    tile_rows: rows of a query tile. runs: for each request and each of its query tiles the runs
    that hold keys, in order; none for a request without keys.
    """

    tile_rows: int
    runs: tuple[tuple[tuple[range, ...], ...], ...]

    @classmethod
    def even(
        cls, tiles: Sequence[range], splits: Sequence[int], query_tiles: int, tile_rows: int
    ) -> Division:
        """The split rule for requests with these key tiles and numbers of splits."""
        return cls(
            tile_rows,
            tuple(
                (tuple(filter(None, (run_tiles(of_request, count, s) for s in range(count)))),)
                * query_tiles
                for of_request, count in zip(tiles, splits, strict=True)
            ),
        )
