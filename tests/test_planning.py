"""The planner: workspaces that fit, grids, limits that name the argument, rules that agree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlakern.config import SCHEDULES, KernelConfig
from mlakern.launch_rules import derived_rules, grid_rules, launch_conditions, workspace_rule
from mlakern.planning import Plan, plan, workspace_bound, workspace_layout
from mlakern.signature import signatures

FOLDED = KernelConfig()
PACKED = KernelConfig(pack_q=True)
PERSISTENT = KernelConfig(schedule="persistent")
LISTED = KernelConfig(schedule="work_list")


def test_workspace_by_hand() -> None:
    # 15 partial rows of 512 halves end at 15360, a multiple of 256.
    layout = workspace_layout(slots=5, tile_rows=3, partial_dtype="float16")
    assert (layout.partial_out_offset, layout.partial_lse_offset, layout.size) == (0, 15360, 15616)
    layout = workspace_layout(slots=5, tile_rows=3, partial_dtype="float32")
    assert (layout.partial_lse_offset, layout.size) == (30720, 30976)
    assert workspace_layout(slots=0, tile_rows=3, partial_dtype="float32").size == 0
    layout = workspace_layout(slots=5, tile_rows=3, partial_dtype="float32", list_words=65)
    assert (layout.work_list_offset, layout.size) == (30976, 30976 + 512)


@given(
    slots=st.integers(1, 1 << 16),
    rows=st.integers(1, 128),
    words=st.integers(0, 1 << 16),
)
def test_workspace_holds_its_arrays_apart(slots: int, rows: int, words: int) -> None:
    layout = workspace_layout(slots, rows, "float32", words)
    assert layout.partial_lse_offset >= slots * rows * 512 * 4
    assert layout.work_list_offset >= layout.partial_lse_offset + slots * rows * 4
    assert layout.size >= layout.work_list_offset + words * 4
    assert layout.partial_lse_offset % 256 == layout.work_list_offset % 256 == 0
    assert layout.size % 256 == 0


@settings(max_examples=60)
@given(
    heads=st.integers(1, 128),
    tokens=st.integers(1, 8),
    max_batch=st.integers(1, 90),
    max_seq_len=st.integers(0, 1 << 15),
    schedule=st.sampled_from(SCHEDULES),
    window=st.sampled_from([-1, 7, 1000]),
    data=st.data(),
)
def test_workspace_bound_serves_smaller_batches_and_lengths(
    heads: int,
    tokens: int,
    max_batch: int,
    max_seq_len: int,
    schedule: str,
    window: int,
    data: st.DataObject,
) -> None:
    config = KernelConfig(schedule=schedule, mask="causal" if window < 0 else "window")
    shape: dict[str, Any] = {
        "num_heads": heads,
        "seq_len_q": tokens,
        "multiprocessors": 148,
        "window_left": window,
    }
    bound = workspace_bound(config, max_batch=max_batch, max_seq_len=max_seq_len, **shape)
    sizes = [
        plan(
            config, batch=batch, max_seq_len=data.draw(st.integers(0, max_seq_len)), **shape
        ).workspace_size
        for batch in range(1, max_batch + 1)
    ]
    assert max(sizes) <= bound


def test_workspace_bound_is_reached_by_a_smaller_batch() -> None:
    shape: dict[str, Any] = {"max_seq_len": 8192, "num_heads": 128, "multiprocessors": 148}
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
    assert made.grid("combine") == (4 * 96, 3, 1)
    assert made.grid("combine_bands2") is None
    assert made.workspace_size == 3 * 4 * 96 * 8 * (512 * 4 + 4)


def test_one_cta_works_on_a_tile_of_64_rows() -> None:
    made = plan(KernelConfig(tile_m=64), [8192] * 3, num_heads=64, multiprocessors=148)
    # 148 // 3 clusters of one CTA.
    assert (made.splits, made.attention_grid) == (32, (1, 32, 3))


def test_few_rows_are_combined_by_two_ctas_each() -> None:
    made = plan(FOLDED, [300] * 9, num_heads=16, multiprocessors=148, splits=2)
    assert (made.grid("combine"), made.grid("combine_bands2")) == (None, (16, 9, 2))
    made = plan(FOLDED, [300] * 10, num_heads=16, multiprocessors=148, splits=2)
    assert (made.grid("combine"), made.grid("combine_bands2")) == ((16, 10, 1), None)


def test_persistent_clusters_walk_the_items_in_one_wave() -> None:
    made = plan(PERSISTENT, [8192] * 30, num_heads=128, seq_len_q=2, multiprocessors=148, splits=3)
    # 30 requests, 2 query tiles, 3 runs: 180 items for 74 clusters.
    assert (made.clusters, made.attention_grid) == (74, (148, 1, 1))
    few = plan(PERSISTENT, [8192], num_heads=128, multiprocessors=148, splits=3)
    assert (few.clusters, few.attention_grid) == (3, (6, 1, 1))
    grid = plan(FOLDED, [8192] * 30, num_heads=128, seq_len_q=2, multiprocessors=148, splits=3)
    assert few.splits == made.splits == grid.splits
    assert made.workspace == grid.workspace


def test_a_work_list_has_a_cluster_for_each_pair_of_multiprocessors() -> None:
    made = plan(LISTED, [8192, 5], num_heads=128, seq_len_q=3, multiprocessors=148)
    assert (made.clusters, made.splits, made.slots) == (74, 1, 2 * 73)
    assert made.attention_grid == (148, 1, 1)
    assert made.grid("planner") == (1, 1, 1)
    # 6 units: 75 + 12 words up to 88, then at most 79 items.
    assert made.work_list_words == 88 + 8 * 79
    partials = 146 * 128 * (512 * 4 + 4)
    assert partials % 256 == 0
    assert made.workspace_size == partials + 12 * 256  # 720 words
    # The combine kernel merges at most 256 partials.
    assert plan(LISTED, [5], num_heads=1, multiprocessors=2048).clusters == 255


def test_a_work_list_of_lengths() -> None:
    made = plan(LISTED, [300, 0, 129], num_heads=128, seq_len_q=1, multiprocessors=4)
    # 3 + 1 + 2 tiles for two clusters: three each.
    assert made.division([300, 0, 129]).runs == (((range(3),),), ((),), ((range(2),),))
    # 5 + 1 tiles: the cut falls inside the first.
    made = plan(LISTED, [640, 1], num_heads=128, seq_len_q=1, multiprocessors=4)
    assert made.division([640, 1]).runs == (((range(3), range(3, 5)),), ((range(1),),))
    with pytest.raises(ValueError, match="seq_lens: got 2 up to 641, need 2 up to the plan's max"):
        made.work_list([641, 1])
    with pytest.raises(ValueError, match="seq_lens: got 1 up to 1, need 2 up to the plan's"):
        made.work_list([1])


def test_splits_of_each_request() -> None:
    made = plan(FOLDED, [1280, 256, 0, 640], num_heads=16, multiprocessors=148, splits=5)
    # Ten tiles in five runs of two; the others in runs of two as well.
    assert made.even_splits([1280, 256, 0, 640]) == [5, 1, 1, 3]
    runs = made.division([1280, 256, 0, 640], [5, 1, 0, 9]).runs
    assert [len(of_request[0]) for of_request in runs] == [5, 1, 0, 5]
    assert runs[3][0] == tuple(range(n, n + 1) for n in range(5))


def test_a_window_bounds_the_keys_that_are_divided() -> None:
    config = KernelConfig(mask="window")
    shape: dict[str, Any] = {"num_heads": 16, "multiprocessors": 148}
    made = plan(config, [1 << 20], window_left=511, **shape)
    # 512 keys lie in five tiles at most.
    assert made.splits == 5
    assert plan(FOLDED, [1 << 20], **shape).splits == 32
    # 2000 - 1 - 511 = 1488 is in tile 11 of 16; tiles 11 to 15 in five runs.
    assert made.division([2000]).runs == ((tuple(range(n, n + 1) for n in range(11, 16)),),)
    with pytest.raises(ValueError, match="window_left: got 2 with seq_len_q 4, need >= 3"):
        plan(config, [5], window_left=2, seq_len_q=4, **shape)
    with pytest.raises(ValueError, match="window_left: got 9 with mask causal; use mask window"):
        plan(FOLDED, [5], window_left=9, **shape)


def test_fewer_tokens_may_be_folded() -> None:
    made = plan(FOLDED, [300], num_heads=16, seq_len_q=4, multiprocessors=148, fold=2)
    assert (made.fold, made.query_tiles, made.attention_grid[0]) == (2, 2, 4)
    assert made.tile_rows == 32
    with pytest.raises(ValueError, match="fold: got 2 with packed rows"):
        plan(PACKED, [300], num_heads=16, seq_len_q=4, multiprocessors=148, fold=2)


def test_one_split_has_no_combine_and_no_workspace() -> None:
    made = plan(FOLDED, [5], num_heads=16, multiprocessors=148)
    assert made.splits == 1
    assert made.grid("combine") is made.grid("combine_bands2") is None
    assert made.workspace_size == 0


def test_plan_is_the_same_for_lengths_and_for_their_maximum() -> None:
    lengths = plan(FOLDED, [7, 5000], num_heads=16, multiprocessors=148)
    bound = plan(FOLDED, batch=2, max_seq_len=5000, num_heads=16, multiprocessors=148)
    assert lengths == bound


@settings(max_examples=200)
@given(
    heads=st.integers(1, 128),
    tokens=st.integers(1, 16),
    batch=st.integers(1, 70),
    splits=st.integers(1, 256),
    multiprocessors=st.integers(1, 600),
    packed=st.booleans(),
    schedule=st.sampled_from(SCHEDULES),
    tile=st.sampled_from([64, 128]),
    dtype=st.sampled_from(["float32", "float16"]),
)
def test_rules_of_the_manifest_give_the_plan(
    heads: int,
    tokens: int,
    batch: int,
    splits: int,
    multiprocessors: int,
    packed: bool,
    schedule: str,
    tile: int,
    dtype: str,
) -> None:
    config = KernelConfig(pack_q=packed, schedule=schedule, tile_m=tile, partial_dtype=dtype)
    made = plan(
        config,
        batch=batch,
        max_seq_len=1000,
        num_heads=heads if packed else min(heads, tile),
        seq_len_q=tokens,
        multiprocessors=multiprocessors,
        splits=None if schedule == "work_list" else splits,
    )
    check_rules(made)


def check_rules(made: Plan) -> None:
    """Evaluates the manifest's expressions as a launcher would, against the plan."""
    config = made.config
    names: dict[str, int] = {
        "batch": made.batch,
        "num_heads": made.num_heads,
        "seq_len_q": made.seq_len_q,
        "fold": made.fold,
        "splits": made.splits,
        "multiprocessors": made.multiprocessors,
    }
    for name, rule in derived_rules(config).items():
        names[name] = evaluated(rule, names)
        assert names[name] == getattr(made, name)
    for role in signatures(config):
        if evaluated(launch_conditions(config)[role], names):
            grid = tuple(evaluated(extent, names) for extent in grid_rules(config)[role])
            assert grid == made.grid(role)
        else:
            assert made.grid(role) is None
    rule = workspace_rule(config)
    assert evaluated(rule.size, names) == made.workspace_size
    layout = made.workspace
    offsets = [layout.partial_out_offset, layout.partial_lse_offset, layout.work_list_offset]
    for region, offset in zip(rule.regions, offsets, strict=False):
        assert evaluated(region.offset, names) == offset
    assert [region.dtype for region in rule.regions[:2]] == [config.partial_dtype, "float32"]
    if config.schedule == "work_list":
        assert [evaluated(extent, names) for extent in rule.regions[2].shape] == [
            made.work_list_words
        ]
    assert evaluated(rule.regions[0].shape[0], names) == made.slots


def evaluated(expression: str, names: dict[str, int]) -> Any:
    return eval(expression, {"min": min, "max": max}, names)


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
        ({"window_left": 3}, "window_left: got 3 with mask causal"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"splits": 2}, "splits: got 2 with schedule work_list, which needs none"),
        ({"min_split_kv": 256}, "min_split_kv: got 256 with schedule work_list"),
        (
            {"seq_lens": None, "batch": 1024, "max_seq_len": 2**28},
            "max_seq_len: got 2147483648 key tiles over all query tiles, need <= 2147482624",
        ),
    ],
)
def test_limits_of_a_work_list(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"seq_lens": [130], "num_heads": 16, "multiprocessors": 148}
    with pytest.raises(ValueError, match="^" + message):
        plan(LISTED, **{**arguments, **changes})  # type: ignore[arg-type]
