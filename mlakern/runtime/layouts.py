"""The layouts of queries and caches that engines hold, as the two pairs of tensors kernels read.

A 576-wide row is 512 latent columns and then 64 rope columns; a kernel takes the two column ranges
as tensors of their own, so a slice of wider rows and two separate tensors are the same to it.
"""

from __future__ import annotations

from typing import Any

from mlakern.config import HEAD_DIM, LATENT_DIM
from mlakern.runtime.arrays import ArrayView, as_view

# 512 latent e4m3 values, 4 float32 block scales and 64 bfloat16 rope values.
SPARSE_FP8_ROW = 656


def query_pair(
    query: Any = None, q_latent: Any = None, q_rope: Any = None
) -> tuple[ArrayView, ArrayView]:
    """(latent, rope) of a query [B, Sq, H, 576], or of the two tensors given apart.

    Raises ValueError when neither or both forms are given, or for another shape.
    """
    whole = _one_form("query", query, {"q_latent": q_latent, "q_rope": q_rope})
    if whole is None:
        return as_view("q_latent", q_latent), as_view("q_rope", q_rope)
    if len(whole.shape) != 4 or whole.shape[-1] != HEAD_DIM:
        raise ValueError(
            f"query: got shape {list(whole.shape)}, need [batch, seq_len_q, num_heads, {HEAD_DIM}]"
        )
    return whole.columns(0, LATENT_DIM), whole.columns(LATENT_DIM, HEAD_DIM)


def cache_pair(
    kv_cache: Any = None, c_latent: Any = None, c_rope: Any = None, *, page_size: int
) -> tuple[ArrayView, ArrayView]:
    """(latent [pages, page_size, 512], rope [pages, page_size, 64]) of a cache.

    kv_cache: [pages, page_size, 576], [pages, 1, page_size, 576] or [pages, page_size, 1, 576]; the
    two tensors may have the extra dimension as well. Strides are free. ValueError otherwise.
    """
    whole = _one_form("kv_cache", kv_cache, {"c_latent": c_latent, "c_rope": c_rope})
    if whole is None:
        return (
            _three_dimensional("c_latent", as_view("c_latent", c_latent), page_size),
            _three_dimensional("c_rope", as_view("c_rope", c_rope), page_size),
        )
    if whole.shape and whole.shape[-1] == SPARSE_FP8_ROW:
        raise ValueError(
            f"kv_cache: got rows of {SPARSE_FP8_ROW} bytes, the sparse FP8 format with block "
            f"scales; need dense FP8 rows of {HEAD_DIM}"
        )
    whole = _three_dimensional("kv_cache", whole, page_size)
    if whole.shape[-1] != HEAD_DIM:
        raise ValueError(
            f"kv_cache: got shape {list(whole.shape)}, need [pages, {page_size}, {HEAD_DIM}]"
        )
    return whole.columns(0, LATENT_DIM), whole.columns(LATENT_DIM, HEAD_DIM)


def _one_form(name: str, whole: Any, parts: dict[str, Any]) -> ArrayView | None:
    """The view of `whole`, or None if its two parts are given instead."""
    given = [part for part, value in parts.items() if value is not None]
    if whole is not None and not given:
        return as_view(name, whole)
    if whole is None and len(given) == len(parts):
        return None
    got = ", ".join(([name] if whole is not None else []) + given) or "none of them"
    raise ValueError(f"{name}: got {got}, need {name} alone or {' and '.join(parts)}")


def _three_dimensional(name: str, view: ArrayView, page_size: int) -> ArrayView:
    if len(view.shape) == 4:
        # [pages, 1, 1, columns] is both layouts at once only for pages of one key: not ours.
        for axis in (1, 2):
            if view.shape[axis] == 1 and view.shape[3 - axis] == page_size:
                return view.without_axis(axis)
    elif len(view.shape) == 3 and view.shape[1] == page_size:
        return view
    raise ValueError(
        f"{name}: got shape {list(view.shape)}, need [pages, {page_size}, columns], "
        f"[pages, 1, {page_size}, columns] or [pages, {page_size}, 1, columns] for a kernel of "
        f"page_size {page_size}"
    )
