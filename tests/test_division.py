"""The rules that divide rows and key tiles, by brute force and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlakern.division import (
    Division,
    choose_pack_q,
    choose_tile_m,
    fold_factor,
    heuristic_splits,
    most_key_tiles,
    query_tile_count,
    run_tiles,
)
from mlakern.masks import Mask


@given(tiles=st.integers(0, 3000), splits=st.integers(1, 256))
def test_runs_cover_every_tile_once_in_order(tiles: int, splits: int) -> None:
    covered = [tile for split in range(splits) for tile in run_tiles(range(tiles), splits, split)]
    assert covered == list(range(tiles))


@given(tiles=st.integers(1, 3000), splits=st.integers(1, 256))
def test_runs_before_the_last_are_equally_long(tiles: int, splits: int) -> None:
    lengths = [len(run_tiles(range(tiles), splits, split)) for split in range(splits)]
    filled = [length for length in lengths if length]
    assert lengths == filled + [0] * (splits - len(filled))
    assert set(filled[:-1]) <= {-(-tiles // splits)}


@pytest.mark.parametrize(
    ("heads", "tokens", "tile_m", "fold", "folded", "packed"),
    [
        (16, 1, 128, 1, 1, 1),
        (16, 4, 128, 4, 1, 1),
        (16, 16, 128, 8, 2, 2),
        (96, 4, 128, 1, 4, 3),
        (128, 3, 128, 1, 3, 3),
        (48, 3, 128, 1, 3, 2),
        (1, 7, 128, 7, 1, 1),
        (6, 15, 64, 5, 3, 2),
    ],
)
def test_rows_of_query_tiles(
    heads: int, tokens: int, tile_m: int, fold: int, folded: int, packed: int
) -> None:
    assert fold_factor(heads, tokens, tile_m) == fold
    assert query_tile_count(heads, tokens, tile_m, pack_q=False) == folded
    assert query_tile_count(heads, tokens, tile_m, pack_q=True) == packed
    assert choose_pack_q(heads, tokens, tile_m) == (packed < folded)


@pytest.mark.parametrize(
    ("tiles", "batch", "query_tiles", "multiprocessors", "splits"),
    [
        # Room 148 // 1 // 2 = 74 clusters, cap 32: runs of 2 tiles.
        (64, 1, 1, 148, 32),
        # Room 148 // 4 // 2 = 18; 32 tiles in runs of 2 need 16.
        (32, 4, 1, 148, 16),
        # Room 148 // 1 // 6 = 24: 64 tiles in runs of 3 need 22, not 24 with two empty.
        (64, 1, 3, 148, 22),
        (64, 128, 1, 148, 1),
        (1, 1, 1, 148, 1),
        (2, 1, 1, 148, 2),
    ],
)
def test_heuristic_by_hand(
    tiles: int, batch: int, query_tiles: int, multiprocessors: int, splits: int
) -> None:
    assert heuristic_splits(tiles, batch, query_tiles, multiprocessors) == splits


@given(
    tiles=st.integers(1, 1 << 13),
    batch=st.integers(1, 300),
    query_tiles=st.integers(1, 16),
    multiprocessors=st.integers(1, 200),
    min_split_kv=st.none() | st.integers(1, 1 << 16),
)
def test_heuristic_leaves_no_run_empty_and_fits_one_wave(
    tiles: int, batch: int, query_tiles: int, multiprocessors: int, min_split_kv: int | None
) -> None:
    splits = heuristic_splits(tiles, batch, query_tiles, multiprocessors, min_split_kv=min_split_kv)
    assert 1 <= splits <= 32
    assert len(run_tiles(range(tiles), splits, splits - 1)) > 0
    assert splits == 1 or 2 * splits * batch * query_tiles <= multiprocessors
    if min_split_kv is not None and splits > 1:
        assert len(run_tiles(range(tiles), splits, 0)) * 128 >= min_split_kv


def test_runs_begin_at_the_first_tile() -> None:
    assert [run_tiles(range(5, 12), 3, split) for split in range(3)] == [
        range(5, 8),
        range(8, 11),
        range(11, 12),
    ]


@given(
    max_seq_len=st.integers(0, 2000),
    tokens=st.integers(1, 16),
    window=st.none() | st.integers(15, 700),
)
def test_most_key_tiles_is_reached_and_not_passed(
    max_seq_len: int, tokens: int, window: int | None
) -> None:
    bound = most_key_tiles(max_seq_len, tokens, -1 if window is None else window)
    mask = Mask("plain") if window is None else Mask("window", window_left=window)
    counts = [len(mask.key_tiles(keys, tokens)) for keys in range(max_seq_len + 1)]
    assert max(1, *counts) <= bound
    # One more than needed at most, where the window cannot lie as badly as it might.
    assert bound - max(1, *counts) <= (window is not None)


def test_a_division_lists_runs_that_hold_keys() -> None:
    made = Division.even([range(3), range(0), range(7, 8)], [2, 2, 3], query_tiles=2, tile_rows=9)
    assert made.tile_rows == 9
    assert made.runs == (
        ((range(2), range(2, 3)),) * 2,
        ((),) * 2,
        ((range(7, 8),),) * 2,
    )


def test_folded_rows_need_one_token_to_fit_the_tile() -> None:
    assert choose_pack_q(96, 2, 64)
    with pytest.raises(ValueError, match="num_heads: got 96 with tile_m 64"):
        fold_factor(96, 2, 64)


@pytest.mark.parametrize(
    ("arch", "heads", "tokens", "tile_m"),
    [
        ("sm_100a", 16, 1, 64),
        ("sm_100a", 16, 4, 64),
        ("sm_100a", 64, 1, 64),
        ("sm_100a", 13, 5, 128),
        ("sm_100a", 128, 1, 128),
        ("sm_103a", 16, 1, 128),
        ("sm_107a", 16, 1, 128),
    ],
)
def test_few_rows_take_the_small_tile_where_there_is_one(
    arch: str, heads: int, tokens: int, tile_m: int
) -> None:
    assert choose_tile_m(arch, heads, tokens) == tile_m


@pytest.mark.parametrize(
    ("min_split_kv", "splits"), [(None, 10), (128, 10), (129, 5), (256, 5), (257, 4), (2000, 1)]
)
def test_a_run_has_whole_tiles_of_at_least_min_split_kv(
    min_split_kv: int | None, splits: int
) -> None:
    assert heuristic_splits(10, 1, 1, 148, min_split_kv=min_split_kv) == splits
