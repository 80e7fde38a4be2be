"""The planner: every tile in one run, workspaces that fit, limits that name the argument."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlakern.config import KernelConfig
from mlakern.planning import (
    choose_pack_q,
    fold_factor,
    grid_rules,
    heuristic_splits,
    plan,
    query_tile_count,
    run_tiles,
    workspace_bound,
    workspace_layout,
    workspace_rule,
)

FOLDED = KernelConfig()
PACKED = KernelConfig(pack_q=True)


@given(tiles=st.integers(0, 3000), splits=st.integers(1, 256))
def test_runs_cover_every_tile_once_in_order(tiles: int, splits: int) -> None:
    covered = [tile for split in range(splits) for tile in run_tiles(tiles, splits, split)]
    assert covered == list(range(tiles))


@given(tiles=st.integers(1, 3000), splits=st.integers(1, 256))
def test_runs_before_the_last_are_equally_long(tiles: int, splits: int) -> None:
    lengths = [len(run_tiles(tiles, splits, split)) for split in range(splits)]
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
    ("max_seq_len", "batch", "query_tiles", "multiprocessors", "splits"),
    [
        # 64 tiles, room 148 // 1 // 2 = 74 clusters, cap 32: runs of 2 tiles.
        (8192, 1, 1, 148, 32),
        # room 148 // 4 // 2 = 18; 32 tiles in runs of 2 need 16.
        (4096, 4, 1, 148, 16),
        # room 148 // 1 // 6 = 24: 64 tiles in runs of 3 need 22, not 24 with two empty.
        (8192, 1, 3, 148, 22),
        (8192, 128, 1, 148, 1),
        (0, 1, 1, 148, 1),
        (129, 1, 1, 148, 2),
    ],
)
def test_heuristic_by_hand(
    max_seq_len: int, batch: int, query_tiles: int, multiprocessors: int, splits: int
) -> None:
    assert heuristic_splits(max_seq_len, batch, query_tiles, multiprocessors) == splits


@given(
    max_seq_len=st.integers(0, 1 << 20),
    batch=st.integers(1, 300),
    query_tiles=st.integers(1, 16),
    multiprocessors=st.integers(1, 200),
    min_split_kv=st.none() | st.integers(1, 1 << 16),
)
def test_heuristic_leaves_no_run_empty_and_fits_one_wave(
    max_seq_len: int, batch: int, query_tiles: int, multiprocessors: int, min_split_kv: int | None
) -> None:
    splits = heuristic_splits(
        max_seq_len, batch, query_tiles, multiprocessors, min_split_kv=min_split_kv
    )
    tiles = max(1, -(-max_seq_len // 128))
    assert 1 <= splits <= 32
    assert len(run_tiles(tiles, splits, splits - 1)) > 0
    assert splits == 1 or 2 * splits * batch * query_tiles <= multiprocessors
    if min_split_kv is not None and splits > 1:
        assert len(run_tiles(tiles, splits, 0)) * 128 >= min_split_kv


@pytest.mark.parametrize(
    ("min_split_kv", "splits"), [(None, 10), (128, 10), (129, 5), (256, 5), (257, 4), (2000, 1)]
)
def test_a_run_has_whole_tiles_of_at_least_min_split_kv(
    min_split_kv: int | None, splits: int
) -> None:
    assert heuristic_splits(1280, 1, 1, 148, min_split_kv=min_split_kv) == splits


def test_workspace_by_hand() -> None:
    # 3 rows, 5 splits: 15 partials of 512 halves end at 15360, a multiple of 256.
    layout = workspace_layout(rows=3, splits=5, partial_dtype="float16")
    assert (layout.partial_out_offset, layout.partial_lse_offset, layout.size) == (0, 15360, 15616)
    layout = workspace_layout(rows=3, splits=5, partial_dtype="float32")
    assert (layout.partial_lse_offset, layout.size) == (30720, 30976)
    assert workspace_layout(rows=3, splits=1, partial_dtype="float32").size == 0


@given(rows=st.integers(1, 1 << 22), splits=st.integers(2, 256))
def test_workspace_holds_both_arrays_apart(rows: int, splits: int) -> None:
    layout = workspace_layout(rows, splits, "float32")
    assert layout.partial_lse_offset >= rows * splits * 512 * 4
    assert layout.size >= layout.partial_lse_offset + rows * splits * 4
    assert layout.partial_lse_offset % 256 == layout.size % 256 == 0


@settings(max_examples=60)
@given(
    heads=st.integers(1, 128),
    tokens=st.integers(1, 8),
    max_batch=st.integers(1, 90),
    max_seq_len=st.integers(0, 1 << 15),
    data=st.data(),
)
def test_workspace_bound_serves_smaller_batches_and_lengths(
    heads: int, tokens: int, max_batch: int, max_seq_len: int, data: st.DataObject
) -> None:
    bound = workspace_bound(
        FOLDED,
        max_batch=max_batch,
        max_seq_len=max_seq_len,
        num_heads=heads,
        seq_len_q=tokens,
        multiprocessors=148,
    )
    sizes = [
        plan(
            FOLDED,
            batch=batch,
            max_seq_len=data.draw(st.integers(0, max_seq_len)),
            num_heads=heads,
            seq_len_q=tokens,
            multiprocessors=148,
        ).workspace_size
        for batch in range(1, max_batch + 1)
    ]
    assert max(sizes) <= bound


def test_workspace_bound_is_reached_by_a_smaller_batch() -> None:
    shape = {"max_seq_len": 8192, "num_heads": 128, "multiprocessors": 148}
    bound = workspace_bound(FOLDED, max_batch=256, **shape)
    assert plan(FOLDED, batch=256, **shape).workspace_size == 0
    # 18 splits for each of 4 requests would be 72 of 74 clusters; 37 of 2 are capped at 32.
    assert bound == max(plan(FOLDED, batch=b, **shape).workspace_size for b in range(1, 257)) > 0


def test_plan_of_lengths() -> None:
    made = plan(PACKED, [130, 8192, 0], num_heads=96, seq_len_q=4, multiprocessors=148)
    assert (made.batch, made.max_seq_len, made.query_tiles, made.fold) == (3, 8192, 3, 0)
    # 148 // 3 // (3 tiles * 2 CTAs) = 8 runs.
    assert made.splits == 8
    assert made.attention_grid == (6, 8, 3)
    assert made.combine_grid == (4 * 96, 3, 1)
    assert made.workspace_size == 3 * 4 * 96 * 8 * (512 * 4 + 4)


def test_fewer_tokens_may_be_folded() -> None:
    made = plan(FOLDED, [300], num_heads=16, seq_len_q=4, multiprocessors=148, fold=2)
    assert (made.fold, made.query_tiles, made.attention_grid[0]) == (2, 2, 4)
    with pytest.raises(ValueError, match="fold: got 2 with packed rows"):
        plan(PACKED, [300], num_heads=16, seq_len_q=4, multiprocessors=148, fold=2)


def test_one_split_has_no_combine_and_no_workspace() -> None:
    made = plan(FOLDED, [5], num_heads=16, multiprocessors=148)
    assert made.splits == 1
    assert made.grid("combine") is None
    assert made.workspace_size == 0


def test_plan_is_the_same_for_lengths_and_for_their_maximum() -> None:
    lengths = plan(FOLDED, [7, 5000], num_heads=16, multiprocessors=148)
    bound = plan(FOLDED, batch=2, max_seq_len=5000, num_heads=16, multiprocessors=148)
    assert lengths == bound


@given(
    heads=st.integers(1, 128),
    tokens=st.integers(1, 16),
    batch=st.integers(1, 9),
    packed=st.booleans(),
)
def test_grid_rules_of_the_manifest_give_the_planned_grid(
    heads: int, tokens: int, batch: int, packed: bool
) -> None:
    config = KernelConfig(pack_q=packed)
    made = plan(
        config,
        batch=batch,
        max_seq_len=1000,
        num_heads=heads,
        seq_len_q=tokens,
        multiprocessors=148,
        splits=3,
    )
    names = {
        "num_heads": heads,
        "seq_len_q": tokens,
        "fold": made.fold,
        "splits": made.splits,
        "batch": batch,
    }
    for role, rule in grid_rules(config).items():
        assert tuple(eval(expression, {}, names) for expression in rule) == made.grid(role)


@given(
    heads=st.integers(1, 128),
    tokens=st.integers(1, 16),
    batch=st.integers(1, 70),
    splits=st.integers(1, 256),
    dtype=st.sampled_from(["float32", "float16"]),
)
def test_workspace_rule_of_the_manifest_gives_the_planned_layout(
    heads: int, tokens: int, batch: int, splits: int, dtype: str
) -> None:
    rule = workspace_rule(KernelConfig(partial_dtype=dtype))
    layout = workspace_layout(batch * tokens * heads, splits, dtype)
    names = {"num_heads": heads, "seq_len_q": tokens, "batch": batch, "splits": splits}
    assert eval(rule.size, {}, names) == layout.size
    if splits > 1:
        offsets = [eval(region.offset, {}, names) for region in rule.regions]
        assert offsets == [layout.partial_out_offset, layout.partial_lse_offset]
    assert [region.dtype for region in rule.regions] == [dtype, "float32"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 129}, "num_heads: got 129, need an integer from 1 to 128"),
        ({"num_heads": 0}, "num_heads: got 0"),
        ({"seq_len_q": 17}, "seq_len_q: got 17, need an integer from 1 to 16"),
        ({"seq_lens": []}, "seq_lens: got no request"),
        ({"seq_lens": [3, -1]}, "seq_lens: got -1, need >= 0"),
        ({"seq_lens": None}, "seq_lens: got none, need host lengths, or batch= and max_seq_len="),
        ({"batch": 3}, "batch: got 3 with 2 seq_lens"),
        ({"max_seq_len": 5}, "max_seq_len: got 5, need >= 300"),
        ({"max_seq_len": 2**31}, "max_seq_len: got 2147483648"),
        ({"multiprocessors": 0}, "multiprocessors: got 0"),
        ({"splits": 257}, "splits: got 257, need an integer from 1 to 256"),
        ({"splits": True}, "splits: got True"),
        ({"fold": 3, "seq_len_q": 4}, "fold: got 3, need a divisor of seq_len_q 4 up to 4"),
        ({"fold": 16, "seq_len_q": 16}, "fold: got 16, need a divisor of seq_len_q 16 up to 8"),
        ({"min_split_kv": 0}, "min_split_kv: got 0"),
        ({"seq_lens": None, "batch": 65536, "max_seq_len": 1}, "batch: got 65536"),
    ],
)
def test_limits(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "seq_lens": [130, 300],
        "num_heads": 16,
        "multiprocessors": 148,
    }
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        plan(FOLDED, **{**arguments, **changes})  # type: ignore[arg-type]


def test_folded_rows_need_one_token_to_fit_the_tile() -> None:
    assert choose_pack_q(96, 2, 64)
    with pytest.raises(ValueError, match="num_heads: got 96 with tile_m 64"):
        fold_factor(96, 2, 64)
