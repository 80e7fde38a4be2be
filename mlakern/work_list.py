"""The work list of the schedule "work_list": its layout and the host's planner.

Units are the (request, query tile) pairs in order, each as long as its request's key tiles (an
empty request counts as one, for the cluster that writes its result). The units laid end to end are
cut into even shares, one for each cluster. A partial result costs as much as reading a tile,
so a cut with a single tile of its unit on one side moves to that end of the unit. No cluster has
more than the even share and one tile: a cut does not move up if the one before it moved down. So
short and long requests cost what they contain, and most short requests stay whole.

The list is int32 words, all in one buffer:

    [clusters + 1]   first item of each cluster; the last entry is the number of items
    [units]          partial results of each unit; 1: its only item stores the final result
    [units]          the first of the unit's partial slots
    items from a multiple of 8, 8 words each:
        query tile, request, first key tile, key tiles, partial slot (-1: final result), 0, 0, 0

The device planner (mlakern.kernels.planner) writes the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

ITEM_WORDS = 8
FINAL = -1


def partials_offset(clusters: Any) -> Any:
    """Word of the units' numbers of partials."""
    return clusters + 1


def slots_offset(clusters: Any, units: Any) -> Any:
    """Word of the units' first slots."""
    return clusters + 1 + units


def items_offset(clusters: Any, units: Any) -> Any:
    """Word of the first item."""
    return (clusters + 1 + 2 * units + ITEM_WORDS - 1) // ITEM_WORDS * ITEM_WORDS


def most_items(clusters: int, units: int) -> int:
    """Each cut inside a unit adds an item."""
    return units + clusters - 1


def most_slots(clusters: int) -> int:
    """A unit with n cuts inside has n + 1 partials: at most two for each cut."""
    return 2 * (clusters - 1)


def size_words(clusters: int, units: int) -> int:
    """Words of the buffer, whatever the lengths."""
    return int(items_offset(clusters, units)) + ITEM_WORDS * most_items(clusters, units)


def build(
    first_tiles: Sequence[int], tiles: Sequence[int], query_tiles: int, clusters: int
) -> list[int]:
    """The list for requests whose keys are `tiles` tiles from `first_tiles`; words in order.

    Words that no reader looks at are 0.
    """
    lengths = [max(count, 1) for count in tiles for _ in range(query_tiles)]
    units = len(lengths)
    cuts = _cuts(lengths, clusters)
    words = [0] * size_words(clusters, units)
    item = slot = 0
    cluster = 0
    start = 0
    for unit, length in enumerate(lengths):
        request, query_tile = divmod(unit, query_tiles)
        end = start + length
        inside = [cut for cut in cuts[1:-1] if start < cut < end]
        edges = [start, *sorted(set(inside)), end]
        pieces = len(edges) - 1
        words[partials_offset(clusters) + unit] = pieces
        words[slots_offset(clusters, units) + unit] = slot if pieces > 1 else 0
        for piece, (low, high) in enumerate(pairwise(edges)):
            while cluster < clusters and cuts[cluster] <= low:
                words[cluster] = item
                cluster += 1
            at = items_offset(clusters, units) + ITEM_WORDS * item
            words[at : at + 5] = [
                query_tile,
                request,
                first_tiles[request] + low - start,
                high - low if tiles[request] else 0,
                slot + piece if pieces > 1 else FINAL,
            ]
            item += 1
        if pieces > 1:
            slot += pieces
        start = end
    for rest in range(cluster, clusters + 1):
        words[rest] = item
    return words


def runs(
    words: Sequence[int], batch: int, query_tiles: int, clusters: int
) -> tuple[tuple[tuple[range, ...], ...], ...]:
    """What a kernel reads: the runs of key tiles of each request's query tiles, none if empty."""
    found: list[list[list[range]]] = [[[] for _ in range(query_tiles)] for _ in range(batch)]
    first_item = items_offset(clusters, batch * query_tiles)
    for item in range(words[clusters]):
        at = first_item + ITEM_WORDS * item
        query_tile, request, first, count = words[at : at + 4]
        if count:
            found[request][query_tile].append(range(first, first + count))
    return tuple(tuple(map(tuple, of_request)) for of_request in found)


def _cuts(lengths: Sequence[int], clusters: int) -> list[int]:
    """Positions where the clusters' shares begin, and the end."""
    total = sum(lengths)
    share = -(-total // clusters)
    ends = []
    position = 0
    for length in lengths:
        position += length
        ends.append(position)
    cuts = []
    unit = move = 0
    for cluster in range(clusters + 1):
        cut = min(cluster * share, total)
        while unit < len(ends) - 1 and ends[unit] <= cut:
            unit += 1
        after = ends[unit] - cut
        move = cut_move(lengths[unit] - after, after, move)
        cuts.append(cut + move)
    return cuts


def cut_move(before: int, after: int, move_before: int) -> int:
    """By how many tiles a cut moves that has this many tiles of its unit on its sides.

    move_before: what the cut before it moved by.
    """
    if before == 0 or after == 0:
        return 0
    if after == 1 and move_before != -1:
        return 1
    return -1 if before == 1 else 0
