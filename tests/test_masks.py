"""Mask bounds against the keys counted one by one."""

from __future__ import annotations

import itertools

import pytest

from mlakern.masks import Mask, local_keys


def visible(mask: Mask, keys: int, tokens: int, token: int, **lengths: int) -> list[int]:
    lower, upper = mask.bounds(keys, tokens, token, **lengths)
    assert 0 <= upper <= keys
    return list(range(lower, upper))


def test_local_keys_counts_owned_positions() -> None:
    for world, interleave, length in itertools.product((1, 2, 3, 8), (1, 2, 16), (-3, 0, 1, 50)):
        for rank in range(world):
            owned = [g for g in range(length) if (g // interleave) % world == rank]
            assert local_keys(length, world, rank, interleave) == len(owned)


@pytest.mark.parametrize("keys", [0, 1, 2, 5, 17])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_plain_and_causal(keys: int, tokens: int) -> None:
    for token in range(tokens):
        position = keys - tokens + token  # of this query token among the keys
        assert visible(Mask("plain"), keys, tokens, token) == list(range(keys))
        expected = [k for k in range(keys) if k <= position]
        assert visible(Mask("causal"), keys, tokens, token) == expected


@pytest.mark.parametrize("keys", [0, 3, 9, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tokens", "window"), [(1, 0), (1, 4), (3, 2), (4, 7)])
def test_window(keys: int, causal: bool, tokens: int, window: int) -> None:
    mask = Mask("window", window_left=window, causal=causal)
    for token in range(tokens):
        position = keys - tokens + token
        expected = [
            k for k in range(keys) if k >= position - window and (not causal or k <= position)
        ]
        assert visible(mask, keys, tokens, token) == expected


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (4, 3), (8, 16)])
@pytest.mark.parametrize("length", [0, 1, 7, 40, 129])
def test_dcp_ranks_share_what_a_causal_mask_shows(world: int, interleave: int, length: int) -> None:
    tokens = 3
    for token in range(tokens):
        position = length - tokens + token
        seen = []
        for rank in range(world):
            mine = [g for g in range(length) if (g // interleave) % world == rank]
            mask = Mask("dcp", cp_world=world, cp_rank=rank, cp_interleave=interleave)
            local = visible(mask, len(mine), tokens, token, global_length=length)
            seen += [mine[k] for k in local]
        assert sorted(seen) == [g for g in range(length) if g <= position]


def test_visible_lens() -> None:
    assert visible(Mask("visible"), 10, 2, 1, visible_len=4) == [0, 1, 2, 3]
    assert visible(Mask("visible"), 10, 2, 1, visible_len=0) == []


@pytest.mark.parametrize("keys", [0, 1, 127, 128, 129, 255, 256, 257, 900])
@pytest.mark.parametrize(("tokens", "window"), [(1, 0), (1, 127), (1, 128), (4, 3), (8, 300)])
def test_key_tiles_hold_every_visible_key_and_no_tile_in_front(
    keys: int, tokens: int, window: int
) -> None:
    for causal in (True, False):
        mask = Mask("window", window_left=window, causal=causal)
        seen = [k for t in range(tokens) for k in visible(mask, keys, tokens, t)]
        tiles = mask.key_tiles(keys, tokens)
        assert {k // 128 for k in seen} <= set(tiles)
        if not causal and keys:
            # The first token's window, whole: its first and its last key decide.
            assert tiles == range(min(seen) // 128, (keys - 1) // 128 + 1)
    assert Mask("causal").key_tiles(keys, tokens) == range(-(-keys // 128))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "diagonal"}, "mask: got 'diagonal', need one of plain, causal"),
        ({"kind": "window"}, "window_left: got -1, need 0 to 2147483520"),
        ({"kind": "plain", "window_left": 3}, "window_left: got 3 with mask plain"),
        ({"kind": "causal", "cp_world": 2}, "cp_world: got 2 with mask causal"),
        ({"kind": "dcp", "cp_world": 2, "cp_rank": 2}, "cp_rank: got 2 of cp_world 2"),
        ({"kind": "dcp", "cp_interleave": 0}, "cp_interleave: got 0"),
        (
            {"kind": "dcp", "cp_world": 1 << 16, "cp_interleave": 1 << 15},
            "cp_interleave: got 32768 with cp_world 65536, need >= 1 and a product <= 2147483520",
        ),
    ],
)
def test_values_that_do_not_belong(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        Mask(**arguments)  # type: ignore[arg-type]


def test_bounds_need_the_lengths_of_their_mask() -> None:
    with pytest.raises(ValueError, match="window_left: got 1 with seq_len_q 3, need >= 2"):
        Mask("window", window_left=1).bounds(9, 3, 0)
    with pytest.raises(ValueError, match=r"^causal_seqs"):
        Mask("dcp").bounds(9, 1, 0)
    with pytest.raises(ValueError, match=r"^local_visible_lens"):
        Mask("visible").bounds(9, 1, 0)
