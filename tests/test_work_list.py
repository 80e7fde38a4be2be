"""The work list's invariants on random batches, and small lists by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest

from mlakern import work_list


@dataclass(frozen=True)
class Item:
    """One item as a kernel reads it."""

    cluster: int
    query_tile: int
    request: int
    first: int
    count: int
    slot: int


def items_of(words: list[int], batch: int, query_tiles: int, clusters: int) -> list[Item]:
    """Every cluster's items in order, by the layout in the module's docstring."""
    units = batch * query_tiles
    start = -(-(clusters + 1 + 2 * units) // 8) * 8
    return [
        Item(cluster, *words[start + 8 * n : start + 8 * n + 5])
        for cluster in range(clusters)
        for n in range(words[cluster], words[cluster + 1])
    ]


def random_batch(seed: int) -> tuple[list[int], list[int], int, int]:
    """(first tiles, tiles, query tiles, clusters): 1 to 64 requests, log-uniform lengths."""
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 65))
    keys = np.exp(rng.uniform(0, math.log(1 << 17), batch)).astype(int)
    keys[rng.random(batch) < 0.1] = 0
    keys[rng.random(batch) < 0.1] = 1
    tiles = [-(-int(k) // 128) for k in keys]
    firsts = [int(rng.integers(0, 5)) if rng.random() < 0.3 else 0 for _ in tiles]
    return firsts, tiles, int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 2, 7, 66, 74, 255]))


@pytest.mark.parametrize("seed", range(300))
def test_shares_are_even_and_cover_every_tile_once(seed: int) -> None:
    firsts, tiles, query_tiles, clusters = random_batch(seed)
    batch = len(tiles)
    units = batch * query_tiles
    words = work_list.build(firsts, tiles, query_tiles, clusters)
    assert len(words) == work_list.size_words(clusters, units)
    items = items_of(words, batch, query_tiles, clusters)
    assert words[0] == 0
    assert words[clusters] == len(items) <= units + clusters - 1

    # Units in order, each one's tiles in order without a gap; an empty request is one item.
    by_unit = itertools.groupby(items, key=lambda item: (item.request, item.query_tile))
    found = [(unit, list(members)) for unit, members in by_unit]
    assert [unit for unit, _ in found] == list(itertools.product(range(batch), range(query_tiles)))
    for (request, _), members in found:
        covered = [t for item in members for t in range(item.first, item.first + item.count)]
        first = firsts[request]
        assert covered == list(range(first, first + tiles[request]))
        assert all(item.count > 0 for item in members) or len(members) == 1

    # No cluster has more than an even share and one tile.
    total = sum(max(count, 1) for count in tiles) * query_tiles
    share = -(-total // clusters)
    for cluster in range(clusters):
        mine = [item for item in items if item.cluster == cluster]
        assert sum(max(item.count, 1) for item in mine) <= share + 1

    # Partials exist for cut units only, in consecutive slots that nothing else has.
    slots = []
    for unit, (_, members) in enumerate(found):
        assert words[clusters + 1 + unit] == len(members)
        if len(members) == 1:
            assert members[0].slot == -1
        else:
            # A run of one tile would cost a partial of its own: the first one has more.
            assert members[0].count > 1
            assert words[clusters + 1 + units + unit] == members[0].slot
            slots += [item.slot for item in members]
    assert slots == list(range(len(slots)))
    assert len(slots) <= work_list.most_slots(clusters)
    assert work_list.runs(words, batch, query_tiles, clusters) == tuple(
        tuple(
            tuple(
                range(item.first, item.first + item.count)
                for item in found[request * query_tiles + tile][1]
                if item.count
            )
            for tile in range(query_tiles)
        )
        for request in range(batch)
    )


def test_a_short_and_a_long_request_by_hand() -> None:
    # 1 + 6 + 1 (empty) tiles for two clusters: four each; the cut lies in the long request.
    words = work_list.build([0, 2, 0], [1, 6, 0], 1, 2)
    assert words[:3] == [0, 2, 4]
    assert words[3:6] == [1, 2, 1]
    assert words[6:9] == [0, 0, 0]
    items = [words[16 + 8 * n : 16 + 8 * n + 5] for n in range(4)]
    assert items == [[0, 0, 0, 1, -1], [0, 1, 2, 3, 0], [0, 1, 5, 3, 1], [0, 2, 0, 0, -1]]


def test_a_cut_that_leaves_one_tile_moves() -> None:
    # 5 tiles for two clusters: the cut after three leaves two, a fair run.
    assert work_list.build([0], [5], 1, 2)[:3] == [0, 1, 2]
    # 4 + 2: the cut after three would leave one tile of the first request.
    words = work_list.build([0, 0], [4, 2], 1, 2)
    assert words[:3] == [0, 1, 2]
    assert words[3:5] == [1, 1]


def test_more_clusters_than_tiles() -> None:
    words = work_list.build([0, 0], [1, 0], 1, 5)
    # Two items; the clusters behind them have none.
    assert words[:6] == [0, 1, 2, 2, 2, 2]
