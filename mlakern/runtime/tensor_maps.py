"""The tensor maps of a launch: how query and cache tensors become boxes of 64 or fewer rows.

All elements are bytes (e4m3 values are never interpreted on the way). Dimensions are innermost
first. Query rows of a tile are numbered as the planner folds or packs them; where one stride steps
through all of them they are one dimension, else heads and tokens are two and a box holds
gcd(H, 64) rows so that it never crosses a token (H must be even then: TMA writes to multiples of
128 bytes of shared memory). Rows outside arrive as zeros: the padding of a
partial tile costs nothing to fill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mlakern.config import LATENT_DIM, ROPE_DIM, KernelConfig
from mlakern.manifest import TensorMapRule
from mlakern.planning import Plan
from mlakern.runtime.arrays import ArrayView
from mlakern.tensormap import Swizzle, TensorMap

# A CTA of a cluster of two holds 64 rows of the query tile, and 64 keys of a key tile.
BOX_ROWS = 64
_ANY_STRIDE = 16


@dataclass(frozen=True)
class Columns:
    """One column range of a tensor: its whole width, the width of a box, and the swizzle."""

    count: int
    box: int
    swizzle: Swizzle


LATENT = Columns(LATENT_DIM, 128, Swizzle.B128)
ROPE = Columns(ROPE_DIM, 64, Swizzle.B64)
QUERY_COLUMNS = {"q_latent": LATENT, "q_rope": ROPE}
CACHE_COLUMNS = {"c_latent": LATENT, "c_rope": ROPE}


@dataclass(frozen=True)
class QueryRows:
    """The row dimensions that q_latent and q_rope share; their strides may differ.

    row_extent: rows in dimension 1 (the kernel's q_row_extent). box_rows: q_box_rows.
    tile_tokens: query tokens of a tile. extents: dimensions 1 to 4.
    """

    row_extent: int
    box_rows: int
    tile_tokens: int
    extents: tuple[int, int, int, int]


def rows_are_uniform(query: ArrayView, tokens: int) -> bool:
    """Whether one stride steps through the rows (token, head) of `tokens` consecutive tokens."""
    _, token_stride, head_stride, _ = query.strides
    heads = query.shape[2]
    return tokens == 1 or heads == 1 or token_stride == heads * head_stride


def query_rows(plan: Plan, queries: Mapping[str, ArrayView]) -> QueryRows:
    """How the rows of `queries` (by argument name, [B, Sq, H, columns]) are cut into boxes.

    Raises ValueError for packed rows, or an odd number of heads with several tokens in a tile, of
    a tensor whose tokens do not follow each other.
    """
    heads, tokens = plan.num_heads, plan.seq_len_q
    tile_tokens = tokens if plan.config.pack_q else plan.fold
    scattered = [n for n, query in queries.items() if not rows_are_uniform(query, tile_tokens)]
    if scattered and plan.config.pack_q:
        _, token_stride, head_stride, _ = queries[scattered[0]].strides
        raise ValueError(
            f"{scattered[0]}: got a token stride of {token_stride} bytes and a head stride of "
            f"{head_stride}, need token stride = {heads} * head stride for packed rows; "
            "try a kernel with folded rows"
        )
    if scattered and heads % 2:
        # A box of one row would put rope rows at odd multiples of 64 bytes of shared memory.
        raise ValueError(
            f"{scattered[0]}: got an odd number of heads, {heads}, with tokens that do not follow "
            f"each other, need token stride = {heads} * head stride; try plan(fold=1)"
        )
    row_extent = heads if scattered else tile_tokens * heads
    return QueryRows(
        row_extent=row_extent,
        box_rows=math.gcd(heads, BOX_ROWS) if scattered else BOX_ROWS,
        tile_tokens=tile_tokens,
        extents=(
            row_extent,
            tile_tokens * heads // row_extent,
            tokens // tile_tokens,
            plan.batch,
        ),
    )


def query_map(name: str, query: ArrayView, rows: QueryRows) -> TensorMap:
    """The tensor map of q_latent or q_rope."""
    columns = QUERY_COLUMNS[name]
    batch_stride, token_stride, head_stride, _ = query.strides
    wanted = (
        head_stride if query.shape[2] > 1 else token_stride,
        token_stride,
        rows.tile_tokens * token_stride,
        batch_stride,
    )
    return TensorMap(
        address=query.address,
        element_bytes=1,
        extents=(columns.count, *rows.extents),
        strides=_legal_strides(rows.extents, wanted),
        box=(columns.box, rows.box_rows, 1, 1, 1),
        swizzle=columns.swizzle,
    )


def cache_map(name: str, cache: ArrayView) -> TensorMap:
    """The tensor map of c_latent or c_rope [pages, page_size, columns]."""
    columns = CACHE_COLUMNS[name]
    pages, page_size, _ = cache.shape
    page_stride, row_stride, _ = cache.strides
    return TensorMap(
        address=cache.address,
        element_bytes=1,
        extents=(columns.count, page_size, pages),
        strides=_legal_strides((page_size, pages), (row_stride, page_stride)),
        box=(columns.box, min(page_size, BOX_ROWS), 1),
        swizzle=columns.swizzle,
    )


def _legal_strides(extents: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, with a legal one where a dimension has one element and any stride will do."""
    return tuple(
        stride if extent > 1 else _ANY_STRIDE
        for extent, stride in zip(extents, strides, strict=True)
    )


_QUERY_NOTE = (
    "The rows of a tile are {rows}. q_row_extent is all of them where one stride steps through "
    "them (one token, one head, or token stride = num_heads * head stride); q_box_rows is then 64. "
    "{otherwise} The kernel reads box (column, row % q_row_extent, row // q_row_extent, tile, "
    "request); row_stride is the head stride, with one head the token stride."
)


def map_rules(config: KernelConfig) -> tuple[TensorMapRule, ...]:
    """The same maps as expressions of argument names, for the manifest."""
    if config.pack_q:
        tile_tokens = "seq_len_q"
        note = _QUERY_NOTE.format(
            rows="all seq_len_q * num_heads rows of the request", otherwise="Nothing else is taken."
        )
    else:
        tile_tokens = "fold"
        note = _QUERY_NOTE.format(
            rows="fold * num_heads",
            otherwise="Else q_row_extent is num_heads and q_box_rows gcd(num_heads, 64).",
        )
    box_keys = str(min(config.page_size, BOX_ROWS))
    queries = tuple(
        TensorMapRule(
            parameter=name,
            source=f"{name} [batch, seq_len_q, num_heads, {columns.count}]",
            element_type="uint8",
            extents=(
                str(columns.count),
                "q_row_extent",
                f"{tile_tokens} * num_heads // q_row_extent",
                f"seq_len_q // {tile_tokens}",
                "batch",
            ),
            strides=(
                "row_stride",
                "token_stride",
                f"{tile_tokens} * token_stride",
                "batch_stride",
            ),
            box=(str(columns.box), "q_box_rows", "1", "1", "1"),
            swizzle=columns.swizzle.value,
            note=note,
        )
        for name, columns in QUERY_COLUMNS.items()
    )
    caches = tuple(
        TensorMapRule(
            parameter=name,
            source=f"{name} [pages, {config.page_size}, {columns.count}]",
            element_type="uint8",
            extents=(str(columns.count), str(config.page_size), "pages"),
            strides=("key_stride", "page_stride"),
            box=(str(columns.box), box_keys, "1"),
            swizzle=columns.swizzle.value,
            note="Strides are free multiples of 16 bytes; pages may be padded.",
        )
        for name, columns in CACHE_COLUMNS.items()
    )
    return (*queries, *caches)
